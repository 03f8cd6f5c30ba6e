"""What the training loop is fed with: the batches of one step after another, made in a thread while it computes."""

import math
import queue
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from llama_ft.data.batches import Batch, BatchSampler, collate

if TYPE_CHECKING:
    from datasets import Dataset

T = TypeVar("T")
STEPS_AHEAD = 2
SECONDS_FOR_THE_END = 5


@dataclass(frozen=True)
class StepBatches:
    """One optimizer step of one rank, ready to compute.

    Attributes:
        step, epoch: counted from 1, and from 0.
        epochs_seen, ends_epoch: after it, with fractions; whether it is the last of its epoch.
        target_tokens: labels that count in the loss, in the whole global batch over all ranks.
        batches: this rank's micro-batches; as many on every rank.
        position: where a stream stands after it, for the checkpoint.
    """

    step: int
    epoch: int
    epochs_seen: float
    ends_epoch: bool
    target_tokens: int
    batches: list[Batch]
    position: dict[str, int] = field(default_factory=dict)


class PreparedBatches:
    """Tokenized rows on disk, and the plan by which they are trained on.

    Args:
        rows: columns as of `build.FEATURES`, memory-mapped.
        plan: which of them each step has.
        pad_token_id: fills padded rows.
        num_epochs: passes over the rows.
        max_train_step: most optimizer steps; 0 = no limit.
    """

    def __init__(
        self, rows: "Dataset", plan: BatchSampler, pad_token_id: int, num_epochs: int, max_train_step: int
    ) -> None:
        self._rows, self._plan, self._pad_token_id = rows, plan, pad_token_id
        self.pack_length = plan.pack_length
        all_steps = plan.steps_per_epoch * num_epochs
        self.total_steps = min(all_steps, max_train_step or all_steps)

    @property
    def size(self) -> int | None:
        """Packs, or rows, of an epoch."""
        return len(self._plan)

    def first_rows(self) -> "Dataset":
        """Some rows, for showing."""
        return self._rows

    def describe(self) -> str:
        """How rows are laid out and how many steps they are, for people."""
        unit = "packs" if self._plan.is_packed else "rows"
        return (
            f"{self._plan.describe()}\n{self.total_steps} optimizer steps of {self._plan.global_batch} {unit}, "
            f"{self._plan.steps_per_epoch} to the epoch"
        )

    def steps(self, first: int, last: int, _: dict[str, int]) -> Generator[StepBatches, None, None]:
        """Yield the steps `first` to `last`, counted from 1, both included."""
        plan, per_epoch = self._plan, self._plan.steps_per_epoch
        for step in range(first, last + 1):
            epoch, step_in_epoch = divmod(step - 1, per_epoch)
            share, is_end = plan.step(epoch, step_in_epoch), step_in_epoch == per_epoch - 1
            batches = [collate(self._rows, rows, self._pad_token_id, plan.is_packed) for rows in share.micro_batches]
            yield StepBatches(step, epoch, step / per_epoch, is_end, share.target_tokens, batches)


class Prefetcher(Generic[T]):
    """Iterates over what a thread makes ahead of time. A context manager: leaving it ends the thread.

    Args:
        items: closed when they are no longer wanted.
        count: how many are made ahead.

    Attributes:
        waited_seconds: how long the latest item was waited for.
    """

    def __init__(self, items: Generator[T, None, None], count: int = STEPS_AHEAD) -> None:
        self.waited_seconds = 0.0
        self._items = items
        self._ready = queue.Queue[Any](count)  # items, then the error that ended them, StopIteration if none did
        self._is_wanted = True
        self._thread = threading.Thread(target=self._work, name="ahead", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_wanted = False
        # After an error other ranks may be gone, and the thread may wait for them: the process then ends without it.
        until = math.inf if kind in (None, GeneratorExit) else time.monotonic() + SECONDS_FOR_THE_END
        while self._thread.is_alive() and time.monotonic() < until:
            with suppress(queue.Empty):
                self._ready.get(timeout=0.05)  # it may be waiting for room

    def __iter__(self) -> Iterator[T]:
        while True:
            started = time.perf_counter()
            item = self._ready.get()
            self.waited_seconds = time.perf_counter() - started
            if isinstance(item, StopIteration):
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def _work(self) -> None:
        try:
            for item in self._items:
                self._ready.put(item)
                if not self._is_wanted:
                    self._items.close()
                    return
            self._ready.put(StopIteration())
        except BaseException as error:  # noqa: BLE001  # raised again where the next item is awaited
            self._ready.put(error)
