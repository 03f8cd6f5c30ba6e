"""Renew the planned memory in configs/, examples/ and README.md, after the planner has changed.

    python benchmarks/planner/planned_figures.py          # prints what changes
    python benchmarks/planner/planned_figures.py --write

It writes the numbers of the configs' head comments and of the tables that repeat them, for the
hardware in the configs' names. Plans are quick, as with recipes/plan.py --quick. The models'
config.json comes from tests/model_shapes.py: it needs no GPU, no weights and no network.
tests/repository/test_configs.py checks the figures. docs/pictures/plans.py renews those of the pictures.
"""

import argparse
import dataclasses
import re
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / folder) for folder in ("src", "recipes", "tests")]

import finetuning
from model_shapes import write_config

from llama_ft.config import load
from llama_ft.plan.predict import predict
from llama_ft.plan.types import Plan, PlanRequest

CONFIGS = REPOSITORY / "configs"
EXAMPLES = REPOSITORY / "examples"
WITHOUT_HARDWARE = ("demo", "quickstart")
# Planned with images, which needs the processors of their models: see examples/README.md.
WITH_IMAGES = ("charts_qwen3_vl", "charts_gemma3")
NUMBER = r"[\d.]+"


def plan_config(file: Path, nodes: int, ranks_per_node: int) -> Plan:
    """Return the quick plan of a config."""
    config, _ = load([f"--config={file}"], paths=False)
    ranks = nodes * ranks_per_node
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_config(Path(temporary) / "model", config.model.model_name)
        model = dataclasses.replace(config.model, model_name=str(folder))
        config = dataclasses.replace(config, model=model)
        request = PlanRequest(config, folder, ranks, ranks_per_node, "cuda")
        return predict(request, finetuning.RECIPE, quick=True)


def hardware_of(stem: str) -> tuple[int, int]:
    """Return nodes and ranks per node from a config's name: 2x8x80gb are two nodes of eight GPUs
    of 80 GB."""
    *counts, _ = stem.rpartition("_")[2].split("x")
    numbers = [1, 1, *map(int, counts)]
    nodes, ranks_per_node = numbers[-2:]
    return nodes, ranks_per_node


def gib(nbytes: int) -> str:
    """Return a size as the files write it."""
    return f"{nbytes / 2**30:.1f}"


def with_numbers(text: str, numbers: list[str]) -> str:
    """Return a text with its sizes in GiB replaced, in order."""
    remaining = iter(numbers)
    return re.sub(rf"{NUMBER} GiB", lambda _: f"{next(remaining)} GiB", text)


class Pages:
    """Files and their new text."""

    def __init__(self) -> None:
        self.texts = dict[Path, str]()

    def replace(self, file: Path, pattern: str, replacement: str) -> None:
        """Replace what the pattern's second group matches, in every match."""
        text = self.texts.get(file, file.read_text())
        self.texts[file] = re.sub(pattern, rf"\g<1>{replacement}\g<3>", text, flags=re.MULTILINE)

    def changed(self) -> list[Path]:
        """Return the files whose text is new."""
        return [file for file, text in self.texts.items() if file.read_text() != text]


def renew_config(pages: Pages, file: Path) -> None:
    """Renew a config's head comment, and its rows in two tables."""
    planned = plan_config(file, *hardware_of(file.stem))
    host_bytes = max(planned.host_load_bytes, planned.host_save_bytes)
    sizes = (planned.device_bytes, host_bytes, planned.checkpoint_bytes, planned.result_bytes)
    numbers = [gib(nbytes) for nbytes in sizes]
    text = file.read_text()
    [line] = re.findall(r"^# Planned by .*:\n(#.*)$", text, re.MULTILINE)
    pages.texts[file] = text.replace(line, with_numbers(line, numbers))
    name = re.escape(file.name)
    # configs/README.md: ... | planned | tokens | checkpointing |
    row = rf"^(\| \[`[^`]+`\]\({name}\) \|.*\| )({NUMBER})( \|[^|]*\|[^|]*\|)$"
    pages.replace(CONFIGS / "README.md", row, numbers[0])
    row = rf"(\(configs/{name}\) \| [\d,]+ \| )({NUMBER})( \| \w+ \|)"
    pages.replace(REPOSITORY / "README.md", row, numbers[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the files")
    options = parser.parse_args()
    pages = Pages()
    for file in sorted(CONFIGS.glob("*.yaml")):
        if file.stem not in WITHOUT_HARDWARE:
            renew_config(pages, file)
            print(file.name, file=sys.stderr, flush=True)
    for file in sorted(EXAMPLES.glob("*.yaml")):
        if file.stem in WITH_IMAGES:
            continue
        planned = gib(plan_config(file, 1, 1).device_bytes)
        row = rf"(\]\({re.escape(file.name)}\) .* \| )({NUMBER})( \|)$"
        pages.replace(EXAMPLES / "README.md", row, planned)
        print(file.name, file=sys.stderr, flush=True)
    for file in pages.changed():
        print(file.relative_to(REPOSITORY))
        if options.write:
            file.write_text(pages.texts[file])


if __name__ == "__main__":
    main()
