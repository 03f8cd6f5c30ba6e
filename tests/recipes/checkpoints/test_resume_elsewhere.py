"""Checkpoints that were moved out of their run, and a finished run that is asked for another one."""

import html
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
import yaml
from conftest import RECIPE, Finished, metrics, run_cases
from forked import forked

from llama_ft.config import load
from llama_ft.extensions.report.run import differing_settings, read_run

ALLOWED = ("--resume_allow_changes", "lr,max_train_step")


@pytest.fixture(scope="module")
def folder(
    tiny_model: Path,
    save_model: Callable[..., Path],
    rows16: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A finished run of 2 steps, copies of its checkpoints in other places, and runs from them."""
    folder = tmp_path_factory.mktemp("elsewhere")
    shutil.copytree(tiny_model, folder / "model")
    save_model(folder / "other_model", seed=1)
    shutil.copy(rows16, folder / "rows.jsonl")
    run_cases(folder, [flags(folder, "run")])
    checkpoints = folder / "run" / "checkpoints"
    shutil.copytree(checkpoints / "step-000001", folder / "copy")
    shutil.copytree(checkpoints / "step-000001", folder / "copied" / "step-000001")
    shutil.copytree(checkpoints / "step-000002", folder / "last")
    (folder / "link").symlink_to(checkpoints / "step-000001")
    run_cases(
        folder,
        [
            flags(folder, f"from-{name}", "--resume", f"{folder}/{name}")
            for name in ("copied/step-000001", "last", "link")
        ]
        + [
            # its store, and a run from there in an empty directory
            stored(folder, "from-copy", "--resume", str(folder / "copy")),
            stored(
                folder,
                "from-store",
                "--resume",
                "auto",
                "--lr",
                "1e-3",
                *ALLOWED,
                "--max_train_step",
                "3",
            ),
            # two resumes with changed settings; the second continues the first
            changed(folder, "1e-3", "--resume", str(folder / "copy")),
            changed(folder, "1e-4", "--max_train_step", "3", "--resume", "auto"),
        ],
    )
    return folder


def flags(folder: Path, output: str, *more: str, model: str = "model") -> list[str]:
    words = (
        f"--model_name @{model} --dataset @rows.jsonl --max_train_step 2 --save_steps 1 --lr 1e-2"
    )
    words += f" --precision fp32 --context_length 64 --output_dir @{output}"
    return [*words.replace("@", f"{folder}/").split(), *more]


def stored(folder: Path, output: str, *more: str) -> list[str]:
    """Flags of a run that saves its checkpoints to a store."""
    return flags(folder, output, "--save_to", f"file://{folder}/store", *more)


def changed(folder: Path, lr: str, *more: str) -> list[str]:
    """Flags of a run with another learning rate than the run that it resumes."""
    return [*flags(folder, "changed"), "--lr", lr, *ALLOWED, *more]


@pytest.mark.parametrize("name", ["copy", "copied/step-000001", "link"])
def test_a_run_resumes_from_a_checkpoint_in_another_place(folder: Path, name: str) -> None:
    whole = metrics(folder / "run")
    resumed = metrics(folder / f"from-{name}")
    assert resumed[-1]["train/loss"] == whole[-1]["train/loss"] and resumed[-1]["step"] == 2
    # a link leads to its run, and with it to the steps before
    assert len(resumed) == (2 if name == "link" else 1)


def test_resuming_the_last_checkpoint_exports_the_final_model(folder: Path) -> None:
    file = "model/model.safetensors"
    assert (folder / "from-last" / file).read_bytes() == (folder / "run" / file).read_bytes()


def test_records_name_the_settings_of_every_step_after_two_resumes(folder: Path) -> None:
    attempts = json.loads((folder / "changed" / "facts.json").read_text())["attempts"]
    assert [attempt["step"] for attempt in attempts] == [0, 1, 2]
    assert [attempt["ranks"] for attempt in attempts] == [1, 1, 1]
    assert attempts[0]["changed"] == {}
    assert attempts[1]["changed"] == {"train.lr": [0.01, 0.001]}
    assert attempts[2]["changed"] == {
        "train.lr": [0.001, 0.0001],
        "train.max_train_step": [2, 3],
    }
    newest = json.loads((folder / "changed/checkpoints/step-000003/trainer.json").read_text())
    assert newest["attempts"] == attempts
    lr = "0.01 until step 1, 0.001 until step 2, then 0.0001"
    card = (folder / "changed" / "model" / "README.md").read_text()
    assert yaml.safe_load(card.split("```yaml")[1].partition("```")[0])["lr"] == lr
    page = html.unescape((folder / "changed" / "report.html").read_text())
    assert f"<td>{lr}</td>" in page
    assert "<td>train.lr: 0.01 -> 0.001<br>" in page
    # the directory of step 1's run was not found, so the plots begin at step 2
    assert page.count("<title>resumed after step 2; train.") >= 2


def test_attempts_are_known_after_a_resume_from_a_store_on_an_empty_disk(folder: Path) -> None:
    attempts = json.loads((folder / "from-store" / "facts.json").read_text())["attempts"]
    assert [attempt["step"] for attempt in attempts] == [0, 1, 2]
    assert [attempt["changed"] for attempt in attempts] == [
        {},
        {"checkpoint.save_to": [None, f"file://{folder}/store"]},
        {"train.lr": [0.01, 0.001], "train.max_train_step": [2, 3]},
    ]
    copied = json.loads((folder / "store" / "facts.json").read_text())
    assert copied["attempts"] == attempts


def test_the_config_of_a_resumed_run_loads_and_says_what_held_before(folder: Path) -> None:
    file = folder / "changed" / "config.yaml"
    comments = [line for line in file.read_text().splitlines() if line.startswith("#")]
    assert "# after step 1: train.lr: 0.01 -> 0.001" in comments
    config, _ = load(["--config", str(file)], paths=False)
    assert config.train.lr == 1e-4 and config.train.max_train_step == 3
    whole = (folder / "run" / "config.yaml").read_text()
    assert whole.startswith(f"# --config {folder}/run/config.yaml repeats this run\n\n")


def test_a_comparison_knows_the_settings_before_a_resume(folder: Path) -> None:
    """The last settings of the second run are those of the first, so only its history differs."""
    whole = read_run(folder / "run")
    resumed = read_run(folder / "from-copy")
    name = "train.lr"
    assert name not in differing_settings([whole, resumed])
    resumed.facts["attempts"][-1]["changed"] = {name: [0.5, 0.01]}
    assert differing_settings([whole, resumed])[name] == [0.01, "0.5 until step 1, then 0.01"]


def resume(folder: Path, *more: str, model: str = "model") -> Finished:
    return forked(
        RECIPE, *flags(folder, "run", "--no_plan", "--resume", "auto", *more, model=model)
    )


def test_a_finished_run_notices_another_model(folder: Path) -> None:
    refused = resume(folder, model="other_model")
    assert refused.exit_code == 2, refused.output
    assert "other_model, was " in refused.output and "Traceback" not in refused.output
    finished = resume(folder)
    assert finished.exit_code == 0 and "This run was finished after step 2" in finished.output


def test_resuming_with_another_optimizer_is_rejected(folder: Path) -> None:
    (folder / "run" / "model").rename(folder / "run" / "aside")  # an unfinished run
    change = ("--optimizer", "Adafactor", "--resume_allow_changes", "optimizer")
    refused = resume(folder, *change)
    (folder / "run" / "aside").rename(folder / "run" / "model")
    assert refused.exit_code == 2, refused.output
    assert "--optimizer is Adafactor, was AdamW" in refused.output
    assert "do not fit another optimizer" in refused.output


# Version 0.1 had no entry, later ones had none for padding.
@pytest.mark.parametrize(("strategy", "entry"), [("packing", {}), ("padding", {"packing": None})])
def test_resuming_a_run_whose_steps_had_other_samples_is_rejected(
    folder: Path, strategy: str, entry: dict[str, None]
) -> None:
    checkpoint = folder / "run" / "checkpoints" / "step-000001"
    older = shutil.copytree(checkpoint, folder / f"older-{strategy}")
    record = json.loads((older / "trainer.json").read_text())
    assert record.pop("batches") == 2
    record |= entry
    record["config"]["data"]["batching_strategy"] = strategy
    (older / "trainer.json").write_text(json.dumps(record))
    checksum = xxhash.xxh3_128_hexdigest((older / "trainer.json").read_bytes())
    listed = (older / "checksums.txt").read_text().splitlines()
    others = [line for line in listed if not line.endswith("trainer.json")]
    (older / "checksums.txt").write_text("\n".join([*others, f"{checksum}  trainer.json", ""]))
    more = ("--batching_strategy", strategy, "--resume", str(older))
    refused = forked(RECIPE, *flags(folder, "repacked", *more))
    assert refused.exit_code == 2, refused.output
    assert refused.output.count("error: ") == 1 and "see other batches" in refused.output
    assert not (folder / "repacked").exists()
