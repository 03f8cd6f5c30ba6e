"""The tables of benchmarks/trl_comparison/comparison.py, in Markdown, from its result.json.

python benchmarks/trl_comparison/comparison_table.py output/comparison/result.json
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

MIB = 2**20
TITLES = {"lora": "LoRA", "full": "full fine-tuning", "dpo": "DPO, LoRA"}


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def scored(score: dict[str, Any]) -> str:
    return f"{score['exact']} of {score['of']}"


def mebibytes(size: float) -> str:
    return f"{size / MIB:,.0f}"


def loss_row(name: str, training: dict[str, Any]) -> list[str]:
    ours = training["llama_ft"]["evaluations"]
    theirs = training["TRL"]["evaluations"]
    scores = training["scores"]
    return [
        TITLES[name],
        str(training["steps"]),
        f"{ours[0]['loss']:.4f}",
        f"{ours[-1]['loss']:.4f}",
        f"{theirs[-1]['loss']:.4f}",
        f"{training['largest_validation_difference']:.1e}",
        f"{training['largest_training_difference']:.1e}",
        scored(scores["before"]),
        scored(scores["llama_ft"]),
        scored(scores["TRL"]),
    ]


def cost_row(name: str, training: dict[str, Any]) -> list[str]:
    measured = training["medians"] or training["whole_runs"]
    ours = measured["llama_ft"]
    theirs = measured["TRL"]
    ratio = ours["cpu_seconds_per_step"] / theirs["cpu_seconds_per_step"]
    disks = [training[side]["disk"] for side in ("llama_ft", "TRL")]
    return [
        TITLES[name],
        *(f"{side.get('tokens_per_second', math.nan):.0f}" for side in (ours, theirs)),
        f"{ours['cpu_seconds_per_step']:.2f}",
        f"{theirs['cpu_seconds_per_step']:.2f}",
        f"{ratio:.2f}",
        mebibytes(ours["peak_bytes"]),
        mebibytes(theirs["peak_bytes"]),
        *(f"{mebibytes(disk['checkpoint'])} + {mebibytes(disk['model'])}" for disk in disks),
    ]


def write_table(result: dict[str, Any]) -> str:
    """Return losses and scores, and costs, of both sides."""
    trainings = result["trainings"].items()
    losses = table(
        ["", "steps", "validation loss before", "after", "TRL", "largest difference"]
        + ["of a training loss", "exact before", "after", "TRL"],
        [loss_row(name, training) for name, training in trainings],
    )
    costs = table(
        ["", "tokens/s", "TRL", "CPU s per step", "TRL", "ratio", "MiB of memory", "TRL"]
        + ["MiB of checkpoint + model", "TRL"],
        [cost_row(name, training) for name, training in trainings],
    )
    return f"{losses}\n{costs}"


if __name__ == "__main__":
    print(write_table(json.loads(Path(sys.argv[1]).read_text())))
