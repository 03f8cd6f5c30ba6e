"""How fast training is beside how fast it could be, at every step; on request torch's profiler and FLOP counter."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.flop_counter import FlopCounterMode
from transformers.modeling_utils import PreTrainedModel

from llama_ft.config import ProfileConfig
from llama_ft.config.rules import PROFILED_STEPS, STEPS_BEFORE_PROFILE
from llama_ft.observe.flops import flop_formula, flops_text, product_rate, published_peak
from llama_ft.observe.run_metadata import RunMetadata
from llama_ft.runtime import Runtime, log

OPERATORS_SHOWN = 12


class ThroughputMeter:
    """A context manager around the steps of a run; every rank has one.

    At its making all ranks together measure how fast matmuls of the model's own shape are, which takes a tenth of a
    second. `perf/matmul_utilization` is the model FLOPs of a step (see observe.flops) over what all ranks could compute
    at that rate in its seconds; `perf/mfu` is the same with the GPUs' published peak, where that is known. A step's
    seconds count from the end of the step before, so that logging and gathering between them are part of it.

    Args:
        model: loaded.
        settings: of --use_profiler and --flop_counter.
        dtype: that the model computes in.
        run: the run's directory.
        facts: gets what was measured.
        job: the ranks.

    Attributes:
        flops: model FLOPs of this rank's samples in the present step.
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
        self.flops = 0.0
        self._settings, self._job = settings, job
        self._folder = Path(settings.profiler_dir).expanduser() if settings.profiler_dir else run / "profile"
        self._formula = formula = flop_formula(model)
        job.all_gather_floats(0)  # begin together
        rate, peak = product_rate(formula.product, dtype, job.device), published_peak(dtype, job.device)
        rates = job.all_gather_floats(rate, peak)
        self._rate, self._peak = (sum(each) if all(each) else None for each in rates.T.tolist())
        self._steps, self._waited = 0, 0.0
        self._is_cuda = job.device.type == "cuda"
        self._end: Any = None  # of the step before
        self._unread: dict[int, tuple[float, float, float, Any, Any]] = {}
        self._profile: profile | None = None
        self._is_to_count = settings.flop_counter and job.is_main
        self._counter: FlopCounterMode | None = None
        name = str(dtype).removeprefix("torch.")
        published = f" (published peak: {flops_text(self._peak)}/s)" if self._peak else ""
        log.info(
            f"Matrix products in {name} run at {flops_text(self._rate or 0)}/s, all ranks together{published}. A token "
            f"takes {flops_text(formula.per_token)}, {formula.per_token / formula.weights:.2g} for each of "
            f"{formula.weights:,} weights, and attention"
        )
        speed = {"product_flops_per_second": rates[:, 0].tolist(), "published_flops_per_second": self._peak}
        facts.add(speed=speed | {"flops_per_token": formula.per_token})

    def __enter__(self) -> Self:
        if self._settings.use_profiler:
            self._profile = profile(
                activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._is_cuda else [])],
                schedule=schedule(wait=STEPS_BEFORE_PROFILE - 1, warmup=1, active=PROFILED_STEPS, repeat=1),
                on_trace_ready=self._log_profile,
                record_shapes=True,
            )
            self._profile.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._profile is not None and error is None:
            self._profile.stop()  # of a run that ends while it is profiled, there is a profile of its last steps

    def begin_step(self, step: int, lengths: Sequence[int], targets: int, waited_seconds: float) -> None:
        """A step begins: this rank has samples of these lengths, with so many target tokens, and waited for them."""
        self._steps, self._waited = self._steps + 1, waited_seconds
        self.flops = sum(self._formula.of(lengths, targets))
        if self._is_to_count and step >= self._settings.flop_counter_start:
            self._is_to_count = False
            self._counter = FlopCounterMode(display=False).__enter__()
        self._end = self._end or self._now()

    def end_step(self, step: int, tokens: float, flops: float) -> None:
        """Its weights are updated, or on a GPU will be. `tokens` (without padding) and `flops` are of all ranks."""
        assert self._end is not None
        before, self._end = self._end, self._now()
        self._unread[step] = tokens, flops, self._waited, before, self._end
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            log.info(_describe(self._counter, self.flops, step))
            self._counter = None
        if self._profile is not None:
            self._profile.step()

    def pause(self) -> None:
        """What happened since the last step, an evaluation or a checkpoint, is no part of the next one's time."""
        self._end = None

    def metrics(self, step: int) -> dict[str, float]:
        """Of a step that has ended, once. On a GPU this waits until it really has."""
        tokens, flops, waited_seconds, before, end = self._unread.pop(step)
        if self._is_cuda:
            end.synchronize()
        seconds = before.elapsed_time(end) / 1000 if self._is_cuda else end - before
        found = {"perf/tokens_per_second": tokens / seconds, "perf/step_seconds": seconds}
        found |= {"perf/data_wait_seconds": waited_seconds}
        limits = {"perf/matmul_utilization": self._rate, "perf/mfu": self._peak}
        return found | {name: flops / seconds / limit for name, limit in limits.items() if limit}

    def _now(self) -> Any:
        """This moment, on a GPU in what it has been sent."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _log_profile(self, finished: profile) -> None:
        if self._steps <= STEPS_BEFORE_PROFILE:
            return
        by = "self_device_time_total" if self._is_cuda else "self_cpu_time_total"
        log.info(finished.key_averages().table(sort_by=by, row_limit=OPERATORS_SHOWN, max_name_column_width=50))
        self._folder.mkdir(parents=True, exist_ok=True)
        finished.export_chrome_trace(str(self._folder / f"rank-{self._job.rank}.json.gz"))
        log.info(f"Traces of all ranks: {self._folder}")


def _describe(counted: FlopCounterMode, expected: float, step: int) -> str:
    """What torch counted in a step by operator, beside what the formula has for the same samples."""
    total = counted.get_total_flops()
    line = f"FLOPs of step {step} on rank 0: {flops_text(total)} as torch counts them, {flops_text(expected)} by the "
    lines = [f"{line}formula of perf/mfu: {total / expected:.2f} x"]
    for operator, flops in sorted(counted.get_flop_counts().get("Global", {}).items(), key=lambda item: -item[1]):
        lines.append(f"  {operator!s:<58} {flops_text(flops):>12} {flops / total:>7.1%}")
    return "\n".join(lines)
