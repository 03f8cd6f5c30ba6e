"""Run benchmarks and keep what they print, with machine, versions, commit and date:

    python benchmarks/record.py                   # all of them: make benchmarks
    python benchmarks/record.py planned loading   # only these: make benchmarks ONLY="planned loading"

A benchmark is written to benchmarks/results/NAME.json. `has_changes` says that files differed from
the commit. Measure speed on a machine that does nothing else.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY / folder) for folder in ("src", ".")]

from benchmarks.trl_comparison.comparison_measures import commit, machine

RESULTS = REPOSITORY / "benchmarks" / "results"
PACKAGES = ("torch", "transformers", "peft", "datasets", "bitsandbytes")


@dataclass(frozen=True)
class Benchmark:
    """A benchmark of docs/development/benchmarks.md.

    Attributes:
        command: after `python`, from the root of the repository.
        section: the heading of its figures.
        minutes: on two cores, estimated.
    """

    command: str
    section: str
    minutes: int


BENCHMARKS = {
    "planned": Benchmark(
        "benchmarks/planner/plan.py --json output/planned.json",
        "Planned against measured memory",
        15,
    ),
    "speed": Benchmark("benchmarks/trainers/throughput.py", "Training speed against TRL", 60),
    "preferences": Benchmark(
        "benchmarks/trainers/preferences.py", "Preference tuning against TRL", 20
    ),
    "speed_dpo": Benchmark(
        "benchmarks/trainers/throughput.py --objective dpo", "DPO speed against TRL", 30
    ),
    "grpo": Benchmark("benchmarks/grpo/grpo_curves.py output/curves", "GRPO against TRL", 25),
    "grpo_losses": Benchmark("benchmarks/grpo/grpo_comparison.py", "Losses of GRPO against TRL", 6),
    "images": Benchmark(
        "benchmarks/trainers/images_trl.py --families Qwen3-VL,'Gemma 3',LLaVA",
        "Fine-tuning on images against TRL",
        3,
    ),
    "padding": Benchmark(
        "benchmarks/trainers/padding_trl.py --settings 60", "Padding against TRL", 10
    ),
    "optimizations": Benchmark("benchmarks/speed/ablation.py", "What each optimization gives", 30),
    "experts": Benchmark("benchmarks/speed/experts.py", "LoRA on experts", 5),
    "scaling": Benchmark("benchmarks/speed/scaling.py", "Memory by length", 30),
    "other_tools": Benchmark(
        "benchmarks/planner/other_tools.py", "Plans against published figures of other tools", 10
    ),
    "sequences": Benchmark("benchmarks/planner/long_context.py", "Sequence parallelism", 30),
    "tiles": Benchmark("benchmarks/planner/tiled_mlp.py", "Tiled MLPs", 5),
    "loading": Benchmark("benchmarks/speed/loading.py", "Loading", 20),
    "data": Benchmark("benchmarks/speed/data.py", "Packing", 15),
    "checkpoints": Benchmark("benchmarks/checkpoints/checkpoint.py", "Checkpoints", 15),
    "uploads": Benchmark("benchmarks/checkpoints/uploads.py", "Saves with object storage", 5),
    "kills": Benchmark("benchmarks/checkpoints/crash.py", "Resuming after kills", 60),
    "rollout_kills": Benchmark(
        "benchmarks/checkpoints/rollout_crash.py --kills 20", "Resuming GRPO after kills", 10
    ),
    "successors": Benchmark(
        "benchmarks/checkpoints/successors.py --cases 50", "Successors that start too early", 30
    ),
    "store_kills": Benchmark(
        "benchmarks/checkpoints/store_crash.py --kills 100",
        "Resuming from object storage after kills",
        20,
    ),
    "store_lies": Benchmark(
        "benchmarks/checkpoints/store_lies.py --lies 60 --seed 1",
        "Resuming from object storage that gives wrong answers",
        30,
    ),
    "start": Benchmark("benchmarks/speed/start.py", "Start-up", 5),
}


def versions() -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def has_changes() -> bool:
    """Return whether files differ from the commit."""
    command = ["git", "-C", str(REPOSITORY), "status", "--porcelain", "--untracked-files=no"]
    return bool(subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout.strip())


def run(benchmark: Benchmark) -> dict[str, Any]:
    """Run a benchmark, show its output, and return the content of its file."""
    head = {
        "date": date.today().isoformat(),
        "commit": commit(),
        "has_changes": has_changes(),
        "machine": machine(),
        "versions": versions(),
        "command": f"python {benchmark.command}",
    }
    (REPOSITORY / "output").mkdir(exist_ok=True)
    start = time.monotonic()
    printed = []
    command = [sys.executable, *shlex.split(benchmark.command)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            printed.append(line.rstrip("\n"))
    seconds = round(time.monotonic() - start)
    return {**head, "seconds": seconds, "exit_code": process.returncode, "printed": printed}


def record(names: list[str], results: Path = RESULTS) -> list[str]:
    """Run benchmarks one after the other, and return the names of those that failed. The file of a
    benchmark that fails stays as it was."""
    failed = []
    for name in names:
        print(f"{name}: python {BENCHMARKS[name].command}", flush=True)
        result = run(BENCHMARKS[name])
        if result["exit_code"]:
            failed.append(name)
            continue
        results.mkdir(exist_ok=True)
        (results / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; none: all of them"
    )
    names = parser.parse_args().names or list(BENCHMARKS)
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark is called {unknown[0]}; there are {', '.join(BENCHMARKS)}")
    failed = record(names)
    if failed:
        raise SystemExit(f"error: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
