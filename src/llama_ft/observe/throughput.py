"""How fast training is beside how fast it could be: utilization at every step, where the seconds of one step went, and
on request torch's profiler and FLOP counter."""

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils.flop_counter import FlopCounterMode
from transformers.modeling_utils import PreTrainedModel

from llama_ft.config import ProfileConfig
from llama_ft.config.rules import PROFILED_STEPS, STEPS_BEFORE_PROFILE
from llama_ft.observe import flop_counter
from llama_ft.observe.breakdown import break_down
from llama_ft.observe.flops import Flops, flop_formula, product_rate, published_peak
from llama_ft.observe.run_metadata import RunMetadata
from llama_ft.runtime import Runtime, log

OPERATORS_SHOWN = 12


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


class ThroughputMeter:
    """A context manager around the steps of a run; every rank has one.

    At its making all ranks together measure how fast matrix products of the model's own shape are, which takes a tenth
    of a second. `perf/matmul_utilization` is the model FLOPs of a step (see observe.flops) over what all ranks could
    compute at that rate in its seconds; `perf/mfu` is the same with the GPUs' published peak, where that is known.

    The fourth step of every run is profiled on rank 0 and broken down. For the other steps nothing of that is there.

    Args:
        model: loaded.
        settings: of --use_profiler and --flop_counter.
        dtype: that the model computes in.
        run: the run's directory.
        facts: gets what was measured.
        job: the ranks.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: ProfileConfig,
        dtype: torch.dtype,
        run: Path,
        facts: RunMetadata,
        job: Runtime,
    ) -> None:
        self._settings, self._facts, self._job = settings, facts, job
        self._folder = Path(settings.profiler_dir).expanduser() if settings.profiler_dir else run / "profile"
        self._formula = flop_formula(model)
        job.all_gather_floats(0)  # begin together
        self._rate = product_rate(self._formula.product, dtype, job.device)
        rates = job.all_gather_floats(self._rate, published_peak(dtype, job.device))
        self._rates, peaks = rates[:, 0].tolist(), rates[:, 1].tolist()
        self._peak = sum(peaks) if all(peaks) else None
        self._log_rates(dtype)
        self._steps = 0
        self._started = self._waited = 0.0
        self._begun: torch.cuda.Event | None = None
        self._unread: dict[int, _Ended] = {}
        self._flops = Flops(0, 0)
        self._profile: profile | None = None
        self._profiled = (0, self._flops, 0.0)  # step, FLOPs and seconds of waiting of the one that is broken down
        self._is_to_profile = settings.use_profiler
        self._is_to_count = settings.flop_counter and job.is_main
        self._counter: FlopCounterMode | None = None
        self._in_step = ExitStack()

    def __enter__(self) -> Self:
        if self._settings.use_profiler or self._job.is_main:
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it prints a line when it begins and one when it ends
            is_cuda = self._job.device.type == "cuda"
            self._profile = profile(
                activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])],
                schedule=schedule(
                    wait=STEPS_BEFORE_PROFILE - 1,
                    warmup=1,
                    active=PROFILED_STEPS if self._settings.use_profiler else 1,
                    repeat=1,
                ),
                on_trace_ready=self._log_profile,
                record_shapes=self._settings.use_profiler,
            )
            self._profile.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._in_step.close()
        if self._profile is not None and error is None:
            if self._steps <= STEPS_BEFORE_PROFILE:
                self._profile.on_trace_ready = None
            self._profile.stop()  # of a run that ends while it is profiled, there is a profile of its last steps
        if self._is_to_profile and error is None:
            log.warning("--use_profiler: nothing is profiled: training ended before step 4.")
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
        if self._profile is not None and self._steps > STEPS_BEFORE_PROFILE:
            self._wait_for_device()
            self._in_step.enter_context(record_function(_label(step)))
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
        self._unread[step] = _Ended(tokens, flops, self._waited, seconds, self._begun, self._mark())
        self._in_step.close()
        if self._counter is not None:
            log.info(flop_counter.describe(self._counter, self._flops, step))
            self._counter = None
        if self._steps == STEPS_BEFORE_PROFILE + 1:
            self._profiled = step, self._flops, self._waited
        if self._profile is not None:
            self._profile.step()

    def metrics(self, step: int) -> dict[str, float]:
        """Of a step that has ended, once. On a GPU this waits until it really has, and its seconds are the device's."""
        ended = self._unread.pop(step)
        seconds = ended.seconds
        if ended.begun is not None and ended.done is not None:
            ended.done.synchronize()
            seconds = ended.begun.elapsed_time(ended.done) / 1000 + ended.waited_seconds
        found = {
            "perf/tokens_per_second": ended.tokens / seconds,
            "perf/step_seconds": seconds,
            "perf/data_wait_seconds": ended.waited_seconds,
            "perf/matmul_utilization": ended.flops / seconds / sum(self._rates),
        }
        return found | ({"perf/mfu": ended.flops / seconds / self._peak} if self._peak else {})

    def _mark(self) -> torch.cuda.Event | None:
        """This moment in what the GPU has been sent."""
        if self._job.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _wait_for_device(self) -> None:
        is_profiled = self._profile is not None and self._steps == STEPS_BEFORE_PROFILE + 1
        if self._job.device.type == "cuda" and is_profiled:
            torch.cuda.synchronize(self._job.device)

    def _log_rates(self, dtype: torch.dtype) -> None:
        name, text, formula = str(dtype).removeprefix("torch."), flop_counter.flops_text, self._formula
        peak = f" (published peak: {text(self._peak)}/s)" if self._peak else ""
        log.info(
            f"Matrix products in {name} run at {text(sum(self._rates))}/s, all ranks together{peak}. A token takes "
            f"{text(formula.per_token)}, {formula.per_token / formula.weights:.2g} for each of "
            f"{formula.weights:,} weights, and attention"
        )
        self._facts.add(
            speed={
                "product_flops_per_second": self._rates,
                "published_flops_per_second": self._peak,
                "dtype": name,
                "flops_per_token": formula.per_token,
                "weights": formula.weights,
            }
        )

    def _log_profile(self, finished: profile) -> None:
        self._profile, self._is_to_profile = None, False
        if self._job.is_main:
            self._log_breakdown(finished)
        if not self._settings.use_profiler:
            return
        by = "self_device_time_total" if self._job.device.type == "cuda" else "self_cpu_time_total"
        log.info(finished.key_averages().table(sort_by=by, row_limit=OPERATORS_SHOWN, max_name_column_width=50))
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            finished.export_chrome_trace(str(self._folder / f"rank-{self._job.rank}.json.gz"))
        except OSError as error:  # a full disk, which the run may not need
            log.warning(f"--use_profiler: the trace of rank {self._job.rank} could not be written: {error}")
        else:
            log.info(f"Traces of all ranks: {self._folder}")

    def _log_breakdown(self, finished: profile) -> None:
        step, flops, waited = self._profiled
        results = finished.profiler.kineto_results if finished.profiler is not None else None
        parts = break_down(results.events(), _label(step), self._job.world_size) if results is not None else None
        if parts is None:
            return
        parts["waiting for data"] = waited
        total = sum(parts.values())
        ideal = {"matrix products": flops.products / self._rate, "attention": flops.attention / self._rate}
        lines = [f"Where step {step} went on rank 0, {_time(total)} with the profiler on:"]
        for name, seconds in parts.items():
            if seconds >= 0.0005 * total:
                enough = f"   {_time(ideal[name])} at the measured rate" if name in ideal else ""
                lines.append(f"  {name:<20} {_time(seconds):>10} {seconds / total:>6.1%}{enough}")
        log.info("\n".join(lines))
        self._facts.add(speed={"step": step, "seconds": total, "parts": parts, "at_measured_rate": ideal})


def _label(step: int) -> str:
    return f"step {step}"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
