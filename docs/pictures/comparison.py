"""trl_comparison.svg: the losses of llama_ft and TRL over each other. benchmarks/trl_comparison/comparison.py has
trained them.

    python docs/pictures/comparison.py output/comparison/result.json    # renews comparison.json
"""

import json
import sys
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).resolve().parent / "comparison.json"
sys.path.append(str(FIGURES.parents[2]))

from benchmarks.trl_comparison.comparison_figure import DESCRIPTION as DESCRIPTION  # noqa: E402
from benchmarks.trl_comparison.comparison_figure import draw_figure  # noqa: E402

# what differs between the directories of two users
LEFT_OUT = {"model", "train", "validation"}


def draw() -> str:
    """Return the picture as SVG."""
    return draw_figure(json.loads(FIGURES.read_text()))


def keep(result: dict[str, Any]) -> str:
    """Return a result.json without directories, a training per line."""
    head = {name: result[name] for name in ("commit", "date", "machine")}
    lines = []
    for name, training in result["trainings"].items():
        kept = {key: value for key, value in training.items() if key not in LEFT_OUT}
        lines.append(f"{json.dumps(name)}: {json.dumps(kept)}")
    return json.dumps(head)[:-1] + ', "trainings": {\n' + ",\n".join(lines) + "\n}}\n"


if __name__ == "__main__":
    FIGURES.write_text(keep(json.loads(Path(sys.argv[1]).read_text())))
