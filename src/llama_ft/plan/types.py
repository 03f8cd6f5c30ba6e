"""A plan: the memory that a run will need, by what holds it, at the peak of each of its phases."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llama_ft.phases import MemoryCategory, Phase

PLAN_FILE = "plan.json"


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
    """What one rank of a run will hold.

    Attributes:
        device: cuda or cpu: what was planned for.
        world_size: ranks.
        rank: the one planned, which holds the most (the first: rows are dealt like torch.chunk).
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
    rank: int
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

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Plan":
        """The plan `to_json` was made of."""
        lists = {"peaks": [Peak(**peak) for peak in values["peaks"]]}
        return cls(**{**values, **lists, "timeline": [Moment(**moment) for moment in values["timeline"]]})

    def save(self, folder: Path) -> None:
        """Write it into a run's directory."""
        (folder / PLAN_FILE).write_text(json.dumps(self.to_json()) + "\n")


@dataclass(frozen=True)
class Change:
    """Settings that would make a run fit.

    Attributes:
        flags: what differs from the recipe, as on the command line.
        gives_up: for people.
        peak_bytes: what the device must have then.
    """

    flags: list[str]
    gives_up: str
    peak_bytes: int


def read_plan(folder: Path) -> Plan | None:
    """The plan in a run's directory; None where there is none."""
    try:
        return Plan.from_json(json.loads((folder / PLAN_FILE).read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return None
