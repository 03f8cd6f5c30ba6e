"""What each --precision means in dtypes, and whether this machine computes bf16 at a useful speed."""

from dataclasses import dataclass
from timeit import repeat
from typing import Literal

import torch

from llama_ft.errors import UserError

PrecisionName = Literal["bf16_mixed", "bf16_pure", "fp32", "fp16"]
SLOW = 1.5  # from this factor on the CPU is taken to have no 16-bit products of its own


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


def product_slowdown(dtype: torch.dtype) -> float:
    """Time of a matrix product in `dtype` over an fp32 one on this CPU; without AVX512-BF16 or AMX it emulates bf16."""
    half, full = (torch.ones(512, 512, dtype=each) for each in (dtype, torch.float32))
    seconds = [min(repeat(lambda: torch.mm(it, it), number=1, repeat=4)) for it in (half, full)]  # noqa: B023
    return seconds[0] / seconds[1]


def advise_precision(asked: PrecisionName, free_to_choose: bool, device: torch.device) -> tuple[PrecisionName, str]:
    """The precision to use on this device, and what to tell the user about it ("" for nothing).

    Args:
        asked: a key of PRECISIONS.
        free_to_choose: whether the user has left the choice open (the demo); otherwise `asked` stands.
        device: where the model computes.

    Raises:
        UserError: bf16 on a GPU without it.
    """
    dtype, is_gpu, slowdown = PRECISIONS[asked].compute, device.type == "cuda", 1.0
    if is_gpu:
        is_slow = dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False)
        what = "this GPU does not compute bf16"
    else:
        is_slow = dtype != torch.float32 and (slowdown := product_slowdown(dtype)) > SLOW
        name = "bf16" if dtype == torch.bfloat16 else "fp16"
        what = f"this CPU only emulates {name} matrix products, {slowdown:.0f} times slower than fp32 ones"
    if is_slow and free_to_choose:
        return "fp32", f"precision=fp32: {what}."
    if is_slow and is_gpu:
        raise UserError(f"--precision {asked}: {what}.\n--precision fp16 uses loss scaling; fp32 is exact and slower.")
    return asked, f"{what}. --precision fp32 is faster here, and takes more memory." if is_slow else ""
