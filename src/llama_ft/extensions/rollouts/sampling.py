"""Sample answers with the model itself: several to each prompt, with the log-probability of each
token.

An answer is a function of the model, its prompt and its seed: each token is chosen by one random
number of the answer's own generator. Which answers share a batch does not depend on the number of
ranks, so that rounding does not, either.

    batch of 4 answers        prompt 0, answers 0 1 2 | prompt 1, answer 0
    the next one              prompt 1, answers 1 2 | prompt 2, answers 0 1
"""

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy
import torch
from pydantic.dataclasses import dataclass
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import utils as generation
from transformers.modeling_utils import PreTrainedModel

from llama_ft.config.value_types import STRICT
from llama_ft.data import pad_token_id
from llama_ft.data.batches.sampler import combine_seeds
from llama_ft.errors import RunFailure
from llama_ft.extensions.rollouts.rounds import Answer, Prompt
from llama_ft.inference.load import LoadedModel
from llama_ft.models import vocabulary_size
from llama_ft.models.sharding.kept_units import units_kept_if_they_fit
from llama_ft.runtime import Ranks, Stopped, sent
from llama_ft.training import free_unsharded
from llama_ft.training.evaluation import prompt_arguments


@dataclass(config=STRICT, frozen=True, kw_only=True)
class Sampling:
    """How answers are sampled.

    Attributes:
        temperature, top_p, top_k: of the distribution; 1, 1 and 0 leave it as it is.
        max_completion_length: maximum tokens of an answer.
        stop_ids: the tokens that end an answer.
        num_generations: answers per prompt.
        seed: from which those of the answers are made.
    """

    temperature: float
    top_p: float
    top_k: int
    max_completion_length: int
    stop_ids: list[int]
    num_generations: int
    seed: int

    def seed_of(self, step: int, prompt: Prompt, number: int) -> int:
        """Return the seed of an answer: that to a prompt with this number in this round."""
        return combine_seeds(self.seed, step, prompt.index, number)


class SamplingStopped(Stopped):
    """A signal has asked to stop. All ranks raise it together.

    Attributes:
        answers: to the first prompts of the round, as far as they are complete. Rank 0 has them.
    """

    def __init__(self, stopped: Stopped) -> None:
        super().__init__(stopped.stop)
        self.answers = list[list[Answer]]()


class Sampler(Protocol):
    """What samples answers: the model itself, or servers."""

    source: dict[str, Any]  # for round.json

    def sample(
        self, prompts: Sequence[Prompt], step: int, begun: Sequence[list[Answer]] = ()
    ) -> list[list[Answer]]:
        """Return the answers to each prompt of a round. All ranks call it, and get all answers.
        `begun`: those to the first prompts, which are known.

        Raises:
            SamplingStopped: a signal has asked to stop.
        """
        ...


class _Item(NamedTuple):
    """An answer to sample: the index of its prompt in the round, and its number."""

    prompt: int
    number: int


