"""The kernel for all experts computes what matmuls one after another do, forward and backward: in Triton's
interpreter, and compiled for GPUs that are not here."""

from typing import Any

import pytest
import torch
from emulated_cuda.test_triton import BF16, Kernel, compile_for
from triton_modules import TARGETS, import_interpreted, import_kernels, needs_triton

from llama_ft.models.adapters.lora_experts import LowRankSum, _grouped_mm
from llama_ft.models.base.grouped_matmul import grouped_matmul, one_group_fills
from llama_ft.runtime import Target, computing_on

KERNEL = "models/base/grouped_kernel.py"
A100 = Target("cuda", (8, 0), "nccl")
ENDS = [70, 70, 81, 81, 150]  # groups of 70, 0, 11, 0 and 69 rows
TERMS = 48
COLUMNS = 144
RANK = 3
SCALING = 0.5
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def made(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype
    error = (found.float() - expected.float()).norm()
    assert error <= TOLERANCE[found.dtype] * expected.float().norm()


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_output_and_gradients_are_those_of_a_loop(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of weights that are stored transposed, as dequantized ones of gpt-oss are."""
    kernels = import_interpreted(KERNEL, monkeypatch)
    ends = torch.tensor(ENDS, dtype=torch.int32)
    x = made(ENDS[-1], TERMS, dtype=dtype).requires_grad_()
    weight = made(5, COLUMNS, TERMS, dtype=dtype).transpose(1, 2).requires_grad_()
    gradient = made(ENDS[-1], COLUMNS, dtype=dtype)
    with computing_on(A100):
        y = grouped_matmul(x, weight, ends)
        dx, dw = torch.autograd.grad(y, (x, weight), gradient)
    assert_close(kernels.multiply(x.detach(), weight.detach(), ends), y)
    assert_close(kernels.multiply(gradient, weight.detach().transpose(1, 2), ends), dx)
    assert_close(kernels.outer(x.detach(), gradient, ends), dw)


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_adapters_have_the_output_and_gradients_of_a_loop(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = import_interpreted(KERNEL, monkeypatch)
    ends = torch.tensor(ENDS, dtype=torch.int32)
    x = made(ENDS[-1], TERMS, dtype=dtype).requires_grad_()
    weight = made(5, TERMS, COLUMNS, dtype=dtype)
    left = made(5, TERMS, RANK, dtype=dtype).requires_grad_()
    right = made(5, RANK, COLUMNS, dtype=dtype).requires_grad_()
    gradient = made(ENDS[-1], COLUMNS, dtype=dtype)
    with computing_on(A100):
        y = _grouped_mm(x, LowRankSum(lambda: weight, left, right, SCALING), ends)
        assert y is not None
        expected = torch.autograd.grad(y, (x, left, right), gradient)
    x, left, right = (tensor.detach() for tensor in (x, left, right))
    u = kernels.multiply(x, left, ends)
    assert_close(kernels.multiply(x, weight, ends, (u, right, SCALING)), y)
    t = kernels.multiply(gradient, right.transpose(1, 2), ends)
    transposed = (weight.transpose(1, 2), left.transpose(1, 2))
    dx = kernels.multiply(gradient, transposed[0], ends, (t, transposed[1], SCALING))
    d_left = kernels.outer(x, t, ends).mul_(SCALING)
    d_right = kernels.outer(u, gradient, ends).mul_(SCALING)
    for found, wanted in zip((dx, d_left, d_right), expected, strict=True):
        assert_close(found, wanted)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_compile(target: int) -> None:
    module = import_kernels(KERNEL)
    tiles = {"ROWS": module.ROWS, "COLUMNS": module.COLUMNS, "TERMS": module.TERMS}
    groups = {"GROUPS": 128, "PADDED_GROUPS": 128, "PRECISION": "tf32"}
    contiguous: dict[str, Any] = {"x_term": 1, "w_column": 1, "u_rank": 1, "r_column": 1}
    types = [BF16] * 5 + ["*i32", "fp32", "i32", "i32"] + ["i32"] * 6
    for rank in (0, 16):
        ranks = {"RANK": rank, "PADDED_RANK": module.padded(rank)}
        constants = tiles | groups | contiguous | ranks
        assert compile_for(Kernel(module.multiply_kernel, types, constants), target)
    types = [BF16] * 3 + ["*i32", "i32", "i32", "i32", "i32"]
    for height, width in ((64, 128), (64, 16), (16, 128)):
        constants = {"HEIGHT": height, "WIDTH": width, "TERMS": module.TERMS, "PRECISION": "tf32"}
        constants |= {"x_column": 1, "g_column": 1}
        assert compile_for(Kernel(module.outer_kernel, types, constants), target)


@pytest.mark.parametrize(
    ("processors", "tokens", "fills"),
    [(108, 16_384, False), (108, 16_385, True), (170, 16_385, False)],
)
def test_large_groups_are_left_to_cublas(processors: int, tokens: int, fills: bool) -> None:
    """gate_up_proj of Qwen3-30B-A3B on an A100 and on a 5090: 8 of 128 experts per token."""
    assert one_group_fills(processors, 8 * tokens, torch.Size((128, 2048, 1536))) == fills
