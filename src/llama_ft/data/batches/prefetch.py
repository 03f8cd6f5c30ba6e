"""Make the batches of the next steps in a thread, while the training loop computes."""

import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

from datasets import Dataset

from llama_ft.data.batches.sampler import Batch, BatchSampler, collate_step
from llama_ft.errors import plural

T = TypeVar("T")
END: Any = object()  # follows the last item
STEPS_AHEAD = 2
SECONDS_FOR_THE_END = 5


@dataclass(frozen=True, kw_only=True)
class StepBatches:
    """The batches of one optimizer step on one rank. The defaults are those of a single step, as a
    plan has it."""

    batches: list[Batch]  # this rank's micro-batches; every rank has the same number
    target_tokens: int  # labels in the loss, in the whole global batch over all ranks
    samples: int  # in the whole global batch; a preference pair is one sample
    step: int = 1  # counted from 1
    epoch: int = 0  # counted from 0
    epochs_seen: float = 0.0  # epochs done after this step
    ends_epoch: bool = False  # the last step of its epoch
    # position of a stream after this step, for checkpoints
    position: dict[str, int] = field(default_factory=dict)


class PreparedBatches:
    """Tokenized samples on disk, and the order in which they are trained on.

    Args:
        samples: the samples, with the columns `tokenize_files.FEATURES`, memory-mapped.
        plan: chooses the samples of each step.
        num_epochs: passes over the samples.
        max_train_step: maximum number of optimizer steps; 0 = no limit.
        repeats: steps one after another that have the same samples.
    """

    def __init__(
        self,
        samples: Dataset,
        plan: BatchSampler,
        num_epochs: int,
        max_train_step: int,
        repeats: int = 1,
    ) -> None:
        self._samples = samples
        self._plan = plan
        self.layout = plan.layout
        # packed sequences, or samples, per epoch
        self.size = len(plan)
        self._repeats = repeats
        self._per_epoch = plan.steps_per_epoch * repeats
        all_steps = self._per_epoch * num_epochs
        self.total_steps = min(all_steps, max_train_step or all_steps)

    def first_samples(self) -> Dataset:
        """Return the first samples, to show them."""
        return self._samples

    def describe(self) -> str:
        """Return a log line about the batches and the number of steps."""
        item = "packed sequence" if self.layout.is_packed else "sample"
        batch = plural(self._plan.global_batch, item)
        steps = f"{plural(self.total_steps, 'optimizer step')} of {batch}, {self._per_epoch:,} per epoch"
        return f"{self._plan.describe()}\n{steps}"

    def steps(self, first: int, last: int, _: dict[str, int]) -> Generator[StepBatches, None, None]:
        """Yield the steps `first` to `last`, counted from 1, both included."""
        plan = self._plan
        per_epoch = self._per_epoch
        for step in range(first, last + 1):
            epoch, step_in_epoch = divmod(step - 1, per_epoch)
            place = step_in_epoch // self._repeats
            target_tokens, samples = plan.counts(epoch, place)
            micro_batches = plan.step(epoch, place)
            yield StepBatches(
                step=step,
                epoch=epoch,
                epochs_seen=step / per_epoch,
                ends_epoch=step_in_epoch == per_epoch - 1,
                target_tokens=target_tokens,
                samples=samples,
                batches=collate_step(self._samples, micro_batches, self.layout),
            )


class Prefetcher(Generic[T]):
    """Iterates over items that a thread makes in advance. As a context manager it ends the thread
    on exit.

    Args:
        items: the generator that the thread runs. It is closed on exit.
        count: maximum number of items made in advance.

    Attributes:
        waited_seconds: time that the consumer waited for the latest item.
    """

    def __init__(self, items: Generator[T, None, None], count: int = STEPS_AHEAD) -> None:
        self.waited_seconds = 0.0
        self._items = items
        self._count = count

    def __enter__(self) -> Self:
        # One thread, because a generator cannot run in two at once. So the items stay in order.
        self._pool = ThreadPoolExecutor(1, "prefetch")
        self._ready = deque[Future[T]]()
        # one more than are made in advance: the one that the consumer takes next
        for _ in range(self._count + 1):
            self._make_next()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for future in self._ready:
            future.cancel()
        closed = self._pool.submit(self._items.close)
        # After an error other ranks may be gone and the thread may wait for them forever. The
        # process then exits without it.
        wait([closed], None if kind in (None, GeneratorExit) else SECONDS_FOR_THE_END)
        self._pool.shutdown(wait=False)

    def __iter__(self) -> Iterator[T]:
        while True:
            started = time.perf_counter()
            item = self._ready.popleft().result()
            self.waited_seconds = time.perf_counter() - started
            if item is END:
                return
            self._make_next()
            yield item

    def _make_next(self) -> None:
        """Let the thread make an item after those that it already has to make."""
        self._ready.append(self._pool.submit(next, self._items, END))
