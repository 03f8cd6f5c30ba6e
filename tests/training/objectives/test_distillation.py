"""The distillation loss against formulas written here on whole distributions."""

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from training.objectives.test_preferences import FILLER, batch, made

from llama_ft.config import Config, PreferenceConfig
from llama_ft.data import Batch
from llama_ft.models import BuiltModel, use_chunked_loss, use_packed_attention
from llama_ft.training.objectives.distill import DIVERGENCES, Distillation, top_k_divergence
from llama_ft.training.objectives.teacher import most_likely

VOCABULARY = 50
TARGETS = 9


def distributions(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a student and of a teacher that is sure of many tokens."""
    generator = torch.Generator().manual_seed(seed)
    student = torch.randn(TARGETS, VOCABULARY, generator=generator) * 2
    teacher = torch.randn(TARGETS, VOCABULARY, generator=generator) * 6
    return student.requires_grad_(), teacher


def bucketed(log_probabilities: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the kept tokens of each target, and of all others together."""
    targets = []
    for row, tokens in zip(log_probabilities, kept, strict=True):
        others = [row[token] for token in range(VOCABULARY) if token not in tokens.tolist()]
        rest = [torch.stack(others).logsumexp(0)] if others else []
        targets.append(torch.stack([row[token] for token in tokens.tolist()] + rest))
    return torch.stack(targets)


def kl(divergence: str, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """The divergence of rows of log-probabilities, by torch."""
    first, second = (student, teacher) if divergence == "forward" else (teacher, student)
    return F.kl_div(first, second, log_target=True, reduction="none").sum(-1)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("size", [1, 8, VOCABULARY - 1, VOCABULARY])
def test_the_divergence_is_that_of_distributions_with_a_bucket(
    size: int, temperature: float, divergence: str
) -> None:
    """In float64, with torch's kl_div; with k = vocabulary, of the whole distributions."""
    student, teacher = distributions(size)
    if divergence == "reverse":
        teacher = teacher / 4  # float32 keeps all digits of what is left for the other tokens
    kept, log_p = most_likely(teacher, size, temperature)
    found = DIVERGENCES[divergence](student, kept, log_p, temperature)
    ours = (student.double() / temperature).log_softmax(-1)
    theirs = (teacher.double() / temperature).log_softmax(-1)
    full = kl(divergence, ours, theirs)
    expected = full
    if size < VOCABULARY:
        ours, theirs = bucketed(ours, kept), bucketed(theirs, kept)
        expected = kl(divergence, ours, theirs)
        assert (expected <= full + 1e-9).all()
    # 1 - sum of p, in float32, is all that is known of the teacher's other tokens
    rtol = 1e-5 if divergence == "forward" else 1e-4
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=1e-6)
    factors = torch.linspace(-1, 2, TARGETS)
    (gradient,) = torch.autograd.grad(found, student, factors)
    (by_formula,) = torch.autograd.grad(expected, student, factors.double())
    torch.testing.assert_close(gradient, by_formula, rtol=10 * rtol, atol=1e-6)


def test_tokens_that_the_teacher_excludes_count_nothing() -> None:
    student, teacher = distributions(0)
    teacher[:, 5:] = -torch.inf
    found = top_k_divergence(student, *most_likely(teacher, 12, 1.0), 1.0)
    ours = student.double().log_softmax(-1)[:, :5]
    theirs = teacher.double().log_softmax(-1)[:, :5]
    expected = (theirs.exp() * (theirs - ours)).sum(-1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.autograd.grad(found.sum(), student)[0].isfinite().all()


def test_tokens_that_the_teacher_excludes_keep_the_reverse_divergence_finite() -> None:
    student, teacher = distributions(0)
    teacher[:, 5:] = -torch.inf
    found = DIVERGENCES["reverse"](student, *most_likely(teacher, 12, 1.0), 1.0)
    assert (found > 1).all() and found.isfinite().all()
    assert torch.autograd.grad(found.sum(), student)[0].isfinite().all()


class Stored:
    """The k most likely tokens of a teacher that is evaluated here, example by example."""

    def __init__(self, teacher: Any, size: int, temperature: float) -> None:
        self.teacher = teacher
        self.settings = (size, temperature)

    def of(self, asked: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        logits = [torch.zeros(0, VOCABULARY)]
        if asked.locations:
            logits += [targets_of(self.teacher, *example)[0] for example in asked.examples()]
        return most_likely(torch.cat(logits).detach(), *self.settings)


def targets_of(
    model: Any, ids: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and tokens of an example's targets, in plain transformers."""
    logits = model(input_ids=ids.unsqueeze(0)).logits[0, :-1]
    wanted = labels[1:]
    return logits[wanted != -100], wanted[wanted != -100]


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize(("weight", "temperature"), [(0.3, 2.0), (1.0, 1.0), (1.0, 2.0)])
@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("is_chunked", [True, False], ids=["chunked", "whole"])
def test_loss_and_gradients_are_those_of_a_plain_formula(
    runtime: Any,
    is_packed: bool,
    is_chunked: bool,
    weight: float,
    temperature: float,
    divergence: str,
) -> None:
    """The full divergence, and cross-entropy, of each example by itself."""
    student, teacher = made(0), made(1)
    total = torch.zeros(())
    for example in batch(is_packed).examples():
        logits, wanted = targets_of(student, *example)
        theirs = targets_of(teacher, *example)[0].detach()
        ours = F.log_softmax(logits / temperature, -1)
        theirs = F.log_softmax(theirs / temperature, -1)
        total = total + weight * kl(divergence, ours, theirs).sum()
        total = total + (1 - weight) * F.cross_entropy(logits, wanted, reduction="sum")
    total.backward()
    expected = {name: value.grad for name, value in student.named_parameters()}

    model = made(0).train()
    built = BuiltModel(model)
    if is_packed:
        built.mixers = use_packed_attention(built)
    if is_chunked:
        assert use_chunked_loss(built)
        built.has_chunked_loss = True
    settings = PreferenceConfig(
        distill_weight=weight,
        distill_temperature=temperature,
        distill_top_k=VOCABULARY,
        distill_divergence=divergence,  # type: ignore[arg-type]  # a text
    )
    objective = Distillation(Config(preference=settings))
    objective.teacher = Stored(teacher, VOCABULARY, temperature)  # type: ignore[assignment]
    found = objective.loss(built, batch(is_packed), runtime)
    assert found.count == batch(is_packed).target_tokens
    assert found.loss.item() == pytest.approx(total.item(), rel=1e-5)
    found.loss.backward()
    for name, value in model.named_parameters():
        torch.testing.assert_close(value.grad, expected[name], rtol=1e-3, atol=1e-5)
    nothing = objective.loss(built, FILLER, runtime)
    assert nothing.count == 0 and nothing.loss.item() == 0.0
    nothing.loss.backward()


def test_the_validation_loss_is_the_cross_entropy(runtime: Any) -> None:
    model = made(0).eval()
    objective = Distillation()
    with torch.no_grad():
        found = objective.loss(BuiltModel(model), batch(False), runtime)
        losses = []
        for example in batch(False).examples():
            losses.append(F.cross_entropy(*targets_of(model, *example), reduction="sum"))
    assert found.loss.item() == pytest.approx(sum(losses).item(), rel=1e-5)
    assert math.isfinite(found.loss.item())
