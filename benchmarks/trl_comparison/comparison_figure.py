"""The loss curves of benchmarks/trl_comparison/comparison.py over each other, as SVG, from its result.json.

    python benchmarks/trl_comparison/comparison_figure.py output/comparison/result.json output/comparison.svg

A panel per training: both training losses as lines, TRL's wide and pale below llama_ft's thin one,
and the validation losses as rings around dots. Colors change with the viewer's light or dark mode.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

PANEL_WIDTH = 205
PANEL_HEIGHT = 240
LEFT = 48  # room for numbers
TOP = 108
BOTTOM = 48
GAP = 24
DESCRIPTION = "Training and validation losses of llama_ft and TRL, which lie over each other"
HEADING = "The same steps in llama_ft and in TRL: losses"
TITLES = {"lora": "LoRA", "full": "Full fine-tuning", "dpo": "DPO of the LoRA result"}
STYLE = """
    text { font-family: -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2937; }
    .title { font-size: 16px; font-weight: 600; }
    .panel { font-size: 14px; font-weight: 600; }
    .number, .legend { font-size: 13px; }
    .card { fill: #ffffff; stroke: #d1d5db; }
    .grid { stroke: #d1d5db; stroke-width: 1; }
    .curve { fill: none; stroke-linejoin: round; }
    .trl { stroke: #f59e0b; stroke-width: 5; stroke-opacity: 0.55; }
    .ours { stroke: #1d4ed8; stroke-width: 1.2; }
    .ring { fill: none; stroke: #b45309; stroke-width: 2; }
    .dot { fill: #1d4ed8; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e5e7eb; }
      .card { fill: #111827; stroke: #374151; }
      .grid { stroke: #374151; }
      .trl { stroke: #f59e0b; }
      .ours { stroke: #93c5fd; }
      .ring { stroke: #fbbf24; }
      .dot { fill: #93c5fd; }
    }
"""


class Panel:
    """One training's axes.

    Args:
        training: of result.json.
        number: counted from the left.
    """

    def __init__(self, training: dict[str, Any], number: int) -> None:
        self.training = training
        self.left = LEFT + number * (PANEL_WIDTH + GAP + LEFT)
        sides = [training[side] for side in ("llama_ft", "TRL")]
        values = [loss for side in sides for loss in side["losses"]]
        values += [record["loss"] for side in sides for record in side["evaluations"]]
        self.step_of_scale = nice_step(max(values))
        self.top_value = math.ceil(max(values) / self.step_of_scale) * self.step_of_scale

    def x(self, step: float) -> float:
        return self.left + PANEL_WIDTH * step / self.training["steps"]

    def y(self, value: float) -> float:
        return TOP + PANEL_HEIGHT * (1 - value / self.top_value)

    def axes(self, title: str) -> list[str]:
        lines = [f'<text class="panel" x="{self.left}" y="{TOP - 14}">{title}</text>']
        right = self.left + PANEL_WIDTH
        for number in range(round(self.top_value / self.step_of_scale) + 1):
            value = number * self.step_of_scale
            y = self.y(value)
            grid = f'<path class="grid" d="M{self.left} {y:.1f}H{right}"/>'
            place = f'x="{self.left - 6}" y="{y + 4:.1f}" text-anchor="end"'
            lines += [grid, f'<text class="number" {place}>{value:g}</text>']
        steps = self.training["steps"]
        for step in (0, steps // 2, steps):
            place = f'x="{self.x(step):.1f}" y="{TOP + PANEL_HEIGHT + 18}" text-anchor="middle"'
            label = f"step {step}" if step == 0 else str(step)
            lines.append(f'<text class="number" {place}>{label}</text>')
        return lines

    def curve(self, side: str, name: str) -> str:
        losses = self.training[side]["losses"]
        points = [f"{self.x(step):.1f} {self.y(loss):.1f}" for step, loss in enumerate(losses, 1)]
        return f'<path class="curve {name}" d="M{" ".join(points)}"/>'

    def marks(self, side: str, name: str, radius: float) -> list[str]:
        marks = []
        for record in self.training[side]["evaluations"]:
            x = self.x(record["step"])
            y = self.y(record["loss"])
            marks.append(f'<circle class="{name}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>')
        return marks


def nice_step(largest: float) -> float:
    """The distance of grid lines, of which there are at most six: 1, 2 or 5 times a power of 10."""
    power = 10 ** math.floor(math.log10(largest))
    steps = [factor * power for factor in (0.1, 0.2, 0.5, 1, 2)]
    return float(next(step for step in steps if largest / step <= 6))


def legend(middle: float) -> list[str]:
    y = 62
    entries = [
        ('<path class="curve trl" d="M{x} {y}h26"/>', "TRL, training"),
        ('<path class="curve ours" d="M{x} {y}h26"/>', "llama_ft, training"),
        ('<circle class="ring" cx="{m}" cy="{y}" r="5"/>', "TRL, validation"),
        ('<circle class="dot" cx="{m}" cy="{y}" r="2.5"/>', "llama_ft, validation"),
    ]
    lines = []
    for number, (mark, label) in enumerate(entries):
        x = middle - 300 + number * 155
        lines.append(mark.format(x=x, y=y, m=x + 13))
        lines.append(f'<text class="legend" x="{x + 32}" y="{y + 4}">{label}</text>')
    return lines


def draw_figure(result: dict[str, Any]) -> str:
    """Return the figure as SVG."""
    trainings = result["trainings"]
    width = len(trainings) * (PANEL_WIDTH + GAP + LEFT) + 9
    height = TOP + PANEL_HEIGHT + BOTTOM
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-labelledby="title desc">',
        '<title id="title">Losses of llama_ft and of TRL</title>',
        f'<desc id="desc">{DESCRIPTION}</desc>',
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
        f'<text class="title" x="20" y="34">{HEADING}</text>',
        *legend(max(width / 2, 310)),
    ]
    for number, (name, training) in enumerate(trainings.items()):
        panel = Panel(training, number)
        lines += panel.axes(TITLES[name])
        lines += [panel.curve("TRL", "trl"), panel.curve("llama_ft", "ours")]
        lines += panel.marks("TRL", "ring", 5) + panel.marks("llama_ft", "dot", 2.5)
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    result_file = Path(sys.argv[1])
    Path(sys.argv[2]).write_text(draw_figure(json.loads(result_file.read_text())))
