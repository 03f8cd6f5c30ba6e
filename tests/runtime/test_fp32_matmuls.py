"""bf16 products by way of fp32, compared with exact ones."""

from pathlib import Path

import pytest
import torch
from forked import forked

from llama_ft.runtime import fp32_matmuls
from llama_ft.runtime.devices import cpu_vendor

JOB = '''
"""What torch computes in this process after use_fp32_matmuls."""
import sys
import torch
from torch.nn import functional
from llama_ft.runtime import fp32_matmuls
fp32_matmuls._is_faster = lambda: True
shapes = []
multiply = fp32_matmuls._multiply
def counted(left, right, *others):
    shapes.append((*left.shape, right.shape[1]))
    return multiply(left, right, *others)
fp32_matmuls._multiply = counted
assert fp32_matmuls.use_fp32_matmuls() and fp32_matmuls.use_fp32_matmuls()
torch.manual_seed(0)
inputs = torch.randn(2, 70, 96).bfloat16().requires_grad_()
weight = torch.randn(80, 96).bfloat16().requires_grad_()
bias = torch.randn(80).bfloat16().requires_grad_()
wanted = torch.randn(2, 70, 80).bfloat16()
parts = (inputs, weight, bias)
found = functional.linear(*parts)
gradients = torch.autograd.grad(found, parts, wanted)
wide = [part.detach().double().requires_grad_() for part in parts]
exact = functional.linear(*wide)
expected = torch.autograd.grad(exact, wide, wanted.double())
for one, other in zip((found, *gradients), (exact, *expected), strict=True):
    assert one.dtype == torch.bfloat16
    assert (one.double() - other).norm() < 0.004 * other.norm()
assert len(shapes) == 3, shapes  # the output and two gradients
del shapes[:]
few = torch.randn(63, 96).bfloat16()
assert torch.equal(few @ few.t(), torch.mm(few, few.t(), out=few.new_empty(63, 63)))
number = torch.randn(64, 96)
assert torch.equal(number @ number.t(), torch.mm(number, number.t(), out=torch.empty(64, 64)))
scaled = torch.addmm(bias.detach(), few, weight.detach().t(), beta=2, alpha=3)
exact = 2 * wide[2] + 3 * few.double() @ wide[1].t()
assert (scaled.double() - exact).norm() < 0.004 * exact.norm() and not shapes
print("equal")
'''


def test_products_and_gradients_are_exact_up_to_their_rounding(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    finished = forked(script)
    assert finished.exit_code == 0 and finished.output == "equal\n", finished.output


@pytest.mark.parametrize("shape", [(70, 130, 65), (129, 64, 64), (64, 64, 200)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_large_matrices_are_multiplied_in_parts(
    shape: tuple[int, int, int],
    transposed: bool,
    with_bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fp32_matmuls, "EDGE", 64)
    rows, inner, columns = shape
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(rows, inner, generator=generator).bfloat16()
    right = torch.randn(inner, columns, generator=generator).bfloat16()
    if transposed:
        left = left.t().contiguous().t()
        right = right.t().contiguous().t()
    bias = torch.randn(columns, generator=generator).bfloat16() if with_bias else None
    found = fp32_matmuls._multiply(left, right, left.new_empty(rows, columns), bias)
    exact = left.double() @ right.double()
    if bias is not None:
        exact += bias.double()
    assert (found.double() - exact).norm() < 0.003 * exact.norm()


@pytest.mark.parametrize(
    ("features", "vendor", "expected"),
    [
        ({"avx512_bf16"}, "GenuineIntel", True),
        ({"avx512_bf16", "amx_bf16"}, "GenuineIntel", False),
        ({"avx512_bf16"}, "AuthenticAMD", False),
        (set(), "GenuineIntel", False),
    ],
)
def test_only_intels_without_amx_take_fp32(
    features: set[str], vendor: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp32_matmuls, "cpu_features", lambda: features)
    monkeypatch.setattr(Path, "read_text", lambda _: f"vendor_id\t: {vendor}\n")
    cpu_vendor.cache_clear()
    try:
        assert fp32_matmuls._is_faster.__wrapped__() is expected
    finally:
        cpu_vendor.cache_clear()