class OwnSampler:
    """Samples with a loaded model. Each rank answers some of the batches.

    Args:
        opened: the model and its tokenizer. Its generation config is replaced.
        sampling: how.
        batch_size: answers generated at once, per rank.
        ranks: the ranks; they share the weights if the model is sharded.
    """

    def __init__(
        self, opened: LoadedModel, sampling: Sampling, batch_size: int, ranks: Ranks
    ) -> None:
        self.source = {"kind": "own generation"}
        self._built = opened.built
        self._model = opened.model
        self._tokenizer = opened.tokenizer
        self._sampling = sampling
        self._batch_size = batch_size
        self._ranks = ranks
        pad = pad_token_id(opened.tokenizer, vocabulary_size(opened.model.config))
        # not the model's generation_config.json, which may ask for other sampling or penalties
        opened.model.generation_config = GenerationConfig(
            do_sample=False, pad_token_id=pad, eos_token_id=sampling.stop_ids or None
        )

    def sample(
        self, prompts: Sequence[Prompt], step: int, begun: Sequence[list[Answer]] = ()
    ) -> list[list[Answer]]:
        """See `Sampler`."""
        ranks = self._ranks
        # A batch of which only a part is known is generated again: alone, the rest would be rounded
        # in another way.
        batches = [batch for batch in self._batches(prompts) if batch[-1].prompt >= len(begun)]
        answers = dict[_Item, Answer]()
        try:
            with units_kept_if_they_fit(self._built, ranks):
                for first in range(0, len(batches), ranks.answering.size):
                    _check_stop(ranks)
                    number = first + ranks.answering.rank
                    is_own = number < len(batches)
                    if not is_own and ranks.shard.size == 1:
                        continue
                    # Ranks that share the weights generate equally often: all must join the all-gathers.
                    batch = batches[number] if is_own else batches[-1]
                    answered = self._answer(batch, prompts, step)
                    if is_own:
                        answers |= answered
        except SamplingStopped as stopped:
            stopped.answers = self._groups(answers, prompts, begun)
            raise
        finally:
            free_unsharded(self._model)
        return self._groups(answers, prompts, begun)

    def _groups(
        self, own: dict[_Item, Answer], prompts: Sequence[Prompt], begun: Sequence[list[Answer]]
    ) -> list[list[Answer]]:
        """Return the answers of all ranks by prompt, up to the first prompt that lacks one."""
        together = dict[_Item, Answer]()
        for part in self._ranks.gather(own):
            together |= part
        groups = list(begun)
        for index in range(len(begun), len(prompts)):
            items = [_Item(index, number) for number in range(self._sampling.num_generations)]
            if not together.keys() >= set(items):
                break
            groups.append([together[item] for item in items])
        return groups

    def _batches(self, prompts: Sequence[Prompt]) -> Iterator[list[_Item]]:
        """Yield what is generated at once. The answers of a batch have one maximum length."""
        batch = list[_Item]()
        for index, prompt in enumerate(prompts):
            for number in range(self._sampling.num_generations):
                is_other = bool(batch) and self._longest(prompts[batch[0].prompt]) != self._longest(
                    prompt
                )
                if is_other or len(batch) == self._batch_size:
                    yield batch
                    batch = []
                batch.append(_Item(index, number))
        if batch:
            yield batch

    def _longest(self, prompt: Prompt) -> int:
        """Return the maximum number of tokens of an answer: the model's positions limit it, too."""
        context = positions(self._model.config)
        return min(self._sampling.max_completion_length, context - len(prompt.token_ids))

    @torch.no_grad()
    def _answer(
        self, batch: list[_Item], prompts: Sequence[Prompt], step: int
    ) -> dict[_Item, Answer]:
        own_prompts = [prompts[item.prompt] for item in batch]
        seeds = []
        for item, prompt in zip(batch, own_prompts, strict=True):
            seeds.append(self._sampling.seed_of(step, prompt, item.number))
        longest = self._longest(own_prompts[0])
        token_ids = [prompt.token_ids for prompt in own_prompts]
        arguments = prompt_arguments(self._model, token_ids, None, self._ranks.device)
        choose = ChooseTokens(seeds, longest, self._sampling, arguments["input_ids"])
        with (
            _stopping_between_tokens(self._model, self._ranks),
            _ends_without_waits(longest, self._ranks),
        ):
            self._model.generate(  # type: ignore[operator]  # a mixin's method
                **arguments,
                max_new_tokens=longest,
                logits_processor=LogitsProcessorList([choose]),
                synced_gpus=self._ranks.shard.size > 1,
            )
        tokens, logprobs = choose.read()
        answers = {}
        for row, item in enumerate(batch):
            answers[item] = make_answer(
                tokens[row], logprobs[row], seeds[row], self._tokenizer, self._sampling.stop_ids
            )
        return answers


def _check_stop(ranks: Ranks) -> None:
    try:
        ranks.check_stop()
    except Stopped as stopped:
        raise SamplingStopped(stopped) from stopped


@contextmanager
def _stopping_between_tokens(model: PreTrainedModel, ranks: Ranks) -> Iterator[None]:
    """In the block a signal raises SamplingStopped before the next token, if all ranks call the model
    equally often: those with their own copy of the weights do not."""
    if ranks.shard.size < ranks.world_size:
        yield
        return
    # `prepend`: before FSDP's own hook, which starts to gather weights
    check = model.register_forward_pre_hook(lambda *_: _check_stop(ranks), prepend=True)
    try:
        yield
    finally:
        check.remove()


