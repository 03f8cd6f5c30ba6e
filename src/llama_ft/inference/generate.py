"""Answers by transformers' own generate: greedy or sampled, one streamed or many at once, on one rank or several.

An answer depends neither on the prompts beside it in its batch nor on the number of ranks (in fp32; narrower products
round differently in batches of other sizes). Padding is on the left and masked. Where tokens are sampled, each row
draws from a generator of its own, of (seed, number of the row).
"""

import copy
import hashlib
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import BaseStreamer
from transformers.modeling_utils import PreTrainedModel

from llama_ft.config.inference_flags import unused_sampling
from llama_ft.data import pad_token_id
from llama_ft.errors import RunFailure, UserError
from llama_ft.inference.load import Opened
from llama_ft.models import vocabulary_size
from llama_ft.runtime import Runtime
from llama_ft.training import free_gathered

TOP_K = 50  # transformers' own where neither the user nor the model says
# Before these `clean_up_tokenization_spaces` of a tokenizer takes the space away.
CLEANED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
EVERY_TOKEN = 1000  # up to here each token is shown when it comes, later every second one, then every third, ...
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff")
Show = Callable[[str], None]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: 0: the likeliest each time.
        top_p: of the likeliest tokens that make up so much; 1: of all.
        top_k: of so many of the likeliest; 0: of all.
        min_p: of those at least so likely, relative to the likeliest; 0: of all.
        repetition_penalty: what logits of tokens that are there already are divided by.
        max_new_tokens: of an answer.
        seed: of what is drawn.
        stop: texts before which an answer ends.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    max_new_tokens: int
    seed: int
    stop: tuple[str, ...]

    @property
    def describe(self) -> str:
        """For people."""
        words = f"at most {self.max_new_tokens} tokens"
        if self.temperature == 0:
            return f"greedy, {words}"
        min_p = f", min_p {self.min_p:g}" if self.min_p else ""
        chosen = f"temperature {self.temperature:g}, top_p {self.top_p:g}, top_k {self.top_k}{min_p}"
        return f"sampled ({chosen}, seed {self.seed}), {words}"


def settle_sampling(options: Namespace, config: GenerationConfig) -> Sampling:
    """What was asked for, and for the rest what the model's generation_config.json says.

    Args:
        options: flags of the recipe.
        config: the model's.

    Raises:
        UserError: a flag about sampling, where nothing is sampled.
    """
    own = config.do_sample or options.do_sample
    temperature = options.temperature
    if temperature is None:
        temperature = (config.temperature if config.temperature is not None else 1.0) if own else 0.0
    if temperature == 0 and (unused := unused_sampling(options)):
        raise UserError(*unused)

    def settled(name: str, otherwise: float) -> Any:
        asked, known = getattr(options, name, None), getattr(config, name, None)
        return asked if asked is not None else known if known is not None else otherwise

    return Sampling(
        temperature,
        settled("top_p", 1.0),
        settled("top_k", TOP_K),
        settled("min_p", 0.0),
        settled("repetition_penalty", 1.0),
        options.max_new_tokens,
        options.seed,
        tuple(options.stop),
    )


@dataclass(frozen=True)
class Answer:
    """What a model has said.

    Attributes:
        text: without special tokens, and without the text that it was to stop at.
        is_cut: whether it was at its longest before it came to an end.
    """

    text: str
    is_cut: bool


class Answerer:
    """A model that answers tokenized prompts.

    Args:
        opened: the model and its tokenizer. Its generation config is changed.
        job: the ranks.
        is_sharded: all ranks then call `answer` together, each with prompts of its own, or with none.

    Attributes:
        context: tokens of prompt and answer that the model has positions for; None: it does not say.
    """

    def __init__(self, opened: Opened, job: Runtime, is_sharded: bool) -> None:
        self.model: PreTrainedModel = opened.model
        self.tokenizer: PreTrainedTokenizerBase = opened.tokenizer
        self._job, self._is_sharded = job, is_sharded
        text_config = self.model.config.get_text_config()
        self.context: int | None = getattr(text_config, "max_position_embeddings", None)
        self._pad = pad_token_id(self.tokenizer, vocabulary_size(self.model.config))
        config = copy.deepcopy(self.model.generation_config)
        known = config.eos_token_id
        self._ends = set(known if isinstance(known, list) else [known] if known is not None else [])
        for name in SAMPLING:  # done here, so that each row draws from its own generator
            setattr(config, name, None)
        config.do_sample, config.num_beams, config.max_length = False, 1, None
        config.num_return_sequences, config.return_dict_in_generate = 1, False
        self.model.generation_config = config

    def longest_answer(self, prompt_tokens: int, sampling: Sampling) -> int:
        """How many tokens the answer to a prompt may have; below 1: the prompt is too long."""
        limit = sampling.max_new_tokens
        return limit if self.context is None else min(limit, self.context - prompt_tokens)

    @torch.no_grad()
    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        rows: Sequence[int],
        sampling: Sampling,
        show: Show | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> list[Answer]:
        """Answer prompts at once.

        Args:
            prompts: token ids. All have the same `longest_answer`: a model with learned positions has no others.
            rows: their numbers, for what is drawn.
            sampling: how tokens are chosen.
            show: is called with the text of the one prompt's answer as it comes.
            stopped: asked after each token, whether to end here.

        Raises:
            RunFailure: the model's numbers are not finite.
        """
        if not prompts and not self._is_sharded:
            return []
        asked = [list(prompt) for prompt in prompts] or [[self._pad]]  # where weights are gathered, none stays away
        limit = self.longest_answer(max(map(len, asked)), sampling) if prompts else 1
        width = max(map(len, asked))
        # Padding repeats the row's first token: a penalty on repetition then sees no token that is not there.
        ids = torch.tensor([[prompt[0]] * (width - len(prompt)) + prompt for prompt in asked])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in asked])
        streamer = _Shown(self, show, limit, sampling.stop) if show is not None else None
        drawn = [_Drawing(sampling, rows or [0])] if sampling.temperature > 0 else []
        criteria = [_Asked(stopped)] if stopped is not None else []
        sequences = self.model.generate(  # type: ignore[operator]  # a mixin's method
            input_ids=ids.to(self._job.device),
            attention_mask=mask.to(self._job.device),
            max_new_tokens=limit,
            repetition_penalty=sampling.repetition_penalty,
            pad_token_id=self._pad,
            logits_processor=LogitsProcessorList([_Finite(), *drawn]),
            stopping_criteria=StoppingCriteriaList(criteria),
            streamer=streamer,
            synced_gpus=self._is_sharded,
            **({"stop_strings": list(sampling.stop), "tokenizer": self.tokenizer} if sampling.stop else {}),
        )
        if self._is_sharded:
            free_gathered(self.model)
        if not prompts:
            return []
        return [self._finish(tokens[width:].tolist(), limit, sampling.stop) for tokens in sequences]

    def _finish(self, tokens: list[int], limit: int, stop: tuple[str, ...]) -> Answer:
        """Cut what comes after the end: pads, where others of the batch went on."""
        end = next((place for place, token in enumerate(tokens) if token in self._ends), len(tokens))
        text = self.tokenizer.decode(tokens[:end], skip_special_tokens=True)
        assert isinstance(text, str)
        found = min((text.index(word) for word in stop if word in text), default=None)
        return Answer(text[:found], end == limit and found is None)


