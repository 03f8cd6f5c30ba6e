"""What each --precision means in dtypes, and whether this machine computes bf16 at a useful speed."""

from functools import partial
from timeit import repeat
from typing import Literal, NamedTuple

import torch

from llama_ft.errors import UserError

PrecisionName = Literal["bf16_mixed", "bf16_pure", "fp32", "fp16"]
SLOW = 1.5  # without AVX512-BF16 or AMX a CPU emulates 16-bit matmuls, several times slower


class Precision(NamedTuple):
    """Dtypes of one run."""

    trained: torch.dtype  # storage of weights that are trained
    frozen: torch.dtype  # storage of weights that are not
    compute: torch.dtype  # weights and activations in forward and backward
    reduce: torch.dtype  # gradients while they are summed over ranks


PRECISIONS = {
    "bf16_mixed": Precision(torch.float32, torch.bfloat16, torch.bfloat16, torch.float32),
    "bf16_pure": Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "fp32": Precision(torch.float32, torch.float32, torch.float32, torch.float32),
    "fp16": Precision(torch.float32, torch.float16, torch.float16, torch.float32),  # with training.LossScale
}


def product_slowdown(dtype: torch.dtype) -> float:
    """Time of a matmul in `dtype` over one in fp32 on this CPU."""
    factors = [torch.ones(512, 512, dtype=each) for each in (dtype, torch.float32)]
    half, full = (min(repeat(partial(torch.mm, each, each), number=1, repeat=4)) for each in factors)
    return half / full


def advise_precision(asked: PrecisionName, free_to_choose: bool, device: torch.device) -> tuple[PrecisionName, str]:
    """The precision to use on this device, and what to tell the user about it ("" for nothing).

    Args:
        asked: a key of PRECISIONS.
        free_to_choose: whether the user has left the choice open (the demo); otherwise `asked` stands.
        device: where the model computes.

    Raises:
        UserError: bf16 on a GPU without it.
    """
    dtype, is_gpu = PRECISIONS[asked].compute, device.type == "cuda"
    if is_gpu:
        is_slow = dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False)
        what = "this GPU does not compute bf16"
    else:
        slowdown = 1.0 if dtype == torch.float32 else product_slowdown(dtype)
        is_slow, name = slowdown > SLOW, asked.partition("_")[0]
        what = f"this CPU only emulates {name} matrix products, {slowdown:.0f} times slower than fp32 ones"
    if is_slow and free_to_choose:
        return "fp32", f"precision=fp32: {what}."
    if is_slow and is_gpu:
        raise UserError(f"--precision {asked}: {what}.\n--precision fp16 uses loss scaling; fp32 is exact and slower.")
    return asked, f"{what}. --precision fp32 is faster here, and takes more memory." if is_slow else ""
