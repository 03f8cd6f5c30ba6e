"""Measure how long a run takes from its command to the end of the first step, compared with its
imports alone.

    python benchmarks/speed/start.py --turns 5

These run alternately: a new Python that imports torch, a model class of Transformers, PEFT and
datasets; one step of recipes/finetuning.py on one process with a tiny Llama, full fine-tuning and
LoRA, with data to be tokenized (cold) or already in the cache (warm); --help of every recipe. Each
is timed from its start to its last output, a run also to the line of its first step. CPU seconds
are those of the whole process, which other load on the machine changes less.

Targets: the first step ends within 1.5 x the imports + 3 s; --help within 2 s.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `import benchmarks`

from benchmarks.checkpoints.crash import REPOSITORY, write_inputs

IMPORTS = "import torch; from transformers import LlamaForCausalLM; import peft; import datasets"
RECIPES = ("finetuning", "plan", "export", "report")
FLAGS = "--device cpu --batch_size_training 1 --context_length 128 --max_train_step 1".split()
METHODS = {"full": ["--precision", "fp32"], "LoRA": ["--precision", "fp32", "--use_peft"]}
FIRST_STEP = "step 1/1 "
MOST_IMPORTS = 1.5
MORE_SECONDS = 3.0
HELP_SECONDS = 2.0


@dataclass
class Timings:
    """Of one command, a number a turn.

    Attributes:
        seconds: until it had ended.
        first_step: until the line of the first step; empty where there is none.
        cpu_seconds: its own and those of the processes it waited for.
    """

    seconds: list[float] = field(default_factory=list)
    first_step: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)


def timed(command: list[str], environment: dict[str, str], into: Timings) -> None:
    """Run a command once."""
    before = os.times()
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY / "src"),
            "PYTHONUNBUFFERED": "1",
            **environment,
        },
    )
    assert process.stdout is not None
    output = []
    for line in process.stdout:
        output.append(line)
        if line.startswith(FIRST_STEP):
            into.first_step.append(time.perf_counter() - started)
    if process.wait():
        raise SystemExit(f"{' '.join(command)} failed:\n{''.join(output)}")
    into.seconds.append(time.perf_counter() - started)
    after = os.times()
    used = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    into.cpu_seconds.append(used)


def write_rows(file: Path) -> None:
    """Questions and answers, to be tokenized."""
    rows = [
        {"instruction": f"What is {n} + {n}?", "output": f"It is {2 * n}. " * (1 + n % 5)}
        for n in range(64)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def one_turn(folder: Path, timings: dict[str, Timings]) -> None:
    """Every command once."""
    timed(["-c", IMPORTS], {}, timings.setdefault("imports", Timings()))
    for method, flags in METHODS.items():
        shutil.rmtree(folder / "cache", ignore_errors=True)
        for cache in ("cold", "warm"):
            run = folder / "run"
            inputs = [
                "--model_name",
                str(folder / "model"),
                "--dataset",
                str(folder / "text.jsonl"),
            ]
            command = [
                str(REPOSITORY / "recipes" / "finetuning.py"),
                *inputs,
                *FLAGS,
                *flags,
                "--output_dir",
                str(run),
            ]
            environment = {"LLAMA_FT_CACHE": str(folder / "cache"), "CUDA_VISIBLE_DEVICES": ""}
            timed(command, environment, timings.setdefault(f"{method}, {cache} cache", Timings()))
            shutil.rmtree(run)
    for name in RECIPES:
        command = [str(REPOSITORY / "recipes" / f"{name}.py"), "--help"]
        timed(command, {}, timings.setdefault(f"{name}.py --help", Timings()))


def cell(numbers: list[float]) -> str:
    """Median (least to most)."""
    return (
        f"{statistics.median(numbers):.2f} ({min(numbers):.2f} to {max(numbers):.2f})"
        if numbers
        else ""
    )


def print_table(timings: dict[str, Timings]) -> None:
    imports = timings["imports"]
    most = MOST_IMPORTS * statistics.median(imports.seconds) + MORE_SECONDS
    print(
        "| | first step after, s | ended after, s | CPU, s | x imports | CPU x imports | target, s | |"
    )
    print("|---" * 8 + "|")
    for name, its in timings.items():
        asked = its.first_step or its.seconds
        ratio = statistics.median(a / b for a, b in zip(asked, imports.seconds, strict=True))
        cpu_ratio = statistics.median(
            a / b for a, b in zip(its.cpu_seconds, imports.cpu_seconds, strict=True)
        )
        target = None
        if its.first_step:
            target = most
        elif "--help" in name:
            target = HELP_SECONDS
        verdict = ""
        if target is not None:
            verdict = "met" if statistics.median(asked) <= target else "MISSED"
        print(
            f"| {name} | {cell(its.first_step)} | {cell(its.seconds)} | {cell(its.cpu_seconds)} | {ratio:.2f} | "
            f"{cpu_ratio:.2f} | {'' if target is None else f'{target:.1f}'} | {verdict} |"
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=5)
    asked = parser.parse_args()
    timings: dict[str, Timings] = {}
    with tempfile.TemporaryDirectory(prefix="start-") as name:
        folder = Path(name)
        write_inputs(folder)
        write_rows(folder / "text.jsonl")
        for turn in range(asked.turns):
            one_turn(folder, timings)
            print(f"turn {turn + 1} of {asked.turns}", file=sys.stderr, flush=True)
    print_table(timings)


if __name__ == "__main__":
    main()
