"""The pictures of docs/img: readable on a light and a dark page, and drawn from what the planner
says."""

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conftest import REPOSITORY
from pages import Page

FOLDER = REPOSITORY / "docs" / "pictures"
sys.path.insert(0, str(FOLDER.parent))

from pictures import curves, draw, fits, memory, plans, recording  # noqa: E402

NAMES = list(draw.PICTURES)
LARGEST = 300_000  # bytes
SMALLEST_TEXT = 13  # px
PAGES = ("README.md", "docs/index.md", "docs/guides/memory.md", "docs/guides/packing-and-streaming.md",
         "docs/concepts/sharding.md", "docs/development/benchmarks.md", "docs/guides/hyperparameters.md",
         "docs/concepts/how-it-works.md", "docs/concepts/memory-model.md",
         "docs/development/trl-comparison.md")  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_small_and_readable_on_any_page(name: str) -> None:
    text = draw.PICTURES[name]()
    picture = ElementTree.fromstring(text)
    sizes = [int(size) for size in re.findall(r"font-size: (\d+)px", text)]
    assert len(text) <= LARGEST
    assert picture.get("width") == "840"
    assert min(sizes) >= SMALLEST_TEXT
    assert "prefers-color-scheme: dark" in text
    # its own background: the browser may ask for the other scheme than the page has
    assert 'class="card"' in text or 'class="terminal"' in text
    assert text.isascii()


def test_every_picture_is_shown_with_its_numbers_in_words() -> None:
    shown = dict[str, str]()
    for name in PAGES:
        for words, file in re.findall(r"!\[([^]]*)\]\(\S*img/(\w+\.svg)\)", Page(name).text):
            shown.setdefault(file, words)
            assert shown[file] == words or file not in draw.WORDS
    wanted = {name: words() for name, words in draw.WORDS.items()}
    assert {name: shown.get(name) for name in NAMES} == wanted


def test_the_recording_has_no_clock_and_ends_with_a_run_that_fits() -> None:
    printed = recording.OUTPUT.read_text()
    commands = [line for line in printed.splitlines() if line.startswith("$ ")]
    assert commands == [f"$ {command}" for command in plans.RECORDING]
    assert printed.index("It does not fit") < printed.index("What fits:") < printed.index("It fits")
    assert not re.search(r"\d\d:\d\d|20\d\d-", printed)
    [first_change] = re.findall(r"^1\. (.*)$", printed, re.MULTILINE)
    assert first_change in commands[-1]
    lines = recording.read_lines()
    assert recording.find_times(lines)[1] < 10.5  # s
    assert int(re.findall(r'height="(\d+)"', recording.draw())[0]) <= 320
    assert {"It does not fit", "It fits"} <= {line[:15].partition(" 23")[0] for line, _ in lines}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    plans.fill_hub_cache(tmp_path / "hub")
    return tmp_path / "hub"


@pytest.mark.large
def test_the_recording_is_what_the_planner_prints(cache: Path) -> None:
    assert plans.record(cache) == recording.OUTPUT.read_text()


@pytest.mark.large
def test_the_bars_are_what_the_planner_says(cache: Path) -> None:
    assert plans.plan_methods(cache) == json.loads(memory.FIGURES.read_text())


FIRST_FIGURES = {
    "README.md": ["{gib} GiB; {minutes} minutes and {cost} per million tokens"],
    "docs/getting-started/first-hour.md": [
        "| {gib} of 23.5 GiB |", "| {minutes} minutes per million tokens;", "| {cost} per million tokens;",
    ],
}  # fmt: skip


@pytest.mark.large
@pytest.mark.parametrize("name", FIRST_FIGURES)
def test_the_first_plan_of_a_page_prints_the_figures_beside_it(name: str, cache: Path) -> None:
    page = Page(name)
    with_prices = [command.text for command in page.commands() if "--price" in command.text]
    printed = plans.run_plan(with_prices[0], cache)
    [gib] = re.findall(r"A GPU needs ([\d.]+) GiB", printed)
    [(minutes, cost)] = re.findall(
        r"([\d.]+) min for 1 million tokens. Cost of these: ([\d.]+)\.", printed
    )
    for figures in FIRST_FIGURES[name]:
        assert figures.format(gib=f"{float(gib):.1f}", minutes=minutes, cost=cost) in page.text


def test_the_results_page_has_the_figures_of_the_recording() -> None:
    printed = recording.OUTPUT.read_text()
    [needs] = re.findall(r"does not fit .* as it is: ([\d.]+) GiB", printed)
    [fits] = re.findall(r"It fits .* as it is: ([\d.]+) GiB", printed)
    [row] = re.findall(
        r"^\| Qwen3 8B, LoRA with 16,384.*$", Page("docs/results.md").text, re.MULTILINE
    )
    figures = [cell.strip() for cell in row.strip("|").split("|")]
    assert figures[1] == f"{float(needs):.1f}"
    assert figures[3].endswith(f" {float(fits):.1f}")


