"""Plots as inline SVG: in the page's own colours (classes of style.css), readable without JavaScript and printable.

Next to each plot lie its points as JSON, which script.js shows under the pointer. plot.html has the markup.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from llama_ft.config.messages import show
from llama_ft.masking import mask_secrets

BINS = 240  # of a plot 440 wide: two points a bin is all that can be told apart
SMOOTH_FROM, SMOOTH_SHARE = 20, 25  # smoothed lines from so many points on, over 1/25 of them


@dataclass(frozen=True, eq=False)
class Series:
    """A line of a plot."""

    name: str  # for the legend
    x: numpy.ndarray  # ascending
    y: numpy.ndarray  # NaN interrupts the line
    style: str = "line"  # or faint, behind a smoothed one; dots, joined by a line; area, filled down to the axis
    colour: int = 0  # those from 8 on begin again


@dataclass
class Plot:
    """A plot and its axes."""

    title: str
    series: list[Series]  # later ones on top
    unit: str = ""  # behind values; "bytes" writes them as MiB and GiB
    fits: bool = False  # whether the scale begins at the lowest value instead of zero
    labels: Sequence[str] = ()  # names of x = 0, 1, ...: modules at work, instead of steps
    bands: Sequence[tuple[float, float, str]] = ()  # (from, to, name) of parts of the x axis
    named: bool = False  # a single series is named, too
    width: int = 440  # of the drawing, in its own units: about pixels on a screen
    height: int = 220

    def svg(self) -> Markup:
        """The figure; empty where there is nothing finite to draw."""
        self.series = [thin(one) for one in self.series if numpy.isfinite(one.y).any()]
        if not self.series:
            return Markup("")
        self.left, self.right = 66.0 if self.unit == "bytes" else 52.0, self.width - 10.0
        self.top, self.bottom = 18.0 if self.bands else 8.0, self.height - 30.0
        xs, ys = (numpy.concatenate([getattr(one, axis) for one in self.series]) for axis in "xy")
        self._x_low, self._x_high = _widened(float(xs.min()), float(xs.max()))
        ys = ys[numpy.isfinite(ys)]
        low, high = float(ys.min()), float(ys.max())
        low, high = _widened(low if self.fits else min(low, 0.0), high)
        room = (high - low) * 0.04
        self._low, self._high = low - room * (low != 0), high + room
        self.y_ticks = [(self.y(mark), number(mark, self.unit)) for mark in ticks(low, high, 5, self.unit == "bytes")]
        steps = [] if self.labels else ticks(self._x_low, self._x_high, 6)
        self.x_ticks = [(self.x(step), number(step)) for step in steps if step == int(step)]
        shown = sorted(self.series, key=lambda one: one.style == "faint")  # a faint line's values come last
        data = {
            "box": [self.left, self.right, self.top, self.bottom],
            "x": [self._x_low, self._x_high],
            "labels": [mask_secrets(label) for label in self.labels],
            "series": [
                {
                    "name": mask_secrets(one.name),
                    "x": [float(f"{x:.7g}") for x in one.x.tolist()],
                    "text": [number(y, self.unit, digits=4) for y in one.y.tolist()],
                }
                for one in shown
            ],
        }
        macro = TEMPLATES.get_template("plot.html").module.svg  # type: ignore[attr-defined]
        return Markup(macro(self, Markup(escape(json.dumps(data)))))

    def x(self, value: float) -> float:
        """Where a value lies in the drawing."""
        share = (value - self._x_low) / (self._x_high - self._x_low)
        return round(self.left + share * (self.right - self.left), 1)

    def y(self, value: float) -> float:
        """Likewise; NaN for what is not finite."""
        share = (value - self._low) / (self._high - self._low) if math.isfinite(value) else math.nan
        return round(self.bottom - share * (self.bottom - self.top), 1)

    def points(self, series: Series) -> list[tuple[float, float]]:
        """Of a line, those that are drawn."""
        return [(self.x(x), y) for x, value in zip(series.x, series.y, strict=True) if (y := self.y(float(value))) == y]

    def path(self, series: Series) -> str:
        """A line through the points; a NaN interrupts it, and a point by itself is a dot of the line's width."""
        words, before = [], math.nan
        for x, value in zip(series.x, series.y, strict=True):
            y = self.y(float(value))
            if y == y:
                words.append(f"L{self.x(x)} {y}" if before == before else f"M{self.x(x)} {y}h.5")
            before = y
        return "".join(words)


def _widened(low: float, high: float) -> tuple[float, float]:
    return (low, high) if low < high else (low - abs(low or 1) / 2, high + abs(high or 1) / 2)


def number(value: float, unit: str = "", digits: int = 3) -> str:
    """A number as short as it can be: 1.5k, 2e-05, 3.2 GiB."""
    if not math.isfinite(value):
        return "not finite"
    if unit == "bytes":
        power = next((p for p in (4, 3, 2, 1) if abs(value) >= 1024**p), 0)
        return f"{value / 1024**power:.{digits}g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}" if value else "0"
    if value and not 1e-3 <= abs(value) < 1e4:
        power = next((p for p in (3, 2, 1) if 1000**p <= abs(value) < 1e12), 0)
        return f"{value / 1000**power:.{digits}g}{' kMG'[power].strip()}"
    return f"{int(value)}" if value == int(value) else f"{value:.{max(digits, 4)}g}"


def ticks(low: float, high: float, most: int, binary: bool = False) -> list[float]:
    """Round numbers from `low` to `high`, about `most`; of bytes, round in their unit."""
    base = 1024.0 ** math.floor(math.log(max(abs(high), 1), 1024)) if binary else 1.0
    rough = (high - low) / base / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999) * power
    first, last = math.ceil(low / base / step - 1e-9), math.floor(high / base / step + 1e-9)
    return [float(f"{n * step:.12g}") * base for n in range(first, last + 1)]


def thin(series: Series) -> Series:
    """At most a few points a bin, its lowest, its highest and what is not finite, in their order: spikes stay."""
    count = len(series.x)
    if count <= 2 * BINS:
        return series
    kept = {0, count - 1}
    for places in numpy.array_split(numpy.arange(count), BINS):
        for part in (places, places[numpy.isfinite(series.y[places])]):  # argmin and argmax find a NaN first
            kept |= {int(part[find(series.y[part])]) for find in (numpy.argmin, numpy.argmax) if len(part)}
    chosen = numpy.array(sorted(kept))
    return replace(series, x=series.x[chosen], y=series.y[chosen])


def smoothed(series: Series) -> list[Series]:
    """A line, or where it has many points the mean of those around each before a faint line of them all."""
    count, y = len(series.y), series.y
    if count < SMOOTH_FROM:
        return [series]
    half = max(2, count // SMOOTH_SHARE // 2)
    window, finite = numpy.ones(2 * half + 1), numpy.isfinite(y)
    sums = numpy.convolve(numpy.where(finite, y, 0.0), window)[half:-half]
    counts = numpy.convolve(finite, window)[half:-half]
    mean = numpy.where(counts > 0.5, sums / numpy.maximum(counts, 1), numpy.nan)
    return [replace(series, name="each step", style="faint"), replace(series, y=mean)]


TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=lambda value: mask_secrets(value) if isinstance(value, str) and type(value) is str else value,
)
TEMPLATES.globals["zip"] = zip
TEMPLATES.filters |= {
    "size": lambda value: "" if value is None else number(value, "bytes", digits=4),
    "percent": lambda share: f"{share * 100:.1f}",
    "show": show,
}
