"""Functions for processes: forks, restarts by torchrun, and text files that other processes read.

torchrun's agent is the parent process of a node's ranks. It restarts all of them after one has
failed.
"""

import atexit
import ctypes
import errno
import fcntl
import gc
import os
import re
import shlex
import signal
import sys
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def end_with(parent: int, oom_score: int = 0) -> None:
    """Make the kernel end this forked process when its parent ends for any reason.

    Args:
        parent: process id of the parent.
        oom_score: 0 to 1000; with a higher score the kernel kills this process before others if
            memory runs out.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before prctl
        os._exit(0)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(oom_score))


class _Parent:
    """The parent of this process when it began, which is torchrun's agent. If that is killed, the
    kernel gives its children to another process, such as the container's first."""

    def __init__(self) -> None:
        self.id = os.getppid()
        os.register_at_fork(after_in_child=self._update)

    def _update(self) -> None:
        self.id = os.getppid()

    def is_alive(self) -> bool:
        return os.getppid() == self.id


PARENT = _Parent()


@atexit.register  # before libraries do that: such functions run in reverse order
def _end_without_report_of_leaks() -> None:
    """Python does not collect frozen objects at its end (runtime.configure_console). Triton's binding
    reports its own ones as leaks, on stderr, after all else."""
    if gc.get_freeze_count() > 0:
        with suppress(Exception), open(os.devnull, "w") as nowhere:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:  # which a closed one is
                    stream.flush()  # if that fails, Python says so
            os.dup2(nowhere.fileno(), 2)


CONSOLE_SCRIPT = "llama-ft"
INSTALLED_COMMANDS = (CONSOLE_SCRIPT, "torchrun")  # which are started without their interpreter


def attempt() -> int:
    """Return how often torchrun has restarted this node's ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def may_be_restarted() -> bool:
    """Return whether an earlier attempt of this job is possible. `attempt` misses failures of other
    nodes."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0)
    nodes = int(os.environ.get("GROUP_WORLD_SIZE") or 1)
    return restarts > 0 or nodes > 1


def end_restarts() -> None:
    """End this node's agent and its ranks, if the agent would restart them."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0)
    if attempt() < restarts and PARENT.is_alive():
        os.kill(PARENT.id, signal.SIGTERM)


def typed_command() -> str:
    """Return the command as it was typed, with its launcher. sys.argv has neither torchrun's words
    nor the original form of the flags."""
    is_launched = "TORCHELASTIC_RUN_ID" in os.environ
    process = PARENT.id if is_launched else os.getpid()
    try:
        command = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace")
    except OSError:  # not Linux, or the launcher has ended
        command = ""
    words = command.split("\0")[:-1]
    names = [Path(word).name for word in words]
    script = Path(sys.argv[0]).name
    if script not in names and CONSOLE_SCRIPT not in names:  # another program calls the recipe
        return shlex.join(sys.argv)
    is_installed = len(names) > 1 and names[1] in INSTALLED_COMMANDS
    return shlex.join([names[1], *words[2:]] if is_installed else [names[0], *words[1:]])


def is_locked(file: Path) -> bool | None:
    """Return whether a living process holds the lock of a file; None if that cannot be found out,
    because there is no such file or its file system has no locks."""
    try:
        with open(file) as opened:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


TEMPORARY_FILE = re.compile(r"\.[\w.]+\.\d+\.tmp")  # that a kill has left


def replace_text(path: Path, text: str) -> None:
    """Replace a text file, see `replace_bytes`."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """Replace a file in one move, so that readers never see a part of it. Several processes may do
    that at once."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # otherwise a power cut may leave an empty file
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


CANNOT_FLUSH = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)


def flush_directory(folder: Path) -> bool:
    """Flush the entries of a directory to disk. Return False if its file system cannot: some FUSE
    and SMB mounts."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in CANNOT_FLUSH:
            raise
        return False
    finally:
        os.close(descriptor)
    return True
