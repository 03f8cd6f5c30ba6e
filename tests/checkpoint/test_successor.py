"""A run that starts while its predecessor still ends: it waits for the directory, then looks for
checkpoints, and deletes none that it has not seen."""

import dataclasses
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from checkpoint_by_hand import save_checkpoint
from forked import Finished, forked

from llama_ft.checkpoint import (
    CheckpointWriter,
    create_run_directory,
    removed_if_unused,
    run_directory,
)
from llama_ft.checkpoint.resume import find_checkpoint
from llama_ft.config import CheckpointConfig, Config
from llama_ft.config.paths import RUN_MARKER
from llama_ft.errors import RunFailure, UserError
from llama_ft.runtime import Ranks
from llama_ft.runtime.ends.exit import RunStatus
from llama_ft.runtime.run_lock import RunLock

PREDECESSOR = """
import os, sys, time
from pathlib import Path
from llama_ft.runtime.run_lock import RunLock

folder = Path(sys.argv[1])
says_so = sys.argv[2] == "ending"
lock = RunLock.try_to_lock(folder)
if says_so:
    lock.announce_end()
(folder.parent / "has lock").touch()
while not (folder.parent / "may save").exists():
    time.sleep(0.01)
time.sleep(0.3)  # a slow disk
os.replace(folder.parent / "step-000007", folder / "checkpoints" / "step-000007")
"""


@pytest.fixture
def ranks(runtime: Ranks) -> Iterator[Ranks]:
    """Ranks of a run that has not begun."""
    ranks = dataclasses.replace(runtime, status=None, lock=None)
    yield ranks
    ranks.release_lock()


@pytest.fixture
def predecessor(tmp_path: Path) -> Iterator[Callable[[str], "Future[Finished]"]]:
    """Starts a process that has the lock of tmp_path/run. Soon after the file `may save` exists
    it completes step 7 there, and ends."""
    save_checkpoint(tmp_path / "made", {}, Config(), 7).rename(tmp_path / "step-000007")
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    script = tmp_path / "predecessor.py"
    script.write_text(PREDECESSOR)
    with ThreadPoolExecutor(1) as pool:

        def start(how: str) -> "Future[Finished]":
            running = pool.submit(forked, script, run, how)
            while not (tmp_path / "has lock").exists():
                assert not running.done(), running.result().output
            (run / "status.json").write_text('{"state": "running", "step": 7}')
            return running

        yield start


def settings_of(folder: Path, resume: str | None = "auto", **more: bool) -> CheckpointConfig:
    return CheckpointConfig(output_dir=str(folder), resume=resume, **more)  # type: ignore[arg-type]


def test_a_successor_resumes_from_the_checkpoint_that_was_saved_while_it_waited(
    predecessor: Callable[[str], "Future[Finished]"],
    tmp_path: Path,
    ranks: Ranks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_directory, "LOCK_WAIT_SECONDS", 0.0)
    running = predecessor("ending")
    (tmp_path / "may save").touch()
    run = tmp_path / "run"
    settings = settings_of(run)
    resumed = find_checkpoint(settings, ranks)
    assert resumed is not None and resumed.step == 7
    assert running.result().exit_code == 0
    assert create_run_directory(settings, "m", ranks, resumed) == run
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000007"]


def test_overwrite_does_not_delete_what_was_saved_while_it_waited(
    predecessor: Callable[[str], "Future[Finished]"], tmp_path: Path, ranks: Ranks
) -> None:
    predecessor("running")
    (tmp_path / "may save").touch()
    with pytest.raises(UserError, match="step-000007 was saved while this run waited"):
        find_checkpoint(settings_of(tmp_path / "run", None, overwrite=True), ranks)
    assert (tmp_path / "run" / "checkpoints" / "step-000007").is_dir()


@pytest.mark.parametrize("resume", ["auto", None])
def test_checkpoints_of_a_run_that_came_between_are_not_deleted(
    resume: str | None, tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without_locks)
    run = tmp_path / "run"
    settings = settings_of(run, resume, overwrite=resume is None)
    assert find_checkpoint(settings, ranks) is None
    other = RunLock.try_to_lock(run)
    assert isinstance(other, RunLock)
    saved = save_checkpoint(run, {}, Config(), 3)
    other.close()
    with pytest.raises(RunFailure, match=r"another run has saved step-000003 .*\n.* Nothing was"):
        create_run_directory(settings, "m", ranks)
    assert saved.is_dir()


def test_without_locks_the_earlier_one_of_two_runs_stops_before_it_saves(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import torch

    def without_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without_locks)
    monkeypatch.setattr("llama_ft.runtime.log.propagate", True)
    settings = settings_of(tmp_path)
    find_checkpoint(settings, ranks)
    create_run_directory(settings, "m", ranks)
    assert "has no locks (flock)" in caplog.text
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    writer = CheckpointWriter(tmp_path, settings, {}, ranks)
    state = {"progress": {"best": {"step": 0}}}
    writer.save(1, model, optimizer, state, is_final=True)
    assert not writer.has_failed
    other = RunLock.try_to_lock(tmp_path)
    assert isinstance(other, RunLock)
    assert writer.has_failed
    status = RunStatus(tmp_path, lock=ranks.lock)
    status.write("failed", 1)
    assert not status.path.exists()  # it is that of the other run now
    with pytest.raises(RunFailure, match=f"has taken the directory .process {os.getpid()} on "):
        writer.save(2, model, optimizer, state, is_final=True)
    (tmp_path / RUN_MARKER).unlink()  # by its user, who has not started another run
    writer.save(2, model, optimizer, state, is_final=True)
    assert writer.last == tmp_path / "checkpoints" / "step-000002"
    other.close()


def test_a_rejected_run_leaves_no_directory_and_who_waits_for_it_gets_another(
    tmp_path: Path, ranks: Ranks
) -> None:
    run = tmp_path / "new" / "run"
    with pytest.raises(UserError, match="no"), removed_if_unused(ranks):
        assert find_checkpoint(settings_of(run), ranks) is None
        assert (run / RUN_MARKER).is_file()
        waiting = open(run / RUN_MARKER)
        raise UserError("no")
    assert [*tmp_path.iterdir()] == []
    assert ranks.lock is not None
    ranks.lock.close()
    fcntl.flock(waiting, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of a file without a name
    lock = RunLock.try_to_lock(run)
    assert isinstance(lock, RunLock)
    assert isinstance(RunLock.try_to_lock(run), str)
    lock.close()
    waiting.close()
