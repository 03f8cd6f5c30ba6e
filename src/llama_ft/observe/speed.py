"""How fast training is beside how fast it could be: model FLOPs utilization at every step, where the seconds of one
step went, and on request torch's profiler and FLOP counter."""

import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode
from transformers.modeling_utils import PreTrainedModel

from llama_ft.config import ProfileConfig
from llama_ft.config.rules import PROFILED_STEPS, STEPS_BEFORE_PROFILE
from llama_ft.errors import UserError
from llama_ft.observe import flop_counter
from llama_ft.observe.breakdown import break_down
from llama_ft.observe.facts import RunFacts
from llama_ft.observe.flops import Flops, flop_formula, product_rate
from llama_ft.runtime import Runtime, cpu_kernels, log

OPERATORS_SHOWN = 12
PRODUCTS, ATTENTION = "matrix products", "attention"


def make_profiler_dir(settings: ProfileConfig) -> None:
    """Make --profiler_dir, so that a mistake in it is told before training.

    Raises:
        UserError: it cannot be made or written to.
    """
    if settings.profiler_dir is None:
        return
    folder = Path(settings.profiler_dir).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"--profiler_dir {folder}: {error.strerror}. Name a folder that can be written to.") from error


class Rows(Protocol):
    """A micro-batch, as far as it is looked at here."""

    @property
    def row_lengths(self) -> list[int]: ...

    @property
    def target_tokens(self) -> int: ...


class _Ended(NamedTuple):
    """A step. Its seconds are the host's; on a GPU those between the two events count."""

    tokens: float
    flops: float
    waited_seconds: float
    seconds: float
    begun: torch.cuda.Event | None
    done: torch.cuda.Event | None


