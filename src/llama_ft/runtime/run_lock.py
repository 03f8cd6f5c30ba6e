"""The lock of a run's directory: it belongs to one run at a time, which holds the lock while it
lives.

File systems without locks, or with locks that other nodes do not see, are common. So the file also
says who holds it, and a run that is not the holder any more writes no checkpoint.
"""

import fcntl
import os
import socket
import uuid
from contextlib import suppress
from pathlib import Path
from typing import IO, Self

from llama_ft.config.paths import RUN_MARKER, run_entries
from llama_ft.errors import UserError, reason

ENDING = "ending"  # last line of the file of a run that takes no more steps


class RunLock:
    """The open and locked file that marks a run's directory. `try_to_lock` makes one.

    Attributes:
        folder: the directory.
        is_exclusive: False on a file system without locks.
    """

    def __init__(
        self, file: IO[str], folder: Path, is_exclusive: bool, new_directories: list[Path]
    ) -> None:
        self.folder = folder
        self.is_exclusive = is_exclusive
        self._file = file
        self._new_directories = new_directories  # directories that did not exist before
        self._has_announced = False
        self._text = f"process {os.getpid()} on {socket.gethostname()}\n{uuid.uuid4().hex}\n"
        file.truncate(0)
        print(self._text, end="", file=file, flush=True)
        # a forked process would hold the lock after this one has ended
        os.register_at_fork(after_in_child=file.close)

    @classmethod
    def try_to_lock(cls, folder: Path) -> Self | str:
        """Mark a directory as a run's, and lock it while this process lives, or return the name of
        the process that holds it. (If torchrun is killed with -9, its ranks live on and continue to
        write there.)

        Raises:
            UserError: the directory cannot be marked.
        """
        marker = folder / RUN_MARKER
        if marker.is_symlink():  # it would be emptied
            raise UserError(f"{marker}: is a link. Remove it, or choose another output_dir.")
        if marker.exists() and not marker.is_file():
            raise UserError(f"{marker}: is not a file. Remove it, or choose another output_dir.")
        new_directories = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = open(marker, "a+")
        except FileNotFoundError:  # a run that was rejected has just removed the directory
            return "a run that is ending"
        except OSError as error:
            raise UserError(f"{marker}: cannot be written ({reason(error)}).") from error
        is_exclusive = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return _describe_holder(marker)
        except OSError:  # the file system has no locks
            is_exclusive = False
        if not _is_same(file, marker):
            file.close()
            return "a run that is ending"
        return cls(file, folder, is_exclusive, new_directories)

    def holds(self, folder: Path) -> bool:
        """Return whether this process holds the lock of a directory."""
        return not self._file.closed and self.folder.resolve() == folder.resolve()

    def close(self) -> None:
        """Release the directory."""
        self._file.close()

    def announce_end(self) -> None:
        """Tell runs that wait for the directory that this one takes no more steps."""
        if self._has_announced:
            return
        self._has_announced = True
        with suppress(OSError, ValueError):  # ValueError: it is closed
            print(ENDING, file=self._file, flush=True)

    def taken_by(self) -> str:
        """Return the name of another process that has taken the directory, or an empty text."""
        now = _read(self.folder / RUN_MARKER)
        if not now or now.startswith(self._text):
            return ""
        return now.splitlines()[0]

    def remove_unused(self) -> None:
        """Remove the file and the directories that were made for it, if the directory holds no file
        of a run."""
        if run_entries(self.folder):
            return
        with suppress(OSError):
            (self.folder / RUN_MARKER).unlink()
            for path in self._new_directories:
                path.rmdir()


def holder_is_ending(holder: str) -> bool:
    """Return whether the result of `RunLock.try_to_lock` names a run that takes no more steps."""
    return holder.endswith(ENDING)


def _describe_holder(marker: Path) -> str:
    lines = _read(marker).splitlines()
    if not lines:
        return "a run that is starting"
    return f"{lines[0]}, {ENDING}" if lines[-1] == ENDING else lines[0]


def _read(marker: Path) -> str:
    try:
        return marker.read_text(errors="replace")
    except OSError:
        return ""


def _is_same(file: IO[str], marker: Path) -> bool:
    """Return whether an open file still has its name: a rejected run removes the file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), marker.stat())
    except OSError:
        return False
