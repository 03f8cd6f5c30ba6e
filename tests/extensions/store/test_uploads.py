"""Checkpoints in a store, with a process group of one, real files, and S3 servers that fail."""

import asyncio
import dataclasses
import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import fsspec
import pytest
import torch
import torch.distributed as dist
from fsspec.asyn import AsyncFileSystem
from fsspec.callbacks import Callback
from torch.distributed.launcher.api import LaunchConfig

from llama_ft.checkpoint import CheckpointWriter
from llama_ft.checkpoint.remote import open_remote
from llama_ft.checkpoint.resume import find_checkpoint
from llama_ft.config import CheckpointConfig
from llama_ft.errors import RunFailure, UserError
from llama_ft.extensions.store.fetch import open_store
from llama_ft.extensions.store.object_store import NoAnswer, ObjectStore, read_commits
from llama_ft.extensions.store.uploads import Uploads, upload_grace_seconds
from llama_ft.runtime import Ranks

STATE = {"progress": {"best": {"step": 0}}}
CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


class Run(NamedTuple):
    """A writer that uploads, and what it writes."""

    writer: CheckpointWriter
    uploads: Uploads
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    def save(self, step: int, best_loss: float | None = None, asked: bool = True) -> None:
        self.writer.save(step, self.model, self.optimizer, STATE, asked, best_loss)
        self.writer.finish()
        self.writer.finish_uploads()


