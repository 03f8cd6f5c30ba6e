"""Devices of the ranks, copies to them, and the dtypes of each --precision."""

import socket
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from llama_ft.config.wording.messages import size_text
from llama_ft.errors import UserError, reason
from llama_ft.runtime.allocator import check_expandable_segments

# CPU features with which oneDNN multiplies matrices in 16 bits, on x86 and on Arm. Without them it
# emulates these matmuls, several times slower than fp32.
MATMUL_FEATURES = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16", "fp16_arith"),
}
LINUX_NAMES = {"asimdhp": "fp16_arith", "svebf16": "sve_bf16"}
PrecisionName = Literal["bf16_mixed", "bf16_pure", "fp32", "fp16"]


class Precision(NamedTuple):
    """The dtypes of a run."""

    trained: torch.dtype  # storage of trained weights
    frozen: torch.dtype  # storage of frozen weights
    compute: torch.dtype  # weights and activations in forward and backward
    reduce: torch.dtype  # gradients while they are reduced over ranks


PRECISIONS = {
    "bf16_mixed": Precision(torch.float32, torch.bfloat16, torch.bfloat16, torch.float32),
    "bf16_pure": Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "fp32": Precision(torch.float32, torch.float32, torch.float32, torch.float32),
    # with training.LossScale
    "fp16": Precision(torch.float32, torch.float16, torch.float16, torch.float32),
}


def pick_device(device: str, gpus: int, local_rank: int, local_world_size: int) -> torch.device:
    """Return the device of a rank; auto: a GPU of its own if there is one, else the CPU."""
    if device == "cuda" and gpus == 0:
        raise UserError(
            "--device cuda: no GPU is visible to torch on this machine.\n--device cpu trains on the CPU."
        )
    if device == "cpu" or gpus == 0:
        return torch.device("cpu")
    if local_world_size > gpus:
        problem = f"{local_world_size} processes on {socket.gethostname()} need a GPU each, and it has {gpus}."
        fix = f"--nproc_per_node {gpus} uses those; --device cpu trains on the CPU."
        if gpus == 1:
            # With SLURM's --gpus-per-task=1, and always with slices of a GPU (MIG), a process sees
            # one GPU only.
            fix += (
                " If each process sees only its own GPU, let it see all (SLURM: --gpus-per-node)."
            )
        raise UserError(f"{problem}\n{fix}")
    return torch.device("cuda", local_rank)


def claim_device(device: torch.device, memory_fraction: float | None) -> str:
    """Select the device for this process and return a description of it. Call it before any
    allocation.

    Args:
        device: the device of this rank.
        memory_fraction: largest share of the GPU's memory that torch may allocate, 0 to 1; None:
            all.
    """
    if device.type != "cuda":
        return f"CPU on {socket.gethostname()}, threads: {torch.get_num_threads()}"
    try:
        torch.cuda.set_device(device)
        free, total = torch.cuda.mem_get_info(device)
    # the driver is too old, or another process uses the GPU exclusively
    except RuntimeError as error:
        raise UserError(
            f"{device} cannot be used: {reason(error)}.\n--device cpu trains on the CPU."
        ) from error
    # it builds a plan for every new shape, which takes 0.1 to 0.5 s
    torch.backends.cuda.enable_cudnn_sdp(False)
    if memory_fraction is not None:
        torch.cuda.set_per_process_memory_fraction(memory_fraction, device)
    name = f"{torch.cuda.get_device_name(device)} on {socket.gethostname()}"
    segments = check_expandable_segments(device)
    return f"{name}, {size_text(total)}, free at the start: {free / total:.0%}, {segments}"


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to the device through pinned memory, without waiting for earlier work of
    the device."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def cpu_features() -> set[str]:
    """Return the names of this CPU's instruction sets, in the spelling of
    torch.cpu.get_capabilities."""
    if hasattr(torch.cpu, "get_capabilities"):
        return {name for name, value in torch.cpu.get_capabilities().items() if value is True}
    try:  # torch 2.11
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return features_of(lines)


@cache
def cpu_vendor() -> str:
    """Return the vendor of an x86 CPU, such as AuthenticAMD; empty elsewhere than on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "vendor_id":
            return value.strip()
    return ""


def features_of(lines: Iterable[str]) -> set[str]:
    """Return the instruction sets named in the lines of Linux's /proc/cpuinfo."""
    features = set[str]()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            features.update(LINUX_NAMES.get(word, word) for word in value.split())
    return features


def advise_precision(
    precision: PrecisionName, free_to_choose: bool, device: torch.device
) -> tuple[PrecisionName, str]:
    """Return the precision to use on this device, and a message for the user (empty if there is
    none).

    Args:
        precision: a key of PRECISIONS.
        free_to_choose: the user did not choose (the demo), so another precision may be returned.
        device: where the model computes.

    Raises:
        UserError: bf16 was asked for, and the GPU does not support it.
    """
    dtype = PRECISIONS[precision].compute
    is_gpu = device.type == "cuda"
    if is_gpu:
        computes_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        is_slow = dtype == torch.bfloat16 and not computes_bf16
        what = "this GPU does not compute bf16"
    else:
        # From its features, not from a measurement: the same on a busy machine.
        fast_features = MATMUL_FEATURES.get(dtype)
        is_slow = fast_features is not None and cpu_features().isdisjoint(fast_features)
        name = precision.partition("_")[0]
        what = f"this CPU only emulates {name} matmuls, several times slower than fp32"
    if not is_slow:
        return precision, ""
    if free_to_choose:
        return "fp32", f"precision=fp32: {what}."
    if is_gpu:
        raise UserError(
            f"--precision {precision}: {what}.\n--precision fp16 uses loss scaling; fp32 is exact and slower."
        )
    return precision, f"{what}. --precision fp32 is faster here but needs more memory."
