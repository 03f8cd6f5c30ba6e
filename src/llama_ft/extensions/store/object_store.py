"""Objects of a run in a store, such as s3://bucket/run, opened through fsspec.

A checkpoint exists in the store exactly if its commit object exists and names files that verify.
docs/guides/object-storage.md describes the objects.
"""

import asyncio
import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Self, TypeVar

import fsspec
from fsspec.callbacks import Callback

from llama_ft.checkpoint.reader import content_digest, file_digest
from llama_ft.config.objectives import FILES_OF_CHECKPOINTS, FOLDERS
from llama_ft.config.paths import STORE_PACKAGES
from llama_ft.errors import RunFailure, UserError, is_disk_full, reason
from llama_ft.masking import mask_secrets
from llama_ft.runtime import log

T = TypeVar("T")
# between the attempts of one request; the packages retry some errors by themselves before that
RETRY_SECONDS: tuple[float, ...] = (1, 2, 4, 8, 16, 32)
# the same at the start, where the user waits
ACCESS_RETRY_SECONDS: tuple[float, ...] = (0.5, 1, 2, 4)
# Requests that make no progress for so long are cancelled. The packages do not: aiohttp waits for the answer to
# `Expect: 100-continue`, which S3 clients send with every upload, and for a peer that reads nothing, without a limit.
SECONDS_WITHOUT_PROGRESS = 60.0
# In addition, for a file: packages report progress only after each part, and send several parts at the same time.
SECONDS_PER_BYTE = 1 / 2**20
LARGEST_PART_BYTES = 2**29
# Requests that take longer, and further failures, are logged: a run is not silent for a minute.
SECONDS_BEFORE_REPORT = 30.0
FAILURES_BEFORE_REPORT = 3
COMMIT_FILE = "commit.json"
OWNER_FILE = "owner.json"
RESULT_FILE = "result.json"
# In a listing it comes after all checkpoints, also if the listing has several pages.
PROBE = "checkpoints/zz-llama_ft-probe-"
COMMIT_NAME = re.compile(rf"checkpoints/step-(\d{{6,}})/{re.escape(COMMIT_FILE)}")
# The names that a run deletes. Others in the same folder belong to somebody else.
CHECKPOINT_OBJECT = re.compile(
    r"checkpoints/step-(?P<step>\d{6,})/(shard-\d{5}-model-00001-of-00001\.safetensors|trainer\.json"
    rf"|checksums\.txt|metrics\.jsonl|facts\.json|{'|'.join(map(re.escape, FILES_OF_CHECKPOINTS))})"
)
MODEL_OBJECT = re.compile(r"model/[\w.-]+\.safetensors")
# Of files that are not in the local checkpoint, but in the directory of its run.
RUN_FILES = ("metrics.jsonl", "facts.json")
CREDENTIALS = (
    "Credentials come from the environment of every rank, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
    "or from the machine's role."
)


class NoAnswer(OSError):
    """A store made no progress with a request."""


