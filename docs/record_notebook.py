"""Run notebooks/quickstart.ipynb from top to bottom and store what its cells print.

    python docs/record_notebook.py            # some minutes on two cores

A kernel is not needed. Directories are shortened, and speeds left out: they belong to the benchmarks
page, which names the hardware.
"""

import io
import json
import os
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "notebooks" / "quickstart.ipynb"
SPEEDS = re.compile(
    r"  [\d,.]+ tokens/s|  \d+% of the matmul rate|  [\d.]+ s/step| The run took [^.]+\d (?:s|min)\."
    r"| in [\d.]+ s(?=;)|, training waited [\d.]+ s, written after [\d.]+ s"
)
PROGRESS = re.compile(r"^.*(?:it/s\]|\?it/s|B/s\]).*\n?", re.MULTILINE)  # bars of other libraries


class Shown(ModuleType):
    """Stands for IPython.display, and keeps what is displayed."""

    def __init__(self) -> None:
        super().__init__("IPython.display")
        self.pictures = list[str]()
        self.SVG = str

    def display(self, picture: str) -> None:
        self.pictures.append(picture)


def shorten(text: str) -> str:
    """Return printed text without speeds and without directories of this machine."""
    text = PROGRESS.sub("", SPEEDS.sub("", text))
    for folder, short in ((f"{ROOT}/", ""), (str(ROOT), "."), (str(Path.home()), "~")):
        text = text.replace(folder, short)
    return text


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def outputs_of(source: str, names: dict[str, Any], shown: Shown) -> list[dict[str, Any]]:
    """Run a cell and return its outputs."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(source, str(NOTEBOOK), "exec"), names)
    outputs = list[dict[str, Any]]()
    text = shorten(printed.getvalue())
    if text:
        outputs.append({"output_type": "stream", "name": "stdout", "text": lines(text)})
    for picture in shown.pictures:
        data = {"image/svg+xml": lines(picture), "text/plain": ["<SVG>"]}
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    shown.pictures.clear()
    return outputs


def main() -> None:
    os.chdir(ROOT)
    notebook = json.loads(NOTEBOOK.read_text())
    shown = Shown()
    sys.modules["IPython.display"] = shown
    sys.modules.setdefault("IPython", ModuleType("IPython"))
    names: dict[str, Any] = {"__name__": "__main__"}
    count = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            cell["outputs"] = outputs_of("".join(cell["source"]), names, shown)
            cell["execution_count"] = count
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
