"""Plots as inline SVG. They use the page's colors (classes of style.css), need no JavaScript and
can be printed.

A drawing is stretched to the size that style.css gives it; its labels are HTML, so that text keeps
its size. The points of each plot are next to it as JSON; script.js shows them at the pointer.
plot.html has the markup.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from llama_ft.config.wording.messages import format_value, size_text
from llama_ft.masking import mask_secrets

BINS = 240  # a plot is about 400 pixels wide; more than two points per bin cannot be seen
DRAWING = 1000.0  # width and height of a drawing, in its own units
# lines with at least so many points are smoothed over 1/25 of them
SMOOTH_FROM = 20
SMOOTH_SHARE = 25


@dataclass(frozen=True, eq=False)
class Series:
    """A line of a plot."""

    name: str  # in the legend
    x: numpy.ndarray  # ascending
    y: numpy.ndarray  # finite
    style: str = "line"  # or "faint", behind a smoothed line; or "dots", joined by a line
    colour: int = 0  # number of the color; 8 is the same as 0


@dataclass
class Plot:
    """A plot and its axes."""

    title: str
    series: Sequence[Series]  # later ones are drawn on top
    fits: bool = False  # the scale begins at the lowest value instead of zero
    named: bool = False  # also name a single series in a legend
    is_wide: bool = False
    marks: Sequence[tuple[float, str]] = ()  # vertical lines: position, and text at the pointer

    def svg(self) -> Markup:
        """Return the figure; empty if there is nothing to draw."""
        self.series = [thin(one) for one in self.series]
        if not self.series:
            return Markup("")
        xs = numpy.concatenate([one.x for one in self.series])
        ys = numpy.concatenate([one.y for one in self.series])
        low = float(ys.min())
        high = float(ys.max())
        self._x_range = _widened(float(xs.min()), float(xs.max()))
        self._y_range = _widened(low if self.fits else min(low, 0.0), high)
        y_marks = ticks(*self._y_range, 5)
        x_marks = ticks(*self._x_range, 6)
        whole_steps = [mark for mark in x_marks if mark == int(mark)]
        heights = [self.y(mark) for mark in y_marks]
        self.y_ticks = list(zip(heights, tick_texts(y_marks), strict=True))
        self.x_ticks = [(self.x(step), number(step)) for step in whole_steps]
        low, high = self._x_range
        self.x_marks = [(self.x(step), text) for step, text in self.marks if low <= step <= high]
        # the values of faint lines come last
        shown = sorted(self.series, key=lambda one: one.style == "faint")
        points = []
        for one in shown:
            texts = [number(y) for y in one.y.tolist()]
            points.append({"name": mask_secrets(one.name), "x": one.x.tolist(), "text": texts})
        data = {"x": self._x_range, "series": points}
        macro = TEMPLATES.get_template("plot.html").module.svg  # type: ignore[attr-defined]
        return Markup(macro(self, Markup(escape(json.dumps(data)))))

    def x(self, value: float) -> float:
        """Return the horizontal position of a value in the drawing."""
        low, high = self._x_range
        share = (value - low) / (high - low)
        return round(share * DRAWING, 1)

    def y(self, value: float) -> float:
        """Return the vertical position of a value in the drawing."""
        low, high = self._y_range
        share = (value - low) / (high - low)
        return round((1 - share) * DRAWING, 1)  # y grows downwards in SVG

    def points(self, series: Series) -> list[tuple[float, float]]:
        """Return the positions of a line's points."""
        points = zip(series.x, series.y, strict=True)
        return [(self.x(x), self.y(y)) for x, y in points]


def _widened(low: float, high: float) -> tuple[float, float]:
    room = (high - low) * 0.04 if low < high else abs(low or 1) / 2
    return low - room * (low != 0), high + room


def number(value: float) -> str:
    """Return a number with 4 digits as text: 12,345; 1.234; 2e-05."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return about `most` round numbers from `low` to `high`."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    # 0.999 and 1e-9 allow for rounding: 3 * 0.1 is more than 0.3.
    factors = [factor for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999]
    step = factors[0] * power
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [count * step for count in range(first, last + 1)]


def tick_texts(marks: Sequence[float]) -> list[str]:
    """Return the labels of an axis, all with the same number of decimals: 2.5, 3.0."""
    largest = max(map(abs, marks))
    if largest < 1e-3:
        return [f"{mark:.1e}".replace(".0e", "e") if mark else "0" for mark in marks]
    texts = [number(mark) for mark in marks]
    decimals = max(len(text.partition(".")[2]) for text in texts)
    return [f"{mark:,.{decimals}f}" for mark in marks]


def thin(series: Series) -> Series:
    """Keep at most two points per bin, the lowest and the highest, and both ends, so that spikes
    remain visible."""
    count = len(series.x)
    if count <= 2 * BINS:
        return series
    bins = numpy.array_split(numpy.arange(count), BINS)
    indices = {0, count - 1}
    for part in bins:
        values = series.y[part]
        indices.add(int(part[values.argmin()]))
        indices.add(int(part[values.argmax()]))
    in_order = sorted(indices)
    return replace(series, x=series.x[in_order], y=series.y[in_order])


def smoothed(series: Series) -> list[Series]:
    """Return the line, or if it has many points, a faint line of them and a line of their moving
    average."""
    count = len(series.y)
    if count < SMOOTH_FROM:
        return [series]
    half = max(2, count // SMOOTH_SHARE // 2)
    window = numpy.ones(2 * half + 1)
    # At both ends the window holds fewer points, so each sum is divided by its own number of them.
    sums = numpy.convolve(series.y, window)
    counts = numpy.convolve(numpy.ones(count), window)
    mean = (sums / counts)[half:-half]
    return [replace(series, name="each step", style="faint"), replace(series, y=mean)]


TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=lambda value: (
        mask_secrets(value) if isinstance(value, str) and type(value) is str else value
    ),
)
TEMPLATES.globals["zip"] = zip
TEMPLATES.filters |= {
    "size": lambda value: "" if value is None else size_text(value),
    "show": format_value,
}