class SpeedWatch:
    """A context manager around the steps of a run; every rank has one.

    At its making all ranks together measure how fast matrix products of the model's own shape are, which takes a tenth
    of a second. MFU (perf/mfu) is the model FLOPs of a step, see observe.flops, over what all ranks could compute at
    that rate in its seconds.

    The fourth step of every run is profiled on rank 0 and broken down. For the other steps nothing of that is there.

    Args:
        model: loaded.
        settings: of --use_profiler and --flop_counter.
        dtype: that the model computes in.
        steps: how many there will be in this process, at most.
        run: the run's directory.
        facts: gets what was measured.
        job: the ranks.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: ProfileConfig,
        dtype: torch.dtype,
        steps: int,
        run: Path,
        facts: RunFacts,
        job: Runtime,
    ) -> None:
        self._settings, self._facts, self._job = settings, facts, job
        self._folder = Path(settings.profiler_dir).expanduser() if settings.profiler_dir else run / "profile"
        self._formula = flop_formula(model)
        if cpu_kernels.is_installed():
            dtype = torch.float32  # in which it multiplies
        job.gather_numbers(0)  # begin together
        self._rate = product_rate(self._formula.product, dtype, job.device)
        self._rates = job.gather_numbers(self._rate)[:, 0].tolist()
        self._tell_rates(dtype)
        self._steps = 0
        self._started = self._ended = self._waited = 0.0
        self._begun: torch.cuda.Event | None = None
        self._untold: dict[int, _Ended] = {}
        self._flops = Flops(0, 0)
        self._profiled = (0, self._flops, 0.0)  # step, FLOPs and seconds of waiting of the one that is broken down
        self._between: list[float] = []
        self._first = STEPS_BEFORE_PROFILE + 1
        self._last = self._first + PROFILED_STEPS - 1 if settings.use_profiler else self._first
        if steps < self._last:
            if settings.use_profiler:
                log.warning(f"--use_profiler: nothing is profiled: it takes {self._last} steps, and {steps} are left.")
            self._last = 0
        elif not settings.use_profiler and not job.is_main:
            self._last = 0
        self._profile: profile | None = None
        self._counter: FlopCounterMode | None = None
        self._is_to_count = settings.flop_counter and job.is_main
        self._in_step = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._in_step.close()
        if self._profile is not None and error is None:  # the run ends before the last profiled step
            if self._steps < self._first:
                self._profile.start_trace()  # what is only prepared cannot be stopped
            self._profile.stop_trace()
            self._profile = None
            if self._settings.use_profiler:
                log.warning("--use_profiler: nothing is profiled: training ended before that.")
        if self._is_to_count and error is None:
            start = self._settings.flop_counter_start
            log.warning(f"--flop_counter: nothing is counted: training ended before step {start}.")

    @property
    def flops(self) -> float:
        """Model FLOPs of this rank's rows in the present step."""
        return sum(self._flops)

    def begin_step(self, step: int, batches: Sequence[Rows], waited_seconds: float) -> None:
        """A step begins, for whose rows this rank has waited so long."""
        self._steps += 1
        self._waited = waited_seconds
        targets = sum(batch.target_tokens for batch in batches)
        self._flops = self._formula.of((length for batch in batches for length in batch.row_lengths), targets)
        if self._steps <= self._last:
            if self._ended and self._job.device.type == "cpu":  # on a GPU it computes meanwhile
                self._between.append(time.perf_counter() - self._ended - waited_seconds)
            self._begin_profile(step)
        if self._is_to_count and step >= self._settings.flop_counter_start:
            self._is_to_count = False
            self._counter = self._in_step.enter_context(flop_counter.counter())
        self._started = time.perf_counter() - waited_seconds
        self._begun = self._mark()

    def end_step(self, step: int, tokens: float, flops: float) -> None:
        """Its weights are updated, or on a GPU will be.

        Args:
            step: the present one.
            tokens: input tokens that are not padding, of all ranks.
            flops: `flops` of all ranks.
        """
        self._wait_for_device()
        seconds = time.perf_counter() - self._started
        self._untold[step] = _Ended(tokens, flops, self._waited, seconds, self._begun, self._mark())
        self._in_step.close()
        if self._counter is not None:
            log.info(flop_counter.describe(self._counter, self._flops, step))
            self._counter = None
        if self._steps <= self._last:
            self._end_profile(step)
        self._ended = time.perf_counter()

    def metrics(self, step: int) -> dict[str, float]:
        """Of a step that has ended, once. On a GPU this waits until it really has, and its seconds are the device's."""
        ended = self._untold.pop(step)
        seconds = ended.seconds
        if ended.begun is not None and ended.done is not None:
            ended.done.synchronize()
            seconds = ended.begun.elapsed_time(ended.done) / 1000 + ended.waited_seconds
        return {
            "perf/tokens_per_second": ended.tokens / seconds,
            "perf/step_seconds": seconds,
            "perf/data_wait_seconds": ended.waited_seconds,
            "perf/mfu": ended.flops / seconds / sum(self._rates),
        }

    def _mark(self) -> torch.cuda.Event | None:
        """This moment in what the GPU has been sent."""
        if self._job.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _tell_rates(self, dtype: torch.dtype) -> None:
        name, text = str(dtype).removeprefix("torch."), flop_counter.flops_text
        per_token = self._formula.per_token
        log.info(
            f"Matrix products in {name} run at {text(sum(self._rates))}/s, all ranks together. A token takes "
            f"{text(per_token)}, {per_token / self._formula.weights:.2g} for each of "
            f"{self._formula.weights:,} weights, and attention"
        )
        self._facts.add(
            speed={
                "product_flops_per_second": self._rates,
                "dtype": name,
                "flops_per_token": per_token,
                "weights": self._formula.weights,
            }
        )

    def _wait_for_device(self) -> None:
        if self._job.device.type == "cuda" and self._steps == self._first <= self._last:
            torch.cuda.synchronize(self._job.device)

    def _begin_profile(self, step: int) -> None:
        if self._steps == self._first - 1:  # so that setting it up is in no profiled step
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it prints a line when it begins and one when it ends
            activities = [ProfilerActivity.CPU]
            if self._job.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities, record_shapes=self._settings.use_profiler)
            self._profile.prepare_trace()
        if self._steps == self._first and self._profile is not None:
            self._wait_for_device()
            self._profile.start_trace()
        if self._steps >= self._first:
            self._in_step.enter_context(record_function(_label(step)))

    def _end_profile(self, step: int) -> None:
        if self._steps == self._first:
            self._profiled = step, self._flops, self._waited
        if self._steps < self._last or self._profile is None:
            return
        self._profile.stop_trace()
        finished, self._profile = self._profile, None
        if self._job.is_main:
            self._tell_breakdown(finished)
        if self._settings.use_profiler:
            log.info(_top_operators(finished, self._job.device))
            self._write_trace(finished)

    def _write_trace(self, finished: profile) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            finished.export_chrome_trace(str(self._folder / f"rank-{self._job.rank}.json.gz"))
        except OSError as error:  # a full disk, which the run may not need
            log.warning(f"--use_profiler: the trace of rank {self._job.rank} could not be written: {error}")
        else:
            log.info(f"Traces of all ranks: {self._folder}")

    def _tell_breakdown(self, finished: profile) -> None:
        step, flops, waited = self._profiled
        results = finished.profiler.kineto_results if finished.profiler is not None else None
        found = break_down(results.events(), _label(step), self._job.world_size) if results is not None else None
        if found is None:
            return
        logging = median(self._between) if self._between else 0.0
        rows = {**found.parts, "waiting for data": waited, "between steps": logging, "Python and the rest": found.rest}
        ideal = {PRODUCTS: flops.products / self._rate, ATTENTION: flops.attention / self._rate}
        total = found.seconds + waited + logging
        log.info(_table(step, total, rows, ideal))
        self._facts.add(speed={"step": step, "seconds": total, "parts": rows, "at_measured_rate": ideal})


def _label(step: int) -> str:
    return f"step {step}"


def _table(step: int, total: float, rows: dict[str, float], ideal: dict[str, float]) -> str:
    lines = [f"Where step {step} went on rank 0, {_time(total)} with the profiler on:"]
    for name, seconds in rows.items():
        if seconds >= 0.0005 * total:
            enough = f"   {_time(ideal[name])} at the measured rate" if name in ideal else ""
            lines.append(f"  {name:<20} {_time(seconds):>10} {seconds / total:>6.1%}{enough}")
    return "\n".join(lines)


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def _top_operators(finished: profile, device: torch.device) -> str:
    def own(event: object) -> float:
        return float(getattr(event, "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"))

    averages = [event for event in finished.key_averages() if not event.key.startswith("step ")]
    averages = sorted(averages, key=own, reverse=True)
    total = sum(map(own, averages)) or 1
    lines = [f"{'operators, own time without those within':<58} {'ms a call':>10} {'calls':>7} {'share':>6}"]
    for event in averages[:OPERATORS_SHOWN]:
        each = own(event) / event.count / 1000
        lines.append(f"  {event.key[:56]:<56} {each:>10.3f} {event.count:>7,} {own(event) / total:>6.1%}")
    return "\n".join(lines)
