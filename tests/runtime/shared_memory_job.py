"""A job of test_shared_memory. What each rank found is written to a file in the given directory."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from llama_ft.observe.memory import CPU, memory_use
from llama_ft.runtime import shared_memory
from llama_ft.runtime.shared_memory import SharedMemory


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def numbers_of_others() -> list[list[float]]:
    """What each rank has written, read by this one: 10 numbers, then 5000."""
    memory = SharedMemory.open(dist.group.WORLD, blocks=2)
    assert memory is not None
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    found = []
    for count in (10, 5000):
        parts = memory.tensor(1, ranks * count, torch.bfloat16).view(ranks, count)
        parts[rank] = rank + 1
        memory.signal(parts.nbytes)
        memory.wait(parts.nbytes)
        assert bool((parts == parts[:, :1]).all())
        found.append(parts[:, 0].tolist())
        memory.signal(0)  # it was read
        memory.wait(0)
    assert memory.tensor(0, 0, torch.float32).numel() == 0
    return found


def counted_mebibytes() -> list[float]:
    """By how much this rank's memory grows by its part of 66 MiB that it touches, and the rest."""
    memory = SharedMemory.open(dist.group.WORLD, blocks=1)
    assert memory is not None
    before = memory_use(CPU)
    memory.tensor(0, 66 * 2**20, torch.uint8).fill_(1)
    after = memory_use(CPU)
    return [
        (after.anonymous - before.anonymous) / 2**20,
        (after.mapped - before.mapped) / 2**20,
    ]


def main(folder: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which the others get when one is killed
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    before = descriptors()
    found: dict[str, Any] = {"numbers": numbers_of_others(), "counted": counted_mebibytes()}

    # as if one rank were on another host
    true_boot_id = shared_memory.BOOT_ID
    if rank == 1:
        shared_memory.BOOT_ID = folder / "boot-id"
        shared_memory.BOOT_ID.write_text("another")
    found["on two hosts"] = SharedMemory.open(dist.group.WORLD, 1) is None
    if rank == 1:
        shared_memory.BOOT_ID = folder / "missing"  # as if not on Linux
    found["not everywhere"] = SharedMemory.open(dist.group.WORLD, 1) is None
    shared_memory.BOOT_ID = true_boot_id
    # as if equal process ids were those of another machine
    with patch.object(shared_memory, "TOKEN_BYTES", 8 if rank == 1 else 16):
        found["not the same memory"] = SharedMemory.open(dist.group.WORLD, 1) is None
    found["left open"] = descriptors() - before

    memory = SharedMemory.open(dist.group.WORLD, blocks=1)
    assert memory is not None
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    # one rank has another tensor than the others
    memory.signal(8 if rank == 1 else 16)
    try:
        memory.wait(16)
    except RuntimeError as error:
        found["other size"] = str(error)
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    if rank == 1:
        memory.wait(16)
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    memory.signal(16)
    try:
        memory.wait(16)
    except RuntimeError as error:
        found["error"] = str(error)
        found["seconds"] = time.monotonic() - started
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
