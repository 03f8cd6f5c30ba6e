"""What the planner patches in torch and in Transformers, with the reason for each.

All patches hold only in a `with` block, in the process of the planner. Private names of torch may
be missing in a newer version: then training continues without a plan.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional
from transformers import modeling_utils
from transformers.integrations import hub_kernels

from llama_ft.errors import UserError
from llama_ft.phases import MemoryCategory

try:
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.utils._python_dispatch import _disable_current_modes
except ImportError as error:
    raise UserError(f"Nothing can be planned with torch {torch.__version__}: {error}.") from error

# Functions of fully_shard that allocate memory of an FSDP unit, not of the current module.
ALLOCATING: dict[tuple[Any, str], MemoryCategory] = {
    (param_group, "foreach_all_gather"): "communication buffers",
    (param_group, "foreach_all_gather_copy_out"): "unsharded units",
    (param_group, "foreach_reduce"): "communication buffers",
}
# torch 2.15 accumulates gradients in autograd
if hasattr(FSDPParam, "to_accumulated_grad_if_needed"):
    ALLOCATING[FSDPParam, "to_accumulated_grad_if_needed"] = "gradients"

Function = Callable[..., Any]


class _KernelNorm(torch.autograd.Function):
    """An RMSNorm that keeps for backward what CUDA's kernel keeps: its input and one number per
    position."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, shape: Any, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        inverse_norms = inputs.new_empty(inputs.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(inputs, weight, inverse_norms)
        return inputs.clone()  # moves as many bytes as the kernel

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        inputs, weight, _ = ctx.saved_tensors
        input_gradient = inputs + gradient.to(inputs.dtype)  # as above
        weight_gradient = torch.empty_like(weight) if ctx.needs_input_grad[2] else None
        return input_gradient, None, weight_gradient, None


@contextmanager
def counted_memory(
    count: Callable[[torch.UntypedStorage], None],
    offloading: Callable[..., Any],
    allocating: Callable[[Function, MemoryCategory], Function],
) -> Iterator[None]:
    """In the block, report memory that no operator of this rank shows.

    Args:
        count: called with each storage after it was resized.
        offloading: returns a context in which autograd keeps tensors on the host.
        allocating: returns a function wrapped so that its memory counts for a category.
    """
    resize = torch.UntypedStorage.resize_
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def resize_and_count(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        result = resize(storage, nbytes)
        count(storage)
        return result

    def propagate_unseen(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return propagate(*args, **kwargs)

    patches: list[Any] = [
        # fully_shard frees and allocates unsharded parameters by resizing their storage. That is
        # no operator, so a dispatch mode does not see it.
        patch.object(torch.UntypedStorage, "resize_", resize_and_count),
        # DTensor runs every operator once on tensors of the global shape, which exist on no rank.
        # They must not be counted.
        patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate_unseen),
    ]
    # It copies to pinned memory, which a machine without a GPU does not have.
    patches.append(patch.object(modeling_utils, "save_on_cpu", offloading))
    # A dispatch mode sees these allocations, but not what they are for.
    for (owner, name), category in ALLOCATING.items():
        counted = allocating(getattr(owner, name), category)
        patches.append(patch.object(owner, name, counted))
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        yield


@contextmanager
def planned_models(device: str, attention: Callable[[Function], Function]) -> Iterator[None]:
    """In the block, torch and Transformers compute in ways that work with fake tensors, which stand
    for tensors on `device`. `attention`: returns what computes torch's sdpa on a GPU."""
    patches: list[Any] = [
        # Kernels of layers with a recurrent state need CUDA. With this, Transformers uses torch
        # operations instead.
        patch.object(hub_kernels, "is_torchdynamo_exporting", lambda: True),
    ]
    if device == "cuda":
        # torch's RMSNorm on the CPU keeps more for backward than CUDA's kernel.
        patches.append(patch.object(functional, "rms_norm", _KernelNorm.apply))
        # sdpa chooses the kernel by the tensors' device.
        sdpa = attention(functional.scaled_dot_product_attention)
        patches.append(patch.object(functional, "scaled_dot_product_attention", sdpa))
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        yield


@contextmanager
def counted_loops(
    loops: Iterable[tuple[ModuleType, str]], count: Callable[[Function], Function]
) -> Iterator[None]:
    """In the block, loops of Transformers' models are counted instead of run: see
    plan/fake/chunk_loops.py.

    Args:
        loops: module and name of each.
        count: returns what stands for a loop.
    """
    with ExitStack() as stack:
        for owner, name in loops:
            stack.enter_context(patch.object(owner, name, count(getattr(owner, name))))
        yield
