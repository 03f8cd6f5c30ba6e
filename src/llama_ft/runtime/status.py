"""output_dir/status.json: how a run stands, for scripts that cannot read torchrun's exit code (always 0 or 1)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from llama_ft.replace_text import replace_text

State = Literal["running", "finished", "stopped", "failed"]


class RunStatus:
    """Keeps one status.json current. `step` is the last optimizer step that was completed.

    Args:
        output_dir: the run's directory, which must exist.
        at_end: called once the run's last state is written and told; it must not raise.
    """

    def __init__(self, output_dir: Path, at_end: Callable[[], None] = lambda: None) -> None:
        self.path = output_dir / "status.json"
        self.step = 0
        self.at_end = at_end

    def write(self, state: State, exit_code: int | None = None, message: str = "") -> None:
        """Replace the file in one move, so that a reader never sees half of it."""
        record = {"state": state, "step": self.step, "exit_code": exit_code, "message": message}
        replace_text(self.path, json.dumps(record) + "\n")

    def write_step(self) -> None:
        """Say how far the run is, unless another rank has said how it ended."""
        try:
            is_over = json.loads(self.path.read_text())["state"] != "running"
        except (OSError, ValueError, KeyError):
            is_over = False
        if not is_over:
            self.write("running")
