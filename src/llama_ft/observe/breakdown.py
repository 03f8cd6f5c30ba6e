"""Where the seconds of one profiled step went, by what was computed.

torch.profiler has every operator with its begin and end. On the CPU they are nested in one thread; on CUDA a kernel
points back to the operator that launched it, and kernels of several streams run at once. There a moment belongs to the
first part of ORDER that is at work in it: communication that other kernels hide is not seen.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

from torch.autograd import DeviceType

FUNCTION, BACKWARD_FUNCTION = 0, 1  # of torch's RecordScope
RECOMPUTATION, OTHER = "recomputation", "other operators"
# The outermost operator of a name that fits decides for all within it: copies in a gather are communication. A cast of
# FSDP's around forward is none.
PARTS = {
    "optimizer": re.compile(r"Optimizer\..*"),
    "communication": re.compile(r"FSDP::(?!cast_).*|c10d::.*|_c10d_functional::.*|(nccl|gloo):.*|record_param_comms"),
    RECOMPUTATION: re.compile(r"(?!)"),  # known by its place
    "attention": re.compile(r"(?i).*(attention|attn|ScaledDotProduct).*"),
    "matrix products": re.compile(
        r"aten::(linear|matmul|mm|addmm_?|bmm|baddbmm|_int_mm|_scaled_mm|_grouped_mm)"
        r"|(bitsandbytes|llama_ft)::.*|_(FrozenMatmul|LowRank|Product)(Backward)?|transformers::grouped_mm\w*"
    ),
    OTHER: re.compile(r".*"),
}
ENGINE = "autograd::engine::"
KERNELS_OF_COMMUNICATION = re.compile(r"(?i).*nccl.*")
# As they are shown; of a moment with several kernels at work on CUDA, the first counts.
ORDER = ("matrix products", "attention", OTHER, RECOMPUTATION, "optimizer", "communication")


class Event(Protocol):
    """What is read of torch's profiler events."""

    def name(self) -> str: ...
    def start_ns(self) -> int: ...
    def end_ns(self) -> int: ...
    def start_thread_id(self) -> int: ...
    def scope(self) -> int: ...
    def sequence_nr(self) -> int: ...
    def correlation_id(self) -> int: ...
    def linked_correlation_id(self) -> int: ...
    def device_type(self) -> Any: ...
    def is_user_annotation(self) -> bool: ...


@dataclass(frozen=True)
class Breakdown:
    """Seconds by part, in ORDER, and `rest`: Python, and on CUDA whatever leaves the device idle."""

    seconds: float
    parts: dict[str, float]
    rest: float


class _Operator(NamedTuple):
    """Of the host. In the order of their begin, those around others first."""

    start: int
    minus_end: int
    name: str
    thread: int
    scope: int
    sequence: int
    id: int


def break_down(events: Iterable[Event], label: str, world_size: int) -> Breakdown | None:
    """Break down the block that ran under `record_function(label)`; None where it is not among the events. One process
    sends nothing: the time of FSDP's own Python code belongs to the rest then."""
    operators, kernels = list[_Operator](), list[Event]()
    for it in events:
        if it.device_type() != DeviceType.CPU:
            if not it.is_user_annotation():
                kernels.append(it)
        elif it.linked_correlation_id() == 0:  # others are CUDA's own calls
            place = it.start_ns(), -it.end_ns(), it.name(), it.start_thread_id()
            operators.append(_Operator(*place, it.scope(), it.sequence_nr(), it.correlation_id()))
    frame = next((it for it in operators if it.name == label), None)
    if frame is None:
        return None
    begin, end = frame.start, -frame.minus_end
    operators = sorted(it for it in operators if begin <= it.start < end and it is not frame)
    parts = _parts_of(operators)
    spans = defaultdict[str, list[tuple[int, int]]](list)
    for kernel in kernels:
        is_sent = KERNELS_OF_COMMUNICATION.fullmatch(kernel.name())
        part = "communication" if is_sent else parts.get(kernel.linked_correlation_id())
        if part is not None:  # else it is of a step before
            spans[part].append((kernel.start_ns(), kernel.end_ns()))
    if not kernels:
        for one in operators:
            if one.thread == frame.thread:
                spans[parts[one.id]].append((one.start, -one.minus_end))
    seconds, covered = dict[str, float](), list[tuple[int, int]]()
    for part in ORDER if kernels else PARTS:
        before = sum(stop - start for start, stop in covered)
        covered = _union([*covered, *((max(start, begin), stop) for start, stop in spans[part])])
        seconds[part] = (sum(stop - start for start, stop in covered) - before) / 1e9
    total = (end - begin) / 1e9
    found = {part: seconds[part] for part in ORDER if part != "communication" or world_size > 1}
    return Breakdown(total, found, max(0.0, total - sum(found.values())))


@cache
def _part_named(name: str) -> str:
    return next(part for part, names in PARTS.items() if names.fullmatch(name))


def _parts_of(operators: Iterable[_Operator]) -> dict[int, str]:
    """Operator's id -> part.

    A recomputed operator is one that autograd records (it has a sequence number) inside of a node of its backward pass:
    gradients are off there but for activation checkpointing.
    """
    parts = dict[int, str]()
    decided = defaultdict[int, tuple[int, str]](lambda: (0, OTHER))  # by thread: until when, and what
    node = defaultdict[int, tuple[int, str]](lambda: (0, OTHER))  # of the backward pass, likewise
    for it in operators:
        until, part = decided[it.thread]
        if it.start >= until:
            part = _part_named(it.name)
            if it.scope == BACKWARD_FUNCTION:  # what it does may be recomputation: look at that
                node[it.thread], part = (-it.minus_end, part), OTHER
            elif it.name.startswith(ENGINE):
                part = OTHER
            elif it.start < node[it.thread][0] and it.scope == FUNCTION:
                whole = node[it.thread][1]
                part = RECOMPUTATION if it.sequence >= 0 else whole if whole != OTHER else part
            if part != OTHER:
                decided[it.thread] = -it.minus_end, part
        parts[it.id] = part
    return parts


def _union(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged = list[tuple[int, int]]()
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop)
        elif stop > start:
            merged.append((start, stop))
    return merged
