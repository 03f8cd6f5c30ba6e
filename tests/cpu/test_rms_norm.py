"""The RMSNorm in blocks of rows, compared with Transformers' and with float64."""

from typing import Any

import pytest
import torch
from profiled import peak_bytes
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from llama_ft.cpu import rms_norm as norms
from llama_ft.cpu.rms_norm import rms_norm

EPS = 1e-5


def inputs(
    shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[LlamaRMSNorm, torch.Tensor, torch.Tensor]:
    """A norm, x and a gradient of y."""
    torch.manual_seed(0)
    norm = LlamaRMSNorm(shape[-1], eps=EPS).to(dtype)
    norm.weight.data.normal_()
    x = (torch.randn(shape) * 3).to(dtype).requires_grad_()
    return norm, x, torch.randn(shape).to(dtype)


def exact(norm: LlamaRMSNorm, x: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
    weight = norm.weight.detach().double().requires_grad_()
    wide = x.detach().double().requires_grad_()
    y = functional.rms_norm(wide, weight.shape, weight, EPS)
    return [y.detach(), *torch.autograd.grad(y, [wide, weight], gradient.double())]


@pytest.mark.parametrize("block", [64, 1000, norms.BLOCK], ids=["a row", "some rows", "all rows"])
@pytest.mark.parametrize("shape", [(2, 25, 96), (3, 7, 4, 16), (1, 0, 96)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_as_exact_as_that_of_transformers(
    dtype: torch.dtype, shape: tuple[int, ...], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norms, "BLOCK", block)
    norm, x, gradient = inputs(shape, dtype)
    before = x.detach().clone()
    plain = norm(x)
    ours = rms_norm(norm, x)
    assert torch.equal(ours, plain)
    found = torch.autograd.grad(ours, [x, norm.weight], gradient)
    theirs = torch.autograd.grad(plain, [x, norm.weight], gradient)
    assert torch.equal(x, before)
    for one, other, value in zip(found, theirs, exact(norm, x, gradient)[1:], strict=True):
        assert one.dtype == dtype
        rounding = 1e-6 * value.norm()
        assert (one - value).norm() <= 1.05 * (other - value).norm() + rounding


def test_an_input_of_another_layout_and_a_frozen_weight() -> None:
    norm, x, gradient = inputs((2, 5, 4, 16), torch.bfloat16)
    norm.weight.requires_grad_(False)
    y = rms_norm(norm, x.transpose(1, 2))
    assert torch.equal(y, norm(x.transpose(1, 2)))
    y.backward(gradient.transpose(1, 2))
    (plain,) = torch.autograd.grad(norm(x), x, gradient)
    assert x.grad is not None and norm.weight.grad is None
    assert (x.grad - plain).norm() < 0.01 * plain.norm()


def test_an_output_that_is_changed_in_place() -> None:
    """Mixtral adds noise to it."""
    norm, x, gradient = inputs((2, 5, 16), torch.bfloat16)
    found = []
    for y in (rms_norm(norm, x), norm(x)):
        y *= 2
        found.append(torch.autograd.grad(y, x, gradient)[0])
    assert (found[0] - found[1]).norm() < 0.01 * found[1].norm()


def test_other_dtypes_are_computed_by_the_models_own_code() -> None:
    norm, x, gradient = inputs((2, 9, 16), torch.float32)
    for module in (norm, norm.bfloat16()):
        found = torch.autograd.grad(rms_norm(module, x), [x, module.weight], gradient)
        theirs = torch.autograd.grad(module(x), [x, module.weight], gradient)
        assert all(torch.equal(*pair) for pair in zip(found, theirs, strict=True))


def test_kept_are_the_input_and_one_number_per_row() -> None:
    norm, x, _ = inputs((2, 100, 64), torch.bfloat16)
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        rms_norm(norm, x)
    new = [tensor for tensor in kept if tensor is not x and tensor is not norm.weight]
    assert [(tensor.numel(), tensor.dtype) for tensor in new] == [(200, torch.float32)]


@pytest.mark.parametrize("is_contiguous", [True, False])
@pytest.mark.parametrize("rows", [300, 3000], ids=["less than a block", "blocks"])
def test_no_more_memory_is_taken_than_the_plan_counts(rows: int, is_contiguous: bool) -> None:
    norm, x, gradient = inputs((2, rows // 2, 512), torch.bfloat16)
    weight = norm.weight.detach()
    x = x.detach()
    if not is_contiguous:
        x = x.transpose(0, 1)
        gradient = gradient.transpose(0, 1)
    _, r = torch.ops.llama_ft.rms_norm(x, weight, EPS)
    backward: tuple[Any, ...] = (gradient, x, weight, r, True)
    calls = [
        (torch.ops.llama_ft.rms_norm, (x, weight, EPS)),
        (torch.ops.llama_ft.rms_norm_backward, backward),
    ]
    for operator, arguments in calls:
        planned = norms.workspace_bytes(arguments) + x.nbytes
        peak = peak_bytes(lambda: operator(*arguments))  # noqa: B023
        assert 0.8 * planned < peak <= 1.02 * planned
