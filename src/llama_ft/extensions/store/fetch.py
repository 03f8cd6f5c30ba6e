"""Fetch checkpoints from an object store into the directory of a run that resumes, perhaps on an
empty disk. One rank per disk fetches, and then the normal resume reads the files."""

import os
import re
import shutil
import socket
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from llama_ft.checkpoint.reader import complete_checkpoints, step_folder
from llama_ft.checkpoint.run_directory import lock_directory, planned_directory, set_aside
from llama_ft.config import CheckpointConfig
from llama_ft.config.data_names import is_url
from llama_ft.config.home import expanded
from llama_ft.config.objectives import FOLDERS
from llama_ft.config.paths import FETCHED_FILE
from llama_ft.config.wording.messages import size_text
from llama_ft.errors import RunFailure, UserError, is_disk_full, reason
from llama_ft.extensions.store.object_store import (
    COMMIT_FILE,
    OWNER_FILE,
    RUN_FILES,
    Commit,
    FoundCommits,
    ObjectStore,
    StoredFile,
    check_access,
    commit_name,
    find_commits,
    store_reason,
    stored_file,
    with_retries,
)
from llama_ft.extensions.store.shared_files import find_missing, put_in_place
from llama_ft.runtime import Ranks, log

PARALLEL_FILES = 8
DOWNLOADS = 2  # of a file whose content is not the expected one: the answer may have been wrong
# texts of S3, Google and Azure, and of their packages
WRONG_CREDENTIALS = re.compile(r"credentials|access key|signature", re.IGNORECASE)
# s3://bucket/run/checkpoints/step-000100 names one checkpoint
OF_A_CHECKPOINT = re.compile(r"(?P<run>.+)/checkpoints/step-(?P<step>\d{6,})")


