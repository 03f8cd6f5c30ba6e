"""Plots: the points that remain of many, and the labels."""

import json
import re
from xml.etree import ElementTree

import numpy
import pytest

from llama_ft.extensions.report.plot import Plot, Series, number, smoothed, thin, tick_texts, ticks

STEPS = 100_000


def drawn(plot: Plot) -> tuple[ElementTree.Element, dict]:
    """The svg, which must be well-formed, and the points for the pointer."""
    figure = ElementTree.fromstring(str(plot.svg()))
    [svg] = figure.iter("svg")
    return svg, json.loads(figure.attrib["data-plot"])


def test_a_long_curve_keeps_its_spikes_and_its_ends() -> None:
    values = numpy.random.default_rng(0).normal(size=STEPS)
    values[[31_337, 77_777]] = 500.0, -400.0
    left = thin(Series("loss", numpy.arange(STEPS), values))
    assert len(left.x) < 1000
    assert {0, 31_337, 77_777, STEPS - 1} <= set(left.x.tolist())
    assert numpy.array_equal(left.y, values[left.x])


def test_a_smoothed_line_is_the_mean_of_the_points_around() -> None:
    values = numpy.random.default_rng(1).normal(size=1000)
    each, mean = smoothed(Series("loss", numpy.arange(1000), values))
    assert each.style == "faint" and numpy.array_equal(each.y, values)
    for place in (0, 7, 490, 510, 999):
        around = values[max(place - 20, 0) : place + 21]
        assert mean.y[place] == pytest.approx(around.mean())
    assert [series.style for series in smoothed(Series("loss", numpy.arange(5), values[:5]))] == [
        "line"
    ]


def test_a_constant_curve_a_single_point_and_zeros_are_drawn() -> None:
    for values in ([5.0, 5.0], [5.0], [0.0, 0.0], [-3.0], [1e-30, 1e-30]):
        svg, _ = drawn(Plot("a", [Series("a", numpy.arange(len(values)), numpy.array(values))]))
        numbers = [float(n) for n in re.findall(r"[\d.]+", next(svg.iter("path")).attrib["d"])]
        assert numbers and all(0 <= n <= 1000 for n in numbers)
    assert Plot("a", []).svg() == ""


def test_names_from_the_run_are_escaped() -> None:
    evil = '"><script>alert(1)</script>'
    plot = Plot(evil, [Series(evil, numpy.arange(2), numpy.arange(2.0))] * 2)
    assert "<script" not in str(plot.svg())
    svg, data = drawn(plot)
    assert data["series"][0]["name"] == evil and not list(svg.iter("script"))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (12, "12"), (0.5, "0.5"), (2e-5, "2e-05"), (25_000, "25,000"), (9.1294, "9.129")],
)
def test_numbers_are_printed_in_short_form(value: float, text: str) -> None:
    assert number(value) == text


def test_ticks_are_round_numbers_within_the_range() -> None:
    assert ticks(0, 10, 5) == [0, 2, 4, 6, 8, 10]
    assert ticks(0.9, 2.2, 5) == pytest.approx([1, 1.5, 2])


@pytest.mark.parametrize(
    ("marks", "texts"),
    [
        ([2.5, 3.0, 3.5], ["2.5", "3.0", "3.5"]),
        ([0, 500, 1000], ["0", "500", "1,000"]),
        ([0, 5e-05, 1e-04, 1.5e-04], ["0", "5e-05", "1e-04", "1.5e-04"]),
    ],
)
def test_the_labels_of_an_axis_have_equal_decimals(marks: list[float], texts: list[str]) -> None:
    assert tick_texts(marks) == texts
