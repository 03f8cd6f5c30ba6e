"""Upload the checkpoints and the results of a run to an object store while training continues.

Each rank uploads its own file of a checkpoint that is complete on disk. When all ranks have, rank 0
writes the commit object, which makes the checkpoint exist in the store. Rank 0 decides which
checkpoint comes next: if checkpoints are written faster than they are uploaded, older ones are left
out, except the best.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from llama_ft.checkpoint import reader
from llama_ft.checkpoint.reader import Checkpoint, complete_checkpoints, step_folder
from llama_ft.checkpoint.retention import SavedCheckpoint, surplus
from llama_ft.checkpoint.writer import SaveHooks
from llama_ft.config.paths import BAD_SAMPLES_FILE, PROBES_FILE
from llama_ft.config.wording.messages import size_text
from llama_ft.errors import RunFailure, reason
from llama_ft.extensions.store.object_store import (
    CHECKPOINT_OBJECT,
    COMMIT_FILE,
    RESULT_FILE,
    RUN_FILES,
    Commit,
    ObjectStore,
    StoredFile,
    commit_name,
    find_commits,
    store_reason,
    stored_file,
    unreachable,
    with_retries,
)
from llama_ft.extensions.store.owner import Takeover, check_owner, take_over
from llama_ft.extensions.store.shared_files import SharedFiles, check_sizes
from llama_ft.models.base.torch_2_11 import IS_TORCH_2_11
from llama_ft.runtime import Ranks, log

POLL_SECONDS = 0.2
ENDED = "uploads/ended"  # set to the reason if the uploads of any rank have ended before the run
PARALLEL_FILES = 8
# After a signal torchrun kills the ranks when so many seconds are over, unless this variable has another number. torch
# 2.11 does not read it. An upload leaves the last ones to what follows.
KILL_SECONDS = 30.0
KILL_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
SECONDS_AFTER_UPLOAD = 10.0
# for status.json and report.html of a run that fails or is stopped
SECONDS_FOR_SMALL_FILES = 4.0
OUTCOME_FILES = (
    "config.yaml", "metrics.jsonl", "facts.json", "plan.json", "report.html", "status.json", "checkpoints/best.json",
    BAD_SAMPLES_FILE,
)  # fmt: skip


class Uploads:
    """The uploads of a run on this rank. All ranks create it, which takes over the prefix: a run
    that still writes there stops before its next commit.

    Args:
        store: of --save_to.
        directory: of the run.
        keep_last: see CheckpointConfig.
        resumed_step: the step of the checkpoint that the run resumes from; 0 for a new run.
        ranks: the ranks.

    Attributes:
        error: set on rank 0 if another run has taken over the prefix. The run must stop.
        newer: the steps of checkpoints in the store that are newer than `resumed_step`. An earlier
            run has uploaded them while this one was starting, or this one could not use them.
            Nothing deletes them.
    """

    def __init__(
        self,
        store: ObjectStore,
        directory: Path,
        keep_last: int,
        resumed_step: int,
        ranks: Ranks,
    ) -> None:
        self.store = store
        self.error: RunFailure | None = None
        self._directory = directory
        self._keep_last = keep_last
        self._ranks = ranks
        self._listed = list[int]()  # on rank 0: the steps that were in the store at the start
        self._valid = dict[int, Commit]()  # those whose commit object is valid
        self._commits = dict[int, Commit]()  # on rank 0: what this run continues and has uploaded
        self._failed = list[str]()  # on rank 0: what is not in the store, with the reason
        self._result: dict[str, StoredFile] | None = None  # uploaded files of the final model
        self._changed = threading.Condition()
        self._waiting = list[SavedCheckpoint]()
        self._current: int | None = None  # the step that is being uploaded
        self._last = -1  # the newest step whose upload has begun
        self._rounds = 0
        self._finishes = 0
        self._given_up = threading.Event()
        self._shared = SharedFiles(store, directory, self._given_up)
        # a client serves one call at a time, and the main thread uses the other one
        self._board = self._connect() if ranks.world_size > 1 else None
        self._takeover = ranks.broadcast_from_rank0(self._take_over)
        newer = ranks.broadcast_from_rank0(
            lambda: [step for step in self._listed if step > resumed_step]
        )
        self.newer: list[int] = newer
        self.resume_at(resumed_step)
        threading.Thread(target=self._run_until_exit, name="uploads", daemon=True).start()

    # The owner of the prefix

    def _take_over(self) -> Takeover:
        """Take over the prefix, and then list it: nobody else writes any more."""
        try:
            takeover = take_over(self.store)
            self.store.abort_parts()
            commits = find_commits(self.store, is_own=True)
        except Exception as error:  # each package has its own errors
            raise unreachable(self.store, error) from error
        self._valid = commits.valid
        self._listed = sorted((*commits.valid, *commits.unusable))
        return takeover

    def resume_at(self, step: int) -> None:
        """Set the step of the checkpoint that the run resumes from, before the first upload. Newer
        ones are not of this run."""
        self._commits = {key: commit for key, commit in self._valid.items() if key <= step}
        for commit in self._commits.values():
            self._shared.add_stored(commit.shared)

    def take_newer(
        self, resumed: Checkpoint | None, find: Callable[[], Checkpoint | None]
    ) -> Checkpoint | None:
        """Return `resumed`, or a newer checkpoint of the store: an earlier run may have uploaded it
        while this one was starting, or a listing was wrong. No other run writes there any more. All
        ranks call it. `find` looks again for the newest valid checkpoint."""
        if not self.newer:
            return resumed
        newest = f"step-{max(self.newer):06d}"
        log.info(
            f"{self.store.url} now holds {newest}: looking again for the newest valid checkpoint."
        )
        newer = find()
        self.resume_at(0 if newer is None else newer.step)
        return newer

    def _check_owner(self, is_retried: bool = True) -> None:
        """Raise RunFailure if another run has taken over the prefix, and another error if that cannot
        be read."""
        try:
            check_owner(self.store, self._takeover, self._given_up if is_retried else None)
        except RunFailure as error:
            self.error = error
            raise

    def _is_taken_over(self) -> bool:
        """Return whether `error` is set, because another run has taken over the prefix. It may
        already have a checkpoint of the same step, whose files an upload would replace."""
        try:
            self._check_owner(is_retried=False)
        except RunFailure:
            return True
        except Exception:  # the upload itself reports it
            return False
        return False

    def _give_up(self) -> None:
        with self._changed:  # `finish` must not wait for ever
            self._given_up.set()
            self._waiting.clear()
            self._current = None
            self._changed.notify_all()

    # Checkpoints

    def add(self, step: int) -> None:
        """Upload a checkpoint that is complete on disk. All ranks call it, in any thread."""
        record = json.loads((step_folder(self._directory, step) / reader.TRAINER_FILE).read_text())
        saved = SavedCheckpoint(step, record["asked"], record["best_loss"])
        with self._changed:
            if step > self._last and not self._given_up.is_set():
                self._waiting.append(saved)
                self._changed.notify_all()

    def add_missing(self) -> None:
        """Upload the newest local checkpoint if the store lacks it. All ranks call it."""

        def missing() -> int | None:
            newest = next(iter(complete_checkpoints(self._directory)), None)
            step = None if newest is None else reader.step_of(newest)
            return None if step in self._commits else step

        step = self._ranks.broadcast_from_rank0(missing)
        if step is not None:
            self.add(step)

    def hooks(self) -> SaveHooks:
        """Return what a writer of checkpoints must call and ask."""
        return SaveHooks(self.add, self.in_use, lambda: self.error, self.finish)

    def in_use(self) -> set[int]:
        """Return the steps whose files are still needed on disk."""
        with self._changed:
            steps = {saved.step for saved in self._waiting}
            return steps if self._current is None else {*steps, self._current}

    def _run_until_exit(self) -> None:
        cause = ""
        try:
            self._run()
        except Exception as error:  # the ranks' store is gone, usually because the run ends
            cause = reason(error)
            if self._ranks.is_main and not self._given_up.is_set():
                self._failed.append(f"later checkpoints ({cause})")
                log.warning(f"{self.store.url}: no more uploads ({cause}). The run continues.")
        finally:
            self._give_up()
        with suppress(Exception):  # nor must the other ranks
            self._connect().set(ENDED, f"rank {self._ranks.rank}: {cause}")

    def _run(self) -> None:
        """Upload what is waiting, one checkpoint after the other, until the process ends."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                self._rounds += 1
                self._current = self._waiting[0].step
                chosen = self._choose()
            if self._ranks.is_main and self._is_taken_over():
                self._give_up()
                continue  # the other ranks upload nothing either
            step = int(self._told("step", str(chosen)))
            with self._changed:
                self._current = self._last = step
                self._waiting = [saved for saved in self._waiting if saved.step > step]
            try:
                self._upload(step)
            except RunFailure:  # `error` is set
                self._given_up.set()
            if not self._ranks.is_main:
                continue  # another rank of this disk may still read the files
            with self._changed:
                self._current = None
                self._changed.notify_all()

    def _choose(self) -> int:
        """Return the step of the checkpoint to upload next: the best, then the newest."""
        bests = [saved.step for saved in self._waiting if saved.best_value is not None]
        newest = self._waiting[-1].step
        return min(newest, max(bests, default=newest))

    def _upload(self, step: int) -> None:
        """Upload this rank's files of a checkpoint. Rank 0 waits for all ranks and commits."""
        started = time.monotonic()
        report: dict[str, Any] = {}
        shared = dict[str, StoredFile]()
        try:
            report["files"] = self._put_own_files(step)
            if self._ranks.is_main:
                shared = self._shared.put()
        except Exception as error:  # never stop training
            report["error"] = f"rank {self._ranks.rank}: {store_reason(error)}"
        reports = self._collected(report)
        if not self._ranks.is_main:
            return
        name = step_folder(self._directory, step).name
        try:
            files = dict[str, StoredFile]()
            for report in reports:
                if "error" in report:
                    raise RuntimeError(report["error"])
                files |= {file: StoredFile(*stored) for file, stored in report["files"].items()}
            self._commit(step, files, shared)
        except RunFailure:
            raise
        except Exception as error:
            if not self._given_up.is_set():
                self._fail(name, error)
            return
        size = size_text(sum(file.bytes for file in files.values()))
        seconds = time.monotonic() - started
        log.info(f"Uploaded {name} to {self.store.url}: {size} in {seconds:.1f} s")
        self._prune(step)

    def _fail(self, what: str, error: BaseException) -> None:
        cause = store_reason(error)
        self._failed.append(f"{what} ({cause})")
        log.warning(f"{what} was not uploaded to {self.store.url}: {cause}. The run continues.")

    def _put_own_files(self, step: int) -> dict[str, StoredFile]:
        """Upload this rank's shards; on rank 0 also the small files. Return their descriptions."""
        folder = step_folder(self._directory, step)
        digests = {}
        for line in (folder / reader.CHECKSUMS_FILE).read_text().splitlines():
            digest, name = line.split("  ")
            digests[name] = digest
        shards = sorted(name for name in digests if name.startswith("shard-"))
        # its own one, unless the checkpoint is from another number of ranks
        names = shards[self._ranks.rank :: self._ranks.world_size]
        prefix = commit_name(step).removesuffix(COMMIT_FILE)
        uploaded = {}
        if self._ranks.is_main:
            names += [name for name in digests if name not in shards]
            names.append(reader.CHECKSUMS_FILE)
            for name, text in self._run_files(step).items():
                self._retried(partial(self.store.put_text, text, prefix + name))
                uploaded[name] = described(text)
        for name in names:
            file = folder / name
            stored = stored_file(file, digests.get(name))
            self._retried(partial(self.store.put_file, file, prefix + name))
            uploaded[name] = stored
        return uploaded

    def _run_files(self, step: int) -> dict[str, str]:
        """Return what a resume on an empty disk needs in addition to the local checkpoint: the log
        up to its step, and the facts for the report."""
        contents = {}
        for name in RUN_FILES:
            file = self._directory / name
            if file.exists():
                contents[name] = file.read_text()
        lines = contents.get("metrics.jsonl", "").splitlines(keepends=True)
        log_lines = [
            line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step
        ]
        return contents | {"metrics.jsonl": "".join(log_lines)}

    def _retried(self, put: Callable[[], None]) -> None:
        with_retries(put, self._given_up)

    def _commit(
        self, step: int, files: dict[str, StoredFile], shared: dict[str, StoredFile]
    ) -> None:
        """Write the commit object, if all files are in the store and this run is the owner."""
        self._check_owner()
        folder = commit_name(step).removesuffix(COMMIT_FILE)

        def check() -> None:
            own = {folder + name: file for name, file in files.items()}
            check_sizes(own, self.store.sizes(folder))
            self._shared.check_sizes(shared)

        with_retries(check, self._given_up)
        trainer = step_folder(self._directory, step) / reader.TRAINER_FILE
        record = json.loads(trainer.read_text())
        commit = Commit(step, record["asked"], record["best_loss"], files, shared)
        if self._given_up.is_set():
            raise RuntimeError("abandoned")
        name = commit_name(step)
        text = commit.text()

        def put() -> None:
            self.store.put_text(text, name)
            if self.store.get_text(name) != text:  # older ones are deleted next
                raise RuntimeError(f"{name} is not what was written")

        with_retries(put, self._given_up, must_exist=True)
        self._commits[step] = commit

    def _prune(self, newest: int) -> None:
        """Delete what keep_last does not keep: first the commit objects, then the files of older
        checkpoints without one, also those that an earlier run has uploaded in part."""
        checkpoints = [
            SavedCheckpoint(step, commit.is_requested, commit.best_value)
            for step, commit in sorted(self._commits.items(), reverse=True)
        ]
        try:
            for step in surplus(checkpoints, newest, self._keep_last)[1]:
                self._retried(partial(self.store.delete, commit_name(step)))
                del self._commits[step]
            names = self.store.sizes("checkpoints")
            for step in self._steps_without_commit(names, newest):
                for name in names:
                    match = CHECKPOINT_OBJECT.fullmatch(name)
                    if match is not None and int(match["step"]) == step:
                        self.store.delete(name)
            self._shared.prune(commit.shared for commit in self._commits.values())
        except Exception as error:  # the new checkpoint itself is complete
            log.warning(
                f"{self.store.url}: could not delete older checkpoints: {store_reason(error)}"
            )

    def _steps_without_commit(self, names: Iterable[str], newest: int) -> list[int]:
        """Return the steps before `newest` that have files but no commit object. The listing alone
        does not show that: it may be old or truncated."""
        matches = filter(None, map(CHECKPOINT_OBJECT.fullmatch, names))
        steps = []
        for step in sorted({int(match["step"]) for match in matches}):
            if step < newest and step not in self._commits and commit_name(step) not in names:
                try:
                    self.store.get_text(commit_name(step))
                except FileNotFoundError:
                    steps.append(step)
        return steps

    # The end of a run

    def finish(self, seconds: float | None = None) -> None:
        """Wait until all checkpoints are uploaded, at most `seconds`; then abandon the rest. All
        ranks call it. Raises RunFailure if another run has taken over."""
        self._finishes += 1
        if self._ranks.is_main:
            self._wait(seconds)
        self._wait_for_rank0(f"finish {self._finishes}")
        if not self._ranks.is_main:
            with self._changed:
                self._current = None
        if self.error is not None:
            raise self.error

    def _wait(self, seconds: float | None) -> None:
        try:
            with self._changed:
                is_done = self._changed.wait_for(self._is_idle, seconds)
        except BaseException:  # a signal
            self._abandon("")
            raise
        if not is_done:
            self._abandon(f" after {seconds:.0f} s")

    def _is_idle(self) -> bool:
        return self._given_up.is_set() or (self._current is None and not self._waiting)

    def _abandon(self, when: str) -> None:
        self._given_up.set()
        steps = ", ".join(f"step-{step:06d}" for step in sorted(self.in_use()))
        newest = max(self._commits, default=None)
        held = "no checkpoint" if newest is None else f"step-{newest:06d}"
        self._failed.append(f"{steps} (abandoned)")
        on_disk = ""
        if self._ranks.shares_disk:
            on_disk = f" On this disk, {self._directory} is complete."
        log.warning(
            f"The upload of {steps} was abandoned{when}; the newest in {self.store.url} is {held}."
            f"{on_disk}"
        )

    def put_model(self) -> None:
        """Upload the final model or adapter, if there is one. All ranks call it after `finish`."""
        self._finishes += 1
        if self._ranks.is_main:
            self._put_model()
        self._wait_for_rank0(f"finish {self._finishes}")
        if self.error is not None:
            raise self.error

    def _put_model(self) -> None:
        # probes hold text of samples, and others may read the store
        paths = (self._directory / "model").rglob("*")
        files = sorted(path for path in paths if path.is_file() and path.name != PROBES_FILE)
        started = time.monotonic()
        try:
            self._check_owner()
            # what a kill has left between a commit and its pruning
            self._prune(max(self._commits, default=0))
            self.store.delete(RESULT_FILE)  # of an earlier end of the run
            uploaded = self._put_files(files)
        except RunFailure:
            return  # `error` is set
        except Exception as error:  # the model is on the disk
            self._fail("model/", error)
            return
        except BaseException:  # a signal
            self._given_up.set()
            log.warning(f"The upload of model/ to {self.store.url} was abandoned.")
            raise
        self._result = uploaded
        if files:
            size = size_text(sum(file.bytes for file in uploaded.values()))
            seconds = time.monotonic() - started
            log.info(f"Uploaded model/ to {self.store.url}: {size} in {seconds:.1f} s")

    def _put_files(self, files: list[Path]) -> dict[str, StoredFile]:
        """Upload files of the run's directory. Return their names and descriptions."""

        def put(file: Path) -> tuple[str, StoredFile]:
            name = str(file.relative_to(self._directory))
            stored = stored_file(file)
            self._retried(partial(self.store.put_file, file, name))
            return name, stored

        pool = ThreadPoolExecutor(PARALLEL_FILES)
        try:
            return dict(pool.map(put, files))
        finally:  # after a signal or an error, do not wait for the other files
            pool.shutdown(wait=False, cancel_futures=True)

    def put_outcome(self, step: int, has_log: bool = True) -> None:
        """Upload the log, the report and the status of a run that has ended in any way. If it has
        finished, `step` is its last one, and result.json, which is written last, says so. It does
        not raise, and waits for a short time only if the run has not finished. `has_log`: False if
        rank 0's disk has the log and the report."""
        is_finished = self._result is not None

        def put() -> None:
            try:
                self._check_owner()
                names = OUTCOME_FILES if has_log else ("status.json",)
                files = [self._directory / name for name in names]
                uploaded = self._put_files([file for file in files if file.exists()])
                if self._result is not None:
                    commit = Commit(step, True, None, self._result | uploaded)
                    self._retried(partial(self.store.put_text, commit.text(), RESULT_FILE))
            except Exception as error:  # the run has ended, and its files are on the disk
                text = store_reason(error)
                log.warning(f"The report was not uploaded to {self.store.url}: {text}")

        if self.error is not None:
            return
        thread = threading.Thread(target=put, daemon=True)
        thread.start()
        thread.join(None if is_finished else SECONDS_FOR_SMALL_FILES)
        self._given_up.set()  # Python waits for the threads of a pool before it exits

    def describe(self) -> str:
        """Return a line for the summary, on rank 0."""
        if self._failed:
            return f"Not uploaded to {self.store.url}: {'; '.join(self._failed)}"
        return f"Uploaded: {self.store.url}"

    # Messages between the ranks, through the store of the process group

    def _connect(self) -> dist.Store:
        assert self._ranks.store is not None
        return cast(dist.Store, self._ranks.store.clone())  # type: ignore[attr-defined]

    def _told(self, what: str, value: str) -> str:
        """Return rank 0's value of this round on all ranks."""
        if self._board is None:
            return value
        key = f"uploads/{self._rounds}/{what}"
        if self._ranks.is_main:
            self._board.set(key, value)
            return value
        return self._get(key, ENDED)

    def _collected(self, report: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the reports of all ranks on rank 0."""
        if self._board is None:
            return [report]
        key = f"uploads/{self._rounds}/rank"
        if not self._ranks.is_main:
            self._board.set(f"{key} {self._ranks.rank}", json.dumps(report))
            return []
        others = range(1, self._ranks.world_size)
        return [report, *(json.loads(self._get(f"{key} {rank}", ENDED)) for rank in others)]

    def _wait_for_rank0(self, what: str) -> None:
        """Wait on the other ranks until rank 0 has called it, too."""
        if self._board is None:
            return
        if self._ranks.is_main:
            self._board.set(f"uploads/{what}", "1")
        else:
            self._get(f"uploads/{what}")

    def _get(self, key: str, end: str | None = None) -> str:
        """Wait for a value. Raises RuntimeError if the key `end` is set."""
        assert self._board is not None
        # a collective would time out, and `get` would block the other thread of this rank
        while not self._board.check([key]):
            if end is not None and self._board.check([end]):
                raise RuntimeError(self._board.get(end).decode())
            threading.Event().wait(POLL_SECONDS)
        return str(self._board.get(key).decode())


def upload_grace_seconds() -> float:
    """Return how long an upload may take after a signal. As torch reads it, the variable is an
    integer. Without torchrun nothing has checked that."""
    seconds = KILL_SECONDS
    with suppress(ValueError, OverflowError):
        seconds = float(int(os.environ.get(KILL_VARIABLE) or KILL_SECONDS))
    if IS_TORCH_2_11:
        seconds = KILL_SECONDS
    return min(max(0.0, seconds - SECONDS_AFTER_UPLOAD), threading.TIMEOUT_MAX)


def described(text: str) -> StoredFile:
    """Describe a text that is written as a file."""
    content = text.encode()
    return StoredFile(len(content), reader.content_digest(content))
