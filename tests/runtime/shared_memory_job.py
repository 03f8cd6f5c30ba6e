"""A job of test_shared_memory. What each rank found is written to a file in the given directory."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

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
        memory.signal()
        memory.wait()
        assert bool((parts == parts[:, :1]).all())
        found.append(parts[:, 0].tolist())
        memory.signal()  # it was read
        memory.wait()
    assert not memory.tensor(0, 3, torch.float32).any()  # the other block
    return found


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = {"numbers": numbers_of_others(), "files": os.listdir("/dev/shm")}

    # as if one rank were on another host
    true_boot_id = shared_memory.BOOT_ID
    if rank == 1:
        shared_memory.BOOT_ID = folder / "boot-id"
        shared_memory.BOOT_ID.write_text("another")
    before = descriptors()
    found["on two hosts"] = SharedMemory.open(dist.group.WORLD, 1) is None
    if rank == 1:
        shared_memory.BOOT_ID = folder / "missing"  # as if not on Linux
    found["not everywhere"] = SharedMemory.open(dist.group.WORLD, 1) is None
    found["left open"] = descriptors() - before
    shared_memory.BOOT_ID = true_boot_id

    memory = SharedMemory.open(dist.group.WORLD, blocks=1)
    assert memory is not None
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    if rank == 1:
        memory.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    memory.signal()
    try:
        memory.wait()
    except RuntimeError as error:
        found["error"] = str(error)
        found["seconds"] = time.monotonic() - started
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
