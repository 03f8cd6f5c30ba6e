"""Compiled layers: the same numbers, few graphs. With aot_eager, the backend that makes the graphs
and runs them operator by operator, on the CPU; what inductor makes of them is torch's."""

import copy
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_llama import tiny_llama
from torch._dynamo.utils import counters
from torch.nn import functional as F

from llama_ft.config import TrainConfig
from llama_ft.models import (
    BuiltModel,
    checkpoint_activations,
    compile_layers,
    packed_arguments,
    without_graphs,
)
from llama_ft.models.adapters.lora import adapter_off
from llama_ft.models.adapters.lora_linear import use_fused_lora
from llama_ft.models.base import attention_kernels
from llama_ft.models.packing.packed_attention import use_packed_attention

# in dynamic_sources; before, numbers vary after their first change
KNOWS_DIMENSIONS = torch.__version__ >= "2.13"
# Tokens of the samples in each.
PACKED_SEQUENCES = [[10, 6], [16], [4, 4, 8], [3, 3, 3, 3, 3], [1, 14], [24], [12, 12]]


@pytest.fixture
def varlen_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's variable-length kernel, which is CUDA's, computed sample by sample on the CPU: compiled
    layers see the operator and its arguments as they do on a GPU."""

    def samples_of(ends: torch.Tensor, *tensors: torch.Tensor) -> list[list[torch.Tensor]]:
        return [
            [tensor[start:end].transpose(0, 1)[None] for tensor in tensors]
            for start, end in pairwise(ends.tolist())
        ]

    def joined(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([part[0].transpose(0, 1) for part in parts])

    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, *rest: Any, **_: Any
    ) -> Any:
        samples = [
            F.scaled_dot_product_attention(*sample, is_causal=True, enable_gqa=True)
            for sample in samples_of(ends, q, k, v)
        ]
        return (
            joined(samples),
            torch.zeros(q.shape[1], q.shape[0]),
            torch.zeros(2, dtype=torch.uint64),
        )

    def backward(
        gradient: Any, q: Any, k: Any, v: Any, output: Any, sums: Any, ends: Any, *_: Any, **__: Any
    ) -> Any:
        kernel = "_scaled_dot_product_flash_attention_for_cpu"
        found = []
        for gradients, *sample in samples_of(ends, gradient, q, k, v):
            computed = getattr(torch.ops.aten, kernel)(*sample, 0.0, True)
            found.append(
                getattr(torch.ops.aten, f"{kernel}_backward")(
                    gradients, *sample, *computed, 0.0, True
                )
            )
        return tuple(map(joined, zip(*found, strict=True)))

    library = torch.library.Library("torch_attn", "IMPL")
    library.impl("_varlen_attn", forward, "CPU", allow_override=True)
    library.impl("_varlen_attn_backward", backward, "CPU", allow_override=True)
    monkeypatch.setattr(attention_kernels, "choose_kernel", lambda *_: "varlen")
    yield
    library._destroy()


def llama(how: str) -> BuiltModel:
    built = BuiltModel(tiny_llama().train())
    built.mixers = use_packed_attention(built)
    checkpoint_activations(built, TrainConfig(activation_checkpointing=how))
    return built


def forward(built: BuiltModel, lengths: list[int]) -> torch.Tensor:
    ids = torch.arange(sum(lengths)).unsqueeze(0)
    arguments = packed_arguments(built, lengths, torch.device("cpu"))
    return built.model(input_ids=ids, use_cache=False, **arguments).logits.logsumexp(-1).sum()


@pytest.mark.parametrize("how", [pytest.param("off", marks=pytest.mark.slow), "full"])
def test_one_graph_trains_on_all_packed_sequences_and_one_evaluates(
    how: str, varlen_on_the_cpu: None
) -> None:
    torch._dynamo.reset()
    counters.clear()
    plain = llama(how)
    compiled = llama(how)
    compile_layers(compiled, backend="aot_eager")
    assert list(compiled.model.state_dict()) == list(plain.model.state_dict())
    for lengths in PACKED_SEQUENCES:
        losses = [forward(built, lengths) for built in (plain, compiled)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses)
    for_training = counters["stats"]["unique_graphs"]
    assert for_training == 1 if KNOWS_DIMENSIONS else for_training < len(PACKED_SEQUENCES)
    assert not counters["graph_break"]
    for (name, parameter), other in zip(
        plain.model.named_parameters(), compiled.model.parameters(), strict=True
    ):
        torch.testing.assert_close(other.grad, parameter.grad, rtol=1e-4, atol=1e-5, msg=name)
    with torch.no_grad():
        compiled.model.eval()
        plain.model.eval()
        with without_graphs(compiled.model):
            assert torch.equal(forward(compiled, [5, 3]), forward(plain, [5, 3]))
        assert counters["stats"]["unique_graphs"] == for_training
        for lengths in PACKED_SEQUENCES:
            torch.testing.assert_close(forward(compiled, lengths), forward(plain, lengths))
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == 2 if KNOWS_DIMENSIONS else graphs - for_training < len(PACKED_SEQUENCES)
    answers = [
        built.model.generate(torch.arange(5)[None], max_new_tokens=4, do_sample=False)
        for built in (plain, compiled)
    ]
    assert torch.equal(*answers)
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.slow
def test_more_graphs_than_kinds_of_layers_explain_are_reported_once(
    varlen_on_the_cpu: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As if a version of Transformers named the arguments of its layers otherwise."""
    torch._dynamo.reset()
    monkeypatch.setattr("llama_ft.models.computing.compiled.VARYING_DIMENSIONS", ())
    built = llama("off")
    compile_layers(built, backend="eager")
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False), torch.no_grad():
        for tokens in range(8, 17):
            forward(built, [tokens])
            reports = [line for line in caplog.messages if "graphs were made" in line]
            assert len(reports) == (tokens == 16), tokens
    assert "9 graphs were made for 1 kind of layers, at most 8 are expected" in reports[0]
    torch.compiler.config.dynamic_sources = ""


@pytest.mark.slow
def test_switching_the_adapter_off_and_on_compiles_one_more_graph(varlen_on_the_cpu: None) -> None:
    """The reference of DPO is the model with its adapter off."""
    torch._dynamo.reset()
    counters.clear()
    base = llama("off")
    plain = llama("off")
    graphs = list[int]()
    settings = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    get_peft_model(plain.model, settings)
    use_fused_lora(plain.model)
    compiled = copy.deepcopy(plain)
    compile_layers(compiled, backend="aot_eager")
    for lengths in PACKED_SEQUENCES[:4:3]:
        before = counters["stats"]["unique_graphs"]
        reference = forward(base, lengths)
        compiled.model.eval()
        with torch.no_grad(), adapter_off(compiled.model):
            torch.testing.assert_close(forward(compiled, lengths), reference)
        graphs.append(counters["stats"]["unique_graphs"] - before)
        for built in (plain, compiled):
            built.model.train()
        losses = [forward(built, lengths) for built in (plain, compiled)]
        torch.testing.assert_close(*losses)
        assert (losses[0] - reference).abs() > 0.01
    assert graphs == [1, 0] or not KNOWS_DIMENSIONS
    losses[1].backward()
    for name, parameter in compiled.model.named_parameters():
        assert (parameter.grad is None) == ("lora" not in name), name
