"""Micro-batches of a round: each answer after its prompt, padded, the longest first.

round        prompt 0: answers 0 1 2 | prompt 1: answers 0 1 2      one without a reward is left out
2 ranks,     rank 0: [0.2 1.1] [0.0]     the answers of a step are shared as the samples of a
2 answers    rank 1: [1.0 0.1] [1.2]     global batch are, so all ranks have equally many micro-batches

Short answers make larger micro-batches, of as many tokens as the longest ones: neighbors in this order
have nearly equal lengths, so little of a micro-batch is padding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy
import torch
from torch.nn.utils.rnn import pad_sequence

from llama_ft.data import IGNORED, Batch, BatchLayout, StepBatches
from llama_ft.extensions.rollouts.grpo.losses import Scale, Tokens, advantages
from llama_ft.extensions.rollouts.rounds import Answer, Prompt, Round

FILLER_TOKENS = 8


class AnswerNumbers(NamedTuple):
    """What the loss needs to know of the answers of a micro-batch, in their order; on the host.

    Attributes:
        tokens: which tokens belong to which answer.
        advantages: float32 [answers].
        sampler_logprobs: of each token when it was sampled, float32 [tokens].
        old_logprobs: of each token for the weights before the first step on the round, float32
            [1, tokens]; with a second row for the reference. None: those are the present weights.
    """

    tokens: Tokens
    advantages: torch.Tensor
    sampler_logprobs: torch.Tensor
    old_logprobs: torch.Tensor | None = None


@dataclass(frozen=True)
class RoundBatch(Batch):
    """A micro-batch of answers. The tokens of an answer are in the loss, those of its prompt are not."""

    numbers: AnswerNumbers | None = None


@dataclass(frozen=True, kw_only=True)
class RoundStep(StepBatches):
    """An optimizer step on a round. `metrics`: of the round, by name."""

    metrics: dict[str, float] = field(default_factory=dict)


class _TrainedAnswer(NamedTuple):
    """An answer to train on."""

    prompt: Prompt
    answer: Answer
    advantage: float
    location: str

    @property
    def length(self) -> int:
        return len(self.prompt.token_ids) + len(self.answer.token_ids)


@dataclass(frozen=True, kw_only=True)
class AnswerSelection:
    """Which answers are trained on.

    Attributes:
        scale: of the advantages.
        drops_equal: groups whose answers have equal rewards are left out.
        masks_truncated: truncated answers are not in the loss. They count as answers.
    """

    scale: Scale
    drops_equal: bool
    masks_truncated: bool


class RoundAnswers(NamedTuple):
    """The answers of a round to train on.

    Attributes:
        items: in the order of the round.
        answers: their number, with truncated ones that are masked.
        equal_groups: prompts whose answers have equal rewards.
    """

    items: list[_TrainedAnswer]
    answers: int
    equal_groups: int


def select(rollouts: Round, how: AnswerSelection) -> RoundAnswers:
    """Return the answers of a round to train on. An answer without a reward, and one to a prompt with
    fewer than two rewards, is left out."""
    totals = [[answer.total for answer in group] for group in rollouts.answers]
    items = list[_TrainedAnswer]()
    count = 0
    equal_groups = 0
    step = rollouts.facts.step
    scaled = advantages(totals, how.scale)
    for prompt, group, values in zip(rollouts.prompts, rollouts.answers, scaled, strict=True):
        known = [value for value in values if value is not None]
        is_equal = bool(known) and not any(known)
        equal_groups += is_equal
        if is_equal and how.drops_equal:
            continue
        for number, (answer, value) in enumerate(zip(group, values, strict=True)):
            if value is None:
                continue
            count += 1
            if answer.has_ended or not how.masks_truncated:
                location = f"round {step}, prompt {prompt.index}, answer {number}"
                items.append(_TrainedAnswer(prompt, answer, value, location))
    return RoundAnswers(items, count, equal_groups)


def make_step(
    chosen: RoundAnswers,
    planned: StepBatches,
    layout: BatchLayout,
    rollouts: Round,
    old: Mapping[str, torch.Tensor] | None,
) -> RoundStep:
    """Return this rank's micro-batches of a round, and the counts of the whole round.

    Args:
        chosen: the answers to train on.
        planned: the step, for its number and its place in the epoch.
        layout: of micro-batches.
        rollouts: the round.
        old: see `AnswerNumbers.old_logprobs`; location -> those of an answer.
    """
    # stable: equal on all ranks
    longest_first = sorted(chosen.items, key=lambda item: -item.length)
    batches = list[Batch]()
    for together in _micro_batches(longest_first, layout) or [[]]:
        own = together[layout.data_rank :: layout.data_size]
        batches.append(_collate(own, layout, rollouts.prompts[0], old))
    tokens = sum(len(item.answer.token_ids) for item in chosen.items)
    return RoundStep(
        **{
            **vars(planned),
            "batches": batches,
            # a step without answers has gradients of 0
            "target_tokens": max(1, tokens),
            "samples": max(1, chosen.answers),
        },
        metrics=metrics_of(rollouts, chosen),
    )


def _micro_batches(
    longest_first: list[_TrainedAnswer], layout: BatchLayout
) -> list[list[_TrainedAnswer]]:
    """Return the answers of each micro-batch, those of all ranks together. A rank has at most as many
    tokens with padding, and as many in the loss, as `layout.micro_batch` of the longest answers."""
    size = layout.data_size
    longest_answer = max((len(item.answer.token_ids) for item in longest_first), default=0)
    groups = list[list[_TrainedAnswer]]()
    longest = 0  # tokens in the loss of an answer of the last group
    for start in range(0, len(longest_first), size):
        next_ones = longest_first[start : start + size]  # one for each rank
        in_loss = max(len(item.answer.token_ids) for item in next_ones)
        if groups:
            count = len(groups[-1]) // size + 1
            tokens = count * groups[-1][0].length
            targets = count * max(longest, in_loss)
            most = layout.micro_batch
            if tokens <= most * longest_first[0].length and targets <= most * longest_answer:
                groups[-1] += next_ones
                longest = max(longest, in_loss)
                continue
        groups.append(next_ones)
        longest = in_loss
    return groups


def _collate(
    items: Sequence[_TrainedAnswer],
    layout: BatchLayout,
    first: Prompt,
    old: Mapping[str, torch.Tensor] | None,
) -> RoundBatch:
    """Make a micro-batch. Without answers it has a few tokens of the prompt `first`, and no label: a
    rank without answers must run forward and backward, too."""
    ids = list[torch.Tensor]()
    labels = list[torch.Tensor]()
    logprobs = [torch.zeros(0)]
    for item in items:
        prompt = torch.tensor(item.prompt.token_ids)
        answer = torch.from_numpy(item.answer.token_ids.astype(numpy.int64))
        ids.append(torch.cat([prompt, answer]))
        labels.append(torch.cat([torch.full_like(prompt, IGNORED), answer]))
        logprobs.append(torch.from_numpy(item.answer.logprobs.copy()))
    if not items:
        filler = torch.tensor(first.token_ids[:FILLER_TOKENS])
        ids.append(filler)
        labels.append(torch.full_like(filler, IGNORED))
    lengths = torch.tensor([len(item.answer.token_ids) for item in items], dtype=torch.int64)
    numbers = AnswerNumbers(
        Tokens(torch.arange(len(items)).repeat_interleave(lengths), lengths),
        torch.tensor([item.advantage for item in items], dtype=torch.float32),
        torch.cat(logprobs),
        None
        if old is None
        else torch.cat([*(old[item.location] for item in items)] or [torch.zeros(2, 0)], dim=1),
    )
    return RoundBatch(
        input_ids=pad_sequence(ids, batch_first=True, padding_value=layout.pad_token_id),
        labels=pad_sequence(labels, batch_first=True, padding_value=IGNORED),
        example_lengths=[len(one) for one in ids],
        is_packed=False,
        locations=[item.location for item in items],
        numbers=numbers,
    )


def metrics_of(rollouts: Round, chosen: RoundAnswers) -> dict[str, float]:
    """Return what metrics.jsonl says about a round. Means are over the answers that have a reward."""
    answers = [answer for group in rollouts.answers for answer in group]
    totals = [answer.total for answer in answers if answer.total is not None]
    metrics = {"train/reward": _mean(totals)}
    for reward in rollouts.facts.rewards:
        values = [answer.rewards.get(reward.name) for answer in answers]
        known = [value for value in values if value is not None]
        if known:
            metrics[f"train/reward/{reward.name}"] = _mean(known)
    return metrics | {
        "train/rollout/tokens": rollouts.tokens,
        "train/rollout/mean_length": _mean([len(answer.token_ids) for answer in answers]),
        "train/rollout/truncated": _mean([not answer.has_ended for answer in answers]),
        "train/rollout/without_reward": len(answers) - len(totals),
        "train/rollout/equal_groups": chosen.equal_groups,
    }


def _mean(values: Sequence[Any]) -> float:
    return float(sum(values)) / len(values)
