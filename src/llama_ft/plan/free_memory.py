"""How much memory a rank can use on a device now, and what a plan adds to its tensors."""

import math

import torch

from llama_ft.config.wording.messages import size_text
from llama_ft.runtime.ends.out_of_memory import host_memory

# CUDA's context with the kernels of libraries, and NCCL's buffers for a few communicators; torch
# does not count them.
CUDA_CONTEXT_BYTES = 600 * 2**20
NCCL_BYTES = 500 * 2**20


def free_bytes(
    device: torch.device, local_world_size: int, memory_fraction: float | None = None
) -> float:
    """Return the bytes that a rank of this machine could use on the device now, by the rules of a
    plan: CUDA and NCCL count, Python's libraries do not. inf if unknown. `memory_fraction` is
    torch's share of a GPU, 0 to 1."""
    if device.type != "cuda":
        host = host_memory()
        return math.inf if host is None else host.available_bytes // local_world_size
    if not torch.cuda.is_available():
        return math.inf
    free, total = torch.cuda.mem_get_info(device)
    most = total if memory_fraction is None else int(total * memory_fraction) + NCCL_BYTES
    return min(free, most) + CUDA_CONTEXT_BYTES


def free_text(free: float) -> str:
    """Return the result of `free_bytes` as text."""
    return "unknown" if math.isinf(free) else size_text(free)
