"""What collectives send, counted where they are called."""

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves


class Traffic:
    """Bytes this rank sends, by collective, if all ranks are on a ring: of n ranks, all-gather sends n - 1 times its
    own part, reduce-scatter (n - 1) / n of its input and all-reduce twice that. Source:
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/collectives.html and its performance notes.

    Attributes:
        sent: by collective.
    """

    def __init__(self) -> None:
        self.sent: dict[str, int] = {}

    def note(self, func: Any, args: Any) -> None:
        """An operator of torch.ops.c10d is about to run."""
        kind, ranks = _kind(func), _ranks(args)
        tensors = [value for value in tree_leaves(args) if isinstance(value, torch.Tensor)]
        if kind is None or ranks < 2 or not tensors:
            return
        largest = max(sum(tensor.nbytes for tensor in tensors[:1]), sum(tensor.nbytes for tensor in tensors[1:]))
        share = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "broadcast": 1}[kind] * (ranks - 1) / ranks
        self.sent[kind] = self.sent.get(kind, 0) + int(largest * share)

    def gloo_buffer(self, func: Any, args: Any) -> int:
        """What gloo takes beside its arguments: reduce-scatter is an all-reduce of a copy of the input, and all-gather
        receives into memory of its own. Source: AsyncAllgatherWork in torch's ProcessGroupGloo.cpp."""
        if _kind(func) not in ("all-gather", "reduce-scatter"):
            return 0
        tensors = [value for value in tree_leaves(args) if isinstance(value, torch.Tensor)]
        return max(tensor.nbytes for tensor in tensors)


def _kind(func: Any) -> str | None:
    name = func._opname.strip("_")
    kinds = {"allgather": "all-gather", "reduce_scatter": "reduce-scatter", "allreduce": "all-reduce"}
    kinds["broadcast"] = "broadcast"
    return next((kind for start, kind in kinds.items() if name.startswith(start)), None)


def _ranks(args: Any) -> int:
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value).size()
    return 1
