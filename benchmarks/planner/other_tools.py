"""Compare plans with the memory that other tools have published for the same settings.

    python benchmarks/planner/other_tools.py            # prints the table
    python benchmarks/planner/other_tools.py --write    # puts it into docs/development/benchmarks.md

The published figures, their sources and the flags are in other_tools.yaml. Each plan is a run of
recipes/plan.py --json --quick. It needs no GPU, no weights and no network.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
FIGURES = REPOSITORY / "benchmarks" / "planner" / "other_tools.yaml"
PAGE = REPOSITORY / "docs" / "development" / "benchmarks.md"
BEGIN = "<!-- Written by benchmarks/planner/other_tools.py --write. -->\n"
END = "<!-- End of what benchmarks/planner/other_tools.py writes. -->\n"
INTRODUCTION = """### Plans against published figures of other tools

**Compared:** the plans for the settings of published GPU runs, with the memory that these runs were published with. The
figures, their sources and all flags are in `benchmarks/planner/other_tools.yaml`.

<!-- needs: some minutes -->
```bash
python benchmarks/planner/other_tools.py --write
```

**Measured:** nothing by llama_ft. "tensors" is the peak of allocated tensors, "reserved" is what torch's allocator
reserves, "GPU" includes the CUDA context. If a source does not say what it measured, the plan's reserved memory is
shown.
"""
RESULT = """**Result:** {higher} plans are higher than the published peak, by at most {most:.0%}. {lower} are lower, by
{least_below:.0%} to {most_below:.0%}. Unsloth says only which GPU suffices: there, plans are up to {most_of_fits:.0%}
higher. The likely reasons are in the code: a plan for llama_ft is not a plan for these tools.
"""
GIB = 2**30
TITLES = [
    *("tool", "model", "method", "tokens", "GPUs", "published GiB", "planned GiB", "difference"),
    "likely reason",
]
# What a plan is compared with, and how the page names it
PEAKS = {
    "allocated": "tensors",
    "reserved": "reserved",
    "unknown": "reserved",
    "card": "GPU",
}


@dataclass(frozen=True)
class Figure:
    """A published figure. For its fields see other_tools.yaml."""

    tool: str
    model: str
    method: str
    tokens: str
    gpus: int
    peak: str
    flags: str
    reason: str = ""
    gib: float = 0.0
    gb: float = 0.0

    @property
    def published_gib(self) -> float:
        """The figure in GiB."""
        return self.gib or self.gb * 1e9 / GIB


def read_figures() -> tuple[list[Figure], dict[str, Any]]:
    """Return the figures, and the rest of the file: sources and models."""
    content = yaml.safe_load(FIGURES.read_text())
    rows = content.pop("rows")
    return [Figure(**row) for row in rows], content


def plan(figure: Figure, model_config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the plan of recipes/plan.py. `folder`: for config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model_config | {"dtype": "bfloat16"}))
    command = [sys.executable, str(REPOSITORY / "recipes" / "plan.py"), "--json", "--quick"]
    command += ["--model_name", str(folder), "--dataset", "demo", "--nproc", str(figure.gpus)]
    command += figure.flags.split()
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY / "src"),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {ended.returncode}")
    result: dict[str, Any] = json.loads(ended.stdout)["plan"]
    return result


def planned_bytes(figure: Figure, planned: dict[str, Any]) -> int:
    """Return the bytes of a plan that the figure is about."""
    reserved = int(planned["reserved_bytes"])
    if figure.peak == "allocated":
        return max(int(peak["bytes"]) for peak in planned["peaks"])
    if figure.peak == "card":
        return reserved + int(planned["outside_bytes"])
    return reserved


def table_row(figure: Figure, planned: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    planned_gib = planned_bytes(figure, planned) / GIB
    published_gib = figure.published_gib
    difference = planned_gib / published_gib - 1
    is_card = figure.peak == "card"
    return [
        figure.tool,
        figure.model,
        figure.method,
        figure.tokens,
        str(figure.gpus),
        f"fits {published_gib:.0f}" if is_card else f"{published_gib:.1f}",
        f"{planned_gib:.1f} ({PEAKS[figure.peak]})",
        f"{difference:+.0%}",
        figure.reason,
    ]


def summarize(rows: list[list[str]]) -> str:
    """Return what the table shows. Rows that only say which GPU suffices are counted apart."""
    measured = []
    fits = []
    for row in rows:
        difference = int(row[TITLES.index("difference")].rstrip("%")) / 100
        is_measured = not row[TITLES.index("published GiB")].startswith("fits")
        (measured if is_measured else fits).append(difference)
    higher = [difference for difference in measured if difference > 0]
    lower = [-difference for difference in measured if difference <= 0]
    return RESULT.format(
        higher=len(higher),
        most=max(higher),
        lower=len(lower),
        least_below=min(lower),
        most_below=max(lower),
        most_of_fits=max(fits),
    )


def markdown(rows: list[list[str]], sources: dict[str, dict[str, str]]) -> str:
    """Return the section with the table and the list of sources."""
    lines = [
        INTRODUCTION,
        "| " + " | ".join(TITLES) + " |",
        "|" + "---|" * len(TITLES),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        summarize(rows),
        "Sources, read on November 23, 2026:",
        "",
    ]
    for tool, source in sources.items():
        note = f"; {source['note']}" if "note" in source else ""
        lines.append(f"- [{tool}]({source['url']}), {source['published']}{note}")
    return "\n".join(lines) + "\n"


def write_page(text: str) -> None:
    """Replace what the page has between the two comments."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the table into the page")
    options = parser.parse_args()
    figures, content = read_figures()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for number, figure in enumerate(figures, start=1):
            folder = Path(temporary) / figure.model.replace(" ", "-")
            planned = plan(figure, content["models"][figure.model], folder)
            rows.append(table_row(figure, planned))
            print(
                f"{number}/{len(figures)}: {' | '.join(rows[-1][:-1])}", file=sys.stderr, flush=True
            )
    text = markdown(rows, content["sources"])
    print(text)
    if options.write:
        write_page(text)


if __name__ == "__main__":
    main()