@pytest.fixture
def start(tmp_path: Path, runtime: Ranks) -> Callable[..., Run]:
    """Starts a run in tmp_path/run, or another directory, that saves to tmp_path/store."""

    def open_run(resumed_step: int = 0, keep_last: int = 2, directory: str = "run") -> Run:
        run = tmp_path / directory
        run.mkdir(exist_ok=True)
        (run / ".llama_ft-run").touch()
        lines = [f'{{"step": {step}}}\n' for step in range(1, 9)]
        (run / "metrics.jsonl").write_text("".join(lines))
        store = ObjectStore(f"file://{tmp_path}/store", "--save_to")
        uploads = Uploads(store, run, keep_last, resumed_step, runtime)
        settings = CheckpointConfig(keep_last=keep_last)
        writer = CheckpointWriter(run, settings, {}, runtime, uploads.hooks())
        uploads.add_missing()
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        return Run(writer, uploads, model, optimizer)

    return open_run


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_ft.extensions.store.object_store.RETRY_SECONDS", (0.01, 0.01))


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The messages of all warnings, from any thread."""
    found = list[str]()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                found.append(record.getMessage())

    from llama_ft.runtime import log

    monkeypatch.setattr(log, "handlers", [*log.handlers, Handler()])
    return found


def settings_of(tmp_path: Path, resume: str | None = "auto") -> CheckpointConfig:
    return CheckpointConfig(
        save_to=f"file://{tmp_path}/store", output_dir=str(tmp_path / "run"), resume=resume
    )


def resume(tmp_path: Path, ranks: Ranks, how: str | None = "auto") -> int | None:
    """The step from which a run would resume."""
    settings = settings_of(tmp_path, how)
    try:
        found = find_checkpoint(settings, ranks, open_remote(settings, ranks))
    finally:
        ranks.release_lock()
    return None if found is None else found.step


def stored(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "store" / "checkpoints").iterdir()}


def test_keep_last_and_the_best_hold_in_the_store_and_foreign_objects_stay(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    run = start(keep_last=1)
    foreign = tmp_path / "store" / "checkpoints" / "step-000002" / "notes.txt"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("mine")
    # of an upload that was killed
    (foreign.parent / "trainer.json").write_text("{}")
    (foreign.parent / "shard-00001-model-00001-of-00001.safetensors").write_text("half")
    for step, best_loss in ((1, 2.0), (2, None), (3, None)):
        run.save(step, best_loss)
    assert [*read_commits(run.uploads.store)] == [3, 1]
    assert [path.name for path in foreign.parent.iterdir()] == ["notes.txt"]
    local = {path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")}
    assert local == {"step-000001", "step-000003"}
    assert run.uploads.describe() == f"Uploaded: file://{tmp_path}/store"


def test_the_final_model_is_uploaded_without_its_probes(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    """They hold text of the validation set."""
    run = start()
    run.save(1)
    (tmp_path / "run" / "model").mkdir()
    for name in ("config.json", "probes.json"):
        (tmp_path / "run" / "model" / name).write_text("{}")
    run.uploads.put_model()
    run.uploads.put_outcome(1)
    assert [file.name for file in (tmp_path / "store" / "model").iterdir()] == ["config.json"]
    named = (tmp_path / "store" / "result.json").read_text()
    assert "model/config.json" in named and "probes" not in named


def test_a_checkpoint_is_fetched_with_its_log_on_an_empty_disk(
    start: Callable[..., Run], tmp_path: Path, runtime: Ranks
) -> None:
    start().save(3)
    shutil.rmtree(tmp_path / "run")
    assert resume(tmp_path, runtime) == 3
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert lines == ['{"step": 1}', '{"step": 2}', '{"step": 3}']
    assert (tmp_path / "run" / ".fetched").read_text() == "step-000003\n"
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000003"]


def test_answers_are_uploaded_once_and_fetched_with_a_checkpoint(
    start: Callable[..., Run], tmp_path: Path, runtime: Ranks
) -> None:
    """What the run has deleted meanwhile is deleted, if no checkpoint needs it any more."""
    local = tmp_path / "run" / "rollouts"
    held = tmp_path / "store" / "rollouts"
    files = {"000001/round.json": "{}", "policy-000002-ab/adapter.bin": "weights", ".lock": ""}
    run = start(keep_last=1)
    for name, text in files.items():
        (local / name).parent.mkdir(parents=True, exist_ok=True)
        (local / name).write_text(text)
    run.save(1)
    assert sorted(path.name for path in held.iterdir()) == ["000001", "policy-000002-ab"]
    uploaded = (held / "000001/round.json").stat().st_mtime_ns
    shutil.rmtree(local / "policy-000002-ab")
    (local / "000002").mkdir()
    (local / "000002/round.json").write_text("[]")
    run.save(2)
    assert sorted(path.name for path in held.iterdir()) == ["000001", "000002"]
    assert (held / "000001/round.json").stat().st_mtime_ns == uploaded
    shutil.rmtree(tmp_path / "run")
    assert resume(tmp_path, runtime) == 2
    found = {str(path.relative_to(local)): path.read_text() for path in local.glob("*/*")}
    assert found == {"000001/round.json": "{}", "000002/round.json": "[]"}


def test_a_checkpoint_whose_answers_are_corrupted_in_the_store_is_not_resumed(
    start: Callable[..., Run], tmp_path: Path, runtime: Ranks
) -> None:
    run = start(keep_last=2)
    folder = tmp_path / "run" / "rollouts"
    for step in (1, 2):
        (folder / f"{step:06}").mkdir(parents=True)
        (folder / f"{step:06}" / "round.json").write_text("{}")
        run.save(step)
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "store/rollouts/000002/round.json").write_text("[]")
    assert resume(tmp_path, runtime) == 1
    assert [path.name for path in folder.iterdir()] == ["000001"]


@pytest.mark.parametrize("damage", ["no commit", "commit", "file", "missing file"])
def test_of_a_damaged_checkpoint_the_one_before_is_taken(
    start: Callable[..., Run], tmp_path: Path, runtime: Ranks, damage: str
) -> None:
    run = start()
    run.save(3)
    run.save(5)
    shutil.rmtree(tmp_path / "run")
    folder = tmp_path / "store" / "checkpoints" / "step-000005"
    name = "commit.json" if "commit" in damage else "trainer.json"
    content = (folder / name).read_bytes()
    if damage in ("no commit", "missing file"):
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content[:20] + b"#" + content[21:])
    assert resume(tmp_path, runtime) == 3
    # nothing is deleted because of one reading; the run itself replaces it
    start(resumed_step=3).save(5)
    assert [*read_commits(run.uploads.store)] == [5, 3]
    shutil.rmtree(tmp_path / "run")
    assert resume(tmp_path, runtime) == 5


@pytest.mark.parametrize("before", [3, None])
def test_a_checkpoint_that_is_uploaded_while_the_next_run_starts_is_resumed(
    start: Callable[..., Run], tmp_path: Path, runtime: Ranks, before: int | None
) -> None:
    run = start()
    if before is not None:
        run.save(before)
    settings = dataclasses.replace(settings_of(tmp_path), output_dir=f"{tmp_path}/next")
    remote = open_remote(settings, runtime)
    found = find_checkpoint(settings, runtime, remote)
    assert (None if found is None else found.step) == before
    run.save(5)  # e.g. after SIGTERM, while the next run loads its model
    following = start(resumed_step=before or 0, directory="next")
    newer = following.uploads.take_newer(found, lambda: find_checkpoint(settings, runtime, remote))
    assert newer is not None and newer.step == 5
    following.save(7)
    assert [*read_commits(run.uploads.store)][:2] == [7, 5]
    with pytest.raises(RunFailure, match="another run has taken over"):
        run.save(6)
    runtime.release_lock()


def test_a_local_checkpoint_that_was_not_uploaded_is_newest_and_follows(
    start: Callable[..., Run], tmp_path: Path, runtime: Ranks
) -> None:
    run = start()
    run.save(3)
    run.save(5)
    (tmp_path / "store" / "checkpoints" / "step-000005" / "commit.json").unlink()
    assert resume(tmp_path, runtime) == 5
    start(resumed_step=5).uploads.finish()
    assert [*read_commits(run.uploads.store)] == [5, 3]


def test_a_corrupted_local_checkpoint_is_replaced_by_the_stored_one(
    start: Callable[..., Run], tmp_path: Path, runtime: Ranks
) -> None:
    start().save(3)
    file = tmp_path / "run" / "checkpoints" / "step-000003" / "trainer.json"
    file.write_text(file.read_text() + " ")
    assert resume(tmp_path, runtime) == 3
    assert (file.parent.parent / "set-aside-1-step-000003").is_dir()


def test_valid_local_files_stay_if_the_rest_of_a_checkpoint_is_corrupted_in_the_store(
    start: Callable[..., Run], tmp_path: Path, runtime: Ranks
) -> None:
    run = start()
    run.save(3)
    run.save(5)
    name = "checkpoints/step-000005"
    local = tmp_path / "run" / name
    shard = next(local.glob("shard-*"))
    content = shard.read_bytes()
    # as on a node's own disk, if rank 0 is on another one
    for file in (local / "trainer.json", local / "checksums.txt"):
        file.unlink(missing_ok=True)
    stored_trainer = tmp_path / "store" / name / "trainer.json"
    stored_trainer.write_text(stored_trainer.read_text() + " ")
    assert resume(tmp_path, runtime) == 3
    assert [file.name for file in local.iterdir()] == [shard.name]
    assert shard.read_bytes() == content


def test_a_checkpoint_that_does_not_fit_on_the_disk_is_an_error_that_names_the_disk(
    start: Callable[..., Run], tmp_path: Path, runtime: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    start().save(3)
    shutil.rmtree(tmp_path / "run")
    attempts = list[str]()

    def to_a_full_disk(store: ObjectStore, name: str, file: Path) -> None:
        attempts.append(name)
        with open("/dev/full", "wb", buffering=0) as full:
            full.write(b"content")

    monkeypatch.setattr(ObjectStore, "get_file", to_a_full_disk)
    with pytest.raises(RunFailure) as caught:
        resume(tmp_path, runtime)
    assert f"{tmp_path}/run: step-000003 of file://{tmp_path}/store has " in str(caught.value)
    assert "do not fit on this disk (No space left on device)" in str(caught.value)
    assert "Free some space" in str(caught.value)
    assert len(attempts) == len(set(attempts))  # it would be the same again
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_a_run_whose_prefix_was_taken_over_stops_before_it_commits(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    run = start()
    run.save(3)
    start(resumed_step=3, directory="other")
    with pytest.raises(RunFailure, match="another run has taken over"):
        run.save(5)
    assert run.writer.has_failed and [*read_commits(run.uploads.store)] == [3]


def test_an_old_answer_about_the_owner_is_no_take_over(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    owner = tmp_path / "store" / "owner.json"
    start().save(3)
    before = owner.read_text()
    run = start(resumed_step=3)
    now = owner.read_text()
    owner.write_text(before)
    run.save(5)
    assert run.uploads.error is None and [*read_commits(run.uploads.store)] == [3]
    owner.unlink()
    run.save(6)
    assert owner.read_text() == now and [*read_commits(run.uploads.store)] == [6, 3]


def test_a_run_that_wakes_up_later_does_not_touch_the_checkpoints_of_its_successor(
    start: Callable[..., Run], tmp_path: Path, runtime: Ranks
) -> None:
    run = start()
    run.save(3)
    start(resumed_step=3, directory="other").save(5)
    with torch.no_grad():
        run.model.weight.add_(1)  # as on another number of ranks, which round differently
    with pytest.raises(RunFailure, match="another run has taken over"):
        run.save(5)
    shutil.rmtree(tmp_path / "run")
    assert resume(tmp_path, runtime) == 5  # whose files still match its commit


def test_a_prefix_with_checkpoints_is_rejected_unless_the_run_continues_them(
    start: Callable[..., Run], tmp_path: Path, runtime: Ranks
) -> None:
    run = start()
    run.save(3)
    run.save(5)
    with pytest.raises(UserError, match="holds checkpoints up to step 5. Continue that run with"):
        resume(tmp_path, runtime, None)
    older = f"{tmp_path}/run/checkpoints/step-000003"
    with pytest.raises(UserError, match="newer than --resume"):
        resume(tmp_path, runtime, older)
    assert resume(tmp_path, runtime, f"{tmp_path}/run/checkpoints/step-000005") == 5
    assert resume(tmp_path, runtime, f"file://{tmp_path}/store") == 5


def test_an_upload_that_fails_for_good_is_one_warning_and_a_line_of_the_summary(
    start: Callable[..., Run], tmp_path: Path, warnings: list[str]
) -> None:
    run = start()
    folder = tmp_path / "store" / "checkpoints"
    folder.mkdir()
    (folder / "step-000003").write_text("a file where a directory has to go")
    run.save(3)
    run.save(5)
    assert [*read_commits(run.uploads.store)] == [5]
    told = [line for line in warnings if "step-000003" in line]
    assert len(told) == 1 and "The run continues" in told[0]
    assert run.uploads.describe().startswith("Not uploaded to file://")


def test_a_report_that_cannot_be_uploaded_does_not_delay_the_exit(
    start: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start()
    monkeypatch.setattr("llama_ft.extensions.store.object_store.RETRY_SECONDS", (300,))
    monkeypatch.setattr("llama_ft.extensions.store.uploads.SECONDS_FOR_SMALL_FILES", 0.2)
    (tmp_path / "store" / "metrics.jsonl").mkdir()  # where a file has to go
    before = set(threading.enumerate())
    run.uploads.put_outcome(8)
    deadline = time.monotonic() + 60
    while left := set(threading.enumerate()) - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[socket.socket]:
    """A server that accepts connections and never answers, as the S3 endpoint."""
    pytest.importorskip("s3fs")
    for name in CREDENTIALS:
        monkeypatch.setenv(name, "do-not-print-this")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    silent = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
    yield silent
    silent.close()


def test_an_upload_is_abandoned_when_the_time_is_over(
    start: Callable[..., Run], tmp_path: Path, aws: socket.socket, warnings: list[str]
) -> None:
    run = start()
    run.save(3)
    run.uploads.store = ObjectStore("s3://bucket/run", "--save_to")  # does not answer any more
    run.writer.save(5, run.model, run.optimizer, STATE)
    run.writer.finish()
    run.writer.finish_uploads(0.3)
    assert "The upload of step-000005 was abandoned after 0 s" in warnings[-1]
    assert "is step-000003" in warnings[-1]


def test_a_store_that_stops_answering_is_one_warning_and_the_run_ends(
    start: Callable[..., Run],
    aws: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
    warnings: list[str],
) -> None:
    monkeypatch.setattr("llama_ft.extensions.store.object_store.SECONDS_WITHOUT_PROGRESS", 0.2)
    run = start()
    run.uploads.store = ObjectStore("s3://bucket/run", "--save_to")
    run.save(3)
    [warning] = warnings
    assert "step-000003 was not uploaded" in warning and "no progress for" in warning
    assert run.uploads.describe().startswith("Not uploaded to s3://bucket/run: step-000003")


class SlowStore(AsyncFileSystem):
    """A store that takes several parts of a file, or hangs after the first."""

    protocol = "slow"
    hangs = False
    cancelled = threading.Event()

    async def _put_file(self, lpath: str, rpath: str, callback: Callback, **more: object) -> None:
        try:
            for _ in range(6):
                await asyncio.sleep(3600 if self.hangs else 0.2)
                callback.relative_update(1)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


def test_only_a_request_without_progress_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.register_implementation("slow", SlowStore, clobber=True)
    store = ObjectStore("slow://run", "--save_to")
    file = tmp_path / "file"
    file.write_text("content")
    monkeypatch.setattr("llama_ft.extensions.store.object_store.SECONDS_WITHOUT_PROGRESS", 1.0)
    store.put_file(file, "name")  # takes longer in all
    monkeypatch.setattr(SlowStore, "hangs", True)
    with pytest.raises(NoAnswer, match="no progress for 1 s"):
        store.put_file(file, "name")
    assert SlowStore.cancelled.wait(60)


def test_uploads_end_with_a_warning_if_those_of_another_rank_have_ended(
    start: Callable[..., Run], tmp_path: Path, runtime: Ranks, warnings: list[str]
) -> None:
    start().save(3)
    meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    lost = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    both = list[Uploads]()
    for rank in (0, 1):
        ranks = dataclasses.replace(runtime, rank=rank, world_size=2, store=meeting)
        store = ObjectStore(f"file://{tmp_path}/two", "--save_to")
        both.append(Uploads(store, tmp_path / "run", 2, 0, ranks))
    both[1]._board = lost.clone()
    del lost
    for uploads in both:
        uploads.add(3)
    both[0].finish()
    [warning] = warnings
    assert "no more uploads (rank 1: " in warning and "The run continues" in warning
    assert "later checkpoints" in both[0].describe() and not read_commits(both[0].store)
    both[0].add(3)  # is not kept on the disk for an upload that never comes
    assert both[0].in_use() == set()


@pytest.mark.parametrize("text", ["5m", "nan", "1e999", "240.5", "9" * 400])
def test_a_time_that_torchrun_would_reject_is_not_used_without_it(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", text)
    assert upload_grace_seconds() in (20.0, threading.TIMEOUT_MAX)
    threading.Event().wait(0 * upload_grace_seconds())


@pytest.mark.parametrize("seconds", ["", "240"])
def test_after_a_signal_an_upload_leaves_10_seconds_of_those_that_torchrun_gives(
    monkeypatch: pytest.MonkeyPatch, seconds: str
) -> None:
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    if seconds:
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", seconds)
    launch = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1)
    given = getattr(launch, "shutdown_timeout", 30)  # which torch 2.11 lacks
    assert upload_grace_seconds() == given - 10


def test_a_run_to_resume_without_credentials_is_an_error_at_once(
    runtime: Ranks, aws: socket.socket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("llama_ft.extensions.store.object_store.RETRY_SECONDS", (300,))
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    settings = CheckpointConfig(output_dir=str(tmp_path / "run"), resume="s3://bucket/run")
    with pytest.raises(UserError, match="--resume s3://bucket/run: cannot be used"):
        find_checkpoint(settings, runtime, open_remote(settings, runtime))


@pytest.mark.parametrize("problem", ["credentials", "down", "package", "protocol"])
def test_a_store_that_cannot_be_used_is_an_error_at_the_start(
    runtime: Ranks, aws: socket.socket, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    expected = "cannot be used"
    url = "s3://bucket/run"
    if problem == "credentials":
        expected = "(?i)credentials"
        for name in CREDENTIALS:
            monkeypatch.delenv(name)
    elif problem == "down":
        aws.close()
    elif problem == "package":
        monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)
        url = "gs://bucket/run"
        expected = "needs the package gcsfs: pip install gcsfs"
    else:
        url = "nowhere://bucket/run"
    with pytest.raises(UserError, match=expected) as caught:
        open_store(CheckpointConfig(save_to=url, output_dir="x"), runtime)
    assert "do-not-print-this" not in str(caught.value)
    assert "do-not-print-this" not in os.environ.get(CREDENTIALS[0], "") or url in str(caught.value)
