"""The benchmarks that `make benchmarks` runs: each section with figures has one, and its files name
machine, versions, commit and date."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY
from pages import Page

sys.path.insert(0, str(REPOSITORY))

from benchmarks import record  # noqa: E402

PAGE = Page("docs/development/benchmarks.md")
# Sections that another section's benchmark measures, or a test.
OTHERS = {
    "Planning time",
    "Loading quantized checkpoints",
    "Tokenization",
    "Host memory of a CPU run",
}
# Their figures were published before results were kept as files, or the script is run once and takes
# most of an hour. Record the others.
WITHOUT_A_FILE = {
    "Training speed against TRL", "DPO speed against TRL", "Preference tuning against TRL",
    "What each optimization gives", "Memory by length",
    "Plans against published figures of other tools", "Loading", "Packing", "Checkpoints", "Resuming after kills",
    "Resuming from object storage after kills", "Start-up", "Padding against TRL", "Successors that start too early",
    "Resuming from object storage that gives wrong answers", "GRPO against TRL",
    "Resuming GRPO after kills", "Losses of GRPO against TRL",
}  # fmt: skip
# A section, in this order. Those of OTHERS may lack a part.
PARTS = ("**Compared:**", "```bash", "**Measured:**", "**Result:**")


def sections() -> dict[str, str]:
    """The sections with figures: heading -> text."""
    groups = re.split(r"^## .*$", PAGE.text, flags=re.MULTILINE)
    found = {}
    for group in groups:
        for section in re.split(r"^### ", group, flags=re.MULTILINE)[1:]:
            heading, _, text = section.partition("\n")
            found[heading] = text
    return found


def test_every_section_has_its_parts_in_one_order() -> None:
    for heading, text in sections().items():
        if heading in OTHERS:
            continue
        places = [text.index(part) for part in PARTS]
        assert places == sorted(places), heading


def test_every_section_of_the_page_has_a_benchmark() -> None:
    measured = {benchmark.section for benchmark in record.BENCHMARKS.values()}
    assert sections().keys() - OTHERS == measured


def test_figures_without_a_file_are_only_the_old_ones() -> None:
    recorded = {file.stem for file in record.RESULTS.glob("*.json")}
    without = {
        benchmark.section for name, benchmark in record.BENCHMARKS.items() if name not in recorded
    }
    assert without <= WITHOUT_A_FILE
    assert recorded <= set(record.BENCHMARKS)


def without_folder(command: str) -> list[str]:
    """The words of a command, with the script's name alone: scripts have moved since some ran."""
    python, script, *flags = shlex.split(command)
    return [python, Path(script).name, *flags]


@pytest.mark.parametrize("file", sorted(record.RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_a_result_is_whole_and_the_page_names_its_commit(file: Path) -> None:
    result = json.loads(file.read_text())
    assert result["exit_code"] == 0
    assert not result["has_changes"]
    assert result["machine"]["processor"]
    assert {"torch", "transformers", "peft"} <= result["versions"].keys()
    assert without_folder(result["command"]) == without_folder(
        f"python {record.BENCHMARKS[file.stem].command}"
    )
    assert f"`{result['commit']}`" in PAGE.text


def test_the_scripts_exist_and_the_makefile_says_how_long_they_take() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    for name, benchmark in record.BENCHMARKS.items():
        script, *_ = shlex.split(benchmark.command)
        assert (REPOSITORY / script).exists()
        assert f"{name} {benchmark.minutes}" in makefile.replace("\n# ", " ")


def test_a_benchmark_that_fails_leaves_the_earlier_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = record.Benchmark("""-c 'print("one", 1); print("two")'""", "Start-up", 1)
    fails = record.Benchmark("-c 'raise SystemExit(3)'", "Start-up", 1)
    monkeypatch.setattr(record, "BENCHMARKS", {"tiny": works})
    assert record.record(["tiny"], tmp_path) == []
    result = json.loads((tmp_path / "tiny.json").read_text())
    assert result["printed"] == ["one 1", "two"]
    assert result["exit_code"] == 0
    assert re.fullmatch(r"[0-9a-f]{7,}", result["commit"])
    assert {"processor", "cores", "load_average"} <= result["machine"].keys()
    monkeypatch.setattr(record, "BENCHMARKS", {"tiny": fails})
    assert record.record(["tiny"], tmp_path) == ["tiny"]
    assert json.loads((tmp_path / "tiny.json").read_text()) == result
