"""A plan, the predicted memory of a run by category at the peak of each phase; and the request for
a plan."""

import dataclasses
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch
from transformers import PretrainedConfig

from llama_ft.config import Config
from llama_ft.config.wording.messages import size_text
from llama_ft.data import Batch, StepBatches
from llama_ft.models import BuildModel, BuiltModel, NewTokens
from llama_ft.phases import MEMORY_CATEGORIES, MemoryCategory, Phase
from llama_ft.runtime import Ranks
from llama_ft.training import LoopState, Objective, StepOutcome

Result = TypeVar("Result")
PLAN_FILE = "plan.json"
# Memory that the CUDA allocator reserves, over allocated memory. Simulations of it for 11 plans of 1B
# to 70B (full fine-tuning, LoRA and quantized, on 1 to 16 GPUs) gave 1.002 to 1.025.
SLACK = 1.03
# --tiled_mlp auto is off for micro-batches up to here: without a plan, so that no run waits for one.
UNTILED_TOKENS = 8192


@dataclass(frozen=True)
class Recipe:
    """The functions of a recipe that a plan runs, on tensors without values. What a copy of the
    recipe changes in them is planned."""

    build_model: BuildModel
    build_objective: Callable[[Config], Objective]
    train_step: Callable[
        [BuiltModel, Objective, torch.optim.Optimizer, StepBatches, LoopState, Ranks], StepOutcome
    ]


class PlannedExample(Protocol):
    """What an example of a planned micro-batch begins with."""

    def batch(self, plain: Batch) -> Batch:
        """Return a micro-batch in which each example begins with it."""


class PlannedMedia(Protocol):
    """What is not text in a planned micro-batch, from an extension."""

    def example(
        self, request: "PlanRequest", model_config: PretrainedConfig, length: int
    ) -> PlannedExample:
        """Return what examples of `length` tokens begin with. Raises UserError if the model has no
        processor, or if there is no room."""


@dataclass(frozen=True)
class PlannedGeneration:
    """What it takes to generate the examples of an optimizer step, see `GeneratedSteps`. The fields
    are those of `Plan`: weights, keys and values are read once per token of a batch."""

    generated_tokens: int
    generation_flops: int
    generation_bytes: int


class SharedResults:
    """What the plans of a search read or build once."""

    def __init__(self) -> None:
        self._results = dict[tuple[Any, ...], Any]()

    def get(self, key: tuple[Any, ...], compute: Callable[[], Result]) -> Result:
        """Return the result of `compute`, which is called once for equal keys."""
        if key not in self._results:
            self._results[key] = compute()
        result: Result = self._results[key]
        return result


@dataclass(frozen=True)
class PlanRequest:
    """The run to plan."""

    config: Config
    folder: Path  # directory with config.json and, if there are weights, headers
    world_size: int
    local_world_size: int
    device: Literal["cuda", "cpu"]
    longest_example: int | None = None  # tokens, for padded batches; None: context_length
    new_tokens: NewTokens | None = None  # added to the model's vocabulary
    target_share: float = 1.0  # share of the tokens in the loss, 0 to 1
    size: int | None = None  # number of packed sequences, or samples; None: unlimited
    has_validation: bool = True
    # examples and loss tokens of the training data, for a teacher's file; None: unknown
    samples: tuple[int, int] | None = None
    media: PlannedMedia | None = None  # None: all samples are text
    # tokens of packed sequences, which may be above the model's positions; None: as the settings say
    pack_length: int | None = None
    # of all requests of a search, which `dataclasses.replace` makes of the first one
    shared: SharedResults = field(default_factory=SharedResults, compare=False, repr=False)

    @property
    def data_size(self) -> int:
        """Number of data ranks, which share the samples; see `Ranks.data`."""
        return self.world_size // self.config.fsdp.sequence_parallel_size


@dataclass(frozen=True)
class Peak:
    """The moment of a phase with the highest memory."""

    phase: Phase
    bytes: int  # all tensors on the device
    holders: dict[MemoryCategory, int]  # category -> bytes


