"""Attention in blocks of queries, compared with the formula in fp32."""

from typing import Any

import pytest
import torch
from profiled import peak_bytes
from tiny_llama import tiny_llama

from llama_ft.config import TrainConfig
from llama_ft.cpu import block_attention as blocks
from llama_ft.cpu.block_attention import gradients_in_blocks
from llama_ft.models import (
    BuiltModel,
    checkpoint_activations,
    packed_arguments,
    use_packed_attention,
)

LENGTHS = {
    "many": (64, 64, 33, 5, 32, 1, 150, 151),
    "one": (512,),
    "a few tokens": (3,),
    "on block ends": (128, 256),
}


def formula(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: tuple[int, ...],
    scale: float,
) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    samples = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    is_seen = (samples[:, None] == samples).tril()
    scores = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scale
    probabilities = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
    return probabilities @ value.repeat_interleave(groups, 1)


@pytest.fixture(params=["products by oneDNN", "products by MKL"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who multiplies queries and keys."""
    by_onednn = request.param == "products by oneDNN"
    monkeypatch.setattr(blocks, "is_faster_forward", lambda _: by_onednn)


@pytest.mark.parametrize("lengths", [(512, 512), (100, 30, 400), (60,) * 8])
@pytest.mark.parametrize("is_backward", [False, True])
def test_no_more_memory_is_taken_than_the_plan_counts(
    lengths: tuple[int, ...], is_backward: bool
) -> None:
    query, key, value, by_output = (
        torch.randn(1, sum(lengths), heads, 64).bfloat16().transpose(1, 2)
        for heads in (12, 4, 4, 12)
    )
    forward = (query, key, value, lengths, 0.1)
    backward = (by_output, *forward)
    blocks._blocks.cache_clear()
    if is_backward:
        peak = peak_bytes(lambda: blocks.gradients_in_blocks(*backward))
        planned = blocks.workspace_bytes(backward) + query.nbytes + key.nbytes + value.nbytes
    else:
        peak = peak_bytes(lambda: blocks.attention_in_blocks(*forward))
        planned = blocks.workspace_bytes(forward) + query.nbytes
    assert 0.8 * planned < peak <= planned


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (2, 2)])
def test_outputs_are_those_of_each_sample_alone(
    lengths: tuple[int, ...], heads: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    many, few = heads
    query, key, value = (
        torch.randn(1, count, sum(lengths), 16, generator=generator).bfloat16()
        for count in (many, few, few)
    )
    value = value[..., :8]  # narrower than a key, as in DeepSeek's attention
    expected = formula(query.float(), key.float(), value.float(), lengths, 0.3)
    output = torch.ops.llama_ft.attention_in_blocks(query, key, value, lengths, 0.3)
    assert output.transpose(1, 2).is_contiguous()
    assert (output.float() - expected).norm() < 0.005 * expected.norm()
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"


def test_products_by_onednn_round_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    # whole numbers, whose sums are exact in any order
    queries = torch.randint(-200, 200, (2, 64, 16), generator=generator).bfloat16()
    keys = torch.randint(-200, 200, (2, 96, 16), generator=generator).bfloat16()
    exact = torch.bmm(queries.double(), keys.double().transpose(1, 2))
    monkeypatch.setattr(blocks, "is_faster_forward", lambda _: True)
    with blocks._products_by_onednn():
        found = torch.bmm(queries.float(), keys.float().transpose(1, 2))
    assert torch.equal(found.double(), exact)


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (2, 2)])
def test_gradients_are_those_of_each_sample_alone(
    lengths: tuple[int, ...], heads: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    many, few = heads
    wide = [
        torch.randn(1, count, sum(lengths), 16, generator=generator).bfloat16().float()
        for count in (many, few, few, many)
    ]
    *inputs, by_output = wide
    inputs = [part.requires_grad_() for part in inputs]
    expected = torch.autograd.grad(formula(*inputs, lengths, 0.3), inputs, by_output)
    query, key, value = (part.detach().bfloat16() for part in inputs)
    found = gradients_in_blocks(by_output.bfloat16(), query, key, value, lengths, 0.3)
    for exact, rounded in zip(expected, found, strict=True):
        assert rounded.dtype == torch.bfloat16
        assert (rounded.float() - exact).norm() < 0.01 * exact.norm()


def trained(how: str) -> list[torch.Tensor]:
    """Gradients of a packed Llama in bf16."""
    model = tiny_llama(hidden_size=64, intermediate_size=96, attn_implementation="sdpa")
    model = model.bfloat16().train()
    built = BuiltModel(model)
    built.mixers = use_packed_attention(built)
    checkpoint_activations(built, TrainConfig(activation_checkpointing=how))
    lengths = [70, 200]
    arguments = packed_arguments(built, lengths, torch.device("cpu"))
    tokens = torch.arange(sum(lengths))[None] % 50
    logits = model(input_ids=tokens, use_cache=False, **arguments).logits
    logits.float().logsumexp(-1).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(("in_forward", "passes"), [(False, 1), (True, 2)])
def test_short_samples_take_blocks_with_every_checkpointing(
    in_forward: bool, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = []
    probabilities = blocks._probabilities

    def counted(*arguments: Any) -> torch.Tensor:
        computed.append(arguments)
        return probabilities(*arguments)

    monkeypatch.setattr(blocks, "_probabilities", counted)
    monkeypatch.setattr(blocks, "is_faster", lambda _: False)
    by_kernel = trained("off")
    assert not computed
    monkeypatch.setattr(blocks, "is_faster", lambda _: True)
    monkeypatch.setattr(blocks, "is_faster_forward", lambda _: in_forward)
    expected = trained("off")
    assert len(computed) == passes * 2 * 3  # two layers, three blocks
    for one, other in zip(by_kernel, expected, strict=True):
        assert (one - other).norm() < 0.02 * one.norm()
    for how in ("selective", "full"):
        computed.clear()
        assert all(torch.equal(*pair) for pair in zip(trained(how), expected, strict=True))
        recomputed = in_forward and how == "full"
        assert len(computed) == (passes + recomputed) * 2 * 3


@pytest.mark.parametrize("vendor", ["AuthenticAMD", "GenuineIntel"])
def test_only_bf16_is_computed_in_blocks(vendor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def choices() -> list[tuple[bool, bool]]:
        blocks.is_faster.cache_clear()
        blocks.is_faster_forward.cache_clear()
        dtypes = (torch.bfloat16, torch.float16, torch.float32)
        return [(blocks.is_faster(dtype), blocks.is_faster_forward(dtype)) for dtype in dtypes]

    monkeypatch.setattr(blocks, "cpu_vendor", lambda: vendor)
    monkeypatch.setattr(blocks, "cpu_features", lambda: {"avx512_bf16"})
    with_products = choices()
    monkeypatch.setattr(blocks, "cpu_features", set[str])
    without = choices()
    monkeypatch.undo()
    choices()
    assert with_products == [(True, vendor == "AuthenticAMD"), (False, False), (False, False)]
    assert without == [(False, False)] * 3
