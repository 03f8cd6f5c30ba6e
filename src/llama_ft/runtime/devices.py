"""Which device each rank has and how the model and the batches lie over them: the first lines of a run."""

import itertools
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llama_ft.config.messages import size_text

# Used before this process has allocated anything: more than its own CUDA context, which takes up to 0.6 GiB, is another
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
    about = describe_gpu(torch.cuda.get_device_name(device), free, total, memory_fraction)
    return DeviceNote(socket.gethostname(), str(device), about)


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on the device, through pinned memory, without waiting for what the device is doing: a copy from
    pageable memory does."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def describe_gpu(name: str, free_bytes: int, total_bytes: int, memory_fraction: float | None) -> str:
    """A GPU in a phrase: its memory, what others use of it, and how much of it this run may use."""
    about = f"{name}, {size_text(total_bytes)}"
    if total_bytes - free_bytes > max(OWN_BYTES, OWN_SHARE * total_bytes):
        about += f", shared with another program ({size_text(free_bytes)} free at the start)"
    if memory_fraction is not None:
        about += f", at most {size_text(memory_fraction * total_bytes)} used (device_memory_fraction)"
    return about


def device_lines(notes: Sequence[DeviceNote]) -> list[str]:
    """`ranks 0-7 on node1: cuda:0-7, NVIDIA H200, 139.81 GiB`: a line for neighbors that differ in number only.

    Args:
        notes: every rank's, in the order of ranks.
    """
    lines = []
    for (host, about), group in itertools.groupby(range(len(notes)), key=lambda r: (notes[r].host, notes[r].about)):
        first, *_, last = ranks = [*group] * 2
        devices = notes[first].device
        if notes[last].device != devices:
            devices += f"-{notes[last].device.rpartition(':')[2]}"
        numbers = f"rank {first}" if first == last else f"ranks {first}-{last}"
        lines.append(f"{numbers} on {host}: {devices}, {about}{' each' if len(ranks) > 2 else ''}")
    return lines


def layout_line(copies: int, shards: int) -> str:
    """How parameters lie over a mesh of `copies` x `shards` ranks."""
    whole = "the whole model on each rank" if shards == 1 else f"the rows of every parameter split over {shards} ranks"
    return f"mesh replicate {copies} x shard {shards}: {whole}"


def batch_line(ranks: int, rows: int, micro_batches: int, global_batch: int, unit: str = "row") -> str:
    """How a global batch is dealt: every rank, of whatever copy and shard, trains on rows of its own."""
    if global_batch != ranks * rows * micro_batches:  # of a run that was begun on other ranks
        return f"global batch: {global_batch} {unit}s as before, at most {rows} of them in a micro-batch of a rank"
    product = f"ranks ({ranks}) x micro-batch ({rows}) x accumulation ({micro_batches})"
    return f"global batch: {global_batch} {unit}s = {product}"
