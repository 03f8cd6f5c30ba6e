"""Matmuls of experts one after another: what torch's grouped matmul computes, to the bit."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from llama_ft.models.base.grouped_matmul import grouped_matmul, multiplies_by_group
from llama_ft.runtime import Target, computing_on

A100 = Target("cuda", (8, 0), "nccl")
ENDS = [30, 30, 41, 41, 64]  # groups of 30, 0, 11, 0 and 23 rows


def results(multiply: Any, dtype: torch.dtype, is_transposed: bool) -> dict[str, torch.Tensor]:
    """Output and gradients of x [64, 16] times weights [5, 16, 24]."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 16, generator=generator).to(dtype).requires_grad_()
    stored = torch.randn(5, 16, 24, generator=generator).to(dtype)
    if is_transposed:
        stored = stored.transpose(1, 2).contiguous()
    stored.requires_grad_()
    weight = stored.transpose(1, 2) if is_transposed else stored
    gradient = torch.randn(64, 24, generator=generator).to(dtype)
    y = multiply(x, weight, torch.tensor(ENDS, dtype=torch.int32))
    y.backward(gradient)
    assert x.grad is not None and stored.grad is not None
    return {"y": y.detach(), "x": x.grad, "weight": stored.grad}


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_and_gradients_are_those_of_torch(dtype: torch.dtype, is_transposed: bool) -> None:
    expected = results(lambda x, weight, ends: functional.grouped_mm(x, weight, offs=ends), dtype,
                       is_transposed)  # fmt: skip
    with computing_on(A100):
        found = results(grouped_matmul, dtype, is_transposed)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        assert found[name].stride() == value.stride(), name
    assert found["weight"][1].count_nonzero() == 0  # an expert without rows


def test_only_what_a_gradient_needs_is_kept() -> None:
    x = torch.randn(64, 16)
    weight = torch.randn(5, 16, 24)
    ends = torch.tensor(ENDS, dtype=torch.int32)
    with computing_on(A100):
        for trained, frozen in ((x, weight), (weight, x)):
            y = grouped_matmul(
                x.detach().requires_grad_(trained is x),
                weight.detach().requires_grad_(trained is weight),
                ends,
            )
            kept = {saved.data_ptr() for saved in y.grad_fn.saved_tensors if saved is not None}  # type: ignore[union-attr]
            assert frozen.data_ptr() in kept and trained.data_ptr() not in kept


@pytest.mark.parametrize(
    ("capability", "dtype", "by_group"),
    [
        (None, torch.float32, False),  # a CPU
        ((7, 5), torch.float16, True),
        ((8, 0), torch.bfloat16, True),
        ((8, 9), torch.bfloat16, True),
        ((9, 0), torch.bfloat16, False),
        ((9, 0), torch.float32, True),
        ((10, 0), torch.bfloat16, False),
        ((10, 3), torch.bfloat16, False),
        ((12, 0), torch.bfloat16, True),
    ],
)
def test_groups_are_multiplied_one_after_another_without_a_kernel_for_all(
    capability: tuple[int, int] | None, dtype: torch.dtype, by_group: bool
) -> None:
    target = Target() if capability is None else Target("cuda", capability, "nccl")
    with computing_on(target):
        assert multiplies_by_group(dtype) == by_group
