"""MXFP4 is dequantized in few passes over memory: by operators of torch, and by a kernel in Triton."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY
from emulated_cuda.test_triton import BF16, Kernel, compile_for
from torch.utils._python_dispatch import TorchDispatchMode
from triton_modules import TARGETS, import_interpreted, import_kernels, needs_triton

from llama_ft.models.base.triton_kernels import TritonKernels
from llama_ft.models.published import mxfp4
from llama_ft.models.published.mxfp4 import StoredMxfp4

KERNEL = "models/published/fp4_kernel.py"
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def weights(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales, and their values by the format's definition, in fp32."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 16, (rows, columns), generator=generator)
    exponents = torch.randint(100, 150, (rows, columns // 32), generator=generator)
    codes = (numbers[:, ::2] | numbers[:, 1::2] << 4).to(torch.uint8)
    sign = 1.0 - 2.0 * (numbers >> 3)
    factor = 2.0 ** (exponents - 127).repeat_interleave(32, dim=1)
    return codes, exponents.to(torch.uint8), sign * VALUES[numbers & 7] * factor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_values_are_exact(dtype: torch.dtype) -> None:
    codes, scale, expected = weights(37, 96)
    found = StoredMxfp4(torch.bfloat16).dequantize(codes, scale, dtype)
    assert torch.equal(found, expected.to(dtype))


class Traffic(TorchDispatchMode):
    """Counts the bytes that operators read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in func.name():
            tensors = [value for value in args if isinstance(value, torch.Tensor)]
            self.bytes += sum(tensor.nbytes for tensor in (*tensors, result))
        return result


def test_operators_of_torch_move_11_bytes_per_weight() -> None:
    """Without the kernel: 0.5 and 2 for numbers of bytes, 2 and 2 to look them up, 2 and 2 to scale."""
    rows, columns = 512, 1024
    codes, scale, _ = weights(rows, columns)
    mxfp4._pairs(torch.bfloat16, codes.device)
    with Traffic() as traffic:
        mxfp4._dequantize(codes, scale, torch.bfloat16)
    assert traffic.bytes / (rows * columns) == pytest.approx(10.5, abs=0.5)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_writes_the_same_values(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter, which runs on a CPU."""
    kernel = import_interpreted(KERNEL, monkeypatch)
    codes, scale, expected = weights(37, 96)
    found = kernel.dequantize(codes, scale, dtype)
    assert torch.equal(found, expected.to(dtype))


@needs_triton
@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_kernel_that_reads_the_high_half_first_is_not_used(
    is_wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (REPOSITORY / "src" / "llama_ft" / KERNEL).read_text()
    right = "tl.join(value_of(pairs & 15) * factor, value_of(pairs >> 4) * factor)"
    wrong = "tl.join(value_of(pairs >> 4) * factor, value_of(pairs & 15) * factor)"
    assert text.count(right) == 1
    (tmp_path / "own_kernel.py").write_text(text.replace(right, wrong) if is_wrong else text)
    name = "own_kernel_of_a_test"
    monkeypatch.setitem(
        sys.modules, name, import_interpreted(tmp_path / "own_kernel.py", monkeypatch)
    )
    kernels = TritonKernels(name, "", mxfp4.KERNELS._references)
    codes, scale, expected = weights(37, 96)
    found = kernels.call("dequantize", codes, scale, torch.bfloat16)
    assert found is None if is_wrong else torch.equal(found, expected.bfloat16())


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernel_compiles(target: int) -> None:
    kernel = import_kernels(KERNEL)
    types = ["*u8", "*u8", BF16, "i32"]
    constants = {"BLOCKS": kernel.BLOCKS_PER_PROGRAM}
    assert compile_for(Kernel(kernel.dequantize_kernel, types, constants), target)
