"""Liger's Triton kernels compile for GPUs that are not here: to machine code, by Triton's assembler.
The kernels and their arguments are those that `--use_liger` calls for Llama 3.1 8B, Gemma 2 9B and
Qwen3."""

from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest

HAS_LIGER = find_spec("triton") is not None and find_spec("liger_kernel") is not None
TARGETS = (80, 90, 100)  # A100, H100, B200
BF16 = "*bf16"
FP32 = "*fp32"
MATRIX = [BF16, "i32"]  # its address, and the elements per row
SUMS = [FP32, "i32"]
HEAD_DIM = 128
INTERMEDIATE = 14_336


class Kernel(NamedTuple):
    """A kernel with the types of its arguments, in order."""

    function: Any
    types: list[str]
    constants: dict[str, Any]
    warps: int = 4


def rms_norm_kernels(hidden: int, casting_mode: int) -> dict[str, Kernel]:
    import triton.language as tl
    from liger_kernel.ops import rms_norm
    from liger_kernel.ops.utils import calculate_settings

    block, warps = calculate_settings(hidden)
    forward = {
        "casting_mode": casting_mode,
        "elementwise_affine": True,
        "BLOCK_SIZE": block,
    }
    backward = forward | {"X_dtype": tl.bfloat16}
    inputs = [*MATRIX, *MATRIX, *MATRIX, *SUMS]  # y, x, w and 1/rms
    gradients = [*MATRIX, *MATRIX, *MATRIX, *MATRIX, *SUMS, *SUMS]
    if block <= 256:  # several rows per program
        rows = {"BLOCK_ROW": 16}
        return {
            "forward in blocks": Kernel(
                rms_norm._block_rms_norm_forward_kernel,
                [*inputs, "i32", "i32", "fp32", "fp32"],
                forward | rows,
                warps,
            ),
            "backward in blocks": Kernel(
                rms_norm._block_rms_norm_backward_kernel,
                [*gradients, "i32", "i32", "fp32"],
                backward | rows | {"COMPUTE_DW": True},
                warps,
            ),
        }
    kernels = {
        "forward": Kernel(
            rms_norm._rms_norm_forward_kernel,
            [*inputs, "i32", "fp32", "fp32"],
            forward,
            warps,
        )
    }
    for trained in (False, True):
        kernels[f"backward, {'trained' if trained else 'frozen'}"] = Kernel(
            rms_norm._rms_norm_backward_kernel,
            [*gradients, "i32", "i32", "fp32", "i32"],
            backward | {"COMPUTE_DW": trained},
            warps,
        )
    return kernels


def rope_kernel(is_backward: bool) -> Kernel:
    from liger_kernel.ops import rope

    constants = {
        "bs": 1,
        "cos_bs": 1,
        "n_qh": 32,
        "n_kh": 8,
        "pad_n_qh": 32,
        "pad_n_kh": 8,
        "BLOCK_SIZE": 8,
    }
    constants |= dict.fromkeys(("hd", "pad_hd", "rd", "pad_rd"), HEAD_DIM)
    types = [*MATRIX, *MATRIX, *MATRIX, *MATRIX, "i32"]  # q, k, cos and sin; tokens
    return Kernel(rope._triton_rope, types, constants | {"BACKWARD_PASS": is_backward})


def kernels() -> dict[str, Kernel]:
    from liger_kernel.ops import geglu, swiglu
    from liger_kernel.ops.utils import calculate_settings

    cases = {}
    for model, hidden, casting_mode in (
        ("Llama 3.1 8B", 4096, 0),
        ("Gemma 2 9B", 3584, 1),
        ("heads of Qwen3", HEAD_DIM, 0),
    ):
        for name, kernel in rms_norm_kernels(hidden, casting_mode).items():
            cases[f"RMSNorm {name}, {model}"] = kernel
    cases["RoPE forward"] = rope_kernel(is_backward=False)
    cases["RoPE backward"] = rope_kernel(is_backward=True)
    block, warps = calculate_settings(INTERMEDIATE)
    row = {"n_cols": INTERMEDIATE, "BLOCK_SIZE": block}
    vectors = [BF16, BF16, BF16, "i32"]
    tile = {"BLOCK_SIZE": 1024}
    for name, plain, tiled in (
        ("forward", swiglu._swiglu_forward_kernel, swiglu._swiglu_forward_kernel_tiled),
        ("backward", swiglu._swiglu_backward_kernel, swiglu._swiglu_backward_kernel_tiled),
    ):
        cases[f"SwiGLU {name}"] = Kernel(plain, [*vectors, "fp32"], row, warps)
        cases[f"SwiGLU {name}, tiled"] = Kernel(tiled, [*vectors, "fp32", "i32"], tile)
    cases["GeGLU forward"] = Kernel(geglu._geglu_tanh_forward_kernel, vectors, row, warps)
    cases["GeGLU backward"] = Kernel(geglu._geglu_tanh_backward_kernel, vectors, row, warps)
    return cases


def compile_for(kernel: Kernel, target: int) -> bytes:
    """Return the machine code of a kernel for a compute capability, such as 80."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    arguments = kernel.function.arg_names
    free = [argument for argument in arguments if argument not in kernel.constants]
    types = dict(zip(free, kernel.types, strict=True))
    signature = {argument: types.get(argument, "constexpr") for argument in arguments}
    source = ASTSource(fn=kernel.function, signature=signature, constexprs=kernel.constants)
    gpu = GPUTarget("cuda", target, 32)
    compiled = triton.compile(source, target=gpu, options={"num_warps": kernel.warps})
    return compiled.asm["cubin"]


@pytest.mark.slow
@pytest.mark.skipif(not HAS_LIGER, reason="Triton or liger-kernel is missing")
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_of_liger_compile(target: int) -> None:
    lengths = {name: len(compile_for(kernel, target)) for name, kernel in kernels().items()}
    assert len(lengths) > 10 and all(lengths.values()), lengths
