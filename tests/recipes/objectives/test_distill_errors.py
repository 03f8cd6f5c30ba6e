"""Teachers, and files of teachers, that do not fit a run: one message that says what to do, exit
code 2, before the model is loaded, and nothing written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import RECIPE, run_cases, write_jsonl
from forked import forked
from plain_losses import read_jsonl, write_tokenized

STORED = "--teacher_file @stored.safetensors"


@pytest.fixture(scope="module")
def folder(
    tiny_model: Path, save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run that has stored its teacher, and what is wrong with copies of its files."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("distill-errors")
    shutil.copytree(tiny_model, folder / "model")
    save_model(folder / "other", seed=3)
    shutil.copytree(tiny_model, folder / "other_tokens")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(folder / "other_tokens")
    save_model(folder / "few_logits", vocab_size=4)
    write_tokenized(folder / "rows.jsonl", [9, 12, 20, 7], seed=1)
    write_tokenized(folder / "other_rows.jsonl", [9, 12, 20, 7], seed=2)
    run_cases(folder, [flags(folder, f"--teacher_model @model {STORED} --output_dir @run")])
    write_broken_files(folder)
    write_columns(folder)
    return folder


def write_broken_files(folder: Path) -> None:
    content = (folder / "stored.safetensors").read_bytes()
    half = len(content) // 2
    broken = {
        "truncated": content[:half],
        "flipped": content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :],
        "renamed": content.replace(b'"distill_temperature', b'"distill_temperaturE'),
        "text": b"a,b\n1,2\n",
        "empty": b"",
    }
    for name, written in broken.items():
        (folder / f"{name}.safetensors").write_bytes(written)


def write_columns(folder: Path) -> None:
    """Columns of log-probabilities with one error each, in the third sample."""
    entry = {str(token): -2.0 - token / 10 for token in range(5)}
    broken: dict[str, Any] = {
        "missing": None,
        "short": [None, entry],
        "few": {"1": -0.1},
        "words": {**entry, "word": -3.0},
        "outside": {**entry, "301": -3.0},
        "positive": {**entry, "9": 0.5},
        "above_one": {str(token): -0.1 for token in range(5)},
    }
    for name, wrong in broken.items():
        samples = read_jsonl(folder / "rows.jsonl")
        for sample in samples:
            sample["logprobs"] = [None] + [entry] * (len(sample["input_ids"]) - 1)
        if isinstance(wrong, dict):
            samples[2]["logprobs"][8] = wrong
        else:
            samples[2]["logprobs"] = wrong
        write_jsonl(folder / f"{name}.jsonl", samples)


def flags(folder: Path, more: str) -> list[str]:
    words = more.split()
    defaults = {
        "--model_name": "@model",
        "--dataset": "@rows.jsonl",
        "--objective": "distill",
        "--distill_top_k": "5",
        "--context_length": "32",
        "--num_epochs": "1",
        "--precision": "fp32",
        "--output_dir": "@refused",
    }
    kept = [word for flag, value in defaults.items() if flag not in words for word in (flag, value)]
    return [word.replace("@", f"{folder}/") for word in [*kept, *words]]


CASES = {
    "no teacher": ("", "has no column logprobs. Set --teacher_model"),
    "no such file": ("--teacher_file @absent.safetensors", "absent.safetensors: no such file, and"),
    "a directory": ("--teacher_file @model", "model: is a directory"),
    "other data": (f"{STORED} --dataset @other_rows.jsonl", "computed with another dataset"),
    "another k": (f"{STORED} --distill_top_k 6", "another distill_top_k (distill_top_k 5, not 6)"),
    "another temperature": (f"{STORED} --distill_temperature 2", "another distill_temperature"),
    "another teacher": (
        f"{STORED} --teacher_model @other",
        "computed with another teacher_weights",
    ),
    "truncated": ("--teacher_file @truncated.safetensors", "truncated.safetensors: not a valid"),
    "flipped": ("--teacher_file @flipped.safetensors", "its checksum differs"),
    "header": ("--teacher_file @renamed.safetensors", "its checksum differs"),
    "text": ("--teacher_file @text.safetensors", "text.safetensors: not a valid file"),
    "empty": ("--teacher_file @empty.safetensors", "empty.safetensors: not a valid file"),
    "tokenizer": ("--teacher_model @other_tokens", "differs from the run's in 1 token (<tool>)"),
    "large k": ("--teacher_model @model --distill_top_k 302", "has only 301 tokens"),
    "teacher of few tokens": ("--teacher_model @few_logits", "few_logits has only 4 tokens"),
    "column": ("--dataset @missing.jsonl", "rows.jsonl:3: logprobs is missing; expected"),
    "short column": ("--dataset @short.jsonl", ":3: logprobs has 2 entries for 20 tokens"),
    "few": ("--dataset @few.jsonl", ":3: logprobs[8]: has 1 log-probabilities; expected at least"),
    "words": ("--dataset @words.jsonl", ":3: logprobs[8]: token word has -3.0; expected"),
    "outside": ("--dataset @outside.jsonl", ":3: logprobs[8]: token 301 has -3.0; expected"),
    "positive": ("--dataset @positive.jsonl", ":3: logprobs[8]: token 9 has 0.5; expected"),
    "above one": ("--dataset @above_one.jsonl", "its probabilities add up to 4.52"),
    "column at another temperature": (
        "--dataset @few.jsonl --distill_temperature 2",
        "--distill_temperature 2.0: the column logprobs",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_teacher_that_does_not_fit_is_one_error(folder: Path, name: str) -> None:
    more, words = CASES[name]
    words = words.replace("rows.jsonl:3", f"{name if name != 'column' else 'missing'}.jsonl:3")
    finished = forked(RECIPE, *flags(folder, more), "--no_plan")
    assert finished.exit_code == 2, finished.output
    assert words in finished.output, finished.output
    assert finished.output.count("error:") == 1, finished.output
    assert "Weights loaded" not in finished.output
    assert "Traceback" not in finished.output
    assert not (folder / "refused").exists()


def test_a_corrupted_file_of_a_resumed_run_is_computed_again(folder: Path) -> None:
    """The teacher is still there, and the run goes on as if nothing had happened."""
    common = "--teacher_model @model --save_steps 1 --batch_size_training 1 --num_epochs 2"
    whole = folder / "whole"
    run_cases(folder, [flags(folder, f"{common} --output_dir @whole")])
    content = (whole / "teacher.safetensors").read_bytes()
    (whole / "teacher.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    step_1 = whole / "checkpoints" / "step-000001"
    finished = run_cases(folder, [flags(folder, f"{common} --output_dir @again --resume {step_1}")])
    assert "The teacher's probabilities are computed again." in finished.output
    assert (folder / "again" / "teacher.safetensors").read_bytes() == content
    last = [json.loads((folder / run / "metrics.jsonl").read_text().splitlines()[-1])
            for run in ("whole", "again")]  # fmt: skip
    assert last[0]["train/loss"] == last[1]["train/loss"]
