"""What a step asks of the emulated GPU: its launches, and where the host waits for it."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

SKIPPED = ("/torch/", "/emulated_cuda/")  # in names of files; a line of theirs says nothing
WRAPPERS = ("/torch/_dynamo/", "/torch/_compile.py", "/torch/utils/", "/emulated_cuda/")


@dataclass
class Recorder:
    """Counts launches and waits while `is_on`."""

    is_on: bool = False
    launches: Counter[str] = field(default_factory=Counter)  # by operator or kernel
    waits: Counter[str] = field(default_factory=Counter)  # by "operator at file:line"
    problems: Counter[str] = field(default_factory=Counter)  # what a GPU would do otherwise

    def launch(self, name: str, count: int = 1) -> None:
        if self.is_on and count:
            self.launches[name] += count

    def wait(self, reason: str) -> None:
        if self.is_on:
            self.waits[f"{reason} at {place()}"] += 1

    def problem(self, text: str) -> None:
        """Note a mistake, also outside of steps."""
        self.problems[f"{text} at {place()}"] += 1

    def clear(self) -> None:
        for counter in (self.launches, self.waits, self.problems):
            counter.clear()

    @contextmanager
    def recording(self, is_on: bool = True) -> Iterator[None]:
        """Count in the block, or do not."""
        before = self.is_on
        self.is_on = is_on
        try:
            yield
        finally:
            self.is_on = before


# One for the process: operators arrive from autograd's threads and from functions of torch.cuda.
RECORDER = Recorder()


def place() -> str:
    """Return the line that called torch, and the nearest line of llama_ft if that is another one."""
    outside = []
    within = ""  # torch's own line, if no other has called it: in a thread of autograd
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not any(part in name for part in SKIPPED):
            outside.append(frame)
        elif not within and not any(part in name for part in WRAPPERS):
            within = _line(frame)
        frame = frame.f_back
    if not outside:
        return within or "a thread of autograd"
    text = _line(outside[0])
    for frame in outside:
        name = frame.f_code.co_filename
        if "/src/llama_ft/" in name or "/recipes/" in name:
            return text if frame is outside[0] else f"{text} (from {_line(frame)})"
    return text


def _line(frame: FrameType) -> str:
    name = frame.f_code.co_filename
    for folder in ("/site-packages/", "/src/"):
        name = name.rpartition(folder)[2]
    if name.startswith("/"):
        name = "/".join(name.split("/")[-2:])
    return f"{name}:{frame.f_lineno}"
