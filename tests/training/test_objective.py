import copy
import dataclasses
import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import REPOSITORY
from models.test_architectures import ARCHITECTURES, SHAPE
from tiny_llama import tiny_llama
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM
from transformers.modeling_utils import PreTrainedModel

from llama_ft.config import Config, TrainConfig
from llama_ft.data import Batch
from llama_ft.models import (
    BuiltModel,
    add_embedding_noise,
    checkpoint_activations,
    use_chunked_loss,
    use_packed_attention,
    use_router_loss,
)
from llama_ft.models.base.replaced_functions import replace_functions
from llama_ft.models.packing.packed_samples import PackedSamples, samples_of
from llama_ft.runtime.sequence import SequenceRank
from llama_ft.training import SupervisedFineTuning, target_losses
from llama_ft.training.objectives import base

CPU = torch.device("cpu")


def token_loss_sum(built: BuiltModel, batch: Batch, device: torch.device) -> torch.Tensor:
    computed = target_losses(built, batch, device)
    return computed.losses + built.router_coefficient * computed.router_loss


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(
        num_hidden_layers=1, num_attention_heads=2, vocab_size=50, initializer_range=0.5
    )


def batch(samples: list[list[int]], labels: list[list[int]], length: int) -> Batch:
    def padded(values: list[list[int]], fill: int) -> torch.Tensor:
        return torch.tensor([sample + [fill] * (length - len(sample)) for sample in values])

    lengths = [len(sample) for sample in samples]
    locations = ["x"] * len(samples)
    return Batch(padded(samples, 0), padded(labels, -100), lengths, False, locations)


def test_padding_adds_nothing_to_the_loss_or_the_gradient(model: LlamaForCausalLM) -> None:
    samples = [[1, 5, 9, 30, 2], [7, 8]]
    labels = [[-100, 5, 9, 30, 2], [-100, 8]]
    together = token_loss_sum(BuiltModel(model), batch(samples, labels, 9), CPU)
    padded = torch.autograd.grad(together, list(model.parameters()))
    theirs = model(input_ids=torch.tensor([samples[0]]), labels=torch.tensor([labels[0]])).loss
    pairs = zip(samples, labels, strict=True)
    first, second = (
        token_loss_sum(BuiltModel(model), batch([sample], [own], len(sample)), CPU)
        for sample, own in pairs
    )
    torch.testing.assert_close(first, theirs * 4)
    apart = first + second
    torch.testing.assert_close(together, apart)
    for ours, expected in zip(
        padded, torch.autograd.grad(apart, list(model.parameters())), strict=True
    ):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=5e-5)  # gradients go up to 10


@pytest.mark.parametrize(
    ("lengths", "router_loss", "filled"),
    [([40, 60], False, 128), ([40, 60], True, 100), ([5, 3], False, 8)],
)
def test_packed_sequences_are_padded_to_few_shapes(
    lengths: list[int], router_loss: bool, filled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not if the routers' auxiliary loss counts all tokens, or positions would go beyond those of
    the longest sample."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "mixtral", **{**SHAPE, "num_local_experts": 2, "output_router_logits": router_loss}
        )
    )
    built = BuiltModel(model)
    built.mixers = use_packed_attention(built)
    built.router_coefficient = use_router_loss(model, None)
    built.has_chunked_loss = use_chunked_loss(built)
    assert built.has_chunked_loss
    ids = torch.randint(0, 300, (1, sum(lengths)))
    packed = Batch(ids, ids.clone(), lengths, True, ["x"] * len(lengths))
    results = []
    seen = list[int]()
    embedding = model.get_input_embeddings()
    embedding.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[1]))
    for multiple in (1, 64):
        monkeypatch.setitem(base.PAD_MULTIPLE, "cpu", multiple)
        loss = token_loss_sum(built, packed, CPU)
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    assert seen == [sum(lengths), filled]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_label_smoothing_and_embedding_noise_apply_to_training_only(
    model: LlamaForCausalLM,
) -> None:
    samples = torch.tensor([[1, 5, 9, 30, 2]])
    one = batch(samples.tolist(), samples.tolist(), 5)
    runtime = SimpleNamespace(device=CPU)
    noisy = copy.deepcopy(model)
    smoothed = SupervisedFineTuning(Config(train=TrainConfig(label_smoothing_factor=0.1)))
    add_embedding_noise(noisy, 5.0)
    built = BuiltModel(noisy)
    built.has_chunked_loss = use_chunked_loss(built)
    for is_training in (False, True):
        torch.manual_seed(7)
        noise = torch.empty(1, 5, 32).uniform_(-1, 1) * (
            5.0 / (5 * 32) ** 0.5 if is_training else 0
        )
        embedded = model.get_input_embeddings()(samples) + noise
        logits = model.lm_head(
            model.model(inputs_embeds=embedded, use_cache=False).last_hidden_state
        )[0, :-1]
        expected = functional.cross_entropy(
            logits, samples[0, 1:], reduction="sum", label_smoothing=0.1 * is_training
        )
        torch.manual_seed(7)
        noisy.train(is_training)
        torch.testing.assert_close(smoothed.loss(built, one, runtime).loss, expected)


