"""planned.svg: every case of benchmarks/plan.py, its planned peak against the measured one."""

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
}
METHODS = {"full": "full fine-tuning", "lora": "LoRA", "8bit": "8-bit base", "4bit": "QLoRA"}
MIB = 2**20
TOP = 84
SIDE = 300  # px of the left plot
LEFT = 84
RIGHT_LEFT = 500
RIGHT_WIDTH = 304
STEPS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0)  # % that the right plot may end at


def read_points() -> list[tuple[str, float, float]]:
    """Method, MiB planned and MiB measured of every case."""
    cases: list[dict[str, Any]] = json.loads(FIGURES.read_text())
    return [
        (
            METHODS.get(case["method"], "DPO, KTO"),
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


def draw() -> str:
    points = read_points()
    values = [value for _, *pair in points for value in pair]
    low = 2 ** math.floor(math.log2(min(values)))
    high = 2 ** math.ceil(math.log2(max(values)))
    octaves = int(math.log2(high / low))
    bottom = TOP + SIDE

    def along(value: float) -> float:
        """Share of the axis, 0 to 1."""
        return math.log2(value / low) / octaves

    body = [
        svg.text(24, 34, "Planned against measured memory", "title"),
        svg.text(24, 56, describe().partition("memory of ")[2], "small"),
    ]
    for octave in range(octaves + 1):
        value = low * 2**octave
        x = LEFT + SIDE * octave / octaves
        y = bottom - SIDE * octave / octaves
        body.append(svg.line(x, TOP, x, bottom, "grid"))
        body.append(svg.line(LEFT, y, LEFT + SIDE, y, "grid"))
        body.append(svg.text(x, bottom + 18, f"{value:g}", "small", anchor="middle"))
        body.append(svg.text(LEFT - 8, y + 5, f"{value:g}", "small", anchor="end"))
    body.append(svg.line(LEFT, bottom, LEFT + SIDE, TOP))
    body.append(svg.text(LEFT + SIDE / 2, bottom + 40, "measured peak, MiB", anchor="middle"))
    turned = f'<g transform="translate(30 {TOP + SIDE // 2}) rotate(-90)">'
    body.append(f"{turned}{svg.text(0, 0, 'planned peak, MiB', anchor='middle')}</g>")
    worst = max(abs(100 * (planned / measured - 1)) for _, planned, measured in points)
    end = next(step for step in STEPS if step >= worst)
    for share in (-1, -0.5, 0, 0.5, 1):
        y = TOP + SIDE * (1 - share) / 2
        body.append(
            svg.line(RIGHT_LEFT, y, RIGHT_LEFT + RIGHT_WIDTH, y, "line" if share == 0 else "grid")
        )
        body.append(svg.text(RIGHT_LEFT - 8, y + 5, f"{share * end:+g}%", "small", anchor="end"))
    body.append(
        svg.text(
            RIGHT_LEFT + RIGHT_WIDTH / 2,
            bottom + 40,
            "planned minus measured, by measured peak",
            anchor="middle",
        )
    )
    for method, planned, measured in points:
        x = LEFT + SIDE * along(measured)
        y = bottom - SIDE * along(planned)
        body.append(dot(x, y, COLORS[method]))
        error = 100 * (planned / measured - 1)
        x = RIGHT_LEFT + RIGHT_WIDTH * along(measured)
        y = TOP + SIDE * (1 - error / end) / 2
        body.append(dot(x, y, COLORS[method]))
    x = 24.0
    for method, color in COLORS.items():
        body.append(dot(x + 5, bottom + 70, color))
        body.append(svg.text(x + 16, bottom + 75, method, "small"))
        x += 44 + 7 * len(method)
    return svg.picture(bottom + 96, "Planned against measured memory", describe(), body)


def dot(x: float, y: float, color: str) -> str:
    place = f'cx="{svg.number(x)}" cy="{svg.number(y)}"'
    return f'<circle {place} r="4" class="{color}" fill-opacity="0.7"/>'
