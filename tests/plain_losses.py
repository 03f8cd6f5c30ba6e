"""Samples for whole runs, and their losses in plain Transformers: one sample at a time, without
padding."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch


def load_model(path: Path) -> Any:
    """A model directory in fp32, as Transformers loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def read_jsonl(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def write_tokenized(file: Path, lengths: Iterable[int], seed: int) -> Path:
    """Tokenized samples, no two alike; their first 1 to 4 tokens are not in the loss."""
    generator = torch.Generator().manual_seed(seed)
    with file.open("w") as lines:
        for number, length in enumerate(lengths):
            ids = torch.randint(0, 301, (length,), generator=generator).tolist()
            prompt_tokens = 1 + number % 4
            labels = [-100] * prompt_tokens + ids[prompt_tokens:]
            lines.write(json.dumps({"input_ids": ids, "labels": labels}) + "\n")
    return file


def write_pairs(file: Path, count: int, first: int = 0) -> Path:
    """Preference pairs of texts of different lengths."""
    with file.open("w") as lines:
        for number in range(first, first + count):
            pair = {
                "prompt": f"Why {number}?" + " Why?" * (number % 3),
                "chosen": " Yes" * (1 + number % 4),
                "rejected": " no" * (number % 5) + "!",
            }
            lines.write(json.dumps(pair) + "\n")
    return file


def loss_tokens(sample: dict[str, list[int]]) -> int:
    return sum(label != -100 for label in sample["labels"][1:])


def sample_loss(model: torch.nn.Module, sample: dict[str, list[int]]) -> torch.Tensor:
    """The sum over the loss tokens of a sample that is computed alone."""
    logits = model(input_ids=torch.tensor([sample["input_ids"]])).logits[0, :-1].float()
    labels = torch.tensor(sample["labels"][1:])
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")


@torch.no_grad()
def losses_per_sample(model: torch.nn.Module, file: Path) -> list[float]:
    return [sample_loss(model, sample).item() for sample in read_jsonl(file)]


def mean_loss(model: torch.nn.Module, file: Path) -> float:
    """The mean over all loss tokens of a file."""
    tokens = sum(loss_tokens(sample) for sample in read_jsonl(file))
    return sum(losses_per_sample(model, file)) / tokens
