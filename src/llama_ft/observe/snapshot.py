"""torch's own record of GPU memory (--memory_snapshot): who allocated what and when, for pytorch.org/memory_viz."""

from pathlib import Path

import torch

# The last ones of them: some steps of an 8B model. Beyond that a snapshot is too large for the viewer's browser.
MOST_EVENTS = 100_000
SNAPSHOT_STEPS = 3  # of this process: the second has all optimizer states, the third repeats it


def record_memory() -> None:
    """Begin to record on the current CUDA device; 2 us an allocation, torch says."""
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=MOST_EVENTS)


def write_snapshot(run: Path, rank: int, moment: str) -> Path:
    """Write run/memory/rank-0-step-3.pickle. It holds sizes, times, and the lines of code that allocated, with their
    paths; no content of any tensor.

    Args:
        run: the run's directory.
        rank: this process's.
        moment: the end of the name.
    """
    file = run / "memory" / f"rank-{rank}-{moment}.pickle"
    file.parent.mkdir(exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(file))
    return file
