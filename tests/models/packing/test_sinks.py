"""Attention with sinks by a kernel: what the eager attention of gpt-oss computes for each sample alone."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from llama_ft.models.packing.packed_attention import _packed_eager
from llama_ft.models.packing.packed_samples import PackedSamples
from llama_ft.models.packing.sinks import attend_with_sinks

LENGTHS = [64, 33, 5, 1, 7, 20, 64]
HEADS = 4
KEY_HEADS = 2
WIDTH = 16
SCALE = 0.3
CPU = torch.device("cpu")


def inputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Query, key, value, sinks, and a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)
    shapes = [(1, heads, tokens, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    shapes += [(HEADS,), (1, tokens, HEADS, WIDTH)]
    made = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    return [tensor.to(dtype).requires_grad_() for tensor in made]


def with_gradients(output: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    *trained, gradient = tensors
    return [output.detach(), *torch.autograd.grad(output, trained, gradient)]


def of_transformers(window: int | None) -> list[torch.Tensor]:
    """The eager attention of gpt-oss for each sample alone, and its gradients."""
    tensors = inputs()
    query, key, value, sinks, _ = tensors
    module: Any = SimpleNamespace(
        num_key_value_groups=HEADS // KEY_HEADS, sinks=sinks, training=False
    )
    outputs = []
    start = 0
    for length in LENGTHS:
        sample = [tensor[:, :, start : start + length] for tensor in (query, key, value)]
        allowed = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - (window or length))
        mask = torch.zeros(length, length).masked_fill(~allowed, float("-inf"))
        outputs.append(eager_attention_forward(module, *sample, mask, scaling=SCALE)[0])
        start += length
    return with_gradients(torch.cat(outputs, dim=1), tensors)


@pytest.mark.parametrize("window", [None, 6])
def test_output_and_gradients_are_those_of_transformers(window: int | None) -> None:
    samples = PackedSamples.of(LENGTHS, CPU)
    expected = of_transformers(window)
    tensors = inputs()
    query, key, value, sinks, _ = tensors
    output = attend_with_sinks((query, key, value), sinks, samples, "cpu", SCALE, window)
    found = with_gradients(output, tensors)
    assert expected[-1].norm() > 0.1  # of the sinks
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    tensors = inputs(torch.bfloat16)
    query, key, value, sinks, _ = tensors
    output = attend_with_sinks((query, key, value), sinks, samples, "cpu", SCALE, window)
    for ours, theirs in zip(with_gradients(output, tensors), expected, strict=True):
        assert (ours.float() - theirs).norm() < 0.01 * theirs.norm()


class Largest(TorchDispatchMode):
    """Notes the most elements of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple | list) else (result,)
        sizes = [one.numel() for one in made if isinstance(one, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def test_scores_of_all_pairs_of_tokens_are_never_made() -> None:
    tokens = 512
    query, key, value = torch.randn(3, 1, HEADS, tokens, WIDTH).unbind()
    module: Any = SimpleNamespace(config=None)
    how = {"scaling": SCALE, "dropout": 0.0, "sliding_window": None}
    samples = PackedSamples.of([tokens], CPU)
    with Largest() as largest:
        sinks = torch.zeros(HEADS, requires_grad=True)
        output, _ = _packed_eager(module, query, key, value, None, samples, s_aux=sinks, **how)
        output.sum().backward()
    assert largest.elements == HEADS * tokens * WIDTH
