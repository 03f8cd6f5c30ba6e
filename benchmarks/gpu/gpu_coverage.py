"""What no GPU has been checked for yet, by the results of gpu_check.py."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu.gpu_bench import REPOSITORY
from benchmarks.gpu.gpu_cases import CASES, COMPILED, FURTHER, METHODS, ON_GPU_ONLY
from benchmarks.gpu.gpu_ranks import TWO_RANKS, run_name

PUBLISHED = REPOSITORY / "benchmarks" / "results" / "gpu"  # gpu_check.jsonl of others
# part -> its claims, where one is left out of the list as soon as it holds
CLAIMS: dict[str, list[str]] = {
    "cases": [*CASES, *ON_GPU_ONLY],
    "methods": [*METHODS],
    "further": [*FURTHER, "GRPO"],
    "compiled": [*COMPILED],
    "two_ranks": [run_name(name) for name in TWO_RANKS],
}
# part -> what it checks, of which all must hold
WHOLE = {
    "start": "imports, a process group of one rank, expandable segments",
    "waits": "waits of the host",
    "attention": "attention kernels",
    "triton": "kernels in Triton for experts and MXFP4, attention with sinks",
    "one_pass": "kernels of the optimizer and of dequantizing",
    "quantized": "4-bit and 8-bit weights, AdamW8bit",
    "sharded": "fully_shard with quantized parameters",
    "lora8b": "speed and memory of LoRA on 8B",
    "quant8b": "speed and memory of QLoRA on 8B",
    "full": "speed and memory of full fine-tuning",
    "resume": "resuming",
    "save": "checkpoints of 3B",
    "ends": "how runs end",
    "oom": "the message when memory runs out",
    "inference": "speed of answers",
    "fixes": "what each optimization saves",
}
NO_CHECK = (
    "several nodes",
    "elastic restarts",
    "uploads to object storage",
    "rollouts and GRPO by servers",
    "evaluation tasks",
    "sequences shared by more than two GPUs",
)


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of all results in a folder that were measured on a GPU."""
    rows = []
    for file in sorted(folder.glob("*.jsonl")):
        own = [json.loads(line) for line in file.read_text().splitlines()]
        if any(row["claim"] == "device" and row["ok"] for row in own):
            rows += own
    return rows


def not_checked(rows: Iterable[dict[str, Any]]) -> str:
    """Return lines on what has not been checked, or does not hold, by rows from GPUs."""
    held = set[tuple[str, str]]()
    wrong = set[str]()  # parts
    for row in rows:
        if row["ok"]:
            held.add((row["check"], row["claim"]))
        elif row["ok"] is False:
            wrong.add(row["check"])
    lines = []
    for part, claims in CLAIMS.items():
        missing = [claim for claim in claims if (part, claim) not in held]
        if missing:
            lines.append(f"{part}: {'; '.join(missing)}")
    checked = {part for part, _ in held} - wrong
    lines += [f"{part}: {what}" for part, what in WHOLE.items() if part not in checked]
    lines.append(f"no part yet: {'; '.join(NO_CHECK)}")
    return "\n".join(lines)
