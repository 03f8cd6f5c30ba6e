"""A run's directory belongs to one process at a time, and nothing in it is lost."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from forked import forked

from llama_ft.checkpoint import create_run_directory, run_directory
from llama_ft.config import CheckpointConfig
from llama_ft.config.paths import RUN_MARKER
from llama_ft.errors import UserError
from llama_ft.runtime import Ranks

AT_WORK = """
import os, sys, time
from pathlib import Path
from llama_ft.runtime.run_lock import RunLock
lock = RunLock.try_to_lock(Path(sys.argv[1]))
os.symlink(str(os.getpid()), sys.argv[2])
time.sleep(600)  # killed before
"""


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A run's directory in which another process works, and that process."""
    folder = tmp_path / "run"
    script = tmp_path / "at_work.py"
    pid_link = tmp_path / "pid"
    script.write_text(AT_WORK)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(forked, script, folder, pid_link)
        while not pid_link.is_symlink():
            assert not other.done(), other.result().output
            time.sleep(0.01)
        pid = int(os.readlink(pid_link))
        (folder / "metrics.jsonl").write_text('{"step": 1}\n')
        yield folder, pid
        if not other.done():
            with suppress(ProcessLookupError):  # it has been killed and is not reported yet
                os.kill(pid, signal.SIGKILL)


def test_a_directory_that_another_process_uses_is_rejected_and_unchanged(
    busy: tuple[Path, int], runtime: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_directory, "LOCK_WAIT_SECONDS", 0.0)
    folder, other = busy
    settings: list[dict[str, Any]] = [{"overwrite": True}, {"resume": "auto"}]
    for way in settings:
        with pytest.raises(UserError, match=f"in use by another process .process {other} on "):
            create_run_directory(CheckpointConfig(output_dir=str(folder), **way), "m", runtime)
        assert (folder / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_a_killed_process_releases_its_directory(busy: tuple[Path, int], runtime: Ranks) -> None:
    folder, other = busy
    os.kill(other, signal.SIGKILL)  # and it need not be reaped
    assert (
        create_run_directory(CheckpointConfig(output_dir=str(folder), overwrite=True), "m", runtime)
        == folder
    )
    assert not (folder / "metrics.jsonl").exists()
    assert runtime.lock is not None
    runtime.lock.close()


@pytest.mark.parametrize("way", [{"overwrite": True}, {"resume": "auto"}])
def test_files_that_no_run_wrote_are_never_removed(
    way: dict[str, Any], tmp_path: Path, runtime: Ranks
) -> None:
    (tmp_path / "checkpoints" / "epoch_1").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text('{"loss": 1}\n')
    for _ in range(2):  # and the first attempt leaves nothing that the second takes for a run's
        with pytest.raises(
            UserError, match="holds metrics.jsonl, checkpoints but no .llama_ft-run"
        ):
            create_run_directory(CheckpointConfig(output_dir=str(tmp_path), **way), "m", runtime)
        held = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
        assert held == {"checkpoints", "checkpoints/epoch_1", "metrics.jsonl"}


@pytest.mark.parametrize("way", [{"overwrite": True}, {"resume": "auto"}])
def test_set_aside_checkpoints_other_directories_and_a_final_model_are_kept(
    way: dict[str, Any], tmp_path: Path, runtime: Ranks
) -> None:
    (tmp_path / RUN_MARKER).touch()
    kept = {"set-aside-1-step-000009", "epoch_1", "step-000010-copy"}
    for name in (*kept, ".writing-step-000004", ".removing-step-000009", "best.json"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "status.json").touch()
    create_run_directory(CheckpointConfig(output_dir=str(tmp_path), **way), "m", runtime)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == kept
    assert {path.name for path in tmp_path.iterdir()} == {RUN_MARKER, "checkpoints"}
    assert runtime.lock is not None
    runtime.lock.close()
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match="already holds a run or its final model"):
        create_run_directory(
            CheckpointConfig(output_dir=str(tmp_path), resume="auto"), "m", runtime
        )
    assert (tmp_path / "model").is_dir() and runtime.lock is not None
    runtime.lock.close()


def test_links_to_other_directories_are_not_followed(tmp_path: Path, runtime: Ranks) -> None:
    other = tmp_path / "other"
    (other / "step-000001").mkdir(parents=True)
    (other / "notes.txt").write_text("mine")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "checkpoints").symlink_to(other)
    (folder / RUN_MARKER).symlink_to(other / "notes.txt")
    settings = CheckpointConfig(output_dir=str(folder), overwrite=True)
    with pytest.raises(UserError, match=f"{RUN_MARKER}: is a link. Remove it"):
        create_run_directory(settings, "m", runtime)
    assert (other / "notes.txt").read_text() == "mine"
    (folder / RUN_MARKER).unlink()
    (folder / RUN_MARKER).touch()
    create_run_directory(settings, "m", runtime)
    assert not (folder / "checkpoints").exists() and (other / "step-000001").is_dir()


@pytest.mark.parametrize("oddity", ["directory", "pipe", "link to itself"])
def test_what_is_not_a_file_of_a_run_is_set_aside(
    oddity: str, tmp_path: Path, runtime: Ranks
) -> None:
    (tmp_path / RUN_MARKER).touch()
    (tmp_path / "checkpoints").mkdir()
    names = ["status.json", "config.yaml", "metrics.jsonl", "facts.json", "reference.safetensors"]
    names.append("checkpoints/best.json")
    for name in names:
        path = tmp_path / name
        if oddity == "directory":
            path.mkdir()
            (path / "notes.txt").write_text("mine")
        elif oddity == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(path)
    (tmp_path / "profile").write_text("mine")
    create_run_directory(CheckpointConfig(output_dir=str(tmp_path), overwrite=True), "m", runtime)
    for name in (*names, "profile"):
        path = tmp_path / name
        assert not path.exists() and not path.is_symlink()
        assert os.path.lexists(path.with_name(f"set-aside-1-{path.name}"))
    assert (tmp_path / "set-aside-1-profile").read_text() == "mine"
    assert runtime.lock is not None
    runtime.lock.close()


@pytest.mark.parametrize("content", ["[" * 100_000 + "]" * 100_000, "[]", "", "{"])
def test_a_corrupted_status_does_not_stop_a_run(
    content: str, tmp_path: Path, runtime: Ranks
) -> None:
    (tmp_path / RUN_MARKER).touch()
    (tmp_path / "status.json").write_text(content)
    settings = CheckpointConfig(output_dir=str(tmp_path), resume="auto")
    create_run_directory(settings, "m", runtime)
    assert runtime.lock is not None
    runtime.lock.close()


def test_temporary_files_of_a_killed_run_are_deleted(tmp_path: Path, runtime: Ranks) -> None:
    (tmp_path / RUN_MARKER).touch()
    (tmp_path / ".facts.json.4711.tmp").write_text("half")
    (tmp_path / ".mine.tmp").write_text("mine")
    create_run_directory(CheckpointConfig(output_dir=str(tmp_path)), "m", runtime)
    assert {path.name for path in tmp_path.iterdir()} == {RUN_MARKER, ".mine.tmp"}
