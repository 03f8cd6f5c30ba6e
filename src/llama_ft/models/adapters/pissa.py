"""PiSSA (https://arxiv.org/abs/2404.02948) starts at A0 and B0, the r largest singular values of the
weight W, and trains W - s B0 A0 + s B A. Here W is not changed. Instead the adapter is a plain LoRA
of rank 2r, [A; A0] and [B, -B0], and only its first half is trained.
"""

import math
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from llama_ft.config import PeftConfig
from llama_ft.errors import UserError
from llama_ft.models.base.shards import ShardGroup, local_shard
from llama_ft.models.quantization.layers import QuantizedLinear


def doubled_rank(peft: PeftConfig) -> dict[str, float]:
    """Return the fields of PEFT's config for twice the rank with the same scaling: alpha / r, or
    alpha / sqrt(r) with rsLoRA."""
    factor = math.sqrt(2) if peft.use_rslora else 2
    return {"r": 2 * peft.r, "lora_alpha": peft.lora_alpha * factor}


def check_pissa(model: nn.Module, peft: PeftConfig) -> None:
    """Raise UserError if a layer with an adapter has no singular values to start at."""
    layers: dict[str, Any] = {
        name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)
    }
    for name, layer in layers.items():
        base = layer.get_base_layer()
        is_plain_linear = isinstance(layer, LoraLinear) and not isinstance(base, QuantizedLinear)
        if not is_plain_linear or peft.r > min(base.weight.shape):
            problem = f"{name} is not an unquantized linear layer with at least {peft.r} inputs and outputs (--peft.r)."
            way_out = "Name such layers: --target_modules q_proj,v_proj."
            raise UserError(f"--init_lora_weights {peft.init_lora_weights}: {problem} {way_out}")


def lora_layers(model: nn.Module) -> list[Any]:
    """Return the layers with LoRA's matrices A and B."""
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def clear_frozen_half(model: nn.Module, rank: int, group: ShardGroup) -> None:
    """Set the gradients of A0 and B0 to zero, so that no optimizer changes them. `rank`: of the
    trained half."""
    for layer in lora_layers(model):
        a = layer.lora_A["default"].weight.grad  # [2 r, in], sharded by rows
        b = layer.lora_B["default"].weight.grad  # [out, 2 r], sharded by rows
        first_row, _ = group.own_rows(len(a))
        first_frozen = max(0, rank - first_row)  # in this rank's shard
        local_shard(a)[first_frozen:].zero_()
        local_shard(b)[:, rank:].zero_()


def first_factors(
    weight: torch.Tensor, layer: Any, rank: int, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the initial A [2r, in] and B [out, 2r] of a layer with this weight. `kind`: the setting
    init_lora_weights."""
    weight = weight.T if layer.fan_in_fan_out else weight
    if kind == "pissa":
        u, values, v = torch.linalg.svd(weight, full_matrices=False)
    else:
        torch.manual_seed(0)  # the same on every rank; the training loop seeds again
        iterations = int(kind.rpartition("_")[2])  # "pissa_niter_16": 16
        u, values, v = torch.svd_lowrank(weight, rank, niter=iterations)
        v = v.T
    root = (values[:rank] / layer.scaling["default"]).sqrt()
    # as peft's pissa_init
    a = root[:, None] * v[:rank]
    b = u[:, :rank] * root
    # [A; A0] and [B, -B0]: the trained half and the frozen one cancel out at first.
    return torch.cat([a, a]), torch.cat([b, -b], dim=1)
