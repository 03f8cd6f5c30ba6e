"""Measured speed over the speed that `llama-ft plan` computes, by results of gpu_check.py."""

import re
import statistics
from collections.abc import Iterable
from typing import Any

PLANNED = "planned per token"  # claim of a run's plan, after its name
MEASURED = "tokens/s"
NO_FACTORS = "no published result has speeds"


def planned_per_token(plan: dict[str, Any]) -> str:
    """Return the FLOPs and the bytes per token of a plan.json."""
    tokens = plan["tokens"] * plan["micro_batches"]
    return f"{plan['step_flops'] / tokens:.4g} FLOP, {plan['step_bytes'] / tokens:.4g} bytes"


def name_in_fit(device: str) -> str:
    """Return the name of --fit of a GPU: `a100-40` of `NVIDIA A100-SXM4-40GB`; "" if it has none."""
    from llama_ft.plan.flags import GPUS, VENDORS

    plain = VENDORS.sub("", re.sub("[^a-z0-9]", "", device.lower()))
    names = []
    for name in GPUS:
        model, _, size = name.partition("-")
        if plain.startswith(model) and (not size or f"{size}gb" in plain):
            names.append(name)
    return max(names, key=len, default="")


def speed_factors(rows: Iterable[dict[str, Any]]) -> str:
    """Return the lines of `llama_ft.plan.duration.SPEED_FACTORS` by rows of the table: the median of each
    GPU's runs. Rows of a GPU follow the one with its name."""
    from llama_ft.plan.duration import computed_seconds

    gpu = ""
    measured = dict[str, float]()
    factors = dict[str, list[float]]()
    for row in rows:
        run, _, claim = row["claim"].rpartition(": ")
        if row["claim"] == "device":
            gpu = name_in_fit(row["found"])
        elif claim == MEASURED:
            measured[run] = float(row["found"].split(", ")[0].replace(",", ""))
        elif claim == PLANNED:
            flops, nbytes = (float(part.split()[0]) for part in row["found"].split(", "))
            seconds = computed_seconds(flops, nbytes, gpu)
            if seconds is not None and run in measured:
                factors.setdefault(gpu, []).append(measured[run] * seconds)
    lines = []
    for name, found in factors.items():
        lines.append(f'"{name}": {statistics.median(found):.2f},  # runs: {len(found)}')
    return "\n".join(lines) or NO_FACTORS
