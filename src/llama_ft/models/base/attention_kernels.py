"""Choose torch's attention kernel by the GPU, the dtype and the shapes."""

from importlib.util import find_spec

import torch
from torch.nn import attention
from transformers import PretrainedConfig

from llama_ft.errors import reason
from llama_ft.runtime.console import log

Capability = tuple[int, int] | None  # compute capability of a GPU; None: a CPU
# flash attention needs Ampere; precision fp16 is for older GPUs
T4 = (7, 5)
AMPERE = (8, 0)
HOPPER = (9, 0)
BLACKWELL = 10  # B200 and GB200 (10.0), B300 (10.3); not 12.0, GeForce
# cuDNN builds a plan for each shape, in 0.1 to 0.5 s. Samples truncated to the context length have
# a length that is a multiple of this, and repeat. Other samples that fill a sequence alone rarely
# do.
CUDNN_LENGTHS = 128


def choose_kernel(
    capability: Capability, dtype: torch.dtype, widths: tuple[int, int], equal_length: bool
) -> str:
    """Return the kernel for packed samples, for attention with only a scale and a window. For all
    samples at once: cudnn (of sdpa) or varlen (flash attention). Per sample: efficient
    (memory-efficient), cpu, or own (chosen by sdpa).

    Args:
        capability: of the device; None for the CPU.
        dtype: of queries, keys and values.
        widths: head dimension of keys, and of values.
        equal_length: all samples have one length, a multiple of CUDNN_LENGTHS, and no window splits
            them.
    """
    is_even = widths[0] == widths[1]
    if capability is None:
        return "cpu" if is_even else "own"
    if any(width % 8 for width in widths) or (dtype == torch.bfloat16 and capability < AMPERE):
        return "own"
    if capability < AMPERE or dtype == torch.float32 or not is_even or widths[0] > 256:
        return "efficient"
    # Elsewhere torch prefers flash attention, too. On 10.x the varlen kernel is flash attention 2.
    prefers_cudnn = capability == HOPPER or capability[0] == BLACKWELL
    return "cudnn" if prefers_cudnn and equal_length and widths[0] <= 128 else "varlen"


def activate_flash_attention_3(config: PretrainedConfig) -> None:
    """On Hopper, let torch's flash attention call FlashAttention 3 if it is installed. It has no
    attention dropout."""
    # False in a plan for GPUs
    is_hopper = torch.cuda.is_initialized() and torch.cuda.get_device_capability() == HOPPER
    if (
        is_hopper
        and getattr(config, "attention_dropout", None) == 0
        and find_spec("flash_attn_interface")
    ):
        try:
            attention.activate_flash_attention_impl("FA3")
            log.info("Packed attention is computed by FlashAttention 3.")
        except Exception as error:  # any error of its import
            log.warning(f"FlashAttention 3 is installed and cannot be used ({reason(error)}).")
