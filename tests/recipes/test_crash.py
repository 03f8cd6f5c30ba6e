"""Runs that are killed and resumed are the runs that were never stopped: benchmarks/crash.py, with few kills."""

import importlib.util
import json
import random
import shutil
import signal
import sys
from pathlib import Path
from types import ModuleType

import pytest
from conftest import RECIPE, REPOSITORY, run
from forked import forked

SCRIPT = REPOSITORY / "benchmarks" / "crash.py"
KILLED = Path(__file__).with_name("killed_job.py")


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, 12])
def test_a_run_killed_at_random_moments_ends_as_if_it_had_not_been(tmp_path: Path, kills: int) -> None:
    command = [sys.executable, str(SCRIPT), "--kills", str(kills), "--folder", str(tmp_path)]
    finished = run([*command, "--methods", "full" if kills < 10 else "lora,full"], timeout=900)
    assert finished.exit_code == 0, finished.output
    assert f"{kills} kills in " in finished.output
    assert "every run identical to the uninterrupted one" in finished.output


@pytest.fixture(scope="module")
def crash() -> ModuleType:
    spec = importlib.util.spec_from_file_location("crash", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_run_killed_in_a_save_goes_on_as_if_it_had_not_been(crash: ModuleType, tmp_path: Path) -> None:
    """The benchmark's run, of one epoch, compared as it does; all ranks are killed at once."""
    crash.write_inputs(tmp_path)
    flags = [*crash.FLAGS, "--model_name", f"{tmp_path}/model", "--dataset", f"{tmp_path}/rows.jsonl"]
    flags[flags.index("--num_epochs") + 1] = "1"
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    finished = forked(RECIPE, *flags, "--output_dir", whole, ranks=2)
    assert finished.exit_code == 0, finished.output
    moment = run_dir / "checkpoints" / ".writing-step-000004"
    killed = forked(KILLED, moment, *flags, "--output_dir", run_dir, ranks=2)
    assert killed.exit_code == -signal.SIGKILL, killed.output
    assert crash.complete_checkpoints(run_dir) and crash.unsound(run_dir) == []
    assert not (run_dir / "model").exists()
    resumed = forked(RECIPE, *flags, "--output_dir", run_dir, ranks=2)
    assert resumed.exit_code == 0 and "Going on from" in resumed.output, resumed.output
    assert f"The run in {run_dir} was killed (exit code -9)" in resumed.output
    assert "Planned on the host per rank" in resumed.output and "docs/exit-code-9.md" in resumed.output
    assert crash.differences(run_dir, whole) == []
    assert crash.flip_bits(run_dir, 12, random.Random(0)) == []


def write_run(folder: Path, lines: list[dict[str, float]], result: bytes) -> None:
    (folder / "checkpoints" / "step-000002").mkdir(parents=True)
    (folder / "checkpoints" / "step-000002" / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"rows")
    (folder / "checkpoints" / "best.json").write_text("{}")
    (folder / "model").mkdir()
    (folder / "model" / "model.safetensors").write_bytes(result)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_difference_is_found_wherever_it_is(crash: ModuleType, tmp_path: Path) -> None:
    """The comparison itself, which the runs above would pass if it saw nothing."""
    lines = [{"step": step, "train/loss": 1 / step, "perf/step_seconds": 0.1} for step in (1, 2)]
    write_run(tmp_path / "reference", lines, b"weights")
    later = [{**line, "perf/step_seconds": 0.2, "perf/save_seconds": 1.0} for line in lines]
    cases = {
        "same": (later, b"weights", []),
        "loss": ([later[0], {**later[1], "train/loss": 0.5000000000000001}], b"weights", ["step 2: train/loss is 0.5"]),
        "missing": (later[:1], b"weights", ["1 lines, not 2"]),
        "result": (later, b"Weights", ["model/model.safetensors differs"]),
    }
    for name, (own, result, expected) in cases.items():
        write_run(tmp_path / name, own, result)
        found = crash.differences(tmp_path / name, tmp_path / "reference")
        assert len(found) == len(expected) and all(it in line for it, line in zip(expected, found, strict=True)), name
    shutil.rmtree(tmp_path / "same" / "checkpoints" / "step-000002")
    assert len(crash.differences(tmp_path / "same", tmp_path / "reference")) == 1