class ObjectStore:
    """A prefix in an object store, or a directory for file://. Names are relative to it.

    Args:
        url: of the prefix.
        setting: the flag that set it, for messages.

    Raises:
        UserError: fsspec does not know the protocol, or its package is missing.
    """

    def __init__(self, url: str, setting: str) -> None:
        self.url = url.rstrip("/")
        self.setting = setting
        protocol = url.partition("://")[0]
        try:
            # an instance of its own: a cached one would keep listings and the credentials
            self._system, root = fsspec.core.url_to_fs(self.url, skip_instance_cache=True)
        except ImportError as error:
            needed = "a package for this protocol"
            if protocol in STORE_PACKAGES:
                needed = f"the package {STORE_PACKAGES[protocol]}: pip install {STORE_PACKAGES[protocol]}"
            raise UserError(f"{setting} {url}: needs {needed}") from error
        except Exception as error:  # each package has its own errors
            raise self.failure(error) from error
        self._root = str(root).rstrip("/")
        self._is_local = protocol in ("file", "local")
        self._progress = _Progress()

    def _path(self, name: str) -> str:
        path = f"{self._root}/{name}"
        if self._is_local:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        return path

    def _request(self, method: str, *words: str | bytes, most_bytes: int = 0, **more: Any) -> Any:
        """Call a method of the file system.

        Args:
            method: its name.
            words: its arguments.
            most_bytes: that may pass before it reports progress.
            more: its keyword arguments.

        Raises:
            NoAnswer: there was no progress for too long, in any request of this rank.
        """
        if not self._system.async_impl:
            return getattr(self._system, method)(*words, **more)
        limit = SECONDS_WITHOUT_PROGRESS + SECONDS_PER_BYTE * min(most_bytes, LARGEST_PART_BYTES)
        started = time.monotonic()
        is_reported = False
        # as the method itself does, but this one can be cancelled
        coroutine = getattr(self._system, f"_{method}")(*words, **more)
        future = asyncio.run_coroutine_threadsafe(coroutine, self._system.loop)
        while not future.done():
            idle = time.monotonic() - max(started, self._progress.last)
            if idle >= limit:
                future.cancel()
                raise NoAnswer(f"no progress for {limit:.0f} s")
            if idle >= SECONDS_BEFORE_REPORT and not is_reported:
                log.info(f"{self.url}: no progress for {idle:.0f} s, waiting up to {limit:.0f} s")
                is_reported = True
            until = limit if is_reported else min(limit, SECONDS_BEFORE_REPORT)
            wait([future], timeout=max(until - idle, 0.01))
        result = future.result()
        self._progress.happened()
        return result

    def put_file(self, file: Path, name: str) -> None:
        """Upload a file, in parts if it is large."""
        path = self._path(name)
        size = file.stat().st_size
        self._request("put_file", str(file), path, most_bytes=size, callback=self._progress)

    def put_text(self, text: str, name: str) -> None:
        """Write a small object."""
        self._request("pipe_file", self._path(name), text.encode())

    def get_file(self, name: str, file: Path) -> None:
        """Download an object. Raises FileNotFoundError if there is none."""
        path = f"{self._root}/{name}"
        most_bytes = LARGEST_PART_BYTES
        self._request("get_file", path, str(file), most_bytes=most_bytes, callback=self._progress)

    def get_text(self, name: str) -> str:
        """Return the content of a small object. Raises FileNotFoundError if there is none."""
        content = self._request("cat_file", f"{self._root}/{name}")
        return bytes(content).decode()

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the names of all objects below a folder, and their sizes in bytes."""
        self._system.invalidate_cache()
        objects = self._request("find", f"{self._root}/{folder}", detail=True)
        start = len(self._root) + 1
        return {path[start:]: int(info["size"]) for path, info in objects.items()}

    def delete(self, name: str) -> None:
        """Delete an object if it exists. In a directory, an empty folder goes with it: it would look
        like a checkpoint."""
        path = f"{self._root}/{name}"
        with suppress(FileNotFoundError):
            self._request("rm_file", path)
        if self._is_local and "/" in name:
            with suppress(OSError):
                Path(path).parent.rmdir()

    def abort_parts(self) -> None:
        """Abort multipart uploads of checkpoints and models that a kill has left in S3, which bills
        them. Other protocols have none, and a server that cannot list them is ignored."""
        if not hasattr(self._system, "call_s3"):
            return
        bucket, _, prefix = self._root.partition("/")
        with suppress(Exception):
            listing = self._request(
                "call_s3", "list_multipart_uploads", Bucket=bucket, Prefix=prefix
            )
            for upload in listing.get("Uploads", []):
                key = upload["Key"]
                name = key.removeprefix(f"{prefix}/") if prefix else key
                if CHECKPOINT_OBJECT.fullmatch(name) or MODEL_OBJECT.fullmatch(name):
                    self._request(
                        "call_s3",
                        "abort_multipart_upload",
                        Bucket=bucket,
                        Key=key,
                        UploadId=upload["UploadId"],
                    )

    def failure(self, error: Exception) -> UserError:
        """Return the message about a store that cannot be used at the start."""
        text = store_reason(error)
        if isinstance(error, FileNotFoundError):
            text = "there is no such bucket"
        return UserError(f"{self.setting} {self.url}: cannot be used ({text}).\n{CREDENTIALS}")


class _Progress(Callback):
    """When there was progress in any request of a store.

    Attributes:
        last: of time.monotonic().
    """

    def __init__(self) -> None:
        super().__init__()
        self.last = time.monotonic()

    def happened(self) -> None:
        self.last = time.monotonic()

    def absolute_update(self, value: int) -> None:
        """Called by fsspec after each part of a file."""
        self.happened()

    def relative_update(self, inc: int = 1) -> None:
        """Called by fsspec after each part of a file."""
        self.happened()


def store_reason(error: BaseException) -> str:
    """Return the message of an error on one line, without secrets."""
    return mask_secrets(reason(error))


def with_retries(
    attempt: Callable[[], T],
    given_up: threading.Event | None = None,
    must_exist: bool = False,
) -> T:
    """Return the result of `attempt`, which is repeated after errors of the store, later and later.

    Args:
        attempt: sends requests.
        given_up: ends the attempts as soon as it is set.
        must_exist: repeat also if an object is missing, because something else says that it exists.

    Raises:
        Exception: the last error. It is not repeated if a disk is full, and only once if there was
            no answer.
    """
    waiting = given_up or threading.Event()
    is_unanswered = False
    for failures, seconds in enumerate(RETRY_SECONDS, start=1):
        try:
            return attempt()
        except Exception as error:  # each package has its own errors
            is_final = is_disk_full(error)
            if isinstance(error, FileNotFoundError):
                is_final = not must_exist
            elif isinstance(error, NoAnswer):  # a new connection may be better
                is_final = is_unanswered
                is_unanswered = True
            if is_final:
                raise
            if failures == FAILURES_BEFORE_REPORT:
                left = sum(RETRY_SECONDS[failures - 1 :])
                log.info(
                    f"The object store fails ({store_reason(error)}). Retrying for {left:.0f} s."
                )
            if waiting.wait(seconds):
                raise
    return attempt()


class StoredFile(NamedTuple):
    """What a commit object says about a file."""

    bytes: int
    xxh3_128: str


def stored_file(file: Path, digest: str | None = None) -> StoredFile:
    """Describe a local file; `digest` if it is known."""
    return StoredFile(file.stat().st_size, digest or file_digest(file))


@dataclass(frozen=True)
class Commit:
    """A commit object: of a checkpoint, or of the files of a finished run.

    Attributes:
        step: optimizer steps done.
        is_requested, best_value: see CheckpointWriter.save.
        files: name -> size and checksum. Names are relative to the folder of the commit object.
        shared: those of the run's directory that other checkpoints need, too; see shared_files.py.
    """

    step: int
    is_requested: bool
    best_value: float | None
    files: Mapping[str, StoredFile]
    shared: Mapping[str, StoredFile] = field(default_factory=dict)

    def text(self) -> str:
        """Return the content of the object, which has its own checksum."""
        record: dict[str, Any] = {
            "step": self.step,
            "asked": self.is_requested,
            "best_loss": self.best_value,
            "files": {name: file._asdict() for name, file in self.files.items()},
        }
        if self.shared:
            record["shared"] = {name: file._asdict() for name, file in self.shared.items()}
        return json.dumps({**record, "checksum": _checksum(record)}, indent=1) + "\n"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the commit of an object's content. Raises ValueError if it is corrupted."""
        try:
            record: dict[str, Any] = json.loads(text)
            checksum = record.pop("checksum")
            if checksum != _checksum(record):
                raise ValueError("its checksum differs")
            files = {name: StoredFile(**file) for name, file in record.pop("files").items()}
            shared = {name: StoredFile(**file) for name, file in record.get("shared", {}).items()}
            return cls(record["step"], record["asked"], record["best_loss"], files, shared)
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"not a commit object ({error!r})") from error


