"""One rank of a world that is not there: a process group whose collectives do nothing."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from llama_ft.runtime.devices import DeviceNote
from llama_ft.runtime.process_group import Runtime, mesh_over, resolve_degree


@contextmanager
def fake_world(world_size: int, local_world_size: int, degree: int | str) -> Iterator[Runtime]:
    """Rank 0 of `world_size`, on the CPU. This process must have no process group.

    Args:
        world_size: ranks.
        local_world_size: ranks of a node.
        degree: as `runtime.start` takes it.

    Raises:
        UserError: the ranks do not divide into groups.
    """
    degree = resolve_degree(degree, world_size, local_world_size)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        here = torch.device("cpu")
        note = DeviceNote(socket.gethostname(), "fake", "")
        mesh = mesh_over("cpu", world_size, degree)
        yield Runtime(0, world_size, 0, local_world_size, here, here, note, mesh, None)
    finally:
        dist.destroy_process_group()
