"""A process group of one, for what needs no launch."""

from collections.abc import Iterator

import pytest
import torch

from llama_ft.runtime import Runtime
from llama_ft.runtime.devices import DeviceNote


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    cpu = torch.device("cpu")
    yield Runtime(0, 1, 0, 1, cpu, cpu, DeviceNote("node1", "CPU", "1 thread"), mesh, None)
    dist.destroy_process_group()
