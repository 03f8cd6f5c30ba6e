"""Which checkpoints --keep_last keeps, on the disk and in the store."""

from collections.abc import Iterable
from typing import NamedTuple


class SavedCheckpoint(NamedTuple):
    """What decides how long a checkpoint is kept."""

    step: int
    is_requested: bool  # False if it was saved only for its validation loss
    best_value: float | None  # the validation loss or other --best_by, if it was the best so far


def surplus(
    checkpoints: Iterable[SavedCheckpoint], newest: int | None, keep_last: int
) -> tuple[SavedCheckpoint | None, list[int]]:
    """Return the newest of the checkpoints that were the best at their time, and the steps of those
    to delete: all older than `newest`, except the best and the last keep_last requested ones (0:
    all).

    Args:
        checkpoints: newest first.
        newest: its step; None: nothing is deleted.
        keep_last: see CheckpointConfig.
    """
    best = None
    requested_count = 0
    doomed = []
    for checkpoint in checkpoints:
        requested_count += checkpoint.is_requested
        if checkpoint.best_value is not None and best is None:
            best = checkpoint
            continue
        is_surplus = 0 < keep_last < requested_count
        if newest not in (None, checkpoint.step) and (is_surplus or not checkpoint.is_requested):
            doomed.append(checkpoint.step)
    return best, doomed
