"""Memory of devices: as `--fit` names it, and as this machine has it."""

import math
from typing import Any

from llama_ft.config.messages import nearest, size_text
from llama_ft.config.run_settings import parse_size
from llama_ft.errors import UserError

# CUDA's context with the libraries' kernels, and NCCL's buffers for a few communicators: not torch's to count.
CUDA_CONTEXT_BYTES, NCCL_BYTES = 600 * 2**20, 500 * 2**20
# GiB: the low end of the totals that torch's out-of-memory messages show (22.03 on an L4, 23.64 on an RTX 4090, 79.15
# to 79.25 on an A100): ECC, firmware and driver take the rest of what is on the box.
TABLE: dict[str, float] = {
    "t4": 14.5,
    "a10": 22.0,
    "l4": 21.9,
    "l40s": 44.3,
    "rtx3090": 23.5,
    "rtx4090": 23.5,
    "rtx5090": 31.3,
    "a100-40": 39.3,
    "a100": 79.1,
    "h100": 79.1,
    "h200": 139.7,
    "b200": 178.3,
    "mi300x": 191.5,
}


def device_bytes(text: str) -> int:
    """Return what `--fit` names: `h100`, `80GiB`, `24000MB`; UserError if it is neither a GPU nor a size."""
    if gigabytes := TABLE.get(text.lower()):
        return int(gigabytes * 2**30)
    try:
        return parse_size(text)
    except ValueError:
        meant = nearest(text.lower(), TABLE)
        hint = f" Did you mean {meant}?" if meant else ""
        known = f"the memory of a rank, such as 80GiB, or one of {', '.join(TABLE)}"
        raise UserError(f"--fit {text}: expected {known}.{hint}") from None


def free_bytes(device: Any, local_world_size: int, memory_fraction: float | None = None) -> float:
    """Return what a rank of this machine could hold on a torch.device now, as a plan counts it: with CUDA itself and
    NCCL, without Python's libraries; inf where that cannot be known. `memory_fraction` is torch's share of a GPU."""
    import torch  # takes 6 s, and a command line is answered before

    from llama_ft.runtime.out_of_memory import host_memory

    if device.type != "cuda":
        host = host_memory()
        return math.inf if host is None else host.available_bytes // local_world_size
    if not torch.cuda.is_available():
        return math.inf
    free, total = torch.cuda.mem_get_info(device)
    most = total if memory_fraction is None else int(total * memory_fraction) + NCCL_BYTES
    return min(free, most) + CUDA_CONTEXT_BYTES


def free_text(free: float) -> str:
    """Show what `free_bytes` has returned."""
    return "unknown" if math.isinf(free) else size_text(int(free))
