"""What the attempts of one launch know of each other. torchrun starts all ranks again after one has
failed, and when a node has left or joined.

The rendezvous store cannot hold it: with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which a returning
node needs, rank 0 runs the store and it ends with the attempt. So each node has a file in the
directory of torchrun's logs, which every agent makes. A node that has joined later has
no file and learns it from the others.
"""

import itertools
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from llama_ft.processes import replace_text
from llama_ft.runtime.rendezvous import gather

_STARTS = itertools.count()  # a script can start several runs in one process


@dataclass(frozen=True)
class Attempt:
    """The run of an earlier attempt.

    Attributes:
        directory: of the run, as the settings named it.
        global_batch: samples, or packed sequences, per optimizer step; 0: not known.
    """

    directory: str
    global_batch: int


class AttemptFile:
    """The file of this node. Each process group that a script starts has its own."""

    def __init__(self) -> None:
        self._file: Path | None = None
        # <logs of this agent>/attempt_0/<local rank>/error.json
        error_file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE") or "/")
        number = next(_STARTS)
        if len(error_file.parts) > 3 and error_file.parents[1].name.startswith("attempt_"):
            self._file = error_file.parents[2] / f"llama_ft-run-{number}.json"

    def read(self) -> Attempt | None:
        """Return the run of an earlier attempt; None if this node has seen none."""
        if self._file is None:
            return None
        with suppress(OSError, ValueError, TypeError):
            return Attempt(**json.loads(self._file.read_text()))
        return None

    def write(self, attempt: Attempt) -> None:
        """Keep a run for the next attempt. Without a file, --resume must find it."""
        if self._file is not None:
            with suppress(OSError):
                replace_text(self._file, json.dumps(asdict(attempt)))


def earlier_attempt(own: Attempt | None) -> Attempt | None:
    """Return what this node knows of an earlier attempt, or else another node. All ranks call it."""
    return next((known for known in [own, *gather(own)] if known is not None), None)