def test_a_bar_that_does_not_fit_leaves_its_frame() -> None:
    text = draw.PICTURES["fits.svg"]()
    too_much = [bar for bar in fits.read_bars() if not bar.fits]
    assert len(too_much) == text.count('class="hatched"') == text.count(": too much<") == 2
    assert {bar.card for bar in fits.read_bars()} == set(fits.CARDS)


def test_the_curves_show_what_their_names_say() -> None:
    recorded = json.loads(curves.FIGURES.read_text())
    assert {"date", "commit", "machine", "versions", "command"} <= recorded.keys()
    validation = {}
    for run in recorded["runs"]:
        validation[run["name"]] = [loss for _, loss in run["validation"]]
    good = validation["good"]
    too_high = validation["learning rate too high"]
    overfitting = validation["overfitting"]
    assert good[0] - min(good) > 1 and good[-1] - min(good) < 0.1
    assert max(too_high) > too_high[0] and too_high[-1] > good[-1] + 0.5
    assert overfitting[-1] - min(overfitting) > 0.3


def test_the_planned_figures_come_from_the_benchmark(tmp_path: Path) -> None:
    peaks = [{"phase": "load", "bytes": 3}, {"phase": "backward", "bytes": 7}]
    ranks = [
        {"peaks": {"load": {"0": 2}, "backward": {"0": 5, "1": 6}}},
        {"peaks": {"load": {"0": 4}}},
    ]
    case = {
        "name": "full-off-2-128",
        "method": "full",
        "plan": {"peaks": peaks},
        "ranks_measured": ranks,
    }
    file = tmp_path / "benchmark.json"
    file.write_text(json.dumps([case]))
    [kept] = json.loads(plans.keep_peaks(file))
    assert kept == {
        "method": "full", "name": "full-off-2-128", "planned_bytes": 7, "measured_bytes": 6
    }  # fmt: skip


@pytest.mark.parametrize(
    ("run", "steps", "names"),
    [
        ("quickstart", 20, ("README.md", "docs/getting-started/quickstart.md")),
        ("tickets", 24, ("docs/getting-started/first-fine-tune.md",)),
    ],
)
def test_the_losses_on_pages_are_those_of_recorded_runs(
    run: str, steps: int, names: tuple[str, ...]
) -> None:
    recorded = {}
    for line in (REPOSITORY / f"docs/recorded/{run}/metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        if "eval/loss" in metrics:
            values = (f"{metrics['eval/loss']:.4g}", f"{metrics['eval/perplexity']:.2f}")
            recorded[metrics["step"]] = values
    first, last = recorded[0][0], recorded[steps][0]
    assert float(first) - float(last) > 0.3
    for name in names:
        pattern = rf"^step (\d+)/{steps}  validation loss (\S+)  perplexity (\S+)"
        shown = re.findall(pattern, Page(name).text, re.MULTILINE)
        assert len(shown) >= 2
        for step, *values in shown:
            assert tuple(values) == recorded[int(step)]
    facts = json.loads((REPOSITORY / f"docs/recorded/{run}/facts.json").read_text())
    phases = facts["memory"]["phases"].values()
    peak = max(rank["anonymous_peak_bytes"] for ranks in phases for rank in ranks) / 2**30
    assert f"| {steps} | {first} | {last} | | | {peak:.2f} GiB" in Page("docs/results.md").text


def test_the_notebook_has_stored_the_losses_of_the_quickstart() -> None:
    cells = json.loads((REPOSITORY / "notebooks" / "quickstart.ipynb").read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    stored = "".join("".join(output.get("text", "")) for output in outputs)
    pattern = r"^(step \d+/20  validation loss \S+  perplexity \S+)"
    losses = re.findall(pattern, stored, re.MULTILINE)
    page = Page("docs/getting-started/quickstart.md").text
    assert len(losses) == 5 and {*re.findall(pattern, page, re.MULTILINE)} < {*losses}
    assert any("image/svg+xml" in output.get("data", {}) for output in outputs)


def test_the_results_page_has_the_cpu_time_of_the_runs_against_trl() -> None:
    trainings = json.loads((REPOSITORY / "docs/pictures/comparison.json").read_text())["trainings"]
    minutes = [trainings[name]["llama_ft"]["cpu_seconds"] / 60 for name in ("lora", "full", "dpo")]
    said = "took {:.1f}, {:.1f} and {:.1f} minutes of CPU time".format(*minutes)
    assert said in Page("docs/results.md").text


def test_the_validation_loss_of_the_quickstart_says_how_many_tokens_it_covers() -> None:
    facts = json.loads((REPOSITORY / "docs/recorded/quickstart/facts.json").read_text())
    evaluated = f"{facts['evaluated']['losses']:,}"
    in_loss = f"{facts['data']['validation']['target_tokens']:,}"
    for name in ("README.md", "docs/getting-started/quickstart.md", "docs/results.md"):
        assert re.search(rf"{evaluated} of (the )?{in_loss} validation tokens", Page(name).text)
