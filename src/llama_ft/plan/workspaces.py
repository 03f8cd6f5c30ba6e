"""Memory that operators take inside themselves, which fake tensors do not show."""

from typing import Any

import torch

from llama_ft.models import lora_linear
from llama_ft.runtime import cpu_kernels


def workspace_bytes(func: Any, args: Any, device: str) -> int:
    """Bytes that an operator allocates and frees before it returns.

    Args:
        func: the operator.
        args: its arguments.
        device: cuda or cpu.
    """
    if device == "cpu" and func.namespace == "aten" and cpu_kernels.is_installed():
        return cpu_kernels.workspace_bytes(func, args)
    if func.namespace == "llama_ft" and func._opname == "lora_linear":
        return lora_linear.workspace_bytes(args)
    if func.namespace != "bitsandbytes":
        return 0
    inputs: torch.Tensor = args[0]
    if func._opname == "gemm_4bit":  # the weight is dequantized into the inputs' dtype, then multiplied
        return int(torch.Size(args[2]).numel()) * inputs.dtype.itemsize
    if func._opname == "quantize_4bit" and device == "cpu":  # an fp32 copy, scaled, clamped, and int32 codes
        return inputs.numel() * 4 * 4
    if func._opname == "int8_vectorwise_quant" and device == "cpu":
        return inputs.numel() * 4
    if func._opname == "optimizer_update_8bit_blockwise" and device == "cpu":
        # In fp32: both states, the gradient, the second state's root before and after a division, narrower weights.
        return int(args[2].numel() * 4 * (5 if args[2].dtype == torch.float32 else 6))
    if func._opname == "int8_scaled_mm" and device == "cuda":  # int32 sums, then fp16
        return int(inputs.shape[0] * args[1].shape[0] * (4 + 2))
    return 0
