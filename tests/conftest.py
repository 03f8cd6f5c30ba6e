"""Small real things to train on, and real torchrun launches. A launch costs 8 to 15 s: `runs` shares one between all
cases of a world size."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
RECIPE = REPOSITORY / "recipes" / "finetuning.py"
QUESTIONS = ["What is a shard", "Who reads the checkpoint", "Why is the loss a sum", "Where do adapters live"]
ANSWERS = [
    "Some rows of a weight.",
    "Rank 0.",
    "So that it does not depend on how rows were dealt.",
    "Beside.",
]


@dataclass(frozen=True)
class Finished:
    """A process that has ended."""

    exit_code: int
    output: str  # stdout and stderr as they came
    seconds: float


def run(command: list[str], timeout: float = 240, **environment: str) -> Finished:
    """Run a command as a user would, with this checkout's package and one thread a process."""
    import time

    started = time.monotonic()
    known = {"PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    finished = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=timeout,
        cwd=REPOSITORY,
        env={**os.environ, **known, **environment},
    )
    return Finished(finished.returncode, finished.stdout, time.monotonic() - started)


def torchrun(processes: int, *arguments: str, timeout: float = 240, **environment: str) -> Finished:
    """torchrun on one machine; `arguments` begin with the script."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return run([*launcher, *arguments], timeout, **environment)


def recipe(*flags: str, processes: int = 0, timeout: float = 240, **environment: str) -> Finished:
    """recipes/finetuning.py with `flags`: through torchrun, or (0) as a process of its own."""
    if processes:
        return torchrun(processes, str(RECIPE), *flags, timeout=timeout, **environment)
    return run([sys.executable, str(RECIPE), *flags], timeout, **environment)


def metrics(output_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl of a run."""
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def losses(output_dir: Path) -> list[float]:
    """Training losses of a run, step by step."""
    return [line["train/loss"] for line in metrics(output_dir) if "train/loss" in line]


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of the test session's own, which the processes it starts inherit."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["LLAMA_FT_CACHE"] = str(folder)
    return folder


@pytest.fixture(scope="session")
def save_tokenizer() -> Callable[..., Path]:
    """Train a small byte-level BPE tokenizer and save it into a folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    def save(folder: Path, pad: bool = True) -> Path:
        inner = Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        special = ["<s>", "</s>", *(["<pad>"] if pad else [])]
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(
            vocab_size=301, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        inner.train_from_iterator(QUESTIONS + ANSWERS, trainer)
        tokens = {"bos_token": "<s>", "eos_token": "</s>", **({"pad_token": "<pad>"} if pad else {})}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **tokens)
        tokenizer.save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="session")
def save_model(save_tokenizer: Callable[..., Path]) -> Callable[..., Path]:
    """Save a tiny random Llama with a tokenizer, several safetensors files and grouped-query attention."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    def save(folder: Path, tied: bool = False, pad: bool = True, seed: int = 0, **settings: Any) -> Path:
        torch.manual_seed(seed)
        shape = {
            "hidden_size": 32,
            "intermediate_size": 66,  # rows that do not divide evenly over 4 ranks
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 301,
            "max_position_embeddings": 256,
            "tie_word_embeddings": tied,
            "initializer_range": 0.1,
        }
        model = LlamaForCausalLM(LlamaConfig(**{**shape, **settings}))
        model.save_pretrained(folder, max_shard_size="60KB")
        return save_tokenizer(folder, pad=pad)

    return save


@pytest.fixture(scope="session")
def tiny_model(save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny untied Llama."""
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tied_model(save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Llama whose head is its embedding."""
    return save_model(tmp_path_factory.mktemp("models") / "tied", tied=True)


def write_rows(file: Path, count: int) -> Path:
    """A .jsonl file of alpaca rows of uneven length, no two alike."""
    rows = [
        {
            "instruction": f"{QUESTIONS[n % 4]}, number {n}?",
            "output": " ".join([ANSWERS[(n + n // 4) % 4]] * (1 + n % 5)),
        }
        for n in range(count)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="session")
def rows16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 rows: with a global batch of 16, every step sees all of them, whatever their order."""
    return write_rows(tmp_path_factory.mktemp("data") / "rows16.jsonl", 16)


@pytest.fixture(scope="session")
def rows70(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """70 rows: with a global batch of 16 the last batch of an epoch has 6."""
    return write_rows(tmp_path_factory.mktemp("data") / "rows70.jsonl", 70)
