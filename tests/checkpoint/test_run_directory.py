"""A run's directory belongs to one process at a time, and nothing in it is lost."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import ENVIRONMENT

from llama_ft.checkpoint import create_run_directory, run_directory
from llama_ft.config import CheckpointConfig
from llama_ft.errors import UserError
from llama_ft.runtime import Runtime

AT_WORK = """
import sys
from pathlib import Path
from llama_ft.checkpoint.run_directory import _lock
lock = _lock(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A run's directory in which another process works."""
    folder = tmp_path / "run"
    other = subprocess.Popen(
        [sys.executable, "-c", AT_WORK, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRONMENT},
    )
    assert other.stdout is not None and other.stdout.readline() == "locked\n"
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    yield folder, other
    other.kill()
    other.communicate()


def test_a_directory_in_which_another_process_works_is_refused_and_left_alone(
    busy: tuple[Path, subprocess.Popen[str]], runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_directory, "SECONDS_FOR_ANOTHER_TO_END", 0.0)
    folder, other = busy
    settings: list[dict[str, Any]] = [{"overwrite": True}, {"resume": "auto"}]
    for way in settings:
        with pytest.raises(UserError, match=f"another process is at work there .process {other.pid} on "):
            create_run_directory(CheckpointConfig(output_dir=str(folder), **way), "m", runtime)
        assert (folder / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_a_process_that_was_killed_holds_no_directory(
    busy: tuple[Path, subprocess.Popen[str]], runtime: Runtime
) -> None:
    folder, other = busy
    other.kill()  # SIGKILL, and it need not be reaped
    assert create_run_directory(CheckpointConfig(output_dir=str(folder), overwrite=True), "m", runtime) == folder
    assert not (folder / "metrics.jsonl").exists()
    assert runtime.lock is not None
    runtime.lock.close()


def test_a_result_without_checkpoints_is_not_begun_anew(tmp_path: Path, runtime: Runtime) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match="holds a result but no checkpoint to go on from"):
        create_run_directory(CheckpointConfig(output_dir=str(tmp_path), resume="auto"), "m", runtime)
    assert (tmp_path / "model").is_dir() and (tmp_path / "metrics.jsonl").exists()
    assert runtime.lock is not None
    runtime.lock.close()
