"""What each --precision means in dtypes, and whether this machine computes bf16 at a useful speed."""

from collections.abc import Callable
from dataclasses import dataclass
from timeit import timeit
from typing import Literal

import torch

from llama_ft.errors import UserError

PrecisionName = Literal["bf16_mixed", "bf16_pure", "fp32", "fp16"]


@dataclass(frozen=True)
class Precision:
    """Dtypes of one run.

    Attributes:
        trained: storage of weights that are trained.
        frozen: storage of weights that are not.
        compute: weights and activations in forward and backward.
        reduce: gradients while they are summed over ranks.
    """

    trained: torch.dtype
    frozen: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype


PRECISIONS = {
    "bf16_mixed": Precision(torch.float32, torch.bfloat16, torch.bfloat16, torch.float32),
    "bf16_pure": Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "fp32": Precision(torch.float32, torch.float32, torch.float32, torch.float32),
    "fp16": Precision(torch.float32, torch.float16, torch.float16, torch.float32),  # with training.LossScale
}


SLOW = 1.5  # from this factor on the CPU is taken to have no 16-bit products of its own


def product_slowdown(dtype: torch.dtype, size: int = 512, repeats: int = 3) -> float:
    """Time of a matrix product in `dtype` over an fp32 one on this CPU; takes about 20 ms.

    CPUs without AVX512-BF16 or AMX emulate bf16: 8 times slower than fp32 on AMD Zen 3, where AMX makes it 9 times
    faster. Measured rather than read from CPU flags, which differ by vendor.
    """

    def seconds(matrix: torch.Tensor) -> float:
        times = [timeit(lambda: torch.nn.functional.linear(matrix, matrix), number=1) for _ in range(repeats + 1)]
        return min(times[1:])  # the first run warms up

    return seconds(torch.ones(size, size, dtype=dtype)) / seconds(torch.ones(size, size))


def card_has_bf16() -> bool:
    """Whether this process's GPU computes bf16 itself: NVIDIA's do from compute capability 8.0 (Ampere) on."""
    return torch.cuda.is_bf16_supported(including_emulation=False)


def advise_precision(
    asked: PrecisionName,
    free_to_choose: bool,
    device: torch.device,
    has_bf16: Callable[[], bool] = card_has_bf16,
) -> tuple[PrecisionName, str]:
    """The precision to use on this device, and what to tell the user about it ("" for nothing).

    Args:
        asked: a key of PRECISIONS.
        free_to_choose: whether the user has left the choice open (the demo); otherwise `asked` stands.
        device: where the model computes.
        has_bf16: asked on a GPU.

    Raises:
        UserError: bf16 on a GPU without it.
    """
    dtype = PRECISIONS[asked].compute
    if device.type == "cuda":
        if dtype != torch.bfloat16 or has_bf16():
            return asked, ""
        lacking = f"{torch.cuda.get_device_name(device) if torch.cuda.is_available() else device} does not compute bf16"
        if free_to_choose:
            return "fp32", f"precision=fp32: {lacking}."
        raise UserError(
            f"--precision {asked}: {lacking}.\n--precision fp16 computes in fp16 with loss scaling and keeps fp32 "
            "weights as bf16_mixed does; fp32 is exact and slower."
        )
    if dtype == torch.float32 or (slowdown := product_slowdown(dtype)) < SLOW:
        return asked, ""
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    measured = f"this CPU only emulates {name} matrix products, {slowdown:.0f} times slower than fp32 ones"
    if free_to_choose:
        return "fp32", f"precision=fp32: {measured}."
    return asked, f"{measured}. --precision fp32 is faster here, and takes more memory."
