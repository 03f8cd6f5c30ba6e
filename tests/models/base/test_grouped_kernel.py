"""The kernel for all experts computes what matmuls one after another do, forward and backward: in Triton's
interpreter, and compiled for GPUs that are not here."""

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY
from emulated_cuda.test_triton import BF16, Kernel, compile_for
from triton_modules import TARGETS, import_interpreted, import_kernels, needs_triton

from llama_ft.models.adapters.lora_experts import LowRankSum, _grouped_mm
from llama_ft.models.base import grouped_matmul as module
from llama_ft.models.base.grouped_matmul import grouped_matmul, multiplied, one_group_fills
from llama_ft.models.base.triton_kernels import TritonKernels
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


# Mistakes that a kernel could have: a line of it, and what stands there by mistake
MISTAKES = {
    "the group of a tile": ("tiles_until <= tile", "tiles_until < tile"),
    "the last row of a group": ("is_row = row < last", "is_row = row < last - 1"),
    "the low-rank part": ("total += tl.dot(low, factor", "total -= tl.dot(low, factor"),
    "x^T g": ("is_row = row < end", "is_row = row < end - 1"),
    "an error": ("places = row", "places = no_such_name + row"),
}


@needs_triton
@pytest.mark.parametrize("mistake", ["", *MISTAKES])
def test_a_kernel_with_a_mistake_is_not_used(
    mistake: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """LoRA's factors are zeros before the first step, which must not hide it."""
    text = (REPOSITORY / "src" / "llama_ft" / KERNEL).read_text()
    right, wrong = MISTAKES.get(mistake, ("", ""))
    assert not mistake or text.count(right) == 1
    (tmp_path / "own_kernel.py").write_text(text.replace(right, wrong) if mistake else text)
    name = "own_kernel_of_a_test"
    monkeypatch.setitem(
        sys.modules, name, import_interpreted(tmp_path / "own_kernel.py", monkeypatch)
    )
    monkeypatch.setattr(logging.getLogger("llama_ft"), "propagate", True)
    kernels = TritonKernels(name, "experts are slow", module.KERNELS._references)
    ends = torch.tensor(ENDS, dtype=torch.int32)
    x = made(ENDS[-1], TERMS, dtype=torch.bfloat16)
    weight = made(5, TERMS, COLUMNS, dtype=torch.bfloat16)
    u = made(ENDS[-1], RANK, dtype=torch.bfloat16)
    right_factor = torch.zeros(5, RANK, COLUMNS, dtype=torch.bfloat16)
    gradient = made(ENDS[-1], COLUMNS, dtype=torch.bfloat16)
    for _ in range(2):
        y = kernels.call("multiply", x, weight, ends, (u, right_factor, SCALING))
        d_weight = kernels.call("outer", x, gradient, ends)
    if not mistake:
        assert_close(y, multiplied(x, weight, ends))
        assert d_weight is not None and not caplog.text
        return
    # from the first call of the wrong one on
    assert d_weight is None and (y is None)
    [line] = caplog.text.splitlines()
    assert "experts are slow" in line
    if mistake != "an error":
        function = "outer" if mistake == "x^T g" else "multiply"
        assert f"{function} differs from torch's operators by " in line and "Triton 3" in line


@needs_triton
def test_a_kernel_is_compared_once_per_dtype_and_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = list[tuple[torch.dtype, int]]()

    def multiply(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
        compared.append((x.dtype, len(x)))
        return multiplied(x, weight, *_)

    name = "own_kernel_of_a_test"
    monkeypatch.setitem(sys.modules, name, import_interpreted(KERNEL, monkeypatch))
    reference = module.KERNELS._references["multiply"]._replace(function=multiply)
    kernels = TritonKernels(name, "", {"multiply": reference})
    for rows in (300, 290):
        for dtype in (torch.float32, torch.bfloat16):
            for columns in (16, 32):
                x = made(rows, 16, dtype=dtype)
                weight = made(2, 16, columns, dtype=dtype)
                ends = torch.tensor([100, rows], dtype=torch.int32)
                y = kernels.call("multiply", x, weight, ends, None)
                assert_close(y, multiplied(x, weight, ends))
    assert compared == [(torch.float32, 256)] * 2 + [(torch.bfloat16, 256)] * 2


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_compile(target: int) -> None:
    kernels = import_kernels(KERNEL)
    tiles = {"ROWS": kernels.ROWS, "COLUMNS": kernels.COLUMNS, "TERMS": kernels.TERMS}
    groups = {"GROUPS": 128, "PADDED_GROUPS": 128, "PRECISION": "tf32"}
    contiguous: dict[str, Any] = {"x_term": 1, "w_column": 1, "u_rank": 1, "r_column": 1}
    types = [BF16] * 5 + ["*i32", "fp32", "i32", "i32"] + ["i32"] * 6
    for rank in (0, 16):
        ranks = {"RANK": rank, "PADDED_RANK": kernels.padded(rank)}
        constants = tiles | groups | contiguous | ranks
        assert compile_for(Kernel(kernels.multiply_kernel, types, constants), target)
    types = [BF16] * 3 + ["*i32", "i32", "i32", "i32", "i32"]
    for height, width in ((64, 128), (64, 16), (16, 128)):
        constants = {"HEIGHT": height, "WIDTH": width, "TERMS": kernels.TERMS, "PRECISION": "tf32"}
        constants |= {"x_column": 1, "g_column": 1}
        assert compile_for(Kernel(kernels.outer_kernel, types, constants), target)


@pytest.mark.parametrize(
    ("processors", "tokens", "fills"),
    [(108, 16_384, False), (108, 16_385, True), (170, 16_385, False)],
)
def test_large_groups_are_left_to_cublas(processors: int, tokens: int, fills: bool) -> None:
    """gate_up_proj of Qwen3-30B-A3B on an A100 and on a 5090: 8 of 128 experts per token."""
    assert one_group_fills(processors, 8 * tokens, torch.Size((128, 2048, 1536))) == fills