@dataclass(frozen=True)
class Plan:
    """Predicted memory of rank 0. No rank needs more: sharding works like torch.chunk, so rank 0
    has a full shard."""

    device: Literal["cuda", "cpu"]
    world_size: int
    peaks: list[Peak]  # one per phase of the run, in order
    # what torch's CUDA allocator reserves: 3% more than the largest peak; on the CPU that peak
    reserved_bytes: int
    # CUDA context and NCCL's buffers (an assumption), not counted by torch; 0 on the CPU
    outside_bytes: int
    # host memory for tensors of this rank while loading; on the CPU the load peak
    host_load_bytes: int
    host_save_bytes: int  # the same while saving
    checkpoint_bytes: int  # size of one checkpoint on disk, all ranks together
    result_bytes: int  # size of output_dir/model
    tokens: int  # per micro-batch of a data rank
    is_quick: bool  # extrapolated from two models with few layers
    step_flops: int = 0  # of an optimizer step, with recomputation by activation checkpointing
    step_bytes: int = 0  # that operators of a step move, see plan/fake/moved_bytes.py
    micro_batches: int = 1  # of a data rank in an optimizer step
    generated_tokens: int = 0  # in an optimizer step, all ranks together, at most
    generation_flops: int = 0  # of a rank for the prompts of a step
    generation_bytes: int = 0  # that a rank reads to generate the answers of a step
    teacher_bytes_per_token: int = 0  # of the file of --objective distill, per loss token
    teacher_bytes: int = 0  # of all of that file; 0 if the data are unknown
    sequence_size: int = 1  # ranks that share each packed sequence
    host_activation_bytes: int = 0  # pinned host memory of offloaded activations
    # peaks of the phases in which answers are generated, if FSDP units stay unsharded for the length of
    # an answer; none without answers or without units to unshard
    kept_peaks: list[Peak] = field(default_factory=list)
    keeps_units: bool = False  # they do, and `peaks` has these peaks

    @property
    def data_size(self) -> int:
        """Number of data ranks, which share the samples; see `Ranks.data`."""
        return self.world_size // self.sequence_size

    def with_kept_units(self) -> "Plan":
        """Return the plan of the run if it keeps units unsharded while it generates answers."""
        highest = {peak.phase: peak for peak in self.peaks}
        for peak in self.kept_peaks:
            highest[peak.phase] = max(peak, highest[peak.phase], key=lambda each: each.bytes)
        more = max(peak.bytes for peak in highest.values()) - self.peak.bytes
        return dataclasses.replace(
            self,
            peaks=list(highest.values()),
            reserved_bytes=self.reserved_bytes + round(more * self._slack),
            keeps_units=True,
        )

    @property
    def _slack(self) -> float:
        return SLACK if self.device == "cuda" else 1.0

    @property
    def peak(self) -> Peak:
        """The highest peak."""
        return max(self.peaks, key=lambda peak: peak.bytes)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory for this rank's tensors. On the CPU they are the device's."""
        return max(self.host_load_bytes, self.host_save_bytes + self.host_activation_bytes)

    @property
    def device_bytes(self) -> int:
        """Bytes that the device must have."""
        return self.reserved_bytes + self.outside_bytes

    def save(self, folder: Path) -> None:
        """Write the plan into a run's directory."""
        (folder / PLAN_FILE).write_text(json.dumps(dataclasses.asdict(self)) + "\n")


def read_plan(folder: Path) -> Plan | None:
    """Return the plan in a run's directory; None if there is none."""
    try:
        values = json.loads((folder / PLAN_FILE).read_text())
        for name in ("peaks", "kept_peaks"):
            values[name] = [Peak(**peak) for peak in values.get(name, ())]
        return Plan(**values)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def describe(plan: Plan) -> str:
    """Return the plan as a table, with further notes below."""
    is_cuda = plan.device == "cuda"
    peak = plan.peak
    peaks = plan.peaks
    widths = [max(11, len(peak.phase) + 2) for peak in peaks]

    def row(name: str, cells: Iterable[str]) -> str:
        aligned = [f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)]
        return f"  {name:<24}" + "".join(aligned)

    def sizes(name: MemoryCategory) -> list[str]:
        return [f"{peak.holders[name] / 2**20:,.0f}" for peak in peaks]

    noun = "ranks" if plan.world_size > 1 else "rank"
    ranks = f"{plan.world_size} {noun} ({plan.device.upper()})"
    spare = size_text(plan.reserved_bytes - peak.bytes)
    outside = size_text(plan.outside_bytes)
    on_gpu = f"A GPU needs {size_text(plan.device_bytes)}, including {spare} of allocator overhead and about {outside}"
    load = size_text(plan.host_load_bytes)
    save = size_text(plan.host_save_bytes)
    lines = [
        f"Rank 0 of {ranks}, micro-batches of {plan.tokens:,} tokens, all in the loss. MiB at the peak of each phase:",
        row("", [peak.phase for peak in peaks]),
    ]
    for name in MEMORY_CATEGORIES:
        cells = sizes(name)
        if set(cells) != {"0"}:
            lines.append(row(name, cells))
    lines.append(row("all tensors", [f"{peak.bytes / 2**20:,.0f}" for peak in peaks]))
    lines.append(f"\nPeak: {size_text(peak.bytes)} of tensors, in phase {peak.phase}.")
    # Measured on an AMD Zen 4: 0.4 GiB after all imports; runs on the CPU with 2 and 4 ranks took
    # 0.4 to 1.2 GiB in addition to their tensors after a few steps.
    if is_cuda:
        libraries = "CUDA and NCCL" if plan.world_size > 1 else "CUDA"
        lines.append(f"{on_gpu} for {libraries}.")
        on_host = f"Host memory per rank for tensors: {load} while loading, {save} while saving"
        if plan.host_activation_bytes:
            on_host += f", {size_text(plan.host_activation_bytes)} of offloaded activations"
        lines.append(f"{on_host}; Python and its libraries take 0.5 to 2 GiB more.")
    else:
        python = "Python and its libraries take 0.4 GiB more, and unused heap up to 0.8 GiB"
        lines.append(f"All of it is host memory; {python}.")
    lines.append(
        f"On disk: {size_text(plan.checkpoint_bytes)} per checkpoint, "
        f"{size_text(plan.result_bytes)} for the final model."
    )
    if plan.keeps_units:
        lines.append("FSDP units stay unsharded while answers are generated.")
    elif plan.kept_peaks:
        size = size_text(plan.with_kept_units().device_bytes)
        lines.append(
            f"FSDP units stay unsharded while answers are generated if there is room; then it needs {size}."
        )
    if plan.teacher_bytes_per_token:
        whole = f": {size_text(plan.teacher_bytes)}" if plan.teacher_bytes else ""
        per_token = f"{plan.teacher_bytes_per_token:,} bytes per token in the loss"
        lines.append(f"The teacher's file takes {per_token}{whole}.")
    if plan.is_quick:
        lines.append("Extrapolated from 3 and 5 layers.")
    return "\n".join(lines)