class StoredRun:
    """The checkpoints of a run in a store, and the local directory into which they are fetched.

    Attributes:
        store: where they are.
        directory: of the run that resumes.
        commits: the checkpoints, by step.
        unusable: step -> why a checkpoint's commit object cannot be used.
        with_local: whether local checkpoints of the directory belong to the same run, and are
            whole.
    """

    def __init__(
        self,
        store: ObjectStore,
        directory: Path,
        commits: FoundCommits,
        with_local: bool,
    ) -> None:
        self.store = store
        self.directory = directory
        self.commits = commits.valid
        self.unusable = commits.unusable
        self.with_local = with_local

    @property
    def steps(self) -> Collection[int]:
        """The steps of the checkpoints."""
        return self.commits.keys()

    def report_without_checkpoint(self) -> None:
        """Log that an earlier run has written into a store without checkpoints, on rank 0.

        Raises:
            RunFailure: it holds commit objects, but none can be used.
        """
        url = self.store.url
        if self.unusable:
            raise RunFailure(
                f"{url}: holds checkpoints, but none of their commit objects can be used:\n"
                + "\n".join(self.unusable.values())
                + "\nNothing was changed. Try again later, or start a new run with another prefix."
            )
        with suppress(Exception):  # there is none, or it cannot be read
            self.store.get_text(OWNER_FILE)
            log.warning(
                f"{url}: an earlier run has written {OWNER_FILE}, but no checkpoint. "
                "This run starts from scratch."
            )

    def fetch(self, step: int, ranks: Ranks, is_resumed: bool = True) -> list[str]:
        """Fetch a checkpoint, and with `is_resumed` also the log of the run. All ranks call it.

        Returns:
            What is wrong with it, one line per file; empty if the checkpoint is there now.

        Raises:
            RunFailure: the disk is full.
        """
        errors = list[str]()
        with ranks.local_main_process_first():
            if ranks.leads_disk:
                errors = self._fetch(step, is_resumed)
        return sorted({error for lines in ranks.gather(errors) for error in lines})

    def _fetch(self, step: int, is_resumed: bool) -> list[str]:
        commit = self.commits[step]
        final = step_folder(self.directory, step)
        log.info(f"Fetching {final.name} from {self.store.url}")
        aside = final.with_name(f".writing-{final.name}-{socket.gethostname()}-{os.getpid()}")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        try:
            names = [name for name in commit.files if is_resumed or name not in RUN_FILES]
            held = self._link_valid_files(commit, final, aside)
            names = [name for name in names if name not in held]
            prefix = commit_name(step).removesuffix(COMMIT_FILE)
            expected = {prefix + name: commit.files[name] for name in names}
            shared = find_missing(self.directory, commit.shared) if is_resumed else []
            expected |= {name: commit.shared[name] for name in shared}
            targets = [aside / name.removeprefix(prefix) for name in expected]
            with ThreadPoolExecutor(PARALLEL_FILES) as pool:
                fetched = pool.map(self._fetch_file, expected, targets, expected.values())
                errors = [error for error in fetched if error]
            if not errors:
                put_in_place(aside, shared, self.directory)
                for name in FOLDERS:
                    shutil.rmtree(aside / name, ignore_errors=True)
                if is_resumed and not final.exists():
                    (self.directory / FETCHED_FILE).write_text(f"{final.name}\n")
                self._put_in_place(aside, final)
            return errors
        except OSError as error:
            if not is_disk_full(error):
                raise
            size = size_text(sum(file.bytes for file in commit.files.values()))
            raise RunFailure(
                f"{self.directory}: {final.name} of {self.store.url} has {size}, which do not fit "
                f"on this disk ({reason(error)}).\nFree some space, or choose another --output_dir."
            ) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _link_valid_files(self, commit: Commit, final: Path, aside: Path) -> set[str]:
        """Link the files of a local checkpoint into `aside`, if all that it has are valid: a disk of
        one node holds only the shards of its ranks. Return their names. Another checkpoint is set
        aside."""
        if not final.exists():
            return set()
        names = {file.name for file in final.iterdir()}
        if not names <= commit.files.keys() or any(
            stored_file(final / name) != commit.files[name] for name in names
        ):
            set_aside(final, f"differs from the one in {self.store.url}")
            return set()
        for name in names:
            try:
                os.link(final / name, aside / name)
            except OSError:  # the file system has no links
                shutil.copyfile(final / name, aside / name)
        return names

    def _fetch_file(self, name: str, file: Path, expected: StoredFile) -> str:
        """Download an object. Return what is wrong with it, or an empty text: one that cannot be read
        is an error of its checkpoint, and an older one may be valid."""
        source = f"{self.store.url}/{name}"
        file.parent.mkdir(parents=True, exist_ok=True)
        get = partial(self.store.get_file, name, file)
        for _ in range(DOWNLOADS):
            try:
                with_retries(get, must_exist=True)
            except FileNotFoundError:
                return f"{source} is missing"
            except Exception as error:  # each package has its own errors
                if is_disk_full(error):
                    raise
                return f"{source} cannot be read ({store_reason(error)})"
            if stored_file(file) == expected:
                return ""
        return f"{source} is corrupted: it differs from its checksum"

    def _put_in_place(self, aside: Path, final: Path) -> None:
        """Move the files of a fetched checkpoint to where a local save would have written them."""
        for name in RUN_FILES:
            if (aside / name).exists():
                os.replace(aside / name, self.directory / name)
        old = final.with_name(f".removing-{final.name}")
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():  # its files are also in `aside`
            os.replace(final, old)
        os.replace(aside, final)
        shutil.rmtree(old, ignore_errors=True)


def fetch_to_each_disk(store: ObjectStore, directory: Path, step: int, ranks: Ranks) -> None:
    """Fetch a checkpoint of this run, of which each disk has only a part. All ranks call it.

    Raises:
        RunFailure: it is not in the store, or corrupted there.
    """
    commits = ranks.broadcast_from_rank0(lambda: _find_commits(store, is_own=True))
    errors = [f"{store.url}: it was not uploaded."]
    if step in commits.valid:
        stored = StoredRun(store, directory, commits, with_local=False)
        errors = stored.fetch(step, ranks, is_resumed=False)
    if errors:
        raise RunFailure("\n".join([f"step-{step:06d} is incomplete on the disks:", *errors]))


def open_store(settings: CheckpointConfig, ranks: Ranks) -> ObjectStore | None:
    """Return the store of --save_to, None without. Rank 0 checks that it can be written. All ranks
    call it, before anything slow starts.

    Raises:
        UserError: it cannot be used.
    """
    if settings.save_to is None:
        return None
    store = ObjectStore(settings.save_to, "--save_to")
    ranks.broadcast_from_rank0(lambda: check_access(store))
    return store


