"""A job of test_gloo: gradients of a small model under fully_shard, over gloo's own collectives and
over ours."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from llama_ft.models.gloo import use_gloo_collectives


def gradients(copies: int, is_ours: bool) -> dict[str, torch.Tensor]:
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
        if is_ours:
            use_gloo_collectives(module)
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
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
        ours = gradients(copies, is_ours=True)
        found[copies] = (ours, gradients(copies, is_ours=False))
    torch.save(found, folder / f"rank-{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
