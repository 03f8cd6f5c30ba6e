"""How fast training is beside how fast it could be, at every step; on request torch's profiler and FLOP counter."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Self

import torch
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.flop_counter import FlopCounterMode
from transformers.modeling_utils import PreTrainedModel

from llama_ft.config import ProfileConfig
from llama_ft.config.rules import PROFILED_STEPS, STEPS_BEFORE_PROFILE
from llama_ft.observe import flop_counter
from llama_ft.observe.flops import flop_formula, product_rate, published_peak
from llama_ft.observe.run_metadata import RunMetadata
from llama_ft.runtime import Runtime, log

OPERATORS_SHOWN = 12


class MicroBatch(Protocol):
    """What is needed of one here."""

    @property
    def row_lengths(self) -> list[int]: ...

    @property
    def target_tokens(self) -> int: ...


class ThroughputMeter:
    """A context manager around the steps of a run; every rank has one.

    At its making all ranks together measure how fast matmuls of the model's own shape are, which takes a tenth of a
    second. `perf/matmul_utilization` is the model FLOPs of a step (see observe.flops) over what all ranks could compute
    at that rate in its seconds; `perf/mfu` is the same with the GPUs' published peak, where that is known.

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
        self._formula = flop_formula(model)
        job.all_gather_floats(0)  # begin together
        rate, peak = product_rate(self._formula.product, dtype, job.device), published_peak(dtype, job.device)
        rates = job.all_gather_floats(rate, peak)
        self._rate, self._peak = (sum(each) if all(each) else None for each in rates.T.tolist())
        self._steps = 0
        self._started = self._waited = 0.0
        # By step: tokens, FLOPs, seconds of waiting, the host's seconds, and on a GPU the events that count instead.
        self._unread: dict[int, tuple[float, float, float, float, list[torch.cuda.Event]]] = {}
        self._is_cuda = job.device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._profile: profile | None = None
        self._is_to_count = settings.flop_counter and job.is_main
        self._counter: FlopCounterMode | None = None
        name, text, formula = str(dtype).removeprefix("torch."), flop_counter.flops_text, self._formula
        published = f" (published peak: {text(self._peak)}/s)" if self._peak else ""
        log.info(
            f"Matrix products in {name} run at {text(self._rate or 0)}/s, all ranks together{published}. A token takes "
            f"{text(formula.per_token)}, {formula.per_token / formula.weights:.2g} for each of "
            f"{formula.weights:,} weights, and attention"
        )
        speed = {"product_flops_per_second": rates[:, 0].tolist(), "published_flops_per_second": self._peak}
        speed |= {"dtype": name, "flops_per_token": formula.per_token, "weights": formula.weights}
        facts.add(speed=speed)

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

    def begin_step(self, step: int, batches: Sequence[MicroBatch], waited_seconds: float) -> None:
        """A step begins, for whose samples this rank has waited so long."""
        self._steps += 1
        self._waited = waited_seconds
        targets = sum(batch.target_tokens for batch in batches)
        self.flops = sum(self._formula.of((length for batch in batches for length in batch.row_lengths), targets))
        if self._is_to_count and step >= self._settings.flop_counter_start:
            self._is_to_count = False
            self._counter = flop_counter.counter().__enter__()
        self._started = time.perf_counter() - waited_seconds
        self._events = []
        self._mark()

    def end_step(self, step: int, tokens: float, flops: float) -> None:
        """Its weights are updated, or on a GPU will be.

        Args:
            step: the present one.
            tokens: input tokens that are not padding, of all ranks.
            flops: `flops` of all ranks.
        """
        self._mark()
        self._unread[step] = tokens, flops, self._waited, time.perf_counter() - self._started, self._events
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            log.info(flop_counter.describe(self._counter, self.flops, step))
            self._counter = None
        if self._profile is not None:
            self._profile.step()

    def metrics(self, step: int) -> dict[str, float]:
        """Of a step that has ended, once. On a GPU this waits until it really has, and its seconds are the device's."""
        tokens, flops, waited_seconds, seconds, events = self._unread.pop(step)
        if events:
            events[1].synchronize()
            seconds = events[0].elapsed_time(events[1]) / 1000 + waited_seconds
        found = {
            "perf/tokens_per_second": tokens / seconds,
            "perf/step_seconds": seconds,
            "perf/data_wait_seconds": waited_seconds,
        }
        limits = {"perf/matmul_utilization": self._rate, "perf/mfu": self._peak}
        return found | {name: flops / seconds / limit for name, limit in limits.items() if limit}

    def _mark(self) -> None:
        """Note this moment in what the GPU has been sent."""
        if self._is_cuda:
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()

    def _log_profile(self, finished: profile) -> None:
        if self._steps <= STEPS_BEFORE_PROFILE:
            log.warning(f"--use_profiler: nothing is profiled: training ended before step {STEPS_BEFORE_PROFILE + 1}.")
            return
        by = "self_device_time_total" if self._is_cuda else "self_cpu_time_total"
        log.info(finished.key_averages().table(sort_by=by, row_limit=OPERATORS_SHOWN, max_name_column_width=50))
        self._folder.mkdir(parents=True, exist_ok=True)
        finished.export_chrome_trace(str(self._folder / f"rank-{self._job.rank}.json.gz"))
        log.info(f"Traces of all ranks: {self._folder}")
