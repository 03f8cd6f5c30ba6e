"""planned.svg: every case of benchmarks/planner/plan.py, its planned peak against the measured one."""

import json
import math
from pathlib import Path
from typing import Any

from . import svg

FIGURES = Path(__file__).resolve().parent / "planned.json"
COLORS = {
    "full fine-tuning": "purple",
    "LoRA": "blue",
    "8-bit base": "green",
    "QLoRA": "orange",
    "DPO, KTO": "yellow",
    "LoRA on experts": "gray",
    "images": "red",
}
METHODS = {"full": "full fine-tuning", "lora": "LoRA", "8bit": "8-bit base", "4bit": "QLoRA"}
KINDS = {"dpo": "DPO, KTO", "kto": "DPO, KTO", "experts": "LoRA on experts", "images": "images"}
MIB = 2**20
TOP = 84
SIDE = 300  # px of the left plot
LEFT = 84
BOTTOM = TOP + SIDE
ERRORS_LEFT = 500
ERRORS_WIDTH = 300
STEPS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0)  # % that the right plot may end at


def name_method(method: str) -> str:
    """The name in the legend of a method of benchmarks/planner/plan.py, such as dpo_lora."""
    kind, _, _ = method.partition("_")
    return METHODS.get(method) or KINDS[kind]


def read_points() -> list[tuple[str, float, float]]:
    """Method, MiB planned and MiB measured of every case."""
    cases: list[dict[str, Any]] = json.loads(FIGURES.read_text())
    return [
        (
            name_method(case["method"]),
            case["planned_bytes"] / MIB,
            case["measured_bytes"] / MIB,
        )
        for case in cases
    ]


def describe() -> str:
    """The numbers in words."""
    points = read_points()
    errors = [abs(planned / measured - 1) for _, planned, measured in points]
    near = sum(error <= 0.005 for error in errors)
    sizes = [measured for _, _, measured in points]
    return (
        f"Planned against measured peak memory of {len(points)} runs on CPUs, of {min(sizes):.0f} to "
        f"{max(sizes):.0f} MiB: {near} plans are within 0.5%. The worst is {max(errors):.1%} off."
    )


class Axis:
    """An axis of MiB in powers of two, from `low` to `high`."""

    def __init__(self, points: list[tuple[str, float, float]]) -> None:
        values = [value for _, *pair in points for value in pair]
        self.low = 2 ** math.floor(math.log2(min(values)))
        high = 2 ** math.ceil(math.log2(max(values)))
        self.octaves = int(math.log2(high / self.low))

    def share(self, value: float) -> float:
        """Place of a value: 0 is the low end, 1 the high end."""
        return math.log2(value / self.low) / self.octaves

    def ticks(self) -> list[int]:
        return [self.low * 2**octave for octave in range(self.octaves + 1)]


def draw_peaks(points: list[tuple[str, float, float]], axis: Axis) -> list[str]:
    """The left plot: planned by measured peak."""
    body = []
    for value in axis.ticks():
        x = LEFT + SIDE * axis.share(value)
        y = BOTTOM - SIDE * axis.share(value)
        body.append(svg.line(x, TOP, x, BOTTOM, "grid"))
        body.append(svg.line(LEFT, y, LEFT + SIDE, y, "grid"))
        body.append(svg.text(x, BOTTOM + 18, f"{value:,}", "small", anchor="middle"))
        body.append(svg.text(LEFT - 8, y + 5, f"{value:,}", "small", anchor="end"))
    body.append(svg.line(LEFT, BOTTOM, LEFT + SIDE, TOP))
    body.append(svg.text(LEFT + SIDE / 2, BOTTOM + 40, "measured peak, MiB", anchor="middle"))
    turned = f'<g transform="translate(24 {TOP + SIDE // 2}) rotate(-90)">'
    body.append(f"{turned}{svg.text(0, 0, 'planned peak, MiB', anchor='middle')}</g>")
    for method, planned, measured in points:
        x = LEFT + SIDE * axis.share(measured)
        y = BOTTOM - SIDE * axis.share(planned)
        body.append(draw_dot(x, y, COLORS[method]))
    return body


def draw_errors(points: list[tuple[str, float, float]], axis: Axis) -> list[str]:
    """The right plot: the error of a plan in %, by measured peak."""
    worst = max(abs(100 * (planned / measured - 1)) for _, planned, measured in points)
    end = next(step for step in STEPS if step >= worst)
    middle = (TOP + BOTTOM) / 2
    right = ERRORS_LEFT + ERRORS_WIDTH
    body = []
    for error in (-end, -end / 2, 0, end / 2, end):
        y = middle - SIDE / 2 * error / end
        label = f"{error:+g}%" if error else "0%"
        body.append(svg.line(ERRORS_LEFT, y, right, y, "grid" if error else "line"))
        body.append(svg.text(ERRORS_LEFT - 8, y + 5, label, "small", anchor="end"))
    for value in axis.ticks():
        x = ERRORS_LEFT + ERRORS_WIDTH * axis.share(value)
        body.append(svg.text(x, BOTTOM + 18, f"{value:,}", "small", anchor="middle"))
    label = "error of the plan, by measured peak in MiB"
    body.append(svg.text((ERRORS_LEFT + right) / 2, BOTTOM + 40, label, anchor="middle"))
    for method, planned, measured in points:
        error = 100 * (planned / measured - 1)
        x = ERRORS_LEFT + ERRORS_WIDTH * axis.share(measured)
        y = middle - SIDE / 2 * error / end
        body.append(draw_dot(x, y, COLORS[method]))
    return body


def draw_dot(x: float, y: float, color: str) -> str:
    place = f'cx="{svg.number(x)}" cy="{svg.number(y)}"'
    return f'<circle {place} r="4" class="{color}" fill-opacity="0.7"/>'


def draw() -> str:
    points = read_points()
    axis = Axis(points)
    title = "Planned against measured memory"
    body = [
        svg.text(24, 34, title, "title"),
        svg.text(24, 56, describe().partition("memory of ")[2], "small"),
        *draw_peaks(points, axis),
        *draw_errors(points, axis),
    ]
    x = 24.0
    drawn = {method for method, _, _ in points}
    for method, color in COLORS.items():
        if method not in drawn:
            continue
        body.append(draw_dot(x + 5, BOTTOM + 70, color))
        body.append(svg.text(x + 16, BOTTOM + 75, method, "small"))
        x += 44 + 7 * len(method)
    return svg.picture(BOTTOM + 96, title, describe(), body)
