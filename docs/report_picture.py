"""Write docs/img/report.png, the first rows of the report of a recorded quickstart.

    python docs/report_picture.py            # needs Chromium
    python docs/report_picture.py RUN        # record this run of the quickstart first

The bytes of a PNG depend on the browser's version and the fonts. So tests compare the digest of the
HTML that is on the picture instead.
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path

from browser import Browser, find_browser

from llama_ft.extensions.report.page import report_page
from llama_ft.extensions.report.run import read_run

DOCS = Path(__file__).resolve().parent
RECORDED = DOCS / "recorded" / "quickstart"
PICTURE = DOCS / "img" / "report.png"
DIGEST = RECORDED / "picture.sha256"
WIDTH = 1180
HEIGHT = 430
FACTS = ("total_steps", "samples", "memory")  # without host, paths and versions


def record(run: Path) -> None:
    """Copy what the picture shows of a run, and the config of the quickstart. Speeds are left out:
    they belong to the benchmarks page, which names the hardware."""
    RECORDED.mkdir(parents=True, exist_ok=True)
    lines = list[str]()
    for line in (run / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        kept = {key: metrics[key] for key in metrics if not key.startswith("perf/")}
        lines.append(json.dumps(kept) + "\n")
    (RECORDED / "metrics.jsonl").write_text("".join(lines))
    shutil.copyfile(run / "status.json", RECORDED / "status.json")
    shutil.copyfile(DOCS.parent / "configs" / "quickstart.yaml", RECORDED / "config.yaml")
    facts = json.loads((run / "facts.json").read_text())
    pictured = {name: facts[name] for name in FACTS}
    (RECORDED / "facts.json").write_text(json.dumps(pictured, indent=1) + "\n")


def digest(page: str) -> str:
    """Return the SHA-256 of the part of a report that is on the picture: its style, its head, and
    the section before the answers."""
    shown = page.partition("<style>")[2].partition("<h2>Answers</h2>")[0]
    return hashlib.sha256(shown.encode()).hexdigest()


def main() -> None:
    program = find_browser()
    if program is None:
        sys.exit("error: neither Chromium nor Chrome is installed.")
    for run in sys.argv[1:]:
        record(Path(run))
    page = report_page(read_run(RECORDED))
    file = RECORDED / "report.html"
    file.write_text(page)
    try:
        with Browser(program) as browser:
            browser.open(file, WIDTH, 1000)
            PICTURE.write_bytes(browser.picture(WIDTH, HEIGHT))
    finally:
        file.unlink()
    DIGEST.write_text(digest(page) + "\n")


if __name__ == "__main__":
    main()