class _Finite(LogitsProcessor):
    """Ends it all where the model computes no numbers, from which some token would be chosen all the same."""

    def __init__(self) -> None:
        self._has_looked = False  # at the first token only: on a GPU each look waits for it

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # A single -inf is a token that is never said; the largest is NaN where one is.
        if not self._has_looked and not scores.amax(dim=-1).isfinite().all():
            raise RunFailure(
                "The model's numbers are not finite (NaN or infinite): its weights are damaged, or need "
                "--precision bf16 or fp32."
            )
        self._has_looked = True
        return scores


class _Drawing(LogitsProcessor):
    """Leaves of each row's scores only the token that the row's own generator draws: a number in [0, 1) from the host,
    and the token at whose part of the summed probabilities it lies."""

    def __init__(self, sampling: Sampling, rows: Sequence[int]) -> None:
        # Hashed: seed + 1 is not to give a row what seed gives the next one, and torch takes the lower 32 bits only.
        digests = [hashlib.sha256(f"{sampling.seed}/{row}".encode()).digest() for row in rows]
        self._generators = [torch.Generator().manual_seed(int.from_bytes(digest[:4])) for digest in digests]
        self._warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(float(sampling.temperature))]
        if sampling.top_k:
            self._warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self._warpers.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p:
            self._warpers.append(MinPLogitsWarper(sampling.min_p))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for warper in self._warpers:
            scores = warper(input_ids, scores)
        sums = scores.softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1)  # [rows, vocab]
        numbers = [torch.rand((), generator=generator, dtype=torch.float64) for generator in self._generators]
        drawn = torch.stack(numbers).to(sums.device)[:, None] * sums[:, -1:]
        chosen = torch.searchsorted(sums, drawn, right=True).clamp(max=sums.shape[-1] - 1)
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)


class _Asked(StoppingCriteria):
    """Stops all rows where someone asks for it."""

    def __init__(self, stopped: Callable[[], bool]) -> None:
        self._stopped = stopped

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), self._stopped(), dtype=torch.bool, device=input_ids.device)


class _Shown(BaseStreamer):
    """Hands on the text of an answer as it comes, up to where a later token could still change it.

    It is decoded from its beginning each time (1 us a token): what a decoder makes of a token depends on those before.
    transformers' TextStreamer begins anew with each line, and so loses a space of its indentation with Llama 2's.
    """

    def __init__(self, answerer: Answerer, show: Show, limit: int, stop: tuple[str, ...]) -> None:
        self._answerer, self._show, self._limit, self._stop = answerer, show, limit, stop
        self._tokens: list[int] | None = None
        self._shown = 0

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, then a token at a time."""
        if self._tokens is None:
            self._tokens = []
            return
        self._tokens += value.tolist()
        if len(self._tokens) % (1 + len(self._tokens) // EVERY_TOKEN):
            return
        # Bytes in a row become characters together, and none of them does if the last one is cut.
        if str(self._answerer.tokenizer.convert_ids_to_tokens(self._tokens[-1])).startswith("<0x"):
            return
        text = self._text().rstrip("\N{REPLACEMENT CHARACTER}")  # so far a character's first bytes only
        self._hand_on(text[: len(text) - max(_begun(text, word) for word in (*self._stop, *CLEANED))])

    def end(self) -> None:
        """Hand on the rest."""
        self._hand_on(self._text())

    def _text(self) -> str:
        return self._answerer._finish(self._tokens or [], self._limit, self._stop).text

    def _hand_on(self, text: str) -> None:
        if len(text) > self._shown:
            self._show(text[self._shown :])
            self._shown = len(text)


def _begun(text: str, word: str) -> int:
    """How many characters at the end of `text` may be the beginning of `word`."""
    return next((size for size in range(min(len(word) - 1, len(text)), 0, -1) if word.startswith(text[-size:])), 0)
