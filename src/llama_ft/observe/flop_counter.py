"""--flop_counter: the FLOPs of one step as torch counts them, operator by operator, beside the formula's."""

from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from llama_ft.observe.flops import Flops

SHARES_SHOWN = 0.001
# Counted and not in the formula.
DIFFERENCES = (
    "Counted are also what is recomputed, the pairs of tokens that fused attention masks, and the scores that its "
    "backward pass computes again."
)


def counter() -> FlopCounterMode:
    """torch's counter, which also knows attention on the CPU, quantized products and experts'."""
    import bitsandbytes  # noqa: F401  # registers torch.ops.bitsandbytes

    aten, quantized = torch.ops.aten, torch.ops.bitsandbytes
    mapping: dict[Any, Any] = {
        aten._scaled_dot_product_flash_attention_for_cpu: _of_attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _of_attention_backward,
        aten.addmm_: _of_product,
        aten._grouped_mm: _of_experts,
        quantized.gemm_4bit: _of_output,
        quantized.int8_scaled_mm: _of_output,
        quantized.int8_mixed_scaled_mm: _of_output,
    }
    if hasattr(torch.ops.transformers, "grouped_mm_fallback"):
        mapping[torch.ops.transformers.grouped_mm_fallback] = _of_experts
        mapping[torch.ops.transformers.grouped_mm_fallback_backward] = _of_experts_backward
    return FlopCounterMode(display=False, custom_mapping=mapping)


def describe(counted: FlopCounterMode, formula: Flops, step: int) -> str:
    """A table for people.

    Args:
        counted: after the step.
        formula: of the same rows.
        step: which it was.
    """
    by_operator = counted.get_flop_counts().get("Global", {})
    total, expected = sum(by_operator.values()), sum(formula)
    lines = [
        f"FLOPs of step {step} on rank 0: {flops_text(total)} as torch counts them, {flops_text(expected)} by the "
        f"formula of perf/mfu ({flops_text(formula.attention)} of them attention): {total / expected:.2f} x"
    ]
    for operator, flops in sorted(by_operator.items(), key=lambda item: -item[1]):
        if flops > SHARES_SHOWN * total:
            lines.append(f"  {operator!s:<58} {flops_text(flops):>12} {flops / total:>7.1%}")
    return "\n".join([*lines, f"  {DIFFERENCES}"])


def flops_text(flops: float) -> str:
    """12.3 GFLOP."""
    power = max(0, min(5, (len(f"{flops:.0f}") - 1) // 3))
    return f"{flops / 1000**power:.3g} {['', 'k', 'M', 'G', 'T', 'P'][power]}FLOP"


def _of_attention(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _of_attention_backward(
    gradient: torch.Size, query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any
) -> int:
    return int(sdpa_backward_flop_count(gradient, query, key, value))


def _of_product(added: torch.Size, a: torch.Size, b: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * prod(a) * b[-1]


def _of_experts(a: torch.Size, b: torch.Size, *_: Any, **__: Any) -> int:
    """Rows sorted by expert [rows, k] x weights [experts, k, n]; for the weights' gradient [k, rows] x [rows, n]."""
    return 2 * prod(a) * b[-1]


def _of_experts_backward(a: torch.Size, b: torch.Size, *_: Any, **__: Any) -> int:
    return 4 * prod(a) * b[-1]


def _of_output(a: torch.Size, *_: Any, out_shape: Any, **__: Any) -> int:
    """Each element of the output is a sum over the inputs' last dimension."""
    shape = out_shape if isinstance(out_shape, torch.Size) else out_shape[0]
    return 2 * prod(shape) * a[-1]
