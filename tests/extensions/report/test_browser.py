"""The report in a real browser: no script errors, no text outside of its box; and the picture of
the README."""

import re
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY
from report_run import write_run

from llama_ft.extensions.report.page import comparison_page, report_page
from llama_ft.extensions.report.run import read_run

sys.path.insert(0, str(REPOSITORY / "docs"))
import report_picture
from browser import Browser, find_browser

PROGRAM = find_browser()
WIDTHS = (400, 1200, 1900)
# Text outside of the window or of its box, unless it can be scrolled to; and axis labels that touch.
PROBLEMS = """(() => {
  const found = [];
  const note = (what, text) => found.push(`${what}: ${text.trim().slice(0, 40)}`);
  if (document.documentElement.scrollWidth > innerWidth) note("wider than the window", "the page");
  const texts = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode;
    const parent = node.parentElement;
    if (!node.data.trim() || parent.closest(".scroll pre")) continue;
    const box = (parent.closest(".card, figure, .message, .sample, td, th") || document.body).getBoundingClientRect();
    const inScroll = parent.closest(".scroll");
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const rect of range.getClientRects()) {
      if (rect.left < box.left - 1 || rect.right > box.right + 1) note("outside of its box", node.data);
      if (!inScroll && (rect.left < 0 || rect.right > innerWidth)) note("outside of the window", node.data);
      if (!parent.closest(".said") && rect.bottom > box.bottom + 1) note("below its box", node.data);
    }
  }
  for (const axis of document.querySelectorAll(".x-axis, .y-axis")) {
    const labels = [...axis.children].map((label) => label.getBoundingClientRect());
    labels.forEach((one, n) => labels.slice(n + 1).forEach((other) => {
      const beside = one.right <= other.left || other.right <= one.left;
      const above = one.bottom <= other.top || other.bottom <= one.top;
      if (!beside && !above) note("labels that touch", axis.textContent);
    }));
  }
  return found;
})()"""
CENTER_OF_LOSS = """(() => {
  const drawn = document.querySelector(".plot svg").getBoundingClientRect();
  return [drawn.left + drawn.width / 2, drawn.top + drawn.height / 2];
})()"""


def test_the_picture_is_of_the_recorded_run() -> None:
    page = report_page(read_run(report_picture.RECORDED))
    recorded = report_picture.DIGEST.read_text().strip()
    assert report_picture.digest(page) == recorded, "run: python docs/report_picture.py"
    assert report_picture.PICTURE.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["README.md", "docs/guides/tracking.md"])
def test_the_text_of_the_picture_has_its_numbers(name: str) -> None:
    text = (REPOSITORY / name).read_text()
    [shown] = re.findall(r"!\[(.*)\]\(.*report\.png\)", text)
    losses = read_run(report_picture.RECORDED).curves["eval/loss"].values
    assert re.findall(r"\d\.\d{3}", shown) == [f"{losses[0]:.3f}", f"{losses[-1]:.3f}"]


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason="neither Chromium nor Chrome is installed")
def test_pages_have_no_script_errors_and_no_text_that_overflows(tmp_path: Path) -> None:
    assert PROGRAM
    finished = read_run(write_run(tmp_path / "finished"))
    failed = read_run(write_run(tmp_path / ("a_long_name_" * 8), "failed", lr="1e-3"))
    pages = {
        "finished": report_page(finished),
        "failed": report_page(failed),
        "recorded": report_page(read_run(report_picture.RECORDED)),
        "comparison": comparison_page([finished, failed]),
    }
    with Browser(PROGRAM) as browser:
        for name, text in pages.items():
            file = tmp_path / f"{name}.html"
            file.write_text(text)
            for width in WIDTHS:
                browser.open(file, width, 900, is_dark=width == WIDTHS[0])
                assert browser.evaluate(PROBLEMS) == [], (name, width)
                browser.evaluate("document.querySelector('.plot').scrollIntoView()")
                browser.move_pointer(*browser.evaluate(CENTER_OF_LOSS))
                note = browser.evaluate("document.querySelector('.note:not([hidden])').innerText")
                assert note.startswith("step "), (name, width)
                assert browser.errors == [], (name, width)


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason="neither Chromium nor Chrome is installed")
def test_script_errors_and_overflowing_text_are_found(tmp_path: Path) -> None:
    assert PROGRAM
    file = tmp_path / "bad.html"
    card = '<div class="card" style="width:50px">overflowing</div>'
    file.write_text(f"<main>{card}</main><script>undefined_name();</script>")
    with Browser(PROGRAM) as browser:
        browser.open(file, 400, 900)
        assert browser.evaluate(PROBLEMS) == ["outside of its box: overflowing"]
        assert "undefined_name" in browser.errors[0]
