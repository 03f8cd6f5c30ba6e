"""Compare the speed that plans compute with the speed that other tools have published.

    python benchmarks/planner/published_speeds.py            # prints the table
    python benchmarks/planner/published_speeds.py --write    # puts it into docs/guides/memory.md

MATMUL_SHARE and BANDWIDTH_SHARE of llama_ft/plan/duration.py are chosen by the last column, whose median
is to be 1 or a little more. The figures, their sources and the flags are in published_speeds.yaml. Each
plan is a run of recipes/plan.py --json --quick. It needs no GPU, no weights and no network.
"""

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "src"), str(REPOSITORY)]

from benchmarks.planner import other_tools
from llama_ft.plan.duration import computed_seconds, peak_name

FIGURES = Path(__file__).with_name("published_speeds.yaml")
PAGE = REPOSITORY / "docs" / "guides" / "memory.md"
BEGIN = "<!-- Written by benchmarks/planner/published_speeds.py --write. -->\n"
END = "<!-- End of what benchmarks/planner/published_speeds.py writes. -->\n"
TITLES = ["tool", "run", "GPUs", "published", "computed", "published / computed"]


@dataclass(frozen=True)
class Speed:
    """A published speed. For its fields see published_speeds.yaml."""

    tool: str
    url: str
    model: str
    method: str
    tokens: str
    gpu: str
    gpus: int
    tokens_per_second: int
    flags: str
    note: str = ""

    def row(self, computed: float) -> list[str]:
        """Return the row of the table. `computed`: tokens/s per GPU."""
        gpus = f"{self.gpus} {peak_name(self.gpu)}" + (f", {self.note}" if self.note else "")
        return [
            f"[{self.tool}]({self.url})",
            f"{self.model}, {self.method}, {self.tokens} tokens",
            gpus,
            f"{self.tokens_per_second:,}",
            f"{computed:,.0f}",
            f"{self.tokens_per_second / computed:.2f}",
        ]


def read_speeds() -> tuple[list[Speed], dict[str, Any]]:
    """Return the published speeds, and config.json of each model."""
    content = yaml.safe_load(FIGURES.read_text())
    return [Speed(**row) for row in content["rows"]], content["models"]


def computed_speed(speed: Speed, model_config: dict[str, Any], folder: Path) -> float:
    """Return the tokens/s per GPU that a plan computes for the settings of a published run."""
    figure = other_tools.Figure(
        *(speed.tool, speed.model, speed.method, speed.tokens, speed.gpus),
        *("unknown", speed.flags),
    )
    planned = other_tools.plan(figure, model_config, folder)
    seconds = computed_seconds(planned["step_flops"], planned["step_bytes"], speed.gpu)
    assert seconds is not None, speed.gpu
    tokens = planned["tokens"] * planned["micro_batches"]
    return float(tokens / seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the table into the page")
    options = parser.parse_args()
    speeds, models = read_speeds()
    lines = [" | ".join(TITLES), " | ".join(["---"] * len(TITLES))]
    ratios = []
    with tempfile.TemporaryDirectory() as temporary:
        for speed in speeds:
            folder = Path(temporary) / speed.model.replace(" ", "-")
            computed = computed_speed(speed, models[speed.model], folder)
            ratios.append(speed.tokens_per_second / computed)
            lines.append(" | ".join(speed.row(computed)))
            print(lines[-1], file=sys.stderr, flush=True)
    table = "".join(f"| {line} |\n" for line in lines)
    print(f"{table}median: {statistics.median(ratios):.3f}")
    if options.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


if __name__ == "__main__":
    main()
