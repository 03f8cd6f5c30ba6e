"""output_dir/status.json: how a run stands, for scripts: torchrun's exit code is always 0 or 1."""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from llama_ft.replace_text import replace_text

SECONDS_BETWEEN_STEPS = 5.0  # a file system of a cluster should not see one write a step
State = Literal["running", "finished", "stopped", "failed"]


class RunStatus:
    """Keeps one status.json current.

    Args:
        output_dir: the run's directory, which must exist.
        at_end: called once the run's last state is written and printed; it must not raise.
        step: the last optimizer step that was completed.
    """

    def __init__(self, output_dir: Path, at_end: Callable[[], None] = lambda: None, step: int = 0) -> None:
        self.path, self.step, self.at_end = output_dir / "status.json", step, at_end
        self._step_time = 0.0

    def write(self, state: State, exit_code: int | None = None, message: str = "") -> None:
        """Replace the file, if that is possible: a full disk must not hide the message itself."""
        record = {"state": state, "step": self.step, "exit_code": exit_code, "message": message}
        with suppress(OSError):
            replace_text(self.path, json.dumps(record) + "\n")

    def write_step(self) -> None:
        """Write how far the run is, now and then, unless another rank has written how it ended."""
        if time.monotonic() - self._step_time > SECONDS_BETWEEN_STEPS and self.path.exists():
            self._step_time = time.monotonic()
            if '"state": "running"' in self.path.read_text():
                self.write("running")
