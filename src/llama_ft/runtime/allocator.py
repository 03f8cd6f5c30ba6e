"""Expandable segments of torch's allocator for CUDA: memory that grows in place. Without them, a
longer batch needs a new segment, and torch may first have to free others, for which it waits for the
GPU.

torch reads the setting once, when CUDA is initialized. The import of bitsandbytes does that.
"""

import os
from pathlib import Path

import torch

from llama_ft.errors import reason

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is its older name
SETTING = "expandable_segments"
KERNEL_RELEASE = Path("/proc/sys/kernel/osrelease")


def request_expandable_segments() -> None:
    """Set the variable that torch reads, unless the user has set it. Call it before CUDA is
    initialized: is_available and device_count do not initialize it."""
    if any(name in os.environ for name in VARIABLES) or is_wsl():
        return
    if torch.cuda.is_available() and torch.cuda.device_count() > 0:
        os.environ[VARIABLES[0]] = f"{SETTING}:True"


def is_wsl(kernel_release: Path = KERNEL_RELEASE) -> bool:
    """Return whether this is Linux in Windows, where the first allocation would fail
    (github.com/pytorch/pytorch/issues/192330)."""
    try:
        return "microsoft" in kernel_release.read_text().lower()
    except OSError:
        return False


def check_expandable_segments(device: torch.device) -> str:
    """Allocate memory of a GPU, and turn expandable segments off if that fails, as on some virtual
    GPUs. Return a text for the log."""
    if not any(f"{SETTING}:True" in os.environ.get(name, "") for name in VARIABLES):
        own = [name for name in VARIABLES if name in os.environ]
        cause = own[0] if own else "WSL2" if is_wsl() else "no GPU was visible at the start"
        return f"no expandable segments ({cause})"
    try:
        torch.empty(1, device=device)
    except RuntimeError as error:
        torch._C._accelerator_setAllocatorSettings(f"{SETTING}:False")
        return f"no expandable segments ({reason(error)})"
    return "expandable segments"
