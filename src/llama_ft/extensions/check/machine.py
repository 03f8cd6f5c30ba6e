"""What one rank has: its node, device, versions, free memory, and how fast it computes."""

import os
import platform
import re
import socket
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist

from llama_ft.observe.flops import matmul_rate
from llama_ft.runtime import Ranks
from llama_ft.runtime.ends.out_of_memory import host_memory

DRIVER = Path("/proc/driver/nvidia/version")
PACKAGES = ("torch", "transformers", "peft", "bitsandbytes")
MATMUL_SHAPE = (4096, 4096)
MATMUL_DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}


@dataclass(frozen=True)
class RankFacts:
    """One rank.

    Attributes:
        rank: 0 to world_size - 1.
        node: torchrun's number of the node, and the host name.
        device: name of the GPU, or the CPU with its threads.
        versions: name of a package or driver -> its version.
        free_bytes: of the device, None on a CPU.
        total_bytes: of the device, None on a CPU.
        host_bytes: available memory of the host, None without /proc.
        flops_per_second: of a dense matmul, in bf16 on a GPU, in fp32 on a CPU.
        clock: time.time() after a barrier of all ranks.
    """

    rank: int
    node: str
    device: str
    versions: dict[str, str]
    free_bytes: int | None
    total_bytes: int | None
    host_bytes: int | None
    flops_per_second: float
    clock: float


def measure_rank(ranks: Ranks) -> RankFacts:
    """Measure this rank. All ranks must call it together."""
    device = ranks.device
    free: int | None = None
    total: int | None = None
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        name = torch.cuda.get_device_name(device)
    else:
        name = f"CPU, threads: {torch.get_num_threads()}"
    host = host_memory()
    dist.barrier()
    clock = time.time()
    return RankFacts(
        rank=ranks.rank,
        node=_node_name(),
        device=name,
        versions=_versions(device),
        free_bytes=free,
        total_bytes=total,
        host_bytes=host.available_bytes if host is not None else None,
        flops_per_second=matmul_rate(MATMUL_SHAPE, MATMUL_DTYPES[device.type], device),
        clock=clock,
    )


def _node_name() -> str:
    number = os.environ.get("GROUP_RANK", "0")  # by torchrun
    return f"node {number} ({socket.gethostname()})"


def _versions(device: torch.device) -> dict[str, str]:
    versions = {"Python": platform.python_version()}
    versions |= {package: version(package) for package in PACKAGES}
    if device.type == "cuda":
        versions["CUDA"] = str(torch.version.cuda)
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        if DRIVER.is_file():
            match = re.search(r"\d+\.\d+(\.\d+)?", DRIVER.read_text())
            versions["driver"] = match.group() if match else "unknown"
    return versions
