"""A job of test_gloo: gradients of a small model under fully_shard, over gloo's own collectives and
over ours, there and in shared memory."""

import sys
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from llama_ft.cpu.gloo import share_memory, use_gloo_collectives

Way = Literal["gloo's own", "over gloo", "shared"]


def gradients(copies: int, way: Way) -> dict[str, torch.Tensor]:
    """Sums over the ranks, of a model with 7 and 13 rows and a frozen int8 parameter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 13))
    model.register_parameter("codes", nn.Parameter(torch.ones(3, dtype=torch.int8), False))
    ranks = dist.get_world_size()
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (copies, ranks // copies), mesh_dim_names=names)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in (*model, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if way != "gloo's own":
            use_gloo_collectives(module)
    if way == "shared":
        assert share_memory(model, mesh)
    torch.manual_seed(dist.get_rank())
    for turn in range(2):
        if turn == 1:
            # weights that wait in the block while those of another unit are all-gathered
            model[1].unshard(async_op=True)
        model(torch.randn(4, 5)).square().sum().backward()
    return {
        name: parameter.grad.full_tensor()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    found = {}
    for copies in (1, 2) if ranks == 4 else (1,):
        ways: tuple[Way, ...] = ("gloo's own", "over gloo", "shared")
        found[copies] = [gradients(copies, way) for way in ways]
    torch.save(found, folder / f"rank-{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
