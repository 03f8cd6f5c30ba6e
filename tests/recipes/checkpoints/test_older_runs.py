"""Runs of an older version, begun and stopped by it, resume with this one: see
before_seams/README.md."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from conftest import Finished, run_cases
from conftest import reproducible_metrics as facts
from plain_losses import read_jsonl

from llama_ft.config import load

BEFORE = Path(__file__).parent / "before_seams"
COMMON = (
    "--model_name @model --precision fp32 --batch_size_training 2 --lr 3e-3 --save_steps 2 --keep_last 1 "
    "--validation 0.2 --eval_steps 3 --seed 7 --no_plan"
)
FLAGS = {  # as they were given to the older version
    "sft": f"{COMMON} --dataset @samples.jsonl --context_length 128 --num_epochs 3 "
    "--gradient_accumulation_steps 2 --gradient_clipping",
    "dpo": f"{COMMON} --dataset @pairs.jsonl --context_length 64 --num_epochs 2 "
    "--batching_strategy padding --objective dpo --beta 0.3 --label_smoothing 0.1 "
    "--precompute_ref_log_probs --use_peft --peft.r 4 --lora_dropout 0.1 --target_modules q_proj,v_proj",
}
STOPPED = {"sft": 5, "dpo": 8}  # after this step
STEPS = {"sft": 15, "dpo": 12}
CASES = [(name, way) for name in FLAGS for way in ("auto", "path")]


def copied(folder: Path) -> Path:
    """A copy of the runs, whose config.yaml names the model and the data of the copy."""
    shutil.copytree(BEFORE, folder)
    for file in folder.glob("*/config.yaml"):
        file.write_text(file.read_text().replace("before_seams/", f"{folder}/"))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("older_runs")


@pytest.fixture(scope="module")
def resumed(folder: Path) -> Finished:
    """Each run twice in one launch: with --resume auto and its config.yaml, and with the path of its
    checkpoint and its flags."""
    cases = []
    for name, flags in FLAGS.items():
        auto = copied(folder / f"{name}-auto")
        words = "--config @/config.yaml --output_dir @ --resume auto"
        cases.append(words.replace("@", f"{auto}/{name}").split())
        path = copied(folder / f"{name}-path")
        checkpoint = f"--resume @{name}/checkpoints/step-{STOPPED[name]:06d}"
        cases.append(f"{flags} {checkpoint}".replace("@", f"{path}/").split())
    return run_cases(folder, cases)


@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_resumed_run_has_the_losses_of_the_version_that_began_it(
    folder: Path, resumed: Finished, name: str, way: str
) -> None:
    assert f"{name}/checkpoints/step-{STOPPED[name]:06d}, after step" in resumed.output
    lines = facts(folder / f"{name}-{way}" / name)
    whole = read_jsonl(BEFORE / f"{name}_to_its_end.jsonl")
    assert [line["step"] for line in lines] == [line["step"] for line in whole]
    for line, expected in zip(lines, whole, strict=True):
        if line["step"] > STOPPED[name]:
            values = {key: line[key] for key in expected}
            assert values == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert "train/loss" in lines[-1] and lines[-1]["step"] == STEPS[name]


@pytest.mark.parametrize("way", ["auto", "path"])
def test_a_resumed_run_reads_the_reference_that_the_older_version_stored(
    folder: Path, resumed: Finished, way: str
) -> None:
    from safetensors.torch import load_file

    run = folder / f"dpo-{way}" / "dpo"
    file = run / "checkpoints" / "step-000008" / "reference.safetensors"
    assert f"log-probabilities of 32 examples from {file}" in resumed.output
    assert "computed again" not in resumed.output
    stored = load_file(BEFORE / "dpo" / "reference.safetensors")
    for folder_of_file in (run, run / "checkpoints" / "step-000012"):
        numbers = load_file(folder_of_file / "reference.safetensors")
        assert numbers.keys() == stored.keys()
        assert all(numbers[name].equal(stored[name]) for name in stored)


@pytest.mark.parametrize("name", FLAGS)
def test_settings_of_an_older_run_load_without_a_message(
    tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """config.yaml, and the flags that the run was begun with, are the settings in its checkpoint."""
    runs = copied(tmp_path / "before_seams")
    trainer = runs / name / "checkpoints" / f"step-{STOPPED[name]:06d}" / "trainer.json"
    saved = json.loads(trainer.read_text().replace("before_seams/", f"{runs}/"))["config"]
    output_dir = f"{runs}/{name}"
    of_file, _ = load(
        ["--config", f"{output_dir}/config.yaml", "--output_dir", output_dir], paths=False
    )
    flags = f"{FLAGS[name]} --output_dir {output_dir}".replace("@", f"{runs}/").split()
    of_flags, _ = load(flags, paths=False)
    loaded = dataclasses.asdict(of_file)
    # settings and sections that were added since have their defaults
    assert {name: values | saved.get(name, {}) for name, values in loaded.items()} == loaded
    by_flags = dataclasses.asdict(of_flags)
    for section, before in saved.items():
        values = by_flags[section]
        given = {key: values[key] for key in before if values[key] not in (None, "auto")}
        assert before == {**before, **given}
    assert caplog.text == ""
    assert capfd.readouterr() == ("", "")
