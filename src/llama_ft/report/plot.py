"""Plots as inline SVG: light, scalable, in the page's own colours, readable without JavaScript and printable.

Colours and strokes are classes of style.css (`series0` to `series7`), so that a plot follows the reader's theme. Next
to each plot lie its points as JSON, which script.js shows under the pointer.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy
from markupsafe import Markup, escape

from llama_ft.masking import mask_secrets
from llama_ft.report.axes import Scale, number, short_module

BINS = 240  # of a plot 440 wide: two points a bin is all that can be told apart
SMOOTH_FROM, SMOOTH_SHARE = 20, 25  # smoothed lines from so many points on, over 1/25 of them
MODULE_PHASES = ("forward", "backward", "recompute")  # before the module in a label
COLOURS = 8


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
    _scale: Scale = field(init=False)

    def __post_init__(self) -> None:
        self.series = [thin(series) for series in self.series if numpy.isfinite(series.y).any()]
        if self.series:
            y = numpy.concatenate([series.y[numpy.isfinite(series.y)] for series in self.series])
            x = numpy.concatenate([series.x for series in self.series])
            left, top = 66.0 if self.unit == "bytes" else 52.0, 18.0 if self.bands else 8.0
            box = left, self.width - 10.0, top, self.height - (78.0 if self.labels else 30.0)
            self._scale = Scale(box, x, y, self.log, self.from_zero, self.unit)

    def svg(self) -> Markup:
        """The figure; empty where there is nothing finite to draw."""
        if not self.series:
            return Markup("")
        at = self._scale
        parts = [self._axes()]
        for series in self.series:
            points = [(at.x(x), at.y(y) if _can_show(y, at.log) else math.nan) for x, y in _pairs(series)]
            colour = f"series{series.colour % COLOURS}" + (" dashed" if series.colour >= COLOURS else "")
            if series.style == "area":
                parts.append(_area(points, at.bottom, colour))
            parts.append(f'<path class="{series.style} {colour}" d="{_path(points)}"/>')
            if series.style == "dots" or len(points) < 3:
                circles = (f'<circle class="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points if y == y)
                parts.append("".join(circles))
        parts.append('<line class="cross" y1="0" y2="0"/>')
        legend = "".join(
            f'<span class="key series{s.colour % COLOURS}{" dashed" * (s.colour >= COLOURS)} {s.style}">{_text(s.name)}'
            "</span>"
            for s in self.series
            if len(self.series) > 1 or self.named
        )
        return Markup(
            f'<figure class="plot" data-plot="{escape(json.dumps(self._data()))}"><figcaption>'
            f'<b>{_text(self.title)}</b><span class="legend">{legend}</span></figcaption><div class="scroll">'
            f'<svg viewBox="0 0 {self.width} {self.height}"{self._least_width()} role="img" aria-label="'
            f'{_text(self._in_words())}">{"".join(parts)}</svg></div></figure>'
        )

    def _least_width(self) -> str:
        return f' style="min-width:{self.width * 0.75:.0f}px"' if self.width > 500 else ""

    def _axes(self) -> str:
        at, parts = self._scale, []
        named_up_to = -math.inf
        for first, last, name in self.bands:
            left, right = at.x(first), at.x(last)
            parts.append(
                f'<rect class="band" x="{left:.1f}" y="{at.top:.1f}" width="{max(right - left, 1):.1f}" '
                f'height="{at.bottom - at.top:.1f}"/>'
            )
            across = 5.5 * len(name)  # about, in this font
            end = right if right - left < across else (left + right + across) / 2
            if end - across > named_up_to:
                named_up_to = end + 8
                parts.append(
                    f'<text class="small" x="{end:.1f}" y="{at.top - 5:.1f}" text-anchor="end">{_text(name)}</text>'
                )
        for value in at.y_ticks:
            parts.append(
                f'<line class="grid" x1="{at.left}" x2="{at.right}" y1="{at.y(value):.1f}" y2="{at.y(value):.1f}"/>'
                f'<text x="{at.left - 6}" y="{at.y(value) + 4:.1f}" text-anchor="end">{number(value, self.unit)}</text>'
            )
        if self.labels:
            return "".join(parts) + self._module_names()
        for value in at.x_ticks:
            parts.append(
                f'<text x="{at.x(value):.1f}" y="{at.bottom + 16}" text-anchor="middle">{number(value)}</text>'
            )
        return (
            "".join(parts) + f'<text x="{at.right}" y="{self.height - 1}" text-anchor="end" class="small">step</text>'
        )

    def _module_names(self) -> str:
        """Under the axis the module that begins there, as many as there is room for."""
        at, parts, last = self._scale, [], -math.inf
        words = [label.removesuffix(" ends").partition(" ") for label in self.labels]
        names = [name if phase in MODULE_PHASES else "" for phase, _, name in words]
        for place, name in enumerate(names):
            x = at.x(place)
            if not name or place and name == names[place - 1] or x < last + 13:
                continue
            last = x
            parts.append(
                f'<text class="small" text-anchor="end" transform="translate({x + 3:.1f} {at.bottom + 10}) '
                f'rotate(-50)">{_text(short_module(name))}</text>'
            )
        return "".join(parts)

    def _data(self) -> dict[str, object]:
        at = self._scale
        shown = [series for series in self.series if series.style != "faint" or len(self.series) < 2]
        shown += [series for series in self.series if series not in shown]
        return {
            "box": [at.left, at.right, at.top, at.bottom],
            "x": [at.x_low, at.x_high],
            "labels": [mask_secrets(label) for label in self.labels],
            "series": [
                {
                    "name": mask_secrets(series.name),
                    "x": [float(f"{x:.7g}") for x, _ in _pairs(series)],
                    "text": [number(y, self.unit, digits=4) for _, y in _pairs(series)],
                }
                for series in shown
            ],
        }

    def _in_words(self) -> str:
        tellings = []
        for series in self.series:
            finite = numpy.flatnonzero(numpy.isfinite(series.y))
            first, last = (number(float(series.y[place]), self.unit) for place in (finite[0], finite[-1]))
            tellings.append(f"{series.name} from {first} to {last}")
        return f"{self.title}: {'; '.join(tellings)}"


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
    return Series(series.name, series.x[chosen], series.y[chosen], series.style, series.colour)


def smoothed(name: str, x: numpy.ndarray, y: numpy.ndarray, colour: int = 0) -> list[Series]:
    """A line, or where it has many points the mean of those around each before a faint line of them all."""
    if len(y) < SMOOTH_FROM:
        return [Series(name, x, y, "line", colour)]
    half = max(2, len(y) // SMOOTH_SHARE // 2)
    finite = numpy.isfinite(y)
    sums = numpy.concatenate([[0.0], numpy.cumsum(numpy.where(finite, y, 0.0))])
    counts = numpy.concatenate([[0], numpy.cumsum(finite)])
    first = numpy.maximum(numpy.arange(len(y)) - half, 0)
    last = numpy.minimum(numpy.arange(len(y)) + half + 1, len(y))
    weights = counts[last] - counts[first]
    mean = numpy.where(weights > 0, (sums[last] - sums[first]) / numpy.maximum(weights, 1), numpy.nan)
    return [Series("each step", x, y, "faint", colour), Series(name, x, mean, "line", colour)]


def histogram(counts: Sequence[int], edges: Sequence[float], name: str, colour: int = 0) -> Markup:
    """Bars of rows by their length, from `edges[n]` to `edges[n + 1]` tokens each."""
    most, width, height = max(counts, default=0), 440, 150
    if not most:
        return Markup("")
    step, parts = (width - 20) / len(counts), []
    for n, count in enumerate(counts):
        tall = count / most * (height - 42)
        low, high = math.ceil(edges[n]), math.ceil(edges[n + 1]) - 1
        telling = f"{low} to {high} tokens: {count:,} rows" if high > low else f"{low} tokens: {count:,} rows"
        parts.append(
            f'<rect class="bar series{colour}" x="{10 + n * step + 1:.1f}" y="{height - 24 - tall:.1f}" width="'
            f'{step - 2:.1f}" height="{max(tall, 1 if count else 0):.1f}" rx="1.5"><title>{telling}</title></rect>'
        )
        if n % 3 == 0 or n == len(counts) - 1 and n % 3 == 2:
            parts.append(f'<text x="{10 + n * step + 1:.1f}" y="{height - 9}">{number(low)}</text>')
    return Markup(
        f'<figure class="histogram"><figcaption><b>{_text(name)}</b> <span class="muted">tokens a row before '
        f'truncation; the highest bar is {most:,} rows</span></figcaption><svg viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{_text(name)}: rows by tokens">{"".join(parts)}</svg></figure>'
    )


def _pairs(series: Series) -> list[tuple[float, float]]:
    return list(zip(series.x.tolist(), series.y.tolist(), strict=True))


def _can_show(value: float, log: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not log)


def _path(points: Sequence[tuple[float, float]]) -> str:
    """Lines through the points; a NaN interrupts them, and a point by itself is a dot of the line's width."""
    words, is_open = [], False
    for n, (x, y) in enumerate(points):
        if y != y:
            is_open = False
            continue
        alone = not is_open and (n + 1 == len(points) or points[n + 1][1] != points[n + 1][1])
        words.append(f"{'L' if is_open else 'M'}{x:.1f} {y:.1f}" + ("h.5" if alone else ""))
        is_open = True
    return "".join(words)


def _area(points: Sequence[tuple[float, float]], bottom: float, colour: str) -> str:
    solid = [(x, y) for x, y in points if y == y]
    outline = [(solid[0][0], bottom), *solid, (solid[-1][0], bottom)]
    return f'<path class="fill {colour}" d="{_path(outline)}z"/>'


def _text(text: str) -> Markup:
    return escape(mask_secrets(text))
