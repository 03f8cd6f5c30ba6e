"""curves.svg: losses of three runs that differ in learning rate and epochs: good, a rate that is too
high, overfitting."""

import json
from pathlib import Path
from typing import Any

from . import svg

FIGURES = Path(__file__).resolve().parent / "curves.json"  # recorded, see its "command"
TOP = 84
HEIGHT = 210
WIDTH = 216  # px of a plot
LEFT = 56
GAP = 46
LARGEST = 6.0  # loss at the upper edge
Points = list[tuple[int, float]]


def read_runs() -> list[dict[str, Any]]:
    """Title, note and losses by step of each run."""
    runs: list[dict[str, Any]] = json.loads(FIGURES.read_text())["runs"]
    return runs


def describe() -> str:
    """The numbers in words."""
    texts = []
    for run in read_runs():
        losses = [loss for _, loss in run["validation"]]
        texts.append(
            f"{run['title']}: the validation loss is {losses[0]:.2f} before training, at its lowest "
            f"{min(losses):.2f}, and {losses[-1]:.2f} at the end."
        )
    return " ".join(texts)


def draw_curve(points: Points, left: float, last_step: int, color: str, dashes: str) -> str:
    """A polyline; losses above the upper edge are drawn on it."""
    places = []
    for step, loss in points:
        x = left + WIDTH * step / last_step
        y = TOP + HEIGHT * (1 - min(loss, LARGEST) / LARGEST)
        places.append(f"{svg.number(x)},{svg.number(y)}")
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{" ".join(places)}" class="{color}"{dashed}/>'


def draw_plot(run: dict[str, Any], left: float, has_labels: bool) -> list[str]:
    """One run: axes, both curves, and what they mean."""
    last_step = run["validation"][-1][0]
    body = [svg.text(left, TOP - 14, run["title"], "bold")]
    for loss in range(int(LARGEST) + 1):
        y = TOP + HEIGHT * (1 - loss / LARGEST)
        body.append(svg.line(left, y, left + WIDTH, y, "grid"))
        if has_labels:
            body.append(svg.text(left - 8, y + 5, str(loss), "small", anchor="end"))
    body.append(draw_curve(run["training"], left, last_step, "training", "4 3"))
    body.append(draw_curve(run["validation"], left, last_step, "validation", ""))
    body.append(svg.text(left, TOP + HEIGHT + 20, "step 0", "small"))
    body.append(svg.text(left + WIDTH, TOP + HEIGHT + 20, str(last_step), "small", anchor="end"))
    body.append(svg.text(left, TOP + HEIGHT + 42, run["note"], "small"))
    return body


def draw() -> str:
    """Return the picture as SVG."""
    title = "Three losses: good, learning rate too high, overfitting"
    body = [svg.text(24, 34, title, "title")]
    for number, run in enumerate(read_runs()):
        body += draw_plot(run, LEFT + number * (WIDTH + GAP), has_labels=number == 0)
    y = TOP + HEIGHT + 72
    body.append(svg.line(LEFT, y - 5, LEFT + 30, y - 5, "validation"))
    body.append(svg.text(LEFT + 38, y, "validation loss", "small"))
    body.append(
        svg.line(LEFT + 160, y - 5, LEFT + 190, y - 5, "training", ' stroke-dasharray="4 3"')
    )
    body.append(svg.text(LEFT + 198, y, "training loss", "small"))
    style = """
    .validation { stroke: #1f6feb; stroke-width: 2.5px; fill: none; }
    .training { stroke: #d9730d; stroke-width: 1.5px; fill: none; }
"""
    return svg.picture(TOP + HEIGHT + 92, title, describe(), body, style)
