"""Whether what runs is a plan (llama_ft.plan): tensors are fake, and may stand for those of a GPU that is not there."""

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def planned_device() -> str | None:
    """The device type that tensors stand for, cuda or cpu; None: they are real."""
    for mode in _get_current_dispatch_mode_stack():
        if device := getattr(mode, "planned_device", None):
            return str(device)
    return None
