"""Limits for chat templates. A template is a program: a mistake in it can loop for ever, take all
memory, or recurse until the process crashes.

Chats made up for it are rendered in a forked process, which may crash (`exceeded_limit`). Chats of
the data are rendered in this process, with a timer and less memory (`limited`).
"""

import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

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
        return _too_much_memory()
    if code == TOO_DEEP:
        return "it is nested too deeply, or calls itself without end."
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return _too_slow()
    if code < 0:  # minus the number of the signal that has ended it
        return f"it ends the process ({signal.Signals(-code).name})."
    return None


def _render_and_exit(render: Callable[[], object]) -> None:
    """Never returns: the fork must not run any of its parent's other code."""
    code = 0
    try:
        most_bytes = _address_space() + BYTES
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


def _address_space() -> int:
    """Return the size of this process in bytes. RLIMIT_AS limits all of it, not only what a template
    adds."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # /proc is hidden, so only the time is limited
        return 2**62
    return pages * resource.getpagesize()


def _too_much_memory() -> str:
    return f"it takes more than {BYTES // 2**30} GiB of memory."


def _too_slow() -> str:
    return f"it does not end within {CPU_SECONDS} s."


class ExceededLimit(BaseException):
    """A template takes too much time or memory for a chat; the text says which. Jinja ignores other
    exceptions when it computes constants."""


@contextmanager
def limited() -> Iterator[None]:
    """Limit what the block may take. In other threads than the main one there is no limit, because
    only the main one receives signals.

    Raises:
        ExceededLimit: the block takes more than CPU_SECONDS or BYTES.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # The handler stays, and the size is read once in 0.1 s: both would take as long as a rendering.
    if signal.getsignal(signal.SIGVTALRM) is not _check_time:
        signal.signal(signal.SIGVTALRM, _check_time)
    _clock.started = time.thread_time()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most_bytes = _recent_address_space() + BYTES
    if soft != resource.RLIM_INFINITY:
        most_bytes = min(most_bytes, soft)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS, 0.2)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, hard))
        yield
    except MemoryError:
        raise ExceededLimit(_too_much_memory()) from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class _Clock:
    """When the block began, in CPU time of the main thread, and the last size of the process."""

    started = 0.0
    read_at = -1.0
    process = 0
    address_space = 0


_clock = _Clock()


def _check_time(_number: int, _frame: FrameType | None) -> None:
    # The timer counts the time of all threads.
    if time.thread_time() - _clock.started >= CPU_SECONDS:
        raise ExceededLimit(_too_slow())


def _recent_address_space() -> int:
    now = time.monotonic()
    if now - _clock.read_at > 0.1 or _clock.process != os.getpid():
        _clock.address_space = _address_space()
        _clock.read_at = now
        _clock.process = os.getpid()
    return _clock.address_space


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
