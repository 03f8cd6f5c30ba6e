"""What each rank holds, measured on its tensors, and which rank holds more than it should."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median_low
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from llama_ft.phases import Holder

Moment = Literal["loading", "the second step"]
LARGEST_SHARE = 1.05
MIB = 2**20
# Tensors are counted exactly. The CUDA allocator rounds up; Python and its libraries take host memory when they like,
# and after loading one rank alone imports some (W&B, TensorBoard, the progress bar).
HOLDER_NOISE, DEVICE_NOISE, HOST_NOISE = MIB, 32 * MIB, {"loading": 32 * MIB, "the second step": 128 * MIB}
WAY_OUT = (
    "Look for what that rank alone does: from_pretrained, torch.load or full_tensor where rank == 0 would do this."
)


@dataclass
class Held:
    """What a rank holds at a moment at which it should hold its shards and nothing else, in bytes.

    Attributes:
        holders: by what holds it, each storage once.
        due: what the rank should hold of it, with the padding of a last shard.
        model: all parameters of all ranks, as they are stored.
        largest: the largest of them.
        memory: as the kernel and the CUDA allocator count it.
    """

    holders: dict[Holder, int]
    due: dict[Holder, int]
    model: int
    largest: int
    memory: dict[str, int] = field(default_factory=dict)


def held_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, gradients: int = 0) -> Held:
    """What this rank's parameters and states take.

    Args:
        model: sharded and loaded.
        optimizer: None while there is none.
        gradients: their bytes (`gradient_bytes`) when there were some.
    """
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    states = optimizer.state.values() if optimizer is not None else []
    floating, packed = ([p for p in parameters if p.is_floating_point() is kind] for kind in (True, False))
    # A last shard has fewer rows: gradients and states of full ones are larger by as much.
    fuller = sum(map(_due_bytes, trained)) / max(1, sum(_own(p).nbytes for p in trained))
    state = _storage_bytes(v for state in states for v in state.values() if isinstance(v, torch.Tensor))
    counted: dict[Holder, tuple[int, int]] = {
        "sharded parameters": (_storage_bytes(floating), sum(map(_due_bytes, floating))),
        "quantized parts": (_storage_bytes(packed), sum(map(_due_bytes, packed))),
        "gradients": (gradients, int(gradients * fuller)),
        "optimizer state": (state, int(state * fuller)),
    }
    holders = {name: size for name, (size, _) in counted.items() if size}
    sizes = [p.nbytes for p in parameters]
    return Held(holders, {name: counted[name][1] for name in holders}, sum(sizes), max(sizes))


def gradient_bytes(model: nn.Module) -> int:
    """Of the gradients this rank has now."""
    return _storage_bytes(p.grad for p in model.parameters() if p.grad is not None)


def find_differences(ranks: list[Held], moment: Moment) -> list[str]:
    """A warning for each holder, and for memory without one, of which a rank has over 5 % more than is usual and due.

    Args:
        ranks: what each holds.
        moment: after what.
    """
    warnings: list[str] = []
    explained = [0] * len(ranks)
    for holder in dict.fromkeys(name for rank in ranks for name in rank.holders):
        due = median_low(rank.due.get(holder, 0) for rank in ranks)
        sizes = [rank.holders.get(holder, 0) for rank in ranks]
        for rank, usual in _outliers(sizes, due, HOLDER_NOISE):
            explained[rank] += sizes[rank] - usual
            more = "they are not sharded like theirs"
            warnings.append(_warning(ranks, moment, rank, sizes[rank], usual, f"of {holder}", more))
    told = {rank for rank, size in enumerate(explained) if size}
    for kind in dict.fromkeys(name for rank in ranks for name in rank.memory):
        noise = DEVICE_NOISE if kind.startswith("device") else HOST_NOISE[moment]
        if kind.endswith("peak"):
            noise += 2 * ranks[0].largest  # a tensor on its way to other ranks, and its rows in another dtype
        sizes = [rank.memory.get(kind, 0) for rank in ranks]
        for rank, usual in _outliers(sizes, 0, noise):
            if rank not in told:
                told.add(rank)
                more = f"{_size(sizes[rank] - usual)} belong to no sharded parameter and no state of the optimizer"
                warnings.append(_warning(ranks, moment, rank, sizes[rank], usual, f"of {kind}", more))
    return warnings


def _outliers(sizes: list[int], due: int, noise: int) -> list[tuple[int, int]]:
    """(rank, what is usual) of ranks above both the median and what is due; of two ranks the smaller is usual."""
    usual = max(median_low(sizes), due)
    return [(rank, usual) for rank, size in enumerate(sizes) if size > max(usual * LARGEST_SHARE, usual + noise)]


def _warning(ranks: list[Held], moment: str, rank: int, size: int, usual: int, holder: str, more: str) -> str:
    return (
        f"after {moment}, rank {rank} holds {_size(size)} {holder}, the other ranks {_size(usual)}: {more}. The whole "
        f"model is {_size(ranks[rank].model)}.\n{WAY_OUT}"
    )


def _due_bytes(parameter: torch.Tensor) -> int:
    """Of a full shard: rows are dealt like torch.chunk, so it is the last ranks that have fewer."""
    shards = 1
    if isinstance(parameter, DTensor):
        for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
            shards *= size if placement.is_shard() else 1
    rows = parameter.shape[0] if parameter.ndim else 1
    return -(-rows // shards) * (parameter.nbytes // max(1, rows))


def _own(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            return tensor.to_local()
    return tensor


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of this rank's part of them: whole storages, since a view of a few rows keeps all of them."""
    storages = {(own := _own(tensor)).untyped_storage().data_ptr(): own for tensor in tensors}
    return sum(own.untyped_storage().nbytes() for own in storages.values())


def _size(size: int) -> str:
    return f"{size / MIB:,.0f} MiB"
