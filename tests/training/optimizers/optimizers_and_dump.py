"""Steps of every optimizer on a sharded model, through a checkpoint in the middle; run by torchrun,
case by case."""

import dataclasses
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from llama_ft import checkpoint, runtime, training
from llama_ft.config import CheckpointConfig, TrainConfig

STEPS = 6  # the checkpoint is after half of them
LR = 2e-3
PURE = {"optimizer": "anyprecision", "precision": "bf16_pure"}
SETTINGS = {
    name: {"optimizer": name} for name in ("AdamW", "AdamW8bit", "SGD", "Adafactor", "anyprecision")
}
SETTINGS["momentum"] = {"optimizer": "SGD", "momentum": 0.9}
SETTINGS |= {"stochastic": PURE, "kahan": {**PURE, "use_kahan_summation": True}}
CASES = {
    name: TrainConfig(weight_decay=0.1, lr=LR, **settings) for name, settings in SETTINGS.items()
}


class Lion(torch.optim.Optimizer):
    """A user's optimizer that knows nothing of llama_ft: https://arxiv.org/abs/2302.06675. It
    counts its steps in an int, as many do."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    state["momentum"] = torch.zeros_like(parameter)
                state["step"] += 1
                momentum = state["momentum"]
                direction = (0.9 * momentum + 0.1 * parameter.grad).sign()
                rate = group["lr"] / state["step"]  # not of the paper: a wrong count shows
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(rate * direction)
                momentum.mul_(0.99).add_(parameter.grad, alpha=0.01)


# Optimizers that a user may put into the recipe.
FOREIGN = {
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "Lion": Lion,
}
CASES |= {name: TrainConfig(weight_decay=0.1, lr=LR) for name in FOREIGN}


class OddShapes(torch.nn.Module):
    """Rows that do not divide by two, one row only, rows that are no whole blocks of 256, experts,
    vectors."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {
            "blocks": (33, 512),
            "ragged": (71, 70),
            "narrow": (129, 40),
            "one_row": (1, 4200),
        }
        shapes |= {"experts": (3, 33, 70), "bias": (5,), "single": (1,)}
        self.weights = torch.nn.ParameterDict(
            {k: torch.nn.Parameter(torch.randn(v) / 6) for k, v in shapes.items()}
        )


def build(case: str, mesh: DeviceMesh | None) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The model of a case, always the same, and its optimizer."""
    torch.manual_seed(0)
    model = OddShapes().bfloat16() if CASES[case].precision == "bf16_pure" else OddShapes()
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    if case not in FOREIGN:
        return model, training.build_optimizer(model, CASES[case])
    vectors = [p for p in model.parameters() if p.ndim == 1]
    matrices = [p for p in model.parameters() if p.ndim > 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return model, FOREIGN[case](groups, lr=LR)


def gradients(step: int) -> dict[str, torch.Tensor]:
    """Gradients of a step: random, of very different sizes from row to row, and some rows without
    any."""
    torch.manual_seed(100 + step)
    found = {}
    for name, parameter in OddShapes().named_parameters():
        size = (
            torch.rand(parameter.shape[0], *[1] * (parameter.ndim - 1)).mul_(8).exp2_().mul_(1e-3)
        )
        found[name] = (torch.randn(parameter.shape) * size).bfloat16().float()
        found[name][7:9] = 0
    return found


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Update the weights with the gradients of `steps`, sharded across ranks like the
    parameters."""
    for step in steps:
        for name, gradient in gradients(step).items():
            parameter = model.get_parameter(name)
            gradient = gradient.to(parameter.dtype)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Full copies of all parameters."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def resumed(case: str, run: Path, ranks: runtime.Ranks) -> dict[str, torch.Tensor]:
    """What a fresh model and optimizer become that load the checkpoint and take the other half of
    the steps."""
    model, optimizer = build(case, ranks.mesh)
    saved = checkpoint.Checkpoint(run / "checkpoints" / f"step-{STEPS // 2:06d}")
    checkpoint.restore(saved, model, optimizer, ranks)
    train(model, optimizer, range(STEPS // 2, STEPS))
    return whole(model)


if __name__ == "__main__":
    out = Path(sys.argv[1])
    with runtime.start("cpu", "world") as ranks:
        two_copies = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        for case in CASES:
            model, optimizer = build(case, ranks.mesh)
            train(model, optimizer, range(STEPS // 2))
            (out / case).mkdir(exist_ok=True)
            about = {"config": {"train": dataclasses.asdict(CASES[case])}}
            with checkpoint.CheckpointWriter(
                out / case, CheckpointConfig(), about, ranks
            ) as writer:
                writer.save(STEPS // 2, model, optimizer, {})
            train(model, optimizer, range(STEPS // 2, STEPS))
            result = {"end": whole(model)}
            result["again"] = resumed(case, out / case, ranks)

            model, optimizer = build(case, two_copies)
            train(model, optimizer, range(STEPS))
            mine = {
                name: parameter.to_local().detach() for name, parameter in model.named_parameters()
            }
            copies: list[dict[str, torch.Tensor]] = [{}, {}]
            dist.all_gather_object(copies, mine)
            result["copies"] = copies
            if ranks.is_main:
                torch.save(result, out / f"{case}.pt")
