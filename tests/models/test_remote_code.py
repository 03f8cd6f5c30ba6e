"""Python code of a model's directory runs only with --trust_remote_code, and nothing asks for it on
stdin: an answer of "y" there, or of a pipe, would run it."""

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY
from image_models import save_image_model, write_samples
from transformers import AutoTokenizer, GenerationConfig

from llama_ft.config import ModelConfig
from llama_ft.errors import UserError
from llama_ft.extensions.images.load_processor import load_processor
from llama_ft.models import build_on_meta, load_model_config, load_tokenizer

CLASSES = (
    "AutoConfig",
    "AutoFeatureExtractor",
    "AutoImageProcessor",
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForMultimodalLM",
    "AutoModelForSequenceClassification",
    "AutoProcessor",
    "AutoTokenizer",
    "AutoVideoProcessor",
)
FILES = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
)
# the class or type that a file names -> one that Transformers does not have
UNKNOWN = {
    "config.json": {"model_type": "mine", "architectures": ["Mine"]},
    "preprocessor_config.json": {"image_processor_type": "Mine"},
    "processor_config.json": {"processor_class": "Mine"},
    "tokenizer_config.json": {"tokenizer_class": "Mine"},
}


def add_code(folder: Path, unknown: str | None = None) -> Path:
    """Name code of the directory in every file, and let one of them need it. Returns the file that
    this code writes."""
    ran = folder / "ran"
    (folder / "mine.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Mine: pass\n")
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text((folder / "mine.py").read_text())
    for name in FILES:
        file = folder / name
        settings: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        code: Any = dict.fromkeys(CLASSES, "mine.Mine")
        if name == "tokenizer_config.json":
            code["AutoTokenizer"] = ["mine.Mine", "mine.Mine"]
        settings |= {"auto_map": code, "custom_generate": "custom_generate"}
        if name == unknown:
            settings |= UNKNOWN[name]
        file.write_text(json.dumps(settings))
    return ran


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    answers = io.StringIO("y\n" * 20)
    monkeypatch.setattr(sys, "stdin", answers)
    yield answers
    assert answers.tell() == 0, "stdin was read"


def test_code_named_in_any_file_does_not_run(
    tmp_path: Path, stdin: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_image_model(tmp_path / "model", "Qwen2.5-VL")
    plain = AutoTokenizer.from_pretrained(folder)
    ran = add_code(folder)
    config = load_model_config(folder, False)
    model = ModelConfig(model_name=str(folder))
    built = build_on_meta(config, model, folder=folder, with_towers=True)
    assert type(built.model).__name__ == "Qwen2_5_VLForConditionalGeneration"
    tokenizer = load_tokenizer(folder, False)
    assert tokenizer("abc").input_ids == plain("abc").input_ids
    processor = load_processor(folder, config, tokenizer)
    assert type(processor.image_processor).__name__.startswith("Qwen2VLImageProcessor")
    GenerationConfig.from_pretrained(folder)
    assert not ran.exists()
    assert "[y/N]" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "unknown", ["config.json", "preprocessor_config.json", "processor_config.json"]
)
def test_a_file_that_needs_code_names_the_flag(
    unknown: str, tmp_path: Path, stdin: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_image_model(tmp_path / "model", "Qwen2.5-VL")
    config = load_model_config(folder, False)
    tokenizer = load_tokenizer(folder, False)
    ran = add_code(folder, unknown)
    # the classes of processors are always those of Transformers
    is_processor = unknown == "processor_config.json"
    message = "Transformers does not have its class" if is_processor else "--trust_remote_code"
    with pytest.raises(UserError, match=message):
        load_model_config(folder, False)
        load_processor(folder, config, tokenizer)
    assert not ran.exists()
    assert "[y/N]" not in capsys.readouterr().out


def test_an_image_size_that_no_machine_can_make_is_rejected(tmp_path: Path) -> None:
    folder = save_image_model(tmp_path / "model", "Qwen2.5-VL")
    file = folder / "preprocessor_config.json"
    size = {"shortest_edge": 10**12, "longest_edge": 10**12}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"size": size}))
    config = load_model_config(folder, False)
    with pytest.raises(UserError, match="1,000,000,000,000; expected at most"):
        load_processor(folder, config, load_tokenizer(folder, False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "unknown"),
    [
        ("finetuning", None),
        *(pytest.param("finetuning", unknown, marks=pytest.mark.large) for unknown in UNKNOWN),
        ("inference", "config.json"),
        pytest.param("inference", "tokenizer_config.json", marks=pytest.mark.large),
        pytest.param("plan", "preprocessor_config.json", marks=pytest.mark.large),
        ("evaluate", "preprocessor_config.json"),
    ],
)
def test_no_recipe_runs_code_or_asks_for_it(
    script: str, unknown: str | None, tmp_path: Path
) -> None:
    folder = save_image_model(tmp_path / "model", "Qwen2.5-VL")
    write_samples(tmp_path / "data")
    rows = tmp_path / "data" / "chats.jsonl"
    ran = add_code(folder, unknown)
    training = ["--model_name", str(folder), "--dataset", str(rows), "--context_length", "256"]
    arguments = {
        "finetuning": [*training, "--max_train_step", "1", "--output_dir", str(tmp_path / "run")],
        "inference": [str(folder), "--prompt", "hi", "--max_new_tokens", "2"],
        "plan": [*training, "--images", "1"],
        "evaluate": [str(folder), "--dataset", str(rows), "--context_length", "256"],
    }[script]
    command = [sys.executable, str(REPOSITORY / "recipes" / f"{script}.py"), *arguments]
    ended = subprocess.run(
        [*command, "--device", "cpu"], input="y\n" * 20, capture_output=True, text=True, timeout=240
    )
    printed = ended.stdout + ended.stderr
    assert not ran.exists(), printed
    assert "[y/N]" not in printed and "Traceback" not in printed, printed
    assert ended.returncode in (0, 2), printed
    if ended.returncode == 2 and unknown != "processor_config.json":
        assert "--trust_remote_code" in printed, printed
