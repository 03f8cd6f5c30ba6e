"""memory.svg: planned memory of fine-tuning Llama 3.1 8B by method, in stacked bars."""

import json
from pathlib import Path
from typing import Any

from llama_ft.plan.flags import GPUS

from . import svg

FIGURES = Path(__file__).resolve().parent / "memory.json"
GIB = 2**30
# Part of a bar -> its color, and the planner's categories in it.
PARTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "weights": ("blue", ("sharded parameters", "quantized parts", "unsharded units")),
    "gradients": ("orange", ("gradients",)),
    "optimizer state": ("purple", ("optimizer state",)),
    "activations": ("green", ("activations",)),
    "logits, loss, temporary": (
        "yellow",
        ("logits and loss", "communication buffers", "temporaries"),
    ),
    "allocator and CUDA": ("gray", ()),
}
LIMITS = {"24 GB GPU": GPUS["rtx4090"], "80 GB GPU": GPUS["h100"]}
LEFT = 150
RIGHT = 730
TOP = 108
ROW = 46
BAR = 30
LABEL = 74  # width of "123.4 GiB" after a bar


def parts_of(bar: dict[str, Any]) -> dict[str, float]:
    """GiB per part of a bar."""
    parts = {}
    for part, (_, categories) in PARTS.items():
        nbytes = sum(bar["bytes"].get(category, 0) for category in categories)
        parts[part] = nbytes / GIB
    parts["allocator and CUDA"] = (bar["allocator_bytes"] + bar["cuda_bytes"]) / GIB
    return parts


def read_bars() -> list[dict[str, Any]]:
    return json.loads(FIGURES.read_text())


def describe() -> str:
    """The numbers in words."""
    bars = read_bars()
    totals = [f"{bar['method']} {bar['gpu_bytes'] / GIB:.1f} GiB" for bar in bars]
    limits = [f"{gib} GiB ({name})" for name, gib in LIMITS.items()]
    return (
        f"Planned GPU memory of Llama 3.1 8B: {'; '.join(totals)}. Lines: {' and '.join(limits)}."
    )


def draw() -> str:
    bars = read_bars()
    widest = max(bar["gpu_bytes"] for bar in bars) / GIB
    scale = (RIGHT - LEFT) / (10 * (widest // 10 + 1))  # px per GiB
    bottom = TOP + ROW * len(bars)
    title = "Llama 3.1 8B on one GPU: what fine-tuning needs, by method"
    body = [
        svg.text(24, 34, title, "title"),
        svg.text(
            24,
            56,
            "Planned without a GPU: micro-batches of 4,096 tokens, bf16 mixed, full activation checkpointing.",
            "small",
        ),
    ]
    for name, gib in LIMITS.items():
        x = LEFT + gib * scale
        body.append(
            svg.line(x, TOP - 14, x, bottom + 4, more=' stroke-width="1.5" stroke-dasharray="5 4"')
        )
        body.append(svg.text(x, TOP - 21, name, "bold", anchor="middle"))
    for row, bar in enumerate(bars):
        y = TOP + ROW * row
        body.append(svg.text(LEFT - 12, y + 20, bar["method"], anchor="end"))
        x = float(LEFT)
        for part, gib in parts_of(bar).items():
            width = gib * scale
            note = f"{bar['method']}, {part}: {gib:.1f} GiB"
            body.append(svg.rect(x, y, width, BAR, PARTS[part][0], note=note))
            x += width
        # a label must not stand on the line of a limit
        for limit in LIMITS.values():
            line = LEFT + limit * scale
            if x + 4 < line < x + LABEL:
                x = line
        body.append(svg.text(x + 8, y + 20, f"{bar['gpu_bytes'] / GIB:.1f} GiB", "bold halo"))
    x = 24.0
    for part, (color, _) in PARTS.items():
        body.append(svg.rect(x, bottom + 22, 12, 12, color, radius=2))
        body.append(svg.text(x + 18, bottom + 33, part, "small"))
        x += 40 + 6.6 * len(part)
    return svg.picture(bottom + 52, title, describe(), body)
