"""Prove that a server applies an adapter: it answers some prompts, and the trainer computes the
log-probabilities of these tokens with the adapter and without it.

    server      -0.9 -2.1 -0.3
    trainer     -0.9 -2.1 -0.3      with the adapter: equal up to rounding
    base        -1.4 -1.8 -0.9      without it: a server that ignores the adapter gives these

A new adapter changes nothing, and one of a few steps less than rounding. So the first adapter that a
server gets, the canary, has random numbers in place of its matrices B. It is never trained on.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils.rnn import pad_sequence

from llama_ft.data import IGNORED, Batch, BatchLayout
from llama_ft.extensions.rollouts.rounds import Answer, Prompt
from llama_ft.inference.verdict import (
    NOISE,
    NOISE_QUANTIZED,
    ROUNDED,
    ROUNDED_QUANTIZED,
    STANDARD_ERRORS,
    Compared,
    Weights,
    judge,
    project,
)
from llama_ft.models import BuiltModel
from llama_ft.models.adapters.lora import adapter_off
from llama_ft.models.computing.chunked_loss import cross_entropy
from llama_ft.models.quantization.layers import quantization_name
from llama_ft.training import free_unsharded
from llama_ft.training.objectives.base import target_losses

# Of the canary's matrices B: the output of a layer changes by about this share.
STRENGTHS = (0.03, 0.12, 0.5, 2.0)
LEAST_EFFECT = 0.3  # mean difference of log-probabilities with the canary: clear of any rounding
PARTS = {".lora_B.": ".lora_A.", ".lora_embedding_B.": ".lora_embedding_A."}
FEWEST_TOKENS = 16  # fewer say nothing about an adapter of some steps
LARGEST_MEAN = 2  # mean difference, in units of what rounding can be for one comparison
LARGEST_SHARE = 0.3  # how far from the whole effect of the adapter


class ProbeAnswer(NamedTuple):
    """An answer of a server to a prompt."""

    prompt: Prompt
    answer: Answer


@dataclass(frozen=True)
class Scorer:
    """Computes log-probabilities with the trainer's model.

    Attributes:
        built: the model.
        layout: of the trainer's micro-batches; no batch here is larger.
        temperature: of the sampling.
        device: where the model computes.
    """

    built: BuiltModel
    layout: BatchLayout
    temperature: float
    device: torch.device

    @property
    def quantization(self) -> str | None:
        """Of the base model; None without."""
        return quantization_name(self.built.model) or None

    @torch.no_grad()
    def scores(self, answers: Sequence[ProbeAnswer]) -> list[float]:
        """Return the log-probabilities of the tokens of all answers. All ranks call it together, with
        the same answers, and with the model in evaluation mode."""

        def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return cross_entropy(logits.float() / self.temperature, targets)

        size = self.layout.micro_batch
        scores = list[float]()
        for start in range(0, len(answers), size):
            batch = _batch(answers[start : start + size], self.layout.pad_token_id)
            losses = target_losses(self.built, batch, self.device, loss, per_token=True).losses
            scores += (-losses.float()).tolist()
        free_unsharded(self.built.model)  # the next change of weights is one of their shards
        return scores


def compare(scorer: Scorer, answers: Sequence[ProbeAnswer]) -> list[Compared]:
    """Return the log-probabilities of all tokens of some answers: of the server, of the model, and of
    the model with its adapter off. See `Scorer.scores`.

    A temperature below 1 makes all differences larger, also those by rounding. So all numbers are
    multiplied by it."""
    tuned = scorer.scores(answers)
    with adapter_off(scorer.built.model):
        base = scorer.scores(answers)
    server = [float(score) for one in answers for score in one.answer.logprobs]
    factor = min(1.0, scorer.temperature)
    compared = []
    for scores in zip(server, tuned, base, strict=True):
        compared.append(Compared(*(score * factor for score in scores)))
    return compared


def _batch(answers: Sequence[ProbeAnswer], pad: int) -> Batch:
    ids = []
    labels = []
    for prompt, answer in answers:
        sample = torch.tensor([*prompt.token_ids, *answer.token_ids.tolist()])
        targets = sample.clone()
        targets[: len(prompt.token_ids)] = IGNORED
        ids.append(sample)
        labels.append(targets)
    return Batch(
        pad_sequence(ids, batch_first=True, padding_value=pad),
        pad_sequence(labels, batch_first=True, padding_value=IGNORED),
        [len(sample) for sample in ids],
        False,
        [""] * len(ids),
    )


def judge_canary(numbers: Sequence[Compared], quantization: str | None) -> str:
    """Return what is wrong with a server that has the canary, as the end of a sentence; "" if nothing
    is."""
    verdict = judge(numbers, quantization)
    if verdict.weights is Weights.FINE_TUNED:
        return ""
    if verdict.weights is Weights.BASE:
        return (
            "answers as the base model, so it ignores the adapter. Its log may name layers that it does not "
            "know; `llama-ft export RUN OUT --for vllm` lists them for a finished run."
        )
    if verdict.weights is None:
        return f"cannot be compared: the adapter changes log-probabilities by {verdict.effect:.1e} only."
    text = (
        f"computes with other weights than the trainer: log-probabilities differ by {verdict.mean:.2g} on average "
        f"(adapter on or off: {verdict.effect:.2g})."
    )
    if verdict.is_whole:
        return (
            f"{text} It applies the adapter, so look for another base model, quantization or dtype."
        )
    return f"{text} It is at {verdict.share:.0%} of the way from the base model to the adapter."


def has_clear_effect(numbers: Sequence[Compared]) -> bool:
    """Return whether the canary changes log-probabilities by far more than rounding does."""
    return fmean(abs(one.fine_tuned - (one.base or 0.0)) for one in numbers) >= LEAST_EFFECT


def judge_version(numbers: Sequence[Compared], quantization: str | None) -> str:
    """The same for a server that has an adapter of the training. In the first steps its effect is
    smaller than rounding, and then only the mean difference tells something."""
    mean = fmean(abs(one.server - one.fine_tuned) for one in numbers)
    pairs = [
        (one.fine_tuned - (one.base or 0.0), one.server - (one.base or 0.0)) for one in numbers
    ]
    effect = fmean(abs(tuned) for tuned, _ in pairs)
    noise = NOISE.get(quantization, NOISE_QUANTIZED)
    rounded = ROUNDED if quantization is None else ROUNDED_QUANTIZED
    share, error = project(pairs)
    is_part = abs(share - 1) > max(LARGEST_SHARE, STANDARD_ERRORS * error)
    differs = (
        f"log-probabilities differ by {mean:.2g} on average (adapter on or off: {effect:.2g})."
    )
    if effect and is_part and len(numbers) >= FEWEST_TOKENS:
        return f"does not apply the adapter as trained, but {share:.0%} of it: {differs}"
    if mean > LARGEST_MEAN * max(noise, rounded * effect):
        return f"computes with other weights than the trainer: {differs}"
    return ""


@contextmanager
def canary(built: BuiltModel, strength: float) -> Iterator[None]:
    """In the block, the matrices B of the adapter are random numbers, which depend on their names and
    on nothing else. All ranks call it together."""
    parameters = dict(built.model.named_parameters())
    config: Any = built.adapter.config if built.adapter is not None else None
    scaling = (
        config.lora_alpha / config.r**0.5 if config.use_rslora else config.lora_alpha / config.r
    )
    before = dict[str, torch.Tensor]()
    try:
        for name, parameter in parameters.items():
            for part, other in PARTS.items():
                if part in name:
                    before[name] = _local(parameter).clone()
                    size = float(_whole(parameters[name.replace(part, other)]).float().norm())
                    deviation = strength / max(scaling * size, 1e-6)
                    _local(parameter).copy_(_random(name, parameter, deviation))
        yield
    finally:
        for name, values in before.items():
            _local(parameters[name]).copy_(values)


def _random(name: str, parameter: torch.Tensor, deviation: float) -> torch.Tensor:
    """Return this rank's part of normal numbers."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(parameter.shape, generator=generator) * deviation
    if isinstance(parameter, DTensor):
        whole = whole.to(parameter.to_local().device)
        placed = distribute_tensor(
            whole, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
        return placed.to_local()
    return whole


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter, without gradient; changes of it change the parameter."""
    value = parameter.detach()
    return value.to_local() if isinstance(value, DTensor) else value


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    value = parameter.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value
