"""A directory of invalid inputs, each with one error, and a valid model and valid data."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import write_jsonl, write_rows


@pytest.fixture(scope="session")
def broken(
    tiny_model: Path, save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder; good are `model` and `rows.jsonl`, what is wrong with the rest its name says."""
    folder = tmp_path_factory.mktemp("broken")
    shutil.copytree(tiny_model, folder / "model")
    write_rows(folder / "rows.jsonl", 16)
    _break_weights(folder)
    _break_models(folder, save_model)
    _break_data(folder)
    _break_adapters(folder)
    _fill_output_dirs(folder)
    return folder


def _break_weights(folder: Path) -> None:
    """Model folders whose safetensors files are not what config.json says."""
    from safetensors.torch import load_file, save_file

    def altered(name: str) -> tuple[Path, dict]:
        shutil.copytree(folder / "model", folder / name)
        file = folder / name / "model-00001-of-00003.safetensors"
        return file, load_file(file)

    file, _ = altered("truncated")
    file.write_bytes(file.read_bytes()[:20_000])
    file, tensors = altered("missing_tensor")
    save_file({name: tensor for name, tensor in tensors.items() if "q_proj" not in name}, file)


def _break_models(folder: Path, save_model: Callable[..., Path]) -> None:
    """Model folders that lack something else, or do not go with their tokenizer."""

    shutil.copytree(
        folder / "model", folder / "no_tokenizer", ignore=shutil.ignore_patterns("tokenizer*")
    )
    save_model(folder / "small_vocabulary", vocab_size=280)


def _break_data(folder: Path) -> None:
    good = {"instruction": "What is a shard?", "output": "Some rows of a weight."}
    write_jsonl(folder / "malformed.jsonl", [good, good, '{"instruction": "a", "output"'])
    write_jsonl(folder / "late.jsonl", [*[good] * 600, {**good, "output": [3]}, *[good] * 300])
    write_jsonl(folder / "letters.jsonl", [{"text": "x y z"}] * 8)  # tokens of one byte
    (folder / "own.py").write_text("def build(groups):\n    return groups[0]\n")
    (folder / "refuses.jinja").write_text("{{ raise_exception('no tools here') }}")


def _break_adapters(folder: Path) -> None:
    """An adapter of a model of another size."""
    from peft import LoraConfig, get_peft_model
    from tiny_llama import tiny_llama

    model = tiny_llama(hidden_size=16, vocab_size=301)
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    get_peft_model(model, lora).save_pretrained(
        folder / "other_adapter", save_embedding_layers=False
    )


def _fill_output_dirs(folder: Path) -> None:
    (folder / "a_run").mkdir()
    (folder / "a_run" / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.5}\n')
    (folder / "a_run" / ".llama_ft-run").touch()
    (folder / "a_run" / "notes.txt").write_text("mine")
