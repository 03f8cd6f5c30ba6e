"""Plots as inline SVG: light, scalable, in the page's own colours, readable without JavaScript and printable.

Colours and strokes are classes of style.css (`series0` to `series7`), so that a plot follows the reader's theme. Next
to each plot lie its points as JSON, which script.js shows under the pointer. plot.html has the markup.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from llama_ft.config.messages import show
from llama_ft.masking import mask_secrets

BINS = 240  # of a plot 440 wide: two points a bin is all that can be told apart
SMOOTH_FROM, SMOOTH_SHARE = 20, 25  # smoothed lines from so many points on, over 1/25 of them
COLOURS = 8
LOG_RATIO = 50  # of the largest value to the least, from where on an axis is logarithmic


@dataclass(frozen=True, eq=False)
class Series:
    """A line of a plot.

    Attributes:
        name: for the legend.
        x, y: its points, x ascending; NaN interrupts the line.
        style: `line`; `faint`, behind a smoothed one; `dots`, joined by a line; `area`, filled down to the axis.
        colour: 0 to 7; others begin again, dashed.
    """

    name: str
    x: numpy.ndarray
    y: numpy.ndarray
    style: str = "line"
    colour: int = 0


@dataclass
class Plot:
    """A plot and its axes.

    Attributes:
        title: what is shown.
        series: what is drawn; later ones on top.
        unit: behind values; "bytes" writes them as MiB and GiB.
        log: a logarithmic scale, where the values ask for it.
        from_zero: the scale begins at zero.
        labels: names of x = 0, 1, ...: modules at work, instead of steps.
        bands: (from, to, name) of parts of the x axis.
        named: a single series is named, too.
        width, height: of the drawing, in its own units: about pixels on a screen.
    """

    title: str
    series: list[Series]
    unit: str = ""
    log: bool = False
    from_zero: bool = False
    labels: Sequence[str] = ()
    bands: Sequence[tuple[float, float, str]] = ()
    named: bool = False
    width: int = 440
    height: int = 220

    def svg(self) -> Markup:
        """The figure; empty where there is nothing finite to draw."""
        series = [thin(one) for one in self.series if numpy.isfinite(one.y).any()]
        if not series:
            return Markup("")
        at = _Axes(self, series)
        lines, words = [], []
        for one in series:
            points = [(at.x(x), at.y(y)) for x, y in zip(one.x.tolist(), one.y.tolist(), strict=True)]
            drawn = [(x, y) for x, y in points if y == y]
            outline = [(drawn[0][0], at.bottom), *drawn, (drawn[-1][0], at.bottom)] if drawn else []
            first, last = (number(float(one.y[numpy.isfinite(one.y)][place]), self.unit) for place in (0, -1))
            words.append(f"{one.name} from {first} to {last}")
            lines.append(
                {
                    "name": one.name,
                    "style": one.style,
                    "colour": f"series{one.colour % COLOURS}" + (" dashed" if one.colour >= COLOURS else ""),
                    "path": Markup(_path(points)),
                    "fill": Markup(_path(outline) + "z"),
                    "dots": drawn if one.style == "dots" or len(points) < 3 else [],
                }
            )
        shown = sorted(series, key=lambda one: one.style == "faint")  # a faint line's values come last
        data = {
            "box": [at.left, at.right, at.top, at.bottom],
            "x": [at.x_low, at.x_high],
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
        return Markup(macro(self, at, lines, "; ".join(words), Markup(escape(json.dumps(data)))))


class _Axes:
    """Where values lie in the drawing, and the round numbers and bands along the axes."""

    def __init__(self, plot: Plot, series: list[Series]) -> None:
        x = numpy.concatenate([one.x for one in series])
        y = numpy.concatenate([one.y[numpy.isfinite(one.y)] for one in series])
        self.left, self.right = 66.0 if plot.unit == "bytes" else 52.0, plot.width - 10.0
        self.top, self.bottom = 18.0 if plot.bands else 8.0, plot.height - 30.0
        self.x_low, self.x_high = float(x.min()), float(x.max())
        if self.x_low == self.x_high:
            self.x_low, self.x_high = self.x_low - 1, self.x_high + 1
        low, high = (min(0.0, float(y.min())) if plot.from_zero else float(y.min())), float(y.max())
        self._log = plot.log and low > 0 and high / low >= LOG_RATIO
        if self._log:
            low, high = math.log10(low), math.log10(high)
            marks = _log_ticks(low, high)
        else:
            if low == high:
                low, high = low - abs(low or 1) / 2, high + abs(high or 1) / 2
            marks = ticks(low, high, 5, binary=plot.unit == "bytes")
        room = (high - low) * 0.04
        self._low, self._high = low if plot.from_zero and low == 0 else low - room, high + room
        self.y_ticks = [
            (at, number(mark, plot.unit)) for mark in marks if self.top - 1 <= (at := self.y(mark)) <= self.bottom + 1
        ]
        steps = [] if plot.labels else ticks(self.x_low, self.x_high, 6)
        self.x_ticks = [(self.x(step), number(step)) for step in steps if step == int(step)]
        self.bands = [(self.x(first), self.x(last), name) for first, last, name in plot.bands]

    def x(self, value: float) -> float:
        return round(self.left + (value - self.x_low) / (self.x_high - self.x_low) * (self.right - self.left), 1)

    def y(self, value: float) -> float:
        if not math.isfinite(value) or self._log and value <= 0:
            return math.nan
        value = math.log10(value) if self._log else value
        return round(self.bottom - (value - self._low) / (self._high - self._low) * (self.bottom - self.top), 1)


def number(value: float, unit: str = "", digits: int = 3) -> str:
    """A number as short as it can be: 1.5k, 2e-05, 3.2 GiB."""
    if not math.isfinite(value):
        return "not finite"
    if unit == "bytes":
        power = next((p for p in (4, 3, 2, 1) if abs(value) >= 1024**p), 0)
        return f"{value / 1024**power:.{digits}g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}" if value else "0"
    if value and not 1e-3 <= abs(value) < 1e4:
        for power, letter in ((9, "G"), (6, "M"), (3, "k")):
            if 10**power <= abs(value) < 10 ** (power + 3):
                return f"{value / 10**power:.{digits}g}{letter}"
        return f"{value:.{digits}g}"
    return f"{int(value)}" if value == int(value) else f"{value:.{max(digits, 4)}g}"


def ticks(low: float, high: float, most: int, binary: bool = False) -> list[float]:
    """Round numbers from `low` to `high`, about `most`; of bytes, round in their unit."""
    base = 1024.0 ** math.floor(math.log(max(abs(high), 1), 1024)) if binary else 1.0
    rough = (high - low) / base / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999) * power
    first, last = math.ceil(low / base / step - 1e-9), math.floor(high / base / step + 1e-9)
    return [float(f"{n * step:.12g}") * base for n in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    factors = (1, 2, 5) if high - low < 2.5 else (1,)
    skip = max(1, math.ceil((high - low) / 6))
    powers = range(math.floor(low), math.ceil(high) + 1)
    return [factor * 10.0**power for power in powers if power % skip == 0 for factor in factors]


def thin(series: Series) -> Series:
    """At most two points a bin, its lowest and its highest in their order: spikes stay."""
    count = len(series.x)
    if count <= 2 * BINS:
        return series
    kept = {0, count - 1}
    for places in numpy.array_split(numpy.arange(count), BINS):
        values = series.y[places]
        if not numpy.isfinite(values).all():
            kept.add(int(places[numpy.flatnonzero(~numpy.isfinite(values))[0]]))  # the gap stays, too
        if numpy.isfinite(values).any():
            kept |= {int(places[numpy.nanargmin(values)]), int(places[numpy.nanargmax(values)])}
    chosen = numpy.array(sorted(kept))
    return replace(series, x=series.x[chosen], y=series.y[chosen])


def smoothed(name: str, x: numpy.ndarray, y: numpy.ndarray, colour: int = 0) -> list[Series]:
    """A line, or where it has many points the mean of those around each before a faint line of them all."""
    if len(y) < SMOOTH_FROM:
        return [Series(name, x, y, "line", colour)]
    half = max(2, len(y) // SMOOTH_SHARE // 2)
    window = numpy.ones(2 * half + 1)
    finite = numpy.isfinite(y)
    sums = numpy.convolve(numpy.where(finite, y, 0.0), window)[half:-half]
    counts = numpy.convolve(finite, window)[half:-half]
    mean = numpy.where(counts > 0.5, sums / numpy.maximum(counts, 1), numpy.nan)
    return [Series("each step", x, y, "faint", colour), Series(name, x, mean, "line", colour)]


def histogram(counts: Sequence[int], edges: Sequence[float], name: str, colour: int = 0) -> Markup:
    """Bars of rows by their length, from `edges[n]` to `edges[n + 1]` tokens each."""
    most = max(counts, default=0)
    if not most:
        return Markup("")
    step, bars = 420 / len(counts), list[dict[str, Any]]()
    for n, count in enumerate(counts):
        low, high = math.ceil(edges[n]), math.ceil(edges[n + 1]) - 1
        text = f"{low} to {high} tokens: {count:,} rows" if high > low else f"{low} tokens: {count:,} rows"
        tall, label = max(round(count / most * 108, 1), 1 if count else 0), number(low) if n % 3 == 0 else ""
        bars.append(
            {"x": round(11 + n * step, 1), "width": round(step - 2, 1), "height": tall, "text": text, "label": label}
        )
    macro = TEMPLATES.get_template("plot.html").module.histogram  # type: ignore[attr-defined]
    return Markup(macro(name, bars, most, colour))


def _path(points: Sequence[tuple[float, float]]) -> str:
    """Lines through the points; a NaN interrupts them, and a point by itself is a dot of the line's width."""
    words, is_open = [], False
    for n, (x, y) in enumerate(points):
        if y != y:
            is_open = False
            continue
        alone = not is_open and (n + 1 == len(points) or points[n + 1][1] != points[n + 1][1])
        words.append(f"{'L' if is_open else 'M'}{x} {y}" + ("h.5" if alone else ""))
        is_open = True
    return "".join(words)


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
    "number": number,
    "show": show,
}
