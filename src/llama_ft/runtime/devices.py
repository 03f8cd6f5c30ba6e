"""Which device each rank has and how the model and the batches lie over them: the first lines of a run."""

import itertools
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Used before this process has allocated anything: beyond its own CUDA context, which takes up to 0.6 GiB, another
# program's.
OWN_BYTES, OWN_SHARE = 2**30, 0.02


@dataclass(frozen=True)
class DeviceNote:
    """One rank's device, for people.

    Attributes:
        host: its node's name.
        device: cuda:3, or CPU.
        about: what it is; equal on ranks that differ in nothing worth telling.
    """

    host: str
    device: str
    about: str


def take_device(device: torch.device, memory_fraction: float | None) -> DeviceNote:
    """Look at this rank's device before anything is allocated, and limit what this process takes of it.

    Args:
        device: where the rank computes; current already when it is a GPU.
        memory_fraction: largest share of the GPU's memory that torch may allocate; None: all.
    """
    if device.type != "cuda":
        threads = torch.get_num_threads()
        return DeviceNote(socket.gethostname(), "CPU", f"{threads} thread{'s' if threads > 1 else ''}")
    free, total = torch.cuda.mem_get_info(device)
    if memory_fraction is not None:
        torch.cuda.set_per_process_memory_fraction(memory_fraction, device)
    name = torch.cuda.get_device_name(device)
    return DeviceNote(socket.gethostname(), str(device), describe_gpu(name, free, total, memory_fraction))


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on the device, through pinned memory, without waiting for what the device is doing: a copy from
    pageable memory does."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def describe_gpu(name: str, free_bytes: int, total_bytes: int, memory_fraction: float | None) -> str:
    """A GPU in a phrase: its memory, what others use of it, and how much of it this run may use."""
    parts = [f"{name}, {_gib(total_bytes)}"]
    if total_bytes - free_bytes > max(OWN_BYTES, OWN_SHARE * total_bytes):
        parts.append(f"shared with another program: {_gib(free_bytes)} were free at the start")
    if memory_fraction is not None:
        parts.append(f"at most {_gib(memory_fraction * total_bytes)} used (device_memory_fraction {memory_fraction:g})")
    return "; ".join(parts)


def device_lines(notes: Sequence[DeviceNote]) -> list[str]:
    """`ranks 0-7 on node1: cuda:0-7, NVIDIA H200, 140 GiB`: a line for neighbours that differ in number only.

    Args:
        notes: every rank's, in the order of ranks.
    """
    lines = []
    for (host, about), group in itertools.groupby(range(len(notes)), key=lambda r: (notes[r].host, notes[r].about)):
        ranks = list(group)
        first, last = notes[ranks[0]].device, notes[ranks[-1]].device
        if len(ranks) == 1:
            lines.append(f"rank {ranks[0]} on {host}: {first}, {about}")
            continue
        devices = first if first == last else f"{first}-{last.rpartition(':')[2]}"
        lines.append(f"ranks {ranks[0]}-{ranks[-1]} on {host}: {devices}, {about} each")
    return lines


def layout_line(copies: int, shards: int) -> str:
    """How parameters lie over a mesh of `copies` x `shards` ranks."""
    if copies == shards == 1:
        return "mesh of one: the whole model on one rank"
    if copies == 1:
        return f"mesh shard {shards}: one copy of the model, the rows of every parameter split over {shards} ranks"
    mesh = f"mesh replicate {copies} x shard {shards}"
    if shards == 1:
        return f"{mesh}: the whole model on each of {copies} ranks"
    return f"{mesh}: {copies} copies of the model, the rows of every parameter split over {shards} ranks"


def batch_line(ranks: int, rows: int, micro_batches: int, global_batch: int, unit: str = "row") -> str:
    """How a global batch is dealt: every rank, of whatever copy and shard, trains on rows of its own."""
    own = "every rank trains on rows of its own; " if ranks > 1 else ""
    if global_batch != ranks * rows * micro_batches:  # of a run that was begun on other ranks
        return f"{own}global batch: {global_batch} {unit}s as before, at most {rows} of them in a micro-batch of a rank"
    product = f"{ranks} rank{'s' if ranks > 1 else ''} x {rows} {unit}{'s' if rows > 1 else ''}"
    more = f" x {micro_batches} micro-batches" if micro_batches > 1 else ""
    return f"{own}global batch: {product}{more} = {global_batch}"


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.0f} GiB" if size_bytes >= 10 * 2**30 else f"{size_bytes / 2**30:.1f} GiB"
