"""Whether what runs is a plan (llama_ft.plan): tensors are fake, and may stand for those of a GPU that is not there."""

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def planned_device() -> str | None:
    """The device type that tensors stand for, cuda or cpu; None: they are real."""
    if torch.compiler.is_compiling():  # its own modes are not to be asked, and there is no plan among them
        return None
    for mode in _get_current_dispatch_mode_stack():
        if device := getattr(mode, "planned_device", None):
            return str(device)
    return None
