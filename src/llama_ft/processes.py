"""What the processes of a run share: forks, torchrun's restarts, and text files that others read.

torchrun's agent is the parent of a node's ranks. It starts them all again when one has failed.
"""

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def end_with(parent: int, oom_score: int = 0) -> None:
    """Have this forked process end when the one that has forked it does, however that ends.

    Args:
        parent: process id.
        oom_score: up to 1000: how much sooner than others the kernel shall take this process where memory runs out.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it had ended before
        os._exit(0)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(oom_score))


def attempt() -> int:
    """How often this node's ranks have failed and been started again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def may_be_restarted() -> bool:
    """Whether an earlier attempt of this job may have been here before: another node's failures are not counted."""
    restarts, nodes = os.environ.get("TORCHELASTIC_MAX_RESTARTS"), os.environ.get("GROUP_WORLD_SIZE")
    return int(restarts or 0) > 0 or int(nodes or 1) > 1


def end_restarts() -> None:
    """Have this node's agent end its ranks and itself, if it would start them again."""
    if attempt() < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0):
        os.kill(os.getppid(), signal.SIGTERM)


def replace_text(path: Path, text: str) -> None:
    """Replace a file in one move: a reader never sees half of it. Several processes may do so at once."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
