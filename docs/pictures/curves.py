"""curves.svg: the losses of three runs side by side: good, learning rate too high, overfitting.
record_curves.py has trained them."""

import json
import math
from pathlib import Path
from typing import Any

from . import svg

FIGURES = Path(__file__).resolve().parent / "curves.json"
LEFT = 56
TOP = 122
WIDTH = 232  # px of a panel
HEIGHT = 210
HIGHEST = 8  # losses above it are drawn at the edge
TRAINED_ON = 48  # tickets, unless a run says otherwise
GAP = 28
BOTTOM = TOP + HEIGHT
STYLE = """
    .training { fill: none; stroke: #848d97; stroke-width: 1.5; }
    .validation { fill: none; stroke: #1f6feb; stroke-width: 2.5; }
"""

Points = list[list[float]]


def read_runs() -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads(FIGURES.read_text())["runs"]
    return runs


def describe() -> str:
    """The numbers in words."""
    parts = []
    for run in read_runs():
        (_, first), *_ = run["validation"]
        step, lowest = min(run["validation"], key=lambda point: point[1])
        _, last = run["validation"][-1]
        _, training = run["training"][-1]
        name = run["name"].capitalize()
        parts.append(
            f"{name}: validation loss {first:.2f} before training, lowest {lowest:.2f} at step {step}, "
            f"{last:.2f} at the end, where the training loss is {training:.2f}"
        )
    return f"Losses of three runs. {'. '.join(parts)}."


def about(run: dict[str, Any]) -> str:
    """What differs between the runs, in a few words."""
    words = run["flags"].split()
    flags = dict(zip(words[::2], words[1::2], strict=True))
    tickets = flags.get("--max_samples", str(TRAINED_ON))
    return f"lr {flags['--lr']}, {tickets} tickets, {run['epochs']:.0f} epochs"


def highest(runs: list[dict[str, Any]]) -> int:
    """The top of the axis: an even number above all losses, but at most HIGHEST."""
    values = [loss for run in runs for _, loss in [*run["training"], *run["validation"]]]
    return min(HIGHEST, 2 * math.ceil(max(values) / 2))


def draw_panel(run: dict[str, Any], left: float, top_loss: int) -> list[str]:
    """One run: both losses by step."""
    last_step = run["training"][-1][0]

    def place(point: list[float]) -> tuple[float, float]:
        step, loss = point
        height = HEIGHT * min(loss, top_loss) / top_loss
        return left + WIDTH * step / last_step, BOTTOM - height

    def path(points: Points, style: str) -> str:
        corners = [f"{svg.number(x)} {svg.number(y)}" for x, y in map(place, points)]
        return f'<polyline points="{" ".join(corners)}" class="{style}"/>'

    body = [
        svg.text(left, TOP - 32, run["name"].capitalize(), "bold"),
        svg.text(left, TOP - 12, about(run), "small"),
    ]
    for loss in range(0, top_loss + 1, 2):
        _, y = place([0, loss])
        body.append(svg.line(left, y, left + WIDTH, y, "grid"))
        body.append(svg.text(left - 8, y + 5, str(loss), "small", anchor="end"))
    for step in range(0, last_step + 1, 50):
        x, _ = place([step, 0])
        body.append(svg.text(x, BOTTOM + 18, str(step), "small", anchor="middle"))
    body.append(path(run["training"], "training"))
    body.append(path(run["validation"], "validation"))
    return body


def draw() -> str:
    title = "Three learning curves: good, learning rate too high, overfitting"
    runs = read_runs()
    top_loss = highest(runs)
    body = [
        svg.text(24, 34, title, "title"),
        svg.text(
            24,
            56,
            "LoRA on SmolLM2-135M-Instruct. Loss by step (above 8: at the edge); validation on 12 other tickets.",
            "small",
        ),
    ]
    for number, run in enumerate(runs):
        body += draw_panel(run, LEFT + number * (WIDTH + GAP), top_loss)
    y = BOTTOM + 44
    for x, style, label in (
        (24, "training", "training loss"),
        (180, "validation", "validation loss"),
    ):
        body.append(svg.line(x, y - 5, x + 26, y - 5, style))
        body.append(svg.text(x + 34, y, label, "small"))
    return svg.picture(BOTTOM + 64, title, describe(), body, STYLE)
