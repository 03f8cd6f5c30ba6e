"""The pages in a real browser, as people with light and dark screens and with phones see them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Page, chromium_page, find_chromium
from report_run import MARKUP, SECRET, write_run

from llama_ft.replace_text import replace_text
from llama_ft.report import comparison_page, read_run, report_page

CHROMIUM = find_chromium()
READERS = [("light", 1280), ("dark", 1280), ("light", 390), ("dark", 390)]
# Of each plot: its title, and how wide and high its lines and bars are drawn.
DRAWN = """[...document.querySelectorAll('figure')].map(figure => [
  figure.querySelector('b').textContent,
  ...[...figure.querySelectorAll('path, i.bar')].map(shape => {
    const box = shape.getBoundingClientRect(), style = getComputedStyle(shape);
    const line = style.stroke === 'none' ? style.fill : style.stroke;
    return [box.width, box.height, {path: line, i: style.backgroundColor}[shape.localName]];
  })])"""
TITLES = [
    "Loss", "Learning rate", "Gradient norm, before clipping", "Tokens per second, all ranks",
    "Model FLOPs utilization (MFU), of the published peak", "Matmul utilization, of the measured rate",
    "Seconds a step",
    "Device memory, peak so far, fullest rank", "Host memory (RSS), peak so far, fullest rank",
    "Peak of each phase, fullest rank", "What holds it at the peak of training (backward)",
    "What stays for the optimizer step, tensor by tensor",
]  # fmt: skip
HEADINGS = ["Training", "Memory", "Each rank", "FSDP units", "Data", "Answers", "Environment", "Settings"]
POINT = """((title, share) => {
  const figure = [...document.querySelectorAll('figure')].find(f => f.querySelector('b').textContent === title);
  const box = figure.querySelector('svg').getBoundingClientRect();
  const at = {clientX: box.left + share * box.width, clientY: box.top + 50, bubbles: true};
  figure.querySelector('svg').dispatchEvent(new PointerEvent('pointermove', at));
  return [...figure.querySelectorAll('.note div')].map(line => line.textContent);
})"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine; Debian's and Ubuntu's package is called chromium")
    with chromium_page(CHROMIUM, tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture(scope="module")
def report(run_dir: Path) -> Path:
    replace_text(run_dir / "report.html", report_page(read_run(run_dir)))
    return run_dir / "report.html"


@pytest.mark.parametrize(("theme", "width"), READERS)
def test_every_plot_is_drawn_and_no_request_leaves_the_page(page: Page, report: Path, theme: str, width: int) -> None:
    page.open(report, theme, width)
    drawn = page.run(DRAWN)
    assert [title for title, *_ in drawn] == TITLES
    for title, *shapes in drawn:
        assert shapes and all(colour not in ("none", "rgba(0, 0, 0, 0)") for *_, colour in shapes), title
        assert all(across > 10 and (high > 10 or across > 20) for across, high, _ in shapes), title
    headings = page.run("[...document.querySelectorAll('h2')].map(h => h.childNodes[0].textContent.trim())")
    assert [name for name in headings if name in HEADINGS] == HEADINGS
    assert page.requests == [report.as_uri()]
    assert page.problems == []
    assert page.run("document.documentElement.scrollWidth") <= width
    background = page.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) > 380) == (theme == "light")


def test_the_pointer_tells_the_values_under_it(page: Page, report: Path) -> None:
    page.open(report, "light", 1280)
    assert page.run(f"{POINT}('Loss', 0.999)") == ["step 60", "training: 1.825", "validation: 1.5", "each step: 1.6"]


def test_the_plots_of_a_comparison_are_drawn_with_a_line_a_run(page: Page, run_dir: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", "failed", steps=30, lr="1e-3", scale=0.9)
    replace_text(tmp_path / "both.html", comparison_page([read_run(run_dir), read_run(other)]))
    for theme, width in READERS[1:3]:
        page.open(tmp_path / "both.html", theme, width)
        drawn = dict((title, shapes) for title, *shapes in page.run(DRAWN))
        assert list(drawn) == ["Loss", "Validation loss", *TITLES[1:9]]
        for title, shapes in drawn.items():
            assert len(shapes) == 2 and shapes[0][2] != shapes[1][2], title
            assert all(across > 20 for across, _, _ in shapes), title
        assert len(page.requests) == 1 and page.problems == []
        assert page.run("document.documentElement.scrollWidth") <= width
    rows = page.run(
        "[...document.querySelectorAll('tr')].map(r => [...r.children].map(c => c.innerText.split('\\n')[0]))"
    )
    assert ["train.lr", "0.0003", "0.001"] in rows and ["state", "finished", "failed"] in rows
    assert ["Loss", "1.6", "2.115"] in rows and ["Steps", "60", "30"] in rows
    assert sum(row[0].startswith("train.") for row in rows) == 1


def test_markup_from_data_settings_and_messages_is_text(page: Page, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "evil <script>", "failed")
    replace_text(folder / "report.html", report_page(read_run(folder)))
    page.open(folder / "report.html", "light", 1280)
    assert page.run("document.querySelectorAll('img, iframe, link, a').length") == 0
    assert page.run("document.querySelectorAll('script').length") == 1
    assert len(page.requests) == 1 and page.problems == []
    text = page.run("document.body.textContent")
    assert text.count(MARKUP) >= 6
    assert "error: no good." in text and "exit code 1" in text


def test_no_secret_is_in_facts_or_pages(run_dir: Path, report: Path) -> None:
    for text in (report.read_text(), (run_dir / "facts.json").read_text(), comparison_page([read_run(run_dir)] * 2)):
        assert SECRET not in text and "hunter2" not in text
    assert "https://***@example.com/rows.jsonl" in report.read_text()
    assert "HF_TOKEN=***" in report.read_text()


def test_each_rank_has_a_row_and_the_page_is_small(report: Path) -> None:
    ranks = report.read_text().partition(">Each rank ")[2].partition("</section>")[0]
    assert ranks.count("<tr>") == 3 and ranks.count(">80 MiB<") == 1
    assert report.stat().st_size < 150_000
