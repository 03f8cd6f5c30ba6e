"""Limits for chat templates. A template is a program: a mistake in it can loop for ever, take all
memory, or recurse until the process crashes."""

import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

CPU_SECONDS = 5  # templates take milliseconds
BYTES = 2**30
WALL_SECONDS = 120.0  # on a machine so busy that 5 s of CPU time take longer, there is no verdict
OUT_OF_MEMORY = 3  # exit codes of the forked process
TOO_DEEP = 4


def exceeded_limit(render: Callable[[], object]) -> str | None:
    """Call `render` in a forked process with limits. Return which limit it exceeds, or None. Other
    errors of `render` are ignored."""
    child = os.fork()
    if child == 0:
        _render_and_exit(render)
    status = _wait(child)
    if status is None:
        return None
    code = os.waitstatus_to_exitcode(status)
    if code == OUT_OF_MEMORY:
        return f"it takes more than {BYTES // 2**30} GiB of memory."
    if code == TOO_DEEP:
        return "it is nested too deeply, or calls itself without end."
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"it does not end within {CPU_SECONDS} s."
    if code < 0:  # minus the number of the signal that has ended it
        return f"it ends the process ({signal.Signals(-code).name})."
    return None


def _render_and_exit(render: Callable[[], object]) -> None:
    """Never returns: the fork must not run any of its parent's other code."""
    code = 0
    try:
        # The first number is the size of the address space. RLIMIT_AS limits all of it, not only
        # what the template adds.
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most_bytes = pages * resource.getpagesize() + BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
        # no core dump, which would have the size of the parent's memory
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        render()
    except MemoryError:
        code = OUT_OF_MEMORY
    except RecursionError:
        code = TOO_DEEP
    except BaseException:  # the parent will meet it, too
        code = 0
    os._exit(code)


def _wait(child: int) -> int | None:
    """Return the status of the forked process; None if it had to be killed after WALL_SECONDS."""
    deadline = time.monotonic() + WALL_SECONDS
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None
