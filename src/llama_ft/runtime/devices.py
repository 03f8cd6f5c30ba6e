"""The device of each rank, and copies to it."""

import os
import socket

import torch

from llama_ft.config.messages import size_text

# Used before this process has allocated anything: more than its own CUDA context, which takes up to 0.6 GiB, is another
# program's.
OWN_BYTES, OWN_SHARE = 2**30, 0.02


def configure_cuda() -> None:
    """Set what the CUDA allocator reads at the first call, unless the user has set it."""
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def take_device(device: torch.device, memory_fraction: float | None) -> str:
    """Make a device this process's, and return a description of it. Nothing may be allocated before.

    Args:
        device: where the rank computes.
        memory_fraction: largest share of the GPU's memory that torch may allocate; None: all.
    """
    host = socket.gethostname()
    if device.type != "cuda":
        return f"CPU on {host}, threads: {torch.get_num_threads()}"
    torch.cuda.set_device(device)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it builds a plan of 0.1 to 0.5 s for every new shape
    free, total = torch.cuda.mem_get_info(device)
    about = f"{torch.cuda.get_device_name(device)} on {host}, {size_text(total)}"
    if total - free > max(OWN_BYTES, OWN_SHARE * total):
        about += f", {device} shared with another program ({size_text(free)} free at the start)"
    if memory_fraction is not None:
        torch.cuda.set_per_process_memory_fraction(memory_fraction, device)
        about += f", at most {size_text(memory_fraction * total)} used (device_memory_fraction)"
    return about


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to the device through pinned memory, without waiting for the device's work before it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
