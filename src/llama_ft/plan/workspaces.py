"""Memory that operators take inside themselves, which fake tensors do not show."""

from typing import Any

import torch


def workspace_bytes(func: Any, args: Any, device: str) -> int:
    """Bytes that an operator allocates and frees before it returns.

    Args:
        func: the operator.
        args: its arguments.
        device: cuda or cpu.
    """
    name = f"{func.namespace}::{func._opname}"
    if name == "bitsandbytes::gemm_4bit":  # the weight is dequantized into the inputs' dtype, then multiplied
        inputs, shape = args[0], args[2]
        return int(torch.Size(shape).numel()) * inputs.dtype.itemsize
    return 0
