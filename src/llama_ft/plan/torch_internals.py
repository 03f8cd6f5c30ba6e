"""The private names of torch that plans need, and what for. If a newer torch lacks one, importing this module raises
UserError: then nothing can be planned, and training goes on without a plan."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from llama_ft.errors import UserError

try:
    # Tensors with shapes, dtypes and storages of a size, and no bytes behind them.
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

    # fully_shard allocates in these functions: what they allocate is held by the unit, not by the module at work.
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    # DTensor runs every operator once on tensors of the global shape, which no rank holds.
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    # Ranks that are not there.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # Every operator of a block passes through a mode; in another block through none.
    from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
    from torch.utils._pytree import tree_leaves

    ALL_GATHER = param_group, "foreach_all_gather"
    COPY_OUT = param_group, "foreach_all_gather_copy_out"
    REDUCE = param_group, "foreach_reduce"
    ACCUMULATE = FSDPParam, "to_accumulated_grad_if_needed"
    PROPAGATE = ShardingPropagator, "_propagate_tensor_meta_non_cached"
    for place, name in (ALL_GATHER, COPY_OUT, REDUCE, ACCUMULATE, PROPAGATE):
        getattr(place, name)
    # tensor.item(), and a matmul per expert, whose fake kernel takes bf16 only.
    ITEM, GROUPED_MM = torch.ops.aten._local_scalar_dense.default, torch.ops.aten._grouped_mm.default
    DEVICE = torch.ops.prim.device.default
except (ImportError, AttributeError) as error:
    raise UserError(f"Nothing can be planned with torch {torch.__version__}: {error}.") from error

__all__ = [
    "ACCUMULATE", "ALL_GATHER", "COPY_OUT", "DEVICE", "GROUPED_MM", "ITEM", "PROPAGATE", "REDUCE", "FakeStore",
    "FakeTensor", "FakeTensorMode", "TorchDispatchMode", "_disable_current_modes", "tree_leaves",
    "unset_fake_temporarily",
]  # fmt: skip


def operator_name(func: Any) -> str:
    """Return `mm` for torch.ops.aten.mm.default."""
    return str(func._opname)


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return what identifies a storage while it is alive, a fake one too."""
    return int(storage._cdata)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part, without an operator that would be counted."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