class EndsOfAnswers:
    """Says when all answers of a batch have ended, in place of Transformers' StopCheck. That waits for
    the GPU after each token; here the host looks at those copies that have arrived. Until then a few
    more tokens are generated, which `make_answer` drops.

    Args:
        longest: maximum tokens of an answer, which the host counts.
    """

    def __init__(self, longest: int) -> None:
        self._remaining = longest
        self._copies = deque[tuple[torch.Tensor, torch.cuda.Event]]()

    def __call__(self, unfinished: torch.Tensor, *others: Any) -> bool:
        self._remaining -= 1
        are_unfinished = torch.empty((), dtype=torch.bool, pin_memory=True)
        are_unfinished.copy_(unfinished.any(), non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self._copies.append((are_unfinished, copied))
        while self._copies and self._copies[0][1].query():
            are_unfinished, _ = self._copies.popleft()
            if not are_unfinished:
                return True
        return self._remaining == 0

    def finish(self) -> int:
        """Return how many tokens Transformers takes back."""
        return 0


@contextmanager
def _ends_without_waits(longest: int, ranks: Ranks) -> Iterator[None]:
    """In the block, `generate` does not wait for the GPU to see whether answers have ended. Ranks that
    share the weights exchange that after each token, for which they wait."""
    if ranks.device.type != "cuda" or ranks.shard.size > 1:
        yield
        return
    own = generation.StopCheck
    generation.StopCheck = lambda *_: EndsOfAnswers(longest)  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        generation.StopCheck = own  # type: ignore[misc]


class ChooseTokens:
    """Chooses the next token of each answer, as a logits processor of `generate`: all others get
    -inf.

    Args:
        seeds: of the answers.
        longest: maximum tokens of an answer.
        sampling: the distribution.
        prompt_ids: [answers, prompt tokens]

    Attributes:
        width: tokens of the prompts, with padding.
        tokens: of each step, int64 [answers]; also after the end of an answer.
        logprobs: of these tokens in the distribution, float32.
    """

    def __init__(
        self, seeds: list[int], longest: int, sampling: Sampling, prompt_ids: torch.Tensor
    ) -> None:
        rows = [numpy.random.Generator(numpy.random.Philox(seed)).random(longest) for seed in seeds]
        self._uniforms = sent(torch.from_numpy(numpy.stack(rows)), prompt_ids.device)
        self._temperature = sampling.temperature
        self.width = prompt_ids.shape[1]
        self._warpers = LogitsProcessorList()
        if sampling.top_k:
            self._warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self._warpers.append(TopPLogitsWarper(sampling.top_p))
        self.tokens = list[torch.Tensor]()
        self.logprobs = list[torch.Tensor]()
        self._are_finite = list[torch.Tensor]()

    def __call__(self, tokens: torch.LongTensor, logits: torch.Tensor) -> torch.Tensor:
        # a single -inf is allowed: it excludes a token
        self._are_finite.append(logits.amax(dim=-1).isfinite().all())
        logits = logits.float() / self._temperature
        logits = self._warpers(tokens, logits)
        logprobs = logits.log_softmax(dim=-1)
        # Inverse of the cumulative distribution, in float64: in float32 its last digits would favor
        # some of 100,000 tokens.
        cumulative = logprobs.double().exp().cumsum(dim=-1)
        uniform = self._uniforms[:, tokens.shape[1] - self.width].unsqueeze(1)
        limit = uniform * cumulative[:, -1:]
        chosen = torch.searchsorted(cumulative, limit, right=True)
        chosen = chosen.clamp_max(logits.shape[-1] - 1)
        self.tokens.append(chosen.squeeze(1))
        self.logprobs.append(logprobs.gather(1, chosen).squeeze(1))
        return torch.full_like(logits, -torch.inf).scatter(1, chosen, 0.0)

    def read(self) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Return the tokens and their log-probabilities, [answers, tokens], after the last token: the
        host waits for the device, once. Raises a RunFailure if the logits of a token were not finite."""
        tokens = torch.stack(self.tokens, dim=1)
        logprobs = torch.stack(self.logprobs, dim=1)
        are_finite = torch.stack(self._are_finite).expand_as(tokens)
        # float64 has all of them exactly, so that one copy is enough
        together = torch.stack([each.double() for each in (tokens, logprobs, are_finite)])
        numbers, values, finite = together.cpu().numpy()
        if not finite.all():
            raise RunFailure(
                "The model's logits are not finite: its weights are corrupted, or it needs --precision bf16."
            )
        return numbers, values


def positions(config: Any) -> int:
    """Return the number of positions of a model."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


def make_answer(
    tokens: Sequence[int] | numpy.ndarray,
    logprobs: Sequence[float] | numpy.ndarray,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: Sequence[int],
) -> Answer:
    """Return an answer from its tokens, of which those after the first end are dropped, and their
    log-probabilities."""
    ids = numpy.asarray(tokens, numpy.int32)
    [ends] = numpy.isin(ids, list(stop_ids)).nonzero()
    has_ended = len(ends) > 0
    length = int(ends[0]) + 1 if has_ended else len(ids)
    before_end = ids[: length - 1] if has_ended else ids
    text = str(tokenizer.decode(before_end.tolist(), skip_special_tokens=True))
    numbers = numpy.asarray(logprobs, numpy.float32)[:length]
    return Answer(text, ids[:length], numbers, seed, has_ended)
