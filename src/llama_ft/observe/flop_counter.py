"""--flop_counter: the FLOPs of one step as torch counts them, operator by operator, beside the formula's."""

from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

SHARES_SHOWN = 0.001


def counter() -> FlopCounterMode:
    """torch's counter, which also knows attention on the CPU, quantized products and experts'."""
    import bitsandbytes  # noqa: F401  # registers torch.ops.bitsandbytes

    aten, quantized = torch.ops.aten, torch.ops.bitsandbytes
    mapping: dict[Any, Any] = {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda *shapes, **_: sdpa_flop_count(*shapes[:3]),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda *shapes, **_: sdpa_backward_flop_count(
            *shapes[:4]
        ),
        aten.addmm_: lambda added, a, b, **_: 2 * prod(a) * b[-1],
        # Rows sorted by expert [rows, k] x weights [experts, k, n]; for the weights' gradient [k, rows] x [rows, n].
        aten._grouped_mm: lambda a, b, *_, **__: 2 * prod(a) * b[-1],
        quantized.gemm_4bit: _of_output,
        quantized.int8_scaled_mm: _of_output,
        quantized.int8_mixed_scaled_mm: _of_output,
    }
    if hasattr(torch.ops.transformers, "grouped_mm_fallback"):
        mapping[torch.ops.transformers.grouped_mm_fallback] = mapping[aten._grouped_mm]
        mapping[torch.ops.transformers.grouped_mm_fallback_backward] = lambda a, b, *_, **__: 4 * prod(a) * b[-1]
    return FlopCounterMode(display=False, custom_mapping=mapping)


def describe(counted: FlopCounterMode, expected: float, step: int) -> str:
    """What was counted in a step by operator, beside what the formula has for the same samples."""
    total = counted.get_total_flops()
    by_operator = sorted(counted.get_flop_counts().get("Global", {}).items(), key=lambda item: -item[1])
    lines = [
        f"FLOPs of step {step} on rank 0: {flops_text(total)} as torch counts them, {flops_text(expected)} by the "
        f"formula of perf/mfu: {total / expected:.2f} x"
    ]
    for operator, flops in by_operator:
        if flops > SHARES_SHOWN * total:
            lines.append(f"  {operator!s:<58} {flops_text(flops):>12} {flops / total:>7.1%}")
    return "\n".join(lines)


def flops_text(flops: float) -> str:
    """12.3 GFLOP."""
    power = max(0, min(5, (len(f"{flops:.0f}") - 1) // 3))
    return f"{flops / 1000**power:.3g} {['', 'k', 'M', 'G', 'T', 'P'][power]}FLOP"


def _of_output(a: torch.Size, *_: Any, out_shape: Any, **__: Any) -> int:
    """Each element of the output is a sum over the inputs' last dimension."""
    shape = out_shape if isinstance(out_shape, torch.Size) else out_shape[0]
    return 2 * prod(shape) * a[-1]
