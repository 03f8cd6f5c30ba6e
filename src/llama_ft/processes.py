"""What the processes that a run forks have in common."""

import ctypes
import os
import signal
import sys
from contextlib import suppress

PR_SET_PDEATHSIG = 1


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_with(parent: int, oom_score: int = 0) -> None:
    """Have this forked process end when the one that has forked it does, however that ends. Linux only.

    Args:
        parent: process id.
        oom_score: up to 1000: how much sooner than others the kernel shall take this process where memory runs out.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it had ended before
        os._exit(0)
    if oom_score:
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write(str(oom_score))
