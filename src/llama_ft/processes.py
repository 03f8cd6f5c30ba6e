"""What the processes that a run forks have in common."""

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
