"""Write docs/img/report.png, the first rows of the report of the recorded run of the tutorial.

    python docs/report_picture.py                                # needs Chromium
    python docs/report_picture.py tickets=RUN quickstart=RUN     # record these runs first

The bytes of a PNG depend on the browser's version and the fonts. So tests compare the digest of the
HTML that is on the picture instead.
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path

import yaml
from browser import Browser, find_browser

from llama_ft.extensions.report.page import report_page
from llama_ft.extensions.report.run import read_run

DOCS = Path(__file__).resolve().parent
RECORDED = DOCS / "recorded" / "tickets"
PICTURE = DOCS / "img" / "report.png"
DIGEST = RECORDED / "picture.sha256"
WIDTH = 1180
HEIGHT = 800
FACTS = ("total_steps", "samples", "memory", "evaluated")  # without host, paths and versions
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def record(run: Path, folder: Path) -> None:
    """Copy what pages show of a run. Speeds and times are left out: they belong to the benchmarks page,
    which names the hardware."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = list[str]()
    for line in (run / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        kept = {key: metrics[key] for key in metrics if not key.startswith("perf/")}
        lines.append(json.dumps(kept) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    shutil.copyfile(run / "status.json", folder / "status.json")
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["model"]["model_name"] = MODEL  # not its directory on this machine
    settings.get("checkpoint", {}).pop("output_dir", None)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    facts = json.loads((run / "facts.json").read_text())
    pictured = {name: facts[name] for name in FACTS}
    sets = ("train", "validation")
    counts = ("samples", "tokens", "target_tokens")
    data = {one: {count: facts["data"][one][count] for count in counts} for one in sets}
    (folder / "facts.json").write_text(json.dumps(pictured | {"data": data}, indent=1) + "\n")


def digest(page: str) -> str:
    """Return the SHA-256 of the part of a report that is on the picture: its style, its head, and
    the sections up to the answers."""
    head, _, answers = page.partition("<style>")[2].partition("<h2>Answers</h2>")
    shown = head + answers.partition("<h2>")[0]
    return hashlib.sha256(shown.encode()).hexdigest()


def main() -> None:
    program = find_browser()
    if program is None:
        sys.exit("error: neither Chromium nor Chrome is installed.")
    for recording in sys.argv[1:]:
        name, _, run = recording.partition("=")
        record(Path(run), RECORDED.with_name(name))
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