@pytest.mark.parametrize("is_chunked", [True, False])
def test_dft_weights_the_loss_of_a_token_by_its_probability_in_training_only(
    model: LlamaForCausalLM, is_chunked: bool
) -> None:
    """With gradients, against the formula on the logits of each sample by itself."""
    samples = [[1, 5, 9, 30, 2], [4, 6, 2]]
    one = batch(samples, [[-100, -100, 9, 30, 2], [-100, 6, 2]], 5)
    losses = []
    for sample, prompt in zip(samples, (2, 1), strict=True):
        logits = model(torch.tensor([sample])).logits[0, prompt - 1 : -1]
        p = logits.softmax(-1)[torch.arange(len(logits)), torch.tensor(sample[prompt:])]
        losses.append(-p.log())
    plain = torch.cat(losses)
    expected = (plain * (-plain.detach()).exp()).sum()
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    ours = copy.deepcopy(model).train()
    built = BuiltModel(ours)
    if is_chunked:
        built.has_chunked_loss = use_chunked_loss(built)
    runtime = SimpleNamespace(device=CPU)
    dft = SupervisedFineTuning(Config(train=TrainConfig(loss_type="dft")))
    found = dft.loss(built, one, runtime)
    assert found.count == 5
    torch.testing.assert_close(found.loss, expected)
    found.loss.backward()
    for parameter, gradient in zip(ours.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
    ours.eval()
    torch.testing.assert_close(dft.loss(built, one, runtime).loss, plain.sum())


@pytest.mark.parametrize("is_packed", [True, False])
def test_embedding_noise_of_a_token_has_the_size_of_its_own_sample(
    model: LlamaForCausalLM, is_packed: bool
) -> None:
    lengths = [50, 10, 4]
    noisy = copy.deepcopy(model)
    built = BuiltModel(noisy)
    if is_packed:
        built.mixers = use_packed_attention(built)
        ids = torch.arange(sum(lengths)).unsqueeze(0) % 50
        mixed = Batch(ids, ids.clone(), lengths, True, ["x"] * 3)
    else:
        samples = [list(range(length)) for length in lengths]
        mixed = batch(samples, samples, 50)
    add_embedding_noise(noisy, 5.0)
    built.has_chunked_loss = use_chunked_loss(built)
    seen = list[torch.Tensor]()
    embedding = noisy.get_input_embeddings()
    embedding.register_forward_hook(lambda _, inputs, output: seen.append(output))
    noisy.train()
    target_losses(built, mixed, CPU)
    noise = (seen[0] - embedding.weight[mixed.input_ids]).abs()
    if is_packed:
        parts = noise[0].split(lengths)
    else:
        parts = tuple(noise[at, :length] for at, length in enumerate(lengths))
    for part, length in zip(parts, lengths, strict=True):
        # the largest of 128 or more uniform numbers
        bound = 5.0 / (length * 32) ** 0.5
        assert 0.9 * bound < part.max() <= bound * 1.0001


def test_embedding_noise_of_a_shared_sequence_has_the_sizes_of_this_ranks_tokens(
    model: LlamaForCausalLM,
) -> None:
    """The second of two ranks has 18 tokens of the first sample, and both others."""
    noisy = copy.deepcopy(model).train()
    add_embedding_noise(noisy, 5.0)
    embedding = noisy.get_input_embeddings()
    group: Any = None  # not asked
    samples = PackedSamples.of([50, 10, 4], CPU)
    shared = dataclasses.replace(samples, sequence=SequenceRank(1, 2, group))
    ids = torch.arange(32).unsqueeze(0)
    with samples_of(shared):
        noise = (embedding(ids) - embedding.weight[ids]).abs()[0]
    for part, length in zip(noise.split([18, 10, 4]), (50, 10, 4), strict=True):
        bound = 5.0 / (length * 32) ** 0.5
        assert 0.9 * bound < part.max() <= bound * 1.0001


def test_a_batch_without_targets_has_a_loss_and_gradients_of_zero(model: LlamaForCausalLM) -> None:
    loss = token_loss_sum(BuiltModel(model), batch([[1, 2, 3]], [[-100] * 3], 3), CPU)
    assert loss.item() == 0
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert all(not gradient.any() for gradient in gradients)


@pytest.mark.parametrize("lengths", [[4, 3], [4, 4]])
@pytest.mark.parametrize("is_packed", [True, False])
def test_forward_and_backward_make_the_host_wait_for_nothing(
    model: LlamaForCausalLM, is_packed: bool, lengths: list[int]
) -> None:
    """Operators that would wait for a GPU are counted. Without the notes, Transformers' masks run
    one to four."""
    sys.path.insert(0, str(REPOSITORY))
    gpu_child = importlib.import_module("benchmarks.gpu.gpu_child")
    replace_functions()  # as building a model does
    ours = BuiltModel(LlamaForCausalLM(model.config))
    if is_packed:
        ours.mixers = use_packed_attention(ours)
    samples = [[3 + n for n in range(length)] for length in lengths]
    measured = batch(samples, samples, 4)
    if is_packed:
        ids = torch.tensor([sum(samples, [])])
        measured = Batch(ids, ids.clone(), lengths, True, ["x"] * 2)
    with gpu_child.CountWaits() as counter:
        token_loss_sum(ours, measured, CPU).backward()
    assert [wait for wait in counter.found if not wait.endswith(gpu_child.ON_HOST)] == []


def with_routers(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model_type, settings = ARCHITECTURES[name]
    asked = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    config = AutoConfig.for_model(model_type, **{**SHAPE, **settings, **asked})
    return AutoModelForCausalLM.from_config(config).train()


@pytest.mark.parametrize("in_pieces", [True, False])
@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3 MoE", "Granite MoE"])
def test_router_auxiliary_losses_of_config_json_equal_those_of_transformers(
    runtime: Any, name: str, is_packed: bool, in_pieces: bool
) -> None:
    ids = torch.randint(3, 320, (2, 20), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    theirs = with_routers(name)
    ours = with_routers(name)
    built = BuiltModel(ours)
    if is_packed:
        ids = ids.view(1, 40)
        labels = labels.view(1, 40)
        labels[0, 25] = -100
        layout = {"position_ids": torch.cat([torch.arange(25), torch.arange(15)])[None]}
        built.mixers = use_packed_attention(built)
    else:
        labels[1, 13:] = -100
        layout = {"attention_mask": (torch.arange(20) < torch.tensor([[20], [13]])).long()}
    batch = Batch(ids, labels, [25, 15] if is_packed else [20, 13], is_packed, ["x"] * 2)
    expected = theirs(input_ids=ids, labels=labels, use_cache=False, **layout)
    expected.loss.backward()
    assert expected.aux_loss > 1
    built.router_coefficient = use_router_loss(ours, None)
    checkpoint_activations(built, TrainConfig(activation_checkpointing="full"))
    built.has_chunked_loss = in_pieces and use_chunked_loss(built)
    assert built.has_chunked_loss == in_pieces
    loss = token_loss_sum(built, batch, CPU) / batch.target_tokens
    loss.backward()
    torch.testing.assert_close(loss, expected.loss)
    for (key, parameter), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-6, msg=key)
    of_tokens = expected.loss - 0.5 * expected.aux_loss
    method = SupervisedFineTuning()
    ours.config.output_router_logits = False
    for coefficient, more in ((None, 0.0), (0.25, 0.25), (0.0, 0.0)):
        built.router_coefficient = use_router_loss(ours, coefficient)
        found = method.loss(built, batch, runtime)
        torch.testing.assert_close(found.loss / found.count, of_tokens + more * expected.aux_loss)
        assert found.logged.keys() == ({"router_aux_loss"} if more else set())
        for value in found.logged.values():
            torch.testing.assert_close(value / found.count, expected.aux_loss)
    built.router_coefficient = use_router_loss(ours, 0.25)
    ours.eval()
    evaluated = token_loss_sum(built, batch, CPU) / batch.target_tokens
    torch.testing.assert_close(evaluated, of_tokens)