def _checksum(record: Mapping[str, Any]) -> str:
    return content_digest(json.dumps(record, sort_keys=True).encode())


def commit_name(step: int) -> str:
    """Return the name of a checkpoint's commit object."""
    return f"checkpoints/step-{step:06d}/{COMMIT_FILE}"


@dataclass(frozen=True)
class FoundCommits:
    """The checkpoints in a store.

    Attributes:
        valid: step -> its commit, newest first.
        unusable: step -> why its commit object, which is listed, cannot be used.
    """

    valid: dict[int, Commit]
    unusable: dict[int, str]


def find_commits(store: ObjectStore, is_own: bool) -> FoundCommits:
    """Return the checkpoints in a store.

    No single answer makes a checkpoint vanish. A commit object that is listed and cannot be read is
    unusable, not absent. The listing of a store that can be written must have an object that was
    written just before: otherwise it is empty, old or truncated, and not believed.

    Args:
        store: where they are.
        is_own: the store can be written, as --save_to.

    Raises:
        Exception: the store cannot be listed; each package has its own errors.
    """
    probe = f"{PROBE}{uuid.uuid4().hex}"
    partly = list[FoundCommits]()

    def attempt() -> FoundCommits:
        partly.clear()
        names = _list_checked(store, probe) if is_own else store.sizes("checkpoints")
        commits = _read_listed(store, names)
        partly.append(commits)
        if commits.unusable:  # they may be readable a moment later
            raise ValueError("; ".join(commits.unusable.values()))
        return commits

    try:
        return with_retries(attempt)
    except Exception:
        if not partly:
            raise
    finally:
        if is_own:
            with suppress(Exception):
                store.delete(probe)
    [commits] = partly
    for problem in commits.unusable.values():
        log.warning(f"{store.url}/{problem}. This checkpoint is not used.")
    return commits


