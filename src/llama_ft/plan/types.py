"""A plan: the memory that a run will need, by what holds it, at the peak of each of its phases; and what is planned."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llama_ft.config import Config
from llama_ft.models import NewTokens
from llama_ft.phases import MemoryCategory, Phase

PLAN_FILE = "plan.json"


@dataclass(frozen=True)
class PlanRequest:
    """What is planned.

    Attributes:
        config: the run's settings.
        folder: of the model: config.json, and the checkpoint's headers where there are weights.
        world_size: ranks.
        local_world_size: ranks of a node.
        device: what they compute on.
        longest_row: tokens of the longest row, which may be truncated, for padded batches; None: context_length.
        new_tokens: that the model gets rows for.
        target_share: of the tokens, how many count in the loss.
        size: packs, or rows, that there are; None: enough.
        has_validation: whether there are rows to evaluate on.
    """

    config: Config
    folder: Path
    world_size: int
    local_world_size: int
    device: Literal["cuda", "cpu"]
    longest_row: int | None = None
    new_tokens: NewTokens | None = None
    target_share: float = 1.0
    size: int | None = None
    has_validation: bool = True

    @property
    def micro_batch(self) -> int:
        """Packs, or rows, of a rank's micro-batch."""
        asked = self.config.train.batch_size_training
        return asked if self.size is None else min(asked, max(1, -(-self.size // self.world_size)))

    def row_length(self, context_length: int) -> int:
        """Tokens of the longest row of a batch."""
        return min(context_length, self.longest_row or context_length)


@dataclass(frozen=True)
class Peak:
    """The moment of a phase at which most is held.

    Attributes:
        phase: which.
        bytes: of all tensors on the device.
        holders: the same by what holds them; they add up to `bytes`.
        module: the innermost module at work, "" where none was.
    """

    phase: Phase
    bytes: int
    holders: dict[MemoryCategory, int]
    module: str


@dataclass(frozen=True)
class Moment:
    """A point of a step (not of the first, which has no optimizer state yet), where a module begins or ends.

    Attributes:
        label: `forward model.layers.3`, `backward lm_head`, `optimizer step`.
        bytes: of all tensors on the device.
        gathered_bytes: of which of gathered units.
    """

    label: str
    bytes: int
    gathered_bytes: int


@dataclass(frozen=True)
class Plan:
    """What rank 0 of a run will hold. No rank holds more: rows are dealt like torch.chunk.

    Attributes:
        device: cuda or cpu: what was planned for.
        world_size: ranks.
        peaks: one for each phase the run has, in order.
        timeline: a step, moment by moment; empty in a quick plan.
        reserved_bytes: what torch's CUDA allocator takes from the device for it, from a simulation of the allocator; on
            the CPU the largest peak.
        outside_bytes: on the device, beside torch: CUDA context and NCCL's buffers (an assumption); 0 on the CPU.
        host_load_bytes: host memory for tensors of this rank while loading; on the CPU the load peak.
        host_save_bytes: the same while saving.
        checkpoint_bytes: of one checkpoint on disk, all ranks together.
        result_bytes: of output_dir/model.
        sent_bytes: that a rank sends in a step, by collective.
        largest_unit: name of the unit with most bytes when gathered, "" is the root.
        largest_unit_bytes: those.
        tokens: input tokens of a rank's micro-batch.
        is_quick: whether it was extrapolated from two models with few layers.
        seconds: that planning took.
    """

    device: Literal["cuda", "cpu"]
    world_size: int
    peaks: list[Peak]
    timeline: list[Moment]
    reserved_bytes: int
    outside_bytes: int
    host_load_bytes: int
    host_save_bytes: int
    checkpoint_bytes: int
    result_bytes: int
    sent_bytes: dict[str, int]
    largest_unit: str
    largest_unit_bytes: int
    tokens: int
    is_quick: bool
    seconds: float

    @property
    def peak(self) -> Peak:
        """The largest of the peaks."""
        return max(self.peaks, key=lambda peak: peak.bytes)

    @property
    def device_bytes(self) -> int:
        """What the device must have."""
        return self.reserved_bytes + self.outside_bytes

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return dataclasses.asdict(self)

    def save(self, folder: Path) -> None:
        """Write it into a run's directory."""
        (folder / PLAN_FILE).write_text(json.dumps(self.to_json()) + "\n")


def read_plan(folder: Path) -> Plan | None:
    """The plan in a run's directory; None where there is none."""
    try:
        values = json.loads((folder / PLAN_FILE).read_text())
        values["peaks"] = [Peak(**peak) for peak in values["peaks"]]
        return Plan(**{**values, "timeline": [Moment(**moment) for moment in values["timeline"]]})
    except (OSError, ValueError, KeyError, TypeError):
        return None
