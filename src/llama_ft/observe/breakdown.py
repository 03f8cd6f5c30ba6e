"""Where the seconds of one profiled step went, by what was computed: the table that docs/slow.md explains."""

import re
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy
from torch.autograd import DeviceType

# The outermost operator whose name fits decides for all within it: copies in a gather are communication. A cast of
# FSDP's around forward is none. On CUDA, with kernels of several streams at once, a moment belongs to the first part
# that is at work in it: communication that other kernels hide is not seen.
PARTS = {
    "matrix products": r"aten::(linear|matmul|mm|addmm_?|bmm|baddbmm|_int_mm|_scaled_mm|_grouped_mm)"
    r"|(bitsandbytes|llama_ft)::.*|_(FrozenMatmul|LowRank|Product)(Backward)?|transformers::grouped_mm\w*",
    "attention": r"(?i:.*(attention|attn|ScaledDotProduct).*)",
    "other operators": r"(?!)",
    "optimizer": r"Optimizer\..*",
    "communication": r"FSDP::(?!cast_).*|c10d::.*|_c10d_functional::.*|(nccl|gloo):.*|record_param_comms",
}
OTHER, COMMUNICATION = 2, 4  # their places in it


def break_down(events: Iterable[Any], label: str, world_size: int) -> dict[str, float] | None:
    """Seconds of each part of the block that ran under `record_function(label)`, and last of what is none of them:
    Python, and on CUDA whatever leaves the device idle. None where there is no such block.

    Args:
        events: torch.profiler's own, `kineto_results.events()`.
        label: the block's.
        world_size: one process sends nothing; the time of FSDP's own Python code belongs to the rest then.
    """
    events = sorted(events, key=lambda it: (it.start_ns(), -it.end_ns()))  # those around others first
    kernels = [it for it in events if it.device_type() != DeviceType.CPU and not it.is_user_annotation()]
    host = [it for it in events if it.device_type() == DeviceType.CPU and it.linked_correlation_id() == 0]
    if (block := next((it for it in host if it.name() == label), None)) is None:
        return None
    begin, end = block.start_ns(), block.end_ns()
    outer = defaultdict[int, tuple[int, int]](lambda: (0, OTHER))  # by thread: until when, and what
    parts, spans = dict[int, int](), list[tuple[int, Any]]()
    for it in (it for it in host if begin <= it.start_ns() < end and it is not block):
        thread = it.start_thread_id()
        if it.start_ns() >= outer[thread][0]:
            part = _part_named(it.name())
            outer[thread] = it.end_ns() if part != OTHER else 0, part
        parts[it.correlation_id()] = outer[thread][1]
        if thread == block.start_thread_id():
            spans.append((outer[thread][1], it))
    if kernels:
        launched = [
            (COMMUNICATION if "nccl" in it.name() else parts.get(it.linked_correlation_id()), it) for it in kernels
        ]
        spans = sorted(((part, it) for part, it in launched if part is not None), key=lambda span: -span[0])
    tick = max(1000, (end - begin) // 10**7)  # nanoseconds
    spans = [(part, it) for part, it in spans if part != COMMUNICATION or world_size > 1]
    moments = numpy.full(-(-(end - begin) // tick), len(PARTS), numpy.int8)
    for part, it in spans:
        moments[max(0, it.start_ns() - begin) // tick : max(0, it.end_ns() - begin) // tick] = part
    counts = numpy.bincount(moments, minlength=len(PARTS) + 1) * (tick / 1e9)
    return dict(zip([*PARTS, "Python and the rest"], counts.tolist(), strict=True))


@cache
def _part_named(name: str) -> int:
    return next((place for place, names in enumerate(PARTS.values()) if re.fullmatch(names, name)), OTHER)
