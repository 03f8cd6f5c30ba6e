import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from llama_ft.data import Batch
from llama_ft.models import use_packed_attention
from llama_ft.training.loss import token_loss_sum

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=2, vocab_size=50, initializer_range=0.5))


def batch(rows: list[list[int]], labels: list[list[int]], length: int) -> Batch:
    def padded(values: list[list[int]], fill: int) -> torch.Tensor:
        return torch.tensor([row + [fill] * (length - len(row)) for row in values])

    return Batch(padded(rows, 0), padded(labels, -100), [len(row) for row in rows], False, ["x"] * len(rows))


def test_the_sum_is_transformers_mean_times_the_targets(model: LlamaForCausalLM) -> None:
    ids, labels = [1, 5, 9, 30, 2], [-100, -100, 9, 30, 2]
    theirs = model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss
    ours = token_loss_sum(model, batch([ids], [labels], 5), CPU)
    torch.testing.assert_close(ours, theirs * 3)


def test_padding_adds_nothing_to_the_loss_or_the_gradient(model: LlamaForCausalLM) -> None:
    rows, labels = [[1, 5, 9, 30, 2], [7, 8]], [[-100, 5, 9, 30, 2], [-100, 8]]
    together = token_loss_sum(model, batch(rows, labels, 9), CPU)
    padded = torch.autograd.grad(together, list(model.parameters()))
    apart = token_loss_sum(model, batch(rows[:1], labels[:1], 5), CPU) + token_loss_sum(
        model, batch(rows[1:], labels[1:], 2), CPU
    )
    torch.testing.assert_close(together, apart)
    for ours, expected in zip(padded, torch.autograd.grad(apart, list(model.parameters())), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=5e-5)  # gradients go up to 10


def test_a_pack_has_the_loss_and_the_gradient_of_its_rows_alone(model: LlamaForCausalLM) -> None:
    rows, labels = [[1, 5, 9, 30, 2], [7, 8, 3], [4, 4]], [[-100, 5, 9, 30, 2], [-100, -100, 3], [-100, 4]]
    alone = sum(
        token_loss_sum(model, batch([row], [own], len(row)), CPU) for row, own in zip(rows, labels, strict=True)
    )
    assert isinstance(alone, torch.Tensor)
    expected = torch.autograd.grad(alone, list(model.parameters()))
    packed_model = LlamaForCausalLM(model.config)
    packed_model.load_state_dict(model.state_dict())
    use_packed_attention(packed_model)
    pack = Batch(torch.tensor([sum(rows, [])]), torch.tensor([sum(labels, [])]), [5, 3, 2], True, ["x"] * 3)
    assert (pack.tokens, pack.target_tokens) == (10, 6)
    together = token_loss_sum(packed_model, pack, CPU)
    torch.testing.assert_close(together, alone)
    for ours, theirs in zip(torch.autograd.grad(together, list(packed_model.parameters())), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=5e-5)


def test_a_batch_without_targets_has_a_loss_and_gradients_of_zero(model: LlamaForCausalLM) -> None:
    loss = token_loss_sum(model, batch([[1, 2, 3]], [[-100] * 3], 3), CPU)
    assert loss.item() == 0
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert all(not gradient.any() for gradient in gradients)