def find_stored(
    settings: CheckpointConfig, store: ObjectStore | None, ranks: Ranks
) -> StoredRun | None:
    """Return the checkpoints in a store from which a run can resume; None if it resumes from none
    of a store. All ranks call it.

    Args:
        settings: resume, save_to and output_dir.
        store: the result of `open_store`.
        ranks: the ranks. After a restart by torchrun they continue the earlier attempt.

    Raises:
        UserError: --resume names no checkpoint, or --save_to holds those of another run.
    """
    resume = settings.resume or ""
    is_restarted = ranks.earlier is not None
    source = store if resume == "auto" or is_restarted else None
    only = None  # the step that --resume names
    if is_url(resume):
        named = OF_A_CHECKPOINT.fullmatch(resume.rstrip("/"))
        url = named["run"] if named else resume.rstrip("/")
        only = int(named["step"]) if named else None
        is_same = store is not None and store.url == url
        source = store if is_same else ObjectStore(url, "--resume")
    elif resume not in ("", "auto"):
        only = _local_step(expanded(resume))
    continues = source is store and only is None
    own = None
    if store is not None and (not is_restarted or source is store):
        own = ranks.broadcast_from_rank0(lambda: _find_commits(store, is_own=True))
    if store is not None and own is not None and not is_restarted and not continues:
        _check_owned(store, own, settings.resume, only)
    if source is None:
        return None
    commits = own
    if commits is None or source is not store:
        commits = ranks.broadcast_from_rank0(lambda: _find_commits(source, is_own=False))
    if is_url(resume):
        commits = _only_named(commits, resume, only)
    directory = planned_directory(settings, ranks)
    assert directory is not None  # the settings are rejected without output_dir
    if commits.valid:
        lock_directory(directory, ranks)
    with_local = (continues or is_restarted) and ranks.shares_disk
    return StoredRun(source, directory, commits, with_local)


def _only_named(commits: FoundCommits, resume: str, step: int | None) -> FoundCommits:
    """Return the checkpoints that the URL of --resume names: of `step`, or all."""
    valid = {key: commit for key, commit in commits.valid.items() if step in (None, key)}
    if not valid:
        why = "holds no checkpoint; expected s3://bucket/run"
        problems = [text for key, text in commits.unusable.items() if step in (None, key)]
        raise UserError(f"--resume {resume}: {'; '.join(problems) or why}.")
    return FoundCommits(valid, commits.unusable)


def _check_owned(
    store: ObjectStore, own: FoundCommits, resume: str | None, named_step: int | None
) -> None:
    """Raise a UserError if --save_to holds checkpoints that this run must not replace."""
    steps = own.valid if resume is not None else {**own.valid, **own.unusable}
    newest = max(steps, default=None)
    if newest is None:
        return
    holds = f"--save_to {store.url}: holds checkpoints up to step {newest}"
    if resume is None:
        raise UserError(f"{holds}. Continue that run with --resume auto, or choose another prefix.")
    if named_step is None or named_step < newest:
        raise UserError(
            f"{holds}, which are newer than --resume {resume}. "
            "Continue with --resume auto, or choose another prefix."
        )


def _local_step(folder: Path) -> int | None:
    """Return the step of the checkpoint that --resume names by its directory, or its run's; None if
    the directory has another name."""
    newest = next(iter(complete_checkpoints(folder)), folder)
    match = re.fullmatch(r"step-(\d{6,})", newest.resolve().name)
    return int(match[1]) if match else None


def _find_commits(store: ObjectStore, is_own: bool) -> FoundCommits:
    try:
        if not is_own:
            _check_credentials(store)
        return find_commits(store, is_own)
    except Exception as error:  # each package has its own errors
        raise store.failure(error) from error


def _check_credentials(store: ObjectStore) -> None:
    """Raise an error if there are no credentials, or wrong ones: more attempts would not help."""
    try:
        store.get_text(OWNER_FILE)
    except Exception as error:  # each package has its own errors
        if WRONG_CREDENTIALS.search(store_reason(error)):
            raise
