"""16-bit products in fp32: the reference is the product of the same numbers in fp64, rounded once."""

from collections.abc import Callable, Iterator

import pytest
import torch

from llama_ft.runtime import cpu_kernels

A, B = torch.randn(37, 53, generator=torch.Generator().manual_seed(0)), torch.randn(53, 29)
BATCHED_A, BATCHED_B = torch.randn(3, 5, 7), torch.randn(3, 7, 6)
BIAS, ADDED, BATCHED_ADDED = torch.randn(29), torch.randn(37, 29), torch.randn(6)
PRODUCTS: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "mm": (torch.mm, (A, B)),
    "of a transposed": (lambda a, b: torch.mm(b.t(), a.t()), (A, B)),
    "with a bias": (torch.addmm, (BIAS, A, B)),
    "added to": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=-2), (ADDED, A, B)),
    "added to in place": (lambda c, a, b: c.clone().addmm_(a, b, beta=0.5, alpha=-2), (ADDED, A, B)),
    "what was not a number, times 0": (lambda c, a, b: torch.addmm(c / 0, a, b, beta=0), (ADDED, A, B)),
    "batched": (torch.bmm, (BATCHED_A, BATCHED_B)),
    "batched, added to": (lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5), (BATCHED_ADDED, BATCHED_A, BATCHED_B)),
    "linear": (lambda a, b: torch.nn.functional.linear(a.view(1, 37, 53), b.t()), (A, B)),
    "of nothing": (lambda a, b: torch.mm(a[:0], b), (A, B)),
    "over nothing": (lambda a, b: torch.mm(a[:, :0], b[:0]), (A, B)),
}


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In blocks of a few rows and columns."""
    monkeypatch.setattr(cpu_kernels, "BLOCK", 53 * 8)
    was_there = cpu_kernels.is_installed()
    cpu_kernels.use_fp32_products()
    yield
    if not was_there:
        cpu_kernels.use_own_products()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_rounded_once(name: str, dtype: torch.dtype) -> None:
    product, operands = PRODUCTS[name]
    narrow = [operand.to(dtype) for operand in operands]
    exact = product(*(operand.double() for operand in narrow))
    result = product(*narrow)
    assert result.dtype == dtype and result.shape == exact.shape
    # Half a unit of the last place, and next to nothing for fp32's own sums.
    unit = torch.finfo(dtype).eps / 2
    assert ((result.double() - exact).abs() <= exact.abs() * unit * 1.01 + 1e-5).all()


@pytest.mark.parametrize("name", PRODUCTS)
def test_fp32_goes_on_to_torchs_own_kernels(name: str) -> None:
    product, operands = PRODUCTS[name]
    ours = product(*operands)
    cpu_kernels.use_own_products()
    assert torch.equal(ours, product(*operands))


def test_operands_of_two_dtypes_are_refused_as_by_torch() -> None:
    with pytest.raises(RuntimeError, match="same dtype"):
        torch.mm(A.bfloat16(), B)


def test_gradients_of_a_layer_are_those_of_fp32_within_rounding() -> None:
    inputs, weight = A.bfloat16().requires_grad_(), B.t().bfloat16().contiguous().requires_grad_()
    wide_inputs, wide_weight = (tensor.detach().float().requires_grad_() for tensor in (inputs, weight))
    torch.nn.functional.linear(inputs, weight).sum().backward()
    torch.nn.functional.linear(wide_inputs, wide_weight).sum().backward()
    torch.testing.assert_close(inputs.grad, wide_inputs.grad.bfloat16())
    torch.testing.assert_close(weight.grad, wide_weight.grad.bfloat16())


def test_what_the_kernels_hold_is_what_is_planned() -> None:
    """Counted on torch's own allocator of the profiler."""
    a, b = A.bfloat16(), B.bfloat16()
    planned = cpu_kernels.workspace_bytes(torch.ops.aten.mm.default, (a, b))
    with torch.profiler.profile(profile_memory=True) as profile:
        torch.mm(a, b)
    held = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    result = 37 * 29 * 2
    assert planned <= most - result + 64 * 4 and most - result <= planned * 1.5 + 64 * 4
    assert cpu_kernels.workspace_bytes(torch.ops.aten.mm.default, (A, B)) == 0
    assert cpu_kernels.workspace_bytes(torch.ops.aten.add.Tensor, (a, 1)) == 0
