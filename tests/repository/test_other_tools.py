"""benchmarks/planner/other_tools.py: published figures of other tools stand beside plans on the page."""

import json
import re
import statistics
import sys
from pathlib import Path
from types import ModuleType

import pytest
from conftest import load_script
from forked import REPOSITORY

from llama_ft.plan.duration import BANDWIDTH_SHARE, MATMUL_SHARE

CHEAP_ROW = 3  # litgpt's LoRA of 7B


@pytest.fixture
def other_tools(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", list(sys.path))
    return load_script(REPOSITORY / "benchmarks" / "planner" / "other_tools.py")


def rows_of_the_page(other_tools: ModuleType) -> list[list[str]]:
    _, _, rest = other_tools.PAGE.read_text().partition(other_tools.BEGIN)
    table, _, _ = rest.partition(other_tools.END)
    rows = re.findall(r"^\| (.*) \|$", table, re.MULTILINE)
    return [row.split(" | ") for row in rows[1:]]


def test_the_page_has_all_published_figures_with_sources(other_tools: ModuleType) -> None:
    figures, content = other_tools.read_figures()
    assert len(figures) >= 15
    rows = rows_of_the_page(other_tools)
    assert len(rows) == len(figures)
    page = other_tools.PAGE.read_text()
    for figure, row in zip(figures, rows, strict=True):
        assert row[:5] == [
            *(figure.tool, figure.model, figure.method),
            *(figure.tokens, str(figure.gpus)),
        ]
        assert row[8] == figure.reason and len(figure.reason) > 3
        published = float(row[5].removeprefix("fits "))
        assert published == pytest.approx(figure.published_gib, abs=0.051)
        planned = float(row[6].split()[0])
        difference = float(row[7].rstrip("%")) / 100
        assert planned / published - 1 == pytest.approx(difference, abs=0.02)
        assert content["sources"][figure.tool]["url"] in page


def test_10_to_the_9_bytes_are_converted_to_gib(other_tools: ModuleType) -> None:
    figures, _ = other_tools.read_figures()
    in_gb = [figure for figure in figures if figure.gb]
    for figure in in_gb:
        assert figure.published_gib * 2**30 == pytest.approx(figure.gb * 1e9)
    assert in_gb


@pytest.mark.slow
def test_a_plan_has_the_figure_of_the_page(other_tools: ModuleType, tmp_path: Path) -> None:
    figures, content = other_tools.read_figures()
    figure = figures[CHEAP_ROW]
    planned = other_tools.plan(figure, content["models"][figure.model], tmp_path / "model")
    row = other_tools.table_row(figure, json.loads(json.dumps(planned)))
    shown = rows_of_the_page(other_tools)[CHEAP_ROW]
    assert float(row[6].split()[0]) == pytest.approx(float(shown[6].split()[0]), abs=0.2)


def test_the_page_has_all_published_speeds_whose_median_is_not_below_the_computed_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = load_script(REPOSITORY / "benchmarks" / "planner" / "published_speeds.py")
    speeds, models = script.read_speeds()
    page = script.PAGE.read_text()
    _, _, rest = page.partition(script.BEGIN)
    table, _, _ = rest.partition(script.END)
    rows = re.findall(r"^\| (\[.*) \|$", table, re.MULTILINE)
    ratios = []
    for speed, row in zip(speeds, rows, strict=True):
        cells = row.split(" | ")
        computed = float(cells[4].replace(",", ""))
        assert cells == speed.row(computed) and speed.model in models
        ratios.append(speed.tokens_per_second / computed)
    assert statistics.median(ratios) >= 1
    for share in (MATMUL_SHARE, BANDWIDTH_SHARE):
        assert f" / ({share:.0%} of the " in page


@pytest.mark.slow
def test_a_plan_has_the_speed_of_the_page(tmp_path: Path) -> None:
    script = load_script(REPOSITORY / "benchmarks" / "planner" / "published_speeds.py")
    speeds, models = script.read_speeds()
    speed = speeds[-1]
    row = speed.row(script.computed_speed(speed, models[speed.model], tmp_path / "model"))
    assert f"| {' | '.join(row)} |" in script.PAGE.read_text()
