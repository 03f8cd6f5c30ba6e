"""Compute the probes of a run at its end, with the model that is still in memory."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch.nn.functional import log_softmax
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from llama_ft import models, runtime
from llama_ft.config.paths import PROBES_FILE
from llama_ft.data import IGNORED, Batch, BatchLayout
from llama_ft.data.read.formats import BadSample
from llama_ft.data.tokenize.prompt_tokens import chat_prompt
from llama_ft.errors import UserError
from llama_ft.extensions.serving.probes.probes import (
    DIGITS,
    ChatProbe,
    Probe,
    Probes,
    ProbeScores,
)
from llama_ft.inference.verdict import WEAKER
from llama_ft.models import BuiltModel, without_graphs
from llama_ft.models.adapters.lora import adapter_off, adapter_scaled
from llama_ft.models.computing.chunked_loss import cross_entropy
from llama_ft.models.quantization.layers import quantization_name
from llama_ft.models.sharding.kept_units import units_kept_if_they_fit
from llama_ft.run.parts import Part
from llama_ft.runtime import Ranks, log
from llama_ft.training.evaluation import evaluating
from llama_ft.training.objectives.base import target_losses

if TYPE_CHECKING:
    from llama_ft.run.inputs import RunInputs
    from llama_ft.run.setup import Setup
    from llama_ft.run.training_run import TrainingRun

PROBES = 8
SEARCHED_SAMPLES = 64  # for that many of different tokens
TOKENS = 128  # of a prompt
FEWEST_TOKENS = 4
NEXT_TOKENS = 20  # servers return 5 to 20 of them
# of a LoRA adapter: with these only, the model without the adapter is the base model
LORA_WEIGHTS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")


class WriteProbes(Part):
    """Writes `model/probes.json`."""

    def __init__(self, setup: Setup, inputs: RunInputs) -> None:
        self._tokenizer = inputs.tokenizer
        length = inputs.config.data.context_length
        limit = models.resolve_context_length(length, inputs.request.model_config)
        self._longest = min(TOKENS, limit - 1)  # one token follows each prompt

    def ended(self, run: TrainingRun, how: Literal["finished", "stopped"]) -> None:
        """Compute the log-probabilities of the probes, some on each rank, and write them."""
        built = run.built
        if how == "stopped" or built.has_score:
            return
        prompts = _find_prompts(run, self._longest)
        if not prompts:
            log.debug(f"No {PROBES_FILE}: no sample is text of {FEWEST_TOKENS} tokens.")
            return
        layout = run.batches.layout
        if run.ranks.sequence is not None:  # each rank computes whole prompts
            layout = dataclasses.replace(layout, pack_length=None)
        run.memory.enter("evaluation")
        own = _own_groups(list(_groups(prompts, layout)), run.ranks)
        base: list[PromptScores] | None = None
        weaker: list[PromptScores] | None = None
        with (
            evaluating(built.model),
            units_kept_if_they_fit(built, run.ranks),
            without_graphs(built.model),
        ):
            tuned = score_prompts(built, own, layout, run.ranks)
            if can_turn_off(built):
                with adapter_off(built.model):
                    base = score_prompts(built, own, layout, run.ranks)
                with adapter_scaled(built.model, WEAKER):
                    weaker = score_prompts(built, own, layout, run.ranks)
        own_prompts = list(itertools.chain.from_iterable(own))
        own_probes = make_probes(self._tokenizer, own_prompts, tuned, base, weaker)
        gathered = itertools.chain.from_iterable(run.ranks.gather(own_probes))
        by_prompt = {tuple(probe.token_ids): probe for probe in gathered}
        if run.ranks.is_main:
            dtype = runtime.PRECISIONS[run.config.train.precision].compute
            probes = Probes(
                is_adapter=built.adapter is not None,
                dtype=str(dtype).removeprefix("torch."),
                quantization=quantization_name(built.model) or None,
                probes=[by_prompt[tuple(ids)] for ids in prompts],
                chat=self._chat(run),
            )
            probes.save(run.directory / "model" / PROBES_FILE)

    def _chat(self, run: TrainingRun) -> ChatProbe | None:
        """Return a chat of the data up to its answer; None without one, with images, or if the
        template writes the date of the day."""
        report = run.dataset.report
        messages = (report.chat_sample or [])[:-1]
        is_text = all(isinstance(one.get("content"), str | None) for one in messages)
        if not messages or not self._tokenizer.chat_template or not is_text:
            return None
        try:
            ids = chat_prompt(self._tokenizer, messages, report.chat_tools)
            today = chat_prompt(self._tokenizer, messages, report.chat_tools, is_today=True)
        except (BadSample, UserError):
            return None
        return ChatProbe(messages, report.chat_tools, ids) if ids == today else None


def make_probes(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    tuned: Sequence[PromptScores],
    base: Sequence[PromptScores] | None,
    weaker: Sequence[PromptScores] | None,
) -> list[Probe]:
    """Return probes with rounded log-probabilities.

    Args:
        tokenizer: of the run.
        prompts: token ids.
        tuned: of the fine-tuned model.
        base: of the base model; None if they are unknown.
        weaker: with WEAKER of the adapter; None if they are unknown.
    """
    probes = []
    for number, ids in enumerate(prompts):
        of_tuned = tuned[number]
        of_base = None if base is None else base[number]
        of_weaker = None if weaker is None else weaker[number]
        next_ids = _most_likely(of_tuned.following)
        if of_base is not None:
            next_ids = list(dict.fromkeys([*next_ids, *_most_likely(of_base.following)]))
        next_scores = [
            None if scores is None else _rounded(scores.following[next_ids])
            for scores in (of_base, of_weaker)
        ]
        probe = Probe(
            token_ids=ids,
            text=_text_of(tokenizer, ids),
            scores=ProbeScores(
                _rounded(of_tuned.scores),
                None if of_base is None else _rounded(of_base.scores),
                None if of_weaker is None else _rounded(of_weaker.scores),
            ),
            next_ids=next_ids,
            next_texts=[str(tokenizer.decode([token])) for token in next_ids],
            next_scores=ProbeScores(_rounded(of_tuned.following[next_ids]), *next_scores),
        )
        probes.append(probe)
    return probes


def _text_of(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str | None:
    """Return the text that has exactly these tokens; None if there is none."""
    text = str(tokenizer.decode(ids))
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    return text if list(tokens) == ids else None


def can_turn_off(built: BuiltModel) -> bool:
    """Return whether the model without its adapter is the base model: no other weights were
    trained."""
    if built.adapter is None:
        return False
    trained = [name for name, weight in built.model.named_parameters() if weight.requires_grad]
    return all(any(f".{part}." in f"{name}." for part in LORA_WEIGHTS) for name in trained)


class PromptScores(NamedTuple):
    """Log-probabilities of a prompt, on the CPU."""

    scores: torch.Tensor  # of its tokens but the first, float32 [tokens - 1]
    following: torch.Tensor  # of all tokens after it, float32 [vocab]


@torch.no_grad()
def score_prompts(
    built: BuiltModel, groups: Sequence[list[list[int]]], layout: BatchLayout, ranks: Ranks
) -> list[PromptScores]:
    """Return the log-probabilities of prompts. All ranks must call it together, with equally many
    groups.

    Args:
        built: the model in evaluation mode.
        groups: token ids of the prompts of each forward pass.
        layout: of the training batches.
        ranks: the ranks.
    """
    scores = list[PromptScores]()
    for group in groups:
        lengths = [len(ids) for ids in group]
        keep = _KeepLast(list(itertools.accumulate(lengths)))
        batch = _batch(group, layout)
        losses = target_losses(built, batch, ranks.device, keep, per_token=True).losses
        of_tokens = (-losses.float()).cpu().split(lengths)
        for own, following in zip(of_tokens, keep.last_ones, strict=True):
            scores.append(PromptScores(own[:-1], following))
    return scores


class _KeepLast:
    """The cross-entropy of targets, which come in parts. It keeps the log-probabilities of all tokens
    at some of them.

    Args:
        ends: numbers of these targets, counted from 1.
    """

    def __init__(self, ends: Sequence[int]) -> None:
        self.last_ones = list[torch.Tensor]()
        self._ends = ends
        self._seen = 0

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        before = self._seen
        self._seen += len(targets)
        for end in self._ends:
            if before < end <= self._seen:
                at_end = logits[end - before - 1].float()
                self.last_ones.append(log_softmax(at_end, dim=-1).cpu())
        return cross_entropy(logits, targets)


def _groups(prompts: Sequence[list[int]], layout: BatchLayout) -> Iterator[list[list[int]]]:
    """Yield the prompts in groups that are not larger than a micro-batch of the training."""
    group = list[list[int]]()
    most = layout.micro_batch
    if layout.pack_length is not None:
        most = layout.pack_length * layout.micro_batch
    filled = 0
    for ids in prompts:
        size = len(ids) + 1 if layout.is_packed else 1
        if group and filled + size > most:
            yield group
            group = []
            filled = 0
        group.append(ids)
        filled += size
    yield group


def _own_groups(groups: Sequence[list[list[int]]], ranks: Ranks) -> list[list[list[int]]]:
    """Return the groups that this rank computes: equally many on each, since each forward pass gathers
    weights of all ranks. Some are computed twice if they cannot be dealt evenly."""
    each = math.ceil(len(groups) / ranks.world_size)
    first = ranks.rank * each
    return [groups[number % len(groups)] for number in range(first, first + each)]


def _batch(group: Sequence[list[int]], layout: BatchLayout) -> Batch:
    """Return a micro-batch in which each token is predicted, and one more after each prompt, whose
    value does not matter."""
    samples = [torch.tensor([*ids, ids[-1]]) for ids in group]
    labels = [sample.clone() for sample in samples]
    for own in labels:
        own[0] = IGNORED
    lengths = [len(sample) for sample in samples]
    locations = [""] * len(group)
    if layout.is_packed:
        ids = torch.cat(samples).unsqueeze(0)
        return Batch(ids, torch.cat(labels).unsqueeze(0), lengths, True, locations)
    ids = pad_sequence(samples, batch_first=True, padding_value=layout.pad_token_id)
    padded = pad_sequence(labels, batch_first=True, padding_value=IGNORED)
    return Batch(ids, padded, lengths, False, locations)


def _find_prompts(run: TrainingRun, longest: int) -> list[list[int]]:
    """Return the first tokens of samples without media: of the validation sets in turn, else of the
    training data."""
    sources = list(run.dataset.validations.values()) or [run.batches.first_samples()]
    prompts = dict[tuple[int, ...], None]()
    for index in range(SEARCHED_SAMPLES):
        for samples in sources:
            if index >= len(samples) or len(prompts) == PROBES:
                continue
            sample = samples[index]
            ids = tuple(sample["input_ids"][:longest])
            if len(ids) >= FEWEST_TOKENS and not sample.get("media"):
                prompts[ids] = None
    return [list(ids) for ids in prompts]


def _most_likely(following: torch.Tensor) -> list[int]:
    return following.topk(min(NEXT_TOKENS, len(following))).indices.tolist()


def _rounded(scores: torch.Tensor) -> list[float]:
    return [round(score, DIGITS) for score in scores.tolist()]
