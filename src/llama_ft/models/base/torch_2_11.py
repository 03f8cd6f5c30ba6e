"""Replacements for what torch 2.11 lacks; torch 2.12 and later have it."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

IS_TORCH_2_11 = torch.__version__ < "2.12"
_init_dtypes = FSDPParam.init_dtype_attrs


def allow_integers() -> None:
    """Let fully_shard shard and all-gather integers unchanged. torch 2.11 requires a gradient of
    every parameter while it creates shards, and casts all to the compute dtype, which would destroy
    the bits of a scale."""
    if IS_TORCH_2_11:
        vars(_fsdp_param)["nn"] = SimpleNamespace(Parameter=_parameter, Module=nn.Module)
        setattr(FSDPParam, "init_dtype_attrs", _init_dtypes_of_floats)  # noqa: B010  # mypy: a method, assigned to


def shared_heads(query: torch.Tensor, key: torch.Tensor) -> dict[str, Any]:
    """Return varlen_attn's argument for query heads that share key heads ([1, heads, ...]); 2.11
    needs none."""
    return {} if IS_TORCH_2_11 else {"enable_gqa": query.shape[1] != key.shape[1]}


def _parameter(data: torch.Tensor, requires_grad: bool = True) -> nn.Parameter:
    return nn.Parameter(data, requires_grad=requires_grad and data.is_floating_point())


def _init_dtypes_of_floats(parameter: FSDPParam, policy: MixedPrecisionPolicy) -> None:
    _init_dtypes(
        parameter, policy if parameter.sharded_param.is_floating_point() else MixedPrecisionPolicy()
    )
