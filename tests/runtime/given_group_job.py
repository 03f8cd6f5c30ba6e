"""Two runs in a process group and in a thread that the caller has started, as Ray Train does. With
the argument `hangs`, rank 1 never arrives in the second."""

import sys
import threading
import time

import torch.distributed as dist

from llama_ft import runtime


def runs() -> None:
    for number in range(2):
        with runtime.start("cpu", "world", timeout_seconds=4) as ranks:
            if sys.argv[1:] == ["hangs"] and number == 1 and ranks.rank == 1:
                time.sleep(60)  # here
            total = ranks.all_gather_floats(ranks.rank + 1.0).sum()
            assert ranks.store is not None
            count = ranks.store.add("arrived", 1)  # each run has keys of its own
            ranks.all_gather_floats(0.0)
            print(f"run {number}: {total:g}, at most {count <= 2}\n", end="", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    thread = threading.Thread(target=runs)
    thread.start()
    thread.join()
    dist.barrier()  # the group is still the caller's
    dist.destroy_process_group()
    print("left\n", end="", flush=True)