def _list_checked(store: ObjectStore, probe: str) -> dict[str, int]:
    try:
        store.put_text("probe", probe)
        names = store.sizes("checkpoints")
    except FileNotFoundError as error:  # the bucket was there a moment ago
        raise RuntimeError(f"a listing failed: {store_reason(error)}") from error
    if probe not in names:
        raise RuntimeError("a listing lacks an object that was written just before")
    return names


def _read_listed(store: ObjectStore, names: Iterable[str]) -> FoundCommits:
    valid = dict[int, Commit]()
    unusable = dict[int, str]()
    steps = sorted(int(match[1]) for match in map(COMMIT_NAME.fullmatch, names) if match)
    for step in reversed(steps):
        name = commit_name(step)
        try:
            commit = Commit.parse(store.get_text(name))
            # a name with a directory could be fetched to anywhere on the disk
            is_own = commit.step == step and not any("/" in file for file in commit.files)
            if not is_own or not all(map(_is_shared_name, commit.shared)):
                raise ValueError("it is of another checkpoint")
            valid[step] = commit
        except NoAnswer:
            raise
        except ValueError as error:
            unusable[step] = f"{name} is corrupted: {error}"
        except Exception as error:  # each package has its own errors
            unusable[step] = f"{name} cannot be read ({store_reason(error)})"
    return FoundCommits(valid, unusable)


def _is_shared_name(name: str) -> bool:
    path = PurePosixPath(name)
    return len(path.parts) > 1 and path.parts[0] in FOLDERS and ".." not in path.parts


def read_commits(store: ObjectStore) -> dict[int, Commit]:
    """Return the checkpoints in a store that is only read, newest first."""
    return find_commits(store, is_own=False).valid


def is_uploaded(store: ObjectStore, step: int) -> bool:
    """Return whether the files of the finished run are in the store, with its last step `step`."""
    try:
        commit = Commit.parse(with_retries(lambda: store.get_text(RESULT_FILE)))
    except (FileNotFoundError, ValueError):
        return False
    sizes = with_retries(lambda: store.sizes(""))
    is_complete = all(sizes.get(name) == file.bytes for name, file in commit.files.items())
    return commit.step == step and is_complete


def check_access(store: ObjectStore) -> None:
    """Write, read and delete a small object. Raises UserError if one of these is not possible."""
    name = f".llama_ft-probe-{uuid.uuid4().hex}"

    def read_and_delete() -> None:
        store.get_text(name)
        store.delete(name)

    try:
        store.put_text("probe", name)
        for seconds in ACCESS_RETRY_SECONDS:  # what was written must be there
            with suppress(Exception):
                return read_and_delete()
            time.sleep(seconds)
        read_and_delete()
    except Exception as error:  # each package has its own errors
        raise store.failure(error) from error


def unreachable(store: ObjectStore, error: Exception) -> RunFailure:
    """Return the error of a store that failed after its access was checked."""
    return RunFailure(f"{store.url}: cannot be read ({store_reason(error)}).")
