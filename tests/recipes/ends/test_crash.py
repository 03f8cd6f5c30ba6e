"""Runs that are killed and resumed are the runs that were never stopped: benchmarks/checkpoints/crash.py, with
few kills."""

import json
import random
import signal
import sys
from pathlib import Path

import pytest
from conftest import RECIPE, REPOSITORY, load_script, run
from forked import forked

from llama_ft.extensions.report.run import read_run

SCRIPT = REPOSITORY / "benchmarks" / "checkpoints" / "crash.py"
KILLED = Path(__file__).with_name("killed_job.py")


@pytest.mark.large
@pytest.mark.parametrize(("kills", "methods"), [(1, "full"), (12, "lora,full"), (6, "distill")])
def test_a_run_killed_at_random_moments_equals_the_uninterrupted_one(
    tmp_path: Path, kills: int, methods: str
) -> None:
    command = [sys.executable, str(SCRIPT), "--kills", str(kills), "--folder", str(tmp_path)]
    finished = run([*command, "--methods", methods], timeout=900)
    assert finished.exit_code == 0, finished.output
    assert f"{kills} kills in " in finished.output
    assert "every run identical to the uninterrupted one" in finished.output


@pytest.mark.slow
def test_a_run_killed_while_saving_resumes_to_equal_the_uninterrupted_one(tmp_path: Path) -> None:
    """The benchmark's run, of one epoch, compared as it does; all ranks are killed at once."""
    crash = load_script(SCRIPT)
    crash.write_inputs(tmp_path)
    flags = [
        *crash.FLAGS,
        "--model_name",
        f"{tmp_path}/model",
        "--dataset",
        f"{tmp_path}/rows.jsonl",
    ]
    flags[flags.index("--num_epochs") + 1] = "1"
    whole = tmp_path / "whole"
    run_dir = tmp_path / "run"
    finished = forked(RECIPE, *flags, "--output_dir", whole, ranks=2)
    assert finished.exit_code == 0, finished.output
    moment = run_dir / "checkpoints" / ".writing-step-000004"
    killed = forked(KILLED, moment, *flags, "--output_dir", run_dir, ranks=2)
    assert killed.exit_code == -signal.SIGKILL, killed.output
    assert crash.complete_checkpoints(run_dir) and crash.unsound(run_dir) == []
    assert not (run_dir / "model").exists()
    assert json.loads((run_dir / "status.json").read_text())["state"] == "running"
    assert read_run(run_dir).status["state"] == "died"
    resumed = forked(RECIPE, *flags, "--output_dir", run_dir, ranks=2)
    assert resumed.exit_code == 0 and "Resuming from" in resumed.output, resumed.output
    assert f"The earlier run in {run_dir} ended without a message" in resumed.output
    assert crash.differences(run_dir, whole) == []
    assert crash.flip_bits(run_dir, 12, random.Random(0)) == []
