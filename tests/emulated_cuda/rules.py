"""What CUDA does with a call of an operator: which tensors it takes, whether the host waits, and how
many kernels it launches."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

# They move no data, or allocate only.
LAUNCH_NOTHING = {
    "view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "split",
    "split_with_sizes", "unbind", "as_strided", "detach", "alias", "empty", "empty_strided", "new_empty", "empty_like",
    "new_empty_strided", "_reshape_alias", "diagonal", "unfold", "lift_fresh", "is_pinned", "_local_scalar_dense",
    "chunk", "unsafe_split", "narrow", "record_stream", "set_", "resize_", "is_same_size",
}  # fmt: skip
# The host needs the values, or the shape of the result depends on them.
ALWAYS_WAIT = {
    "_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "unique_dim", "unique_consecutive",
    "equal", "is_nonzero", "bincount", "argwhere", "_linalg_svd", "linalg_eigh",
}  # fmt: skip
# Copies between devices, indices that may be on the host, and collectives.
MAY_MIX = {
    "copy_", "_to_copy", "_foreach_copy_", "index", "index_put", "index_put_", "_index_put_impl_", "record_stream",
    "set_", "_pin_memory",
}  # fmt: skip
COLLECTIVES = ("c10d", "_c10d_functional")
# Libraries whose operators have CUDA kernels that a build for CPUs lacks.
HAVE_CUDA_KERNELS = ("aten", "prim", "bitsandbytes", "fsdp", *COLLECTIVES)
KERNEL_KEYS = ("CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
ALIGNMENT = 16  # bytes; where matrices of a grouped matmul begin


@dataclass
class Call:
    """A call of an operator, with CUDA tensors or for a CUDA device."""

    operator: Any  # torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    capability: tuple[int, int]

    def __post_init__(self) -> None:
        self.name: str = self.operator._opname
        tensors = [
            leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor)
        ]
        self.cuda = [tensor for tensor in tensors if tensor.device.type == "cuda"]
        self.host = [tensor for tensor in tensors if tensor.device.type == "cpu"]
        self.meta = [tensor for tensor in tensors if tensor.device.type == "meta"]

    @property
    def device(self) -> str | None:
        """The type of the device that the call names."""
        device = self.kwargs.get("device")
        return None if device is None else torch.device(device).type


def error_of(call: Call) -> str:
    """Return the error that CUDA raises for such a call, or ""."""
    if not call.cuda:
        return ""
    on_host = [tensor for tensor in call.host if tensor.dim() > 0]  # of one number: allowed
    if on_host and call.name not in MAY_MIX and call.operator.namespace not in COLLECTIVES:
        shape = tuple(on_host[0].shape)
        return f"Expected all tensors to be on the same device: {call.operator} got cuda:0 and cpu {shape}"
    if call.meta and call.name not in ("copy_", "_to_copy"):
        return f"{call.operator} got tensors on cuda:0 and meta"
    if call.operator.namespace not in HAVE_CUDA_KERNELS:
        qualified = f"{call.operator.namespace}::{call.name}"
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        if not any(has_kernel(qualified, key) for key in KERNEL_KEYS):
            return f"{qualified} has no CUDA kernel"
    if call.name == "_grouped_mm":
        for matrix in call.args[:2]:
            if matrix.storage_offset() * matrix.element_size() % ALIGNMENT:
                return "_grouped_mm: expected data_ptr to be aligned to 16 bytes"
    return ""


def waits_of(call: Call) -> Iterator[str]:
    """Yield why the host waits for the GPU."""
    args = call.args
    name = call.name
    if name in ALWAYS_WAIT and call.cuda:
        yield name
    elif name == "repeat_interleave" and call.cuda and call.kwargs.get("output_size") is None:
        if "Tensor" in call.operator._overloadname:
            yield "repeat_interleave without output_size"
    elif name in ("index", "index_put", "index_put_", "_index_put_impl_") and call.cuda:
        yield from _waits_of_indices(call)
    elif name == "_to_copy" and not call.kwargs.get("non_blocking"):
        is_cuda = args[0].device.type == "cuda"
        if is_cuda and call.device == "cpu":
            yield "copy to the host"
        elif call.device == "cuda" and args[0].device.type == "cpu":
            yield "copy from pageable memory"
    elif name == "copy_":
        is_asynchronous = call.kwargs.get("non_blocking") or (len(args) > 2 and args[2])
        is_mixed = args[0].device.type != args[1].device.type
        if is_mixed and not is_asynchronous:
            is_cuda = args[1].device.type == "cuda"
            yield "copy to the host" if is_cuda else "copy from pageable memory"
    elif name == "_grouped_mm" and not has_fast_grouped_mm(call):
        yield "_grouped_mm without a fast kernel"  # reads the ends of the groups


def _waits_of_indices(call: Call) -> Iterator[str]:
    indices = [index for index in call.args[1] if isinstance(index, torch.Tensor)]
    value = call.args[2] if len(call.args) > 2 else None
    is_fill = isinstance(value, torch.Tensor) and value.numel() == 1
    for index in indices:
        if index.dtype in (torch.bool, torch.uint8):
            if not is_fill:  # a fill is computed for all elements
                yield f"{call.name} with a mask"
        elif index.device.type == "cpu" and index.dim() > 0:
            yield f"{call.name} with indices on the host"


def has_fast_grouped_mm(call: Call) -> bool:
    """Return whether torch has a kernel for all groups at once: aten/src/ATen/native/GroupedMMUtils.h."""
    is_bf16 = all(matrix.dtype == torch.bfloat16 for matrix in call.args[:2])
    return is_bf16 and call.capability[0] in (9, 10)


def launches_of(call: Call) -> tuple[str, int]:
    """Return the name of a call's kernels and their number. It is 1 for every operator that computes:
    a rough count, which shows changes."""
    if call.name == "_grouped_mm" and not has_fast_grouped_mm(call):
        ends = call.args[2] if len(call.args) > 2 else call.kwargs["offs"]
        return "mm of one group", int(ends.shape[0])
    return call.name, 0 if call.name in LAUNCH_NOTHING else 1
