"""Speed of each step compared with the hardware's limit. On request also torch's profiler and FLOP
counter."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.flop_counter import FlopCounterMode
from transformers.modeling_utils import PreTrainedModel

from llama_ft.config import ProfileConfig
from llama_ft.config.home import expanded
from llama_ft.config.rules import PROFILED_STEPS, STEPS_BEFORE_PROFILE
from llama_ft.observe.flops import flop_formula, matmul_rate, published_peak
from llama_ft.observe.run_metadata import RunMetadata
from llama_ft.runtime import Ranks, log

OPERATORS_SHOWN = 12
GIGA = 1e9


class _StepTimes(NamedTuple):
    """A finished step whose time has not been read yet. Tokens and FLOPs are sums of all ranks."""

    tokens: float
    flops: float
    waited_seconds: float
    start: Any  # seconds, or on a GPU an event
    end: Any


class ThroughputMeter:
    """A context manager around the steps of a run. Every rank has one.

    The constructor measures the rate of matmuls in the model's own shape, on all ranks together, in
    0.1 s. `perf/matmul_utilization` is the model FLOPs of a step (see observe.flops) over what all
    ranks could compute at that rate in the time of the step. `perf/mfu` uses the GPUs' published
    peak instead, if it is known. The time of a step begins at the end of the previous step, so it
    includes logging and waiting for data.

    Args:
        model: the loaded model.
        settings: for --use_profiler and --flop_counter.
        dtype: the model's compute dtype.
        run: the run's directory.
        facts: receives the measured rates.
        ranks: the ranks.

    Attributes:
        flops: model FLOPs of this rank's samples in the current step.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: ProfileConfig,
        dtype: torch.dtype,
        run: Path,
        facts: RunMetadata,
        ranks: Ranks,
    ) -> None:
        is_counting = settings.flop_counter and ranks.is_main
        self.flops = 0.0
        self._rank = ranks.rank
        self._is_cuda = ranks.device.type == "cuda"
        self._waited_seconds = 0.0
        self._folder = run / "profile"
        if settings.profiler_dir:
            self._folder = expanded(settings.profiler_dir)
        formula = flop_formula(model)
        self._formula = formula
        ranks.all_gather_floats(0)  # a barrier: all ranks begin at the same time
        rate = matmul_rate(formula.product, dtype, ranks.device)
        peak = published_peak(dtype, ranks.device)
        rates = ranks.all_gather_floats(rate, peak)  # [ranks, 2]
        if self._is_cuda:
            torch.cuda.empty_cache()  # frees the tensors of the measurement
        # name of a metric -> FLOP/s of all ranks; a rate of 0 is unknown
        self._limits = dict[str, float]()
        measured, published = rates.T.tolist()
        if all(measured):
            self._limits["perf/matmul_utilization"] = sum(measured)
        if all(published):
            self._limits["perf/mfu"] = sum(published)
        self._end: Any = None  # time at the end of the previous step
        self._unread: dict[int, _StepTimes] = {}
        self._counted_step = settings.flop_counter_start if is_counting else None
        self._counter: FlopCounterMode | None = None
        self._profile = self._make_profile() if settings.use_profiler else None
        facts.add(
            speed={
                "product_flops_per_second": measured,
                "flops_per_token": formula.per_token,
            }
        )

    def _make_profile(self) -> profile:
        activities = [ProfilerActivity.CPU]
        if self._is_cuda:
            activities.append(ProfilerActivity.CUDA)
        steps = schedule(wait=STEPS_BEFORE_PROFILE - 1, warmup=1, active=PROFILED_STEPS, repeat=1)
        return profile(
            activities=activities,
            schedule=steps,
            on_trace_ready=self._log_profile,
            record_shapes=True,
        )

    def __enter__(self) -> Self:
        if self._profile is not None:
            self._profile.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._profile is not None and error is None:
            # if the run ends during profiling, the profile covers its last steps
            self._profile.stop()

    def begin_step(
        self,
        step: int,
        lengths: Sequence[int],
        targets: int,
        waited_seconds: float,
        processes: int = 1,
    ) -> None:
        """Begin to measure a step.

        Args:
            step: counted from 1.
            lengths: tokens of each sample of this data rank.
            targets: its loss tokens.
            waited_seconds: how long training waited for the batches.
            processes: that compute these samples together, each a part of their tokens.
        """
        self._waited_seconds = waited_seconds
        self.count(lengths, targets, processes)
        if self._counted_step is not None and step >= self._counted_step:
            self._counted_step = None
            self._counter = FlopCounterMode(display=False).__enter__()
        self._end = self._end or self._now()

    def count(self, lengths: Sequence[int], targets: int, processes: int = 1) -> None:
        """Count the FLOPs of a step. Arguments: see `begin_step`."""
        self.flops = sum(self._formula.of(lengths, targets)) / processes

    def end_step(self, step: int, tokens: float, flops: float) -> None:
        """Take the time after the weights' update (on a GPU: when it is queued). Arguments: sums of
        all ranks."""
        start = self._end
        self._end = self._now()
        self._unread[step] = _StepTimes(tokens, flops, self._waited_seconds, start, self._end)
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            total = self._counter.get_total_flops() / GIGA
            by_formula = self.flops / GIGA
            self._counter = None
            counted = f"FLOPs of step {step} on rank 0: {total:.3g} GFLOP as torch counts them"
            log.info(f"{counted}, {by_formula:.3g} GFLOP by the formula of perf/mfu")
        if self._profile is not None:
            self._profile.step()

    def pause(self) -> None:
        """Exclude the time until the next step from it, because an evaluation or a checkpoint
        follows."""
        self._end = None

    def metrics(self, step: int) -> dict[str, float]:
        """Return the metrics of a finished step. Call it once per step. On a GPU it waits until the
        step is done."""
        times = self._unread.pop(step)
        if self._is_cuda:
            times.end.synchronize()
            seconds = times.start.elapsed_time(times.end) / 1000
        else:
            seconds = times.end - times.start
        metrics = {
            "perf/tokens_per_second": times.tokens / seconds,
            "perf/step_seconds": seconds,
            "perf/data_wait_seconds": times.waited_seconds,
        }
        for name, limit in self._limits.items():
            metrics[name] = times.flops / seconds / limit
        return metrics

    def _now(self) -> Any:
        """Return the current time; on a GPU an event in its stream."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _log_profile(self, finished: profile) -> None:
        table = finished.key_averages().table(
            sort_by="self_device_time_total" if self._is_cuda else "self_cpu_time_total",
            row_limit=OPERATORS_SHOWN,
            max_name_column_width=50,
        )
        log.info(table)
        self._folder.mkdir(parents=True, exist_ok=True)
        finished.export_chrome_trace(str(self._folder / f"rank-{self._rank}.json.gz"))
        log.info(f"Traces of all ranks: {self._folder}")
