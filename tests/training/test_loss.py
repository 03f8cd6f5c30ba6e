from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from llama_ft.training.loss import token_loss_sum

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=2, vocab_size=50, initializer_range=0.5))


def batch(rows: list[list[int]], labels: list[list[int]], length: int) -> SimpleNamespace:
    def padded(values: list[list[int]], fill: int) -> torch.Tensor:
        return torch.tensor([row + [fill] * (length - len(row)) for row in values])

    mask = padded([[1] * len(row) for row in rows], 0)
    return SimpleNamespace(
        input_ids=padded(rows, 0), attention_mask=mask, labels=padded(labels, -100), sources=["x"] * len(rows)
    )


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


def test_a_batch_without_targets_has_a_loss_and_gradients_of_zero(model: LlamaForCausalLM) -> None:
    loss = token_loss_sum(model, batch([[1, 2, 3]], [[-100] * 3], 3), CPU)
    assert loss.item() == 0
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert all(not gradient.any() for gradient in gradients)
