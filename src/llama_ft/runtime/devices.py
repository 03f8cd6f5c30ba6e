"""Which device each rank has and how the model and the batches lie over them: the first lines of a run."""

import itertools
import socket
from collections.abc import Sequence
from typing import NamedTuple

import torch

from llama_ft.config.messages import size_text

# Used before this process has allocated anything: more than its own CUDA context, which takes up to 0.6 GiB, is another
# program's.
OWN_BYTES, OWN_SHARE = 2**30, 0.02


class DeviceNote(NamedTuple):
    """One rank's device, for people: its node's name, cuda:3 or CPU, and what it is."""

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
        return DeviceNote(socket.gethostname(), "CPU", f"threads: {torch.get_num_threads()}")
    free, total = torch.cuda.mem_get_info(device)
    about = f"{torch.cuda.get_device_name(device)}, {size_text(total)}"
    if total - free > max(OWN_BYTES, OWN_SHARE * total):
        about += f", shared with another program ({size_text(free)} free at the start)"
    if memory_fraction is not None:
        torch.cuda.set_per_process_memory_fraction(memory_fraction, device)
        about += f", at most {size_text(memory_fraction * total)} used (device_memory_fraction)"
    return DeviceNote(socket.gethostname(), str(device), about)


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on the device, through pinned memory, without waiting for what the device is doing: a copy from
    pageable memory does."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def device_lines(notes: Sequence[DeviceNote]) -> list[str]:
    """`ranks 0-7 on node1: cuda:0-7, NVIDIA H200, 139.81 GiB`: a line for neighbors that differ in number only.

    Args:
        notes: every rank's, in the order of ranks.
    """
    lines = []
    for (host, about), group in itertools.groupby(range(len(notes)), key=lambda r: (notes[r].host, notes[r].about)):
        first, *_, last = [*group] * 2
        ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
        more = "" if notes[last].device == notes[first].device else f"-{notes[last].device.rpartition(':')[2]}"
        lines.append(f"{ranks} on {host}: {notes[first].device}{more}, {about}")
    return lines
