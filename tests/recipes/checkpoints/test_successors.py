"""Runs that overlap in one directory: benchmarks/checkpoints/successors.py, with few cases."""

import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, run

SCRIPT = REPOSITORY / "benchmarks" / "checkpoints" / "successors.py"
CASES = 3
# all endings, with and without checkpoints at intervals, 1 and 2 successors, before and after the end
SEED = "268"


@pytest.mark.large
def test_a_successor_loses_no_complete_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--cases", str(CASES)]
    command += ["--seed", SEED, "--folder", str(tmp_path)]
    finished = run(command, timeout=600)
    assert finished.exit_code == 0, finished.output
    assert f"{CASES} overlaps: " in finished.output
    assert "No complete checkpoint was lost" in finished.output
