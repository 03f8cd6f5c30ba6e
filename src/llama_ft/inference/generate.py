"""Answers by transformers' own generate: greedy or sampled, one streamed or many in a batch, on one rank or several.

An answer depends neither on its neighbors in the batch nor on the number of ranks (in fp32; matmuls of lower precision
round differently in batches of other sizes). Padding is on the left and masked. Each row of a batch samples from its
own generator, seeded by (seed, number of the prompt).
"""

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import BaseStreamer

from llama_ft.data import pad_token_id
from llama_ft.errors import RunFailure, UserError
from llama_ft.inference.flags import InferenceFlags
from llama_ft.inference.load import Opened
from llama_ft.models import vocabulary_size
from llama_ft.runtime import Runtime
from llama_ft.training import free_unsharded

DEFAULTS = {"top_p": 1.0, "top_k": 50, "min_p": 0.0, "repetition_penalty": 1.0}  # transformers' own
# `clean_up_tokenization_spaces` of a tokenizer removes the space of these.
CLEANED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
EVERY_TOKEN = 1000  # up to here each token is shown when it comes, then every second one, then every third, ...
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff")
Show = Callable[[str], None]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: 0: the likeliest token each time.
        top_p: sample from the likeliest tokens that make up this probability.
        top_k: sample from this many of the likeliest tokens; 0: from all.
        min_p: sample from tokens at least so likely, relative to the likeliest; 0: from all.
        repetition_penalty: divides the logits of tokens that have occurred.
        max_new_tokens: of an answer.
        seed: of sampling.
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


def settle_sampling(options: InferenceFlags, config: GenerationConfig) -> Sampling:
    """What was asked for, and for the rest what the model's generation_config.json says.

    Args:
        options: flags of recipes/inference.py.
        config: of the model.

    Raises:
        UserError: a flag about sampling, but nothing is sampled.
    """
    temperature = options.temperature
    if temperature is None and (config.do_sample or options.do_sample):
        temperature = 1.0 if config.temperature is None else config.temperature
    unused = [] if temperature else [name for name in ("top_p", "top_k") if getattr(options, name) is not None]
    if unused:
        raise UserError(*(f"--{name}: nothing is sampled; --temperature above 0 samples." for name in unused))
    settled: dict[str, Any] = {"temperature": temperature or 0.0}
    for name, default in DEFAULTS.items():
        known = [getattr(options, name, None), getattr(config, name, None), default]
        settled[name] = next(value for value in known if value is not None)
    return Sampling(**settled, max_new_tokens=options.max_new_tokens, seed=options.seed, stop=tuple(options.stop))


@dataclass(frozen=True)
class Answer:
    """What a model said.

    Attributes:
        text: without special tokens, and without the stop text.
        is_cut: whether it reached its maximum length before its end.
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
        self.model, self.tokenizer = opened.model, opened.tokenizer
        self._job, self._is_sharded = job, is_sharded
        text_config = self.model.config.get_text_config()
        self.context: int | None = getattr(text_config, "max_position_embeddings", None)
        self._pad = pad_token_id(self.tokenizer, vocabulary_size(self.model.config))
        config = copy.deepcopy(self.model.generation_config)
        known = config.eos_token_id
        self._ends = set(known if isinstance(known, list) else [known] if known is not None else [])
        for name in SAMPLING:  # _NextToken samples instead, so that each row has its own generator
            setattr(config, name, None)
        config.do_sample, config.num_beams, config.max_length = False, 1, None
        config.num_return_sequences, config.return_dict_in_generate = 1, False
        self.model.generation_config = config

    def longest_answer(self, prompt_tokens: int, sampling: Sampling) -> int:
        """Most tokens that the answer to a prompt may have; below 1: the prompt is too long."""
        limit = sampling.max_new_tokens
        return limit if self.context is None else min(limit, self.context - prompt_tokens)

    @torch.no_grad()
    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        sampling: Sampling,
        show: Show | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> list[Answer]:
        """Answer prompts in one batch.

        Args:
            prompts: token ids. All have the same `longest_answer`: a model with learned positions has no others.
            numbers: their numbers, for sampling.
            sampling: how tokens are chosen.
            show: is called with the text of the one prompt's answer as it comes.
            stopped: asked after each token, whether to end here.

        Raises:
            RunFailure: the model's logits are not finite.
        """
        if not prompts and not self._is_sharded:
            return []
        asked = [list(prompt) for prompt in prompts] or [[self._pad]]  # every rank takes part in all-gathers
        width = max(map(len, asked))
        limit = self.longest_answer(width, sampling) if prompts else 1
        # Padding repeats the row's first token: a penalty on repetition then sees no token that is not there.
        ids = torch.tensor([[prompt[0]] * (width - len(prompt)) + prompt for prompt in asked])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in asked])

        def stop_all(input_ids: torch.Tensor, _: Any, **__: Any) -> torch.Tensor:
            return torch.full((len(input_ids),), bool(stopped and stopped()), device=input_ids.device)

        sequences = self.model.generate(  # type: ignore[operator]  # a mixin's method
            input_ids=ids.to(self._job.device),
            attention_mask=mask.to(self._job.device),
            max_new_tokens=limit,
            repetition_penalty=sampling.repetition_penalty,
            pad_token_id=self._pad,
            logits_processor=LogitsProcessorList([_NextToken(sampling, numbers or [0])]),
            stopping_criteria=StoppingCriteriaList([stop_all] if stopped is not None else []),
            streamer=_Streamer(self, show, limit, sampling.stop) if show is not None else None,
            synced_gpus=self._is_sharded,
            **({"stop_strings": list(sampling.stop), "tokenizer": self.tokenizer} if sampling.stop else {}),
        )
        if self._is_sharded:
            free_unsharded(self.model)
        return [self.finish(tokens[width:].tolist(), limit, sampling.stop) for tokens in sequences][: len(prompts)]

    def finish(self, tokens: list[int], limit: int, stop: tuple[str, ...]) -> Answer:
        """Return the answer without what follows its end: pads, if other rows of the batch were longer."""
        end = next((place for place, token in enumerate(tokens) if token in self._ends), len(tokens))
        text = str(self.tokenizer.decode(tokens[:end], skip_special_tokens=True))
        found = min((text.index(word) for word in stop if word in text), default=None)
        return Answer(text[:found], end == limit and found is None)


class _NextToken(LogitsProcessor):
    """Sample: keep of each row's scores only the token that the row's own generator draws, with a number in [0, 1) from
    the host, and the token in whose part of the cumulative probabilities it lies. Also reject NaN and infinities."""

    def __init__(self, sampling: Sampling, numbers: Sequence[int]) -> None:
        self._has_looked, self._samples = False, sampling.temperature > 0
        # Hashed: seed + 1 is not to give a row what seed gives the next one, and torch takes the lower 32 bits only.
        digests = [hashlib.sha256(f"{sampling.seed}/{number}".encode()).digest() for number in numbers]
        self._generators = [torch.Generator().manual_seed(int.from_bytes(digest[:4])) for digest in digests]
        self._warpers: list[LogitsProcessor] = []
        if self._samples:
            self._warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k:
            self._warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self._warpers.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p:
            self._warpers.append(MinPLogitsWarper(sampling.min_p))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # At the first token only: on a GPU each look waits for it. A single -inf is a token that is never said; the
        # largest is NaN if one is.
        if not self._has_looked and not scores.amax(dim=-1).isfinite().all():
            raise RunFailure(
                "The model's logits are not finite (NaN or infinite): its weights are corrupted, or need "
                "--precision bf16 or fp32."
            )
        self._has_looked = True
        if not self._samples:
            return scores
        for warper in self._warpers:
            scores = warper(input_ids, scores)
        sums = scores.softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1)  # [rows, vocab]
        numbers = [torch.rand((), generator=generator, dtype=torch.float64) for generator in self._generators]
        drawn = torch.stack(numbers).to(sums.device)[:, None] * sums[:, -1:]
        chosen = torch.searchsorted(sums, drawn, right=True).clamp(max=sums.shape[-1] - 1)
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)


class _Streamer(BaseStreamer):
    """Show the text of an answer as it comes, up to where a later token could still change it.

    The answer is decoded from its beginning each time (1 us per token): what a decoder makes of a token depends on
    those before. transformers' TextStreamer starts again with each line, and loses a space of its indentation with
    Llama 2's tokenizer.
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
        """Show the rest."""
        self._hand_on(self._text())

    def _text(self) -> str:
        return self._answerer.finish(self._tokens or [], self._limit, self._stop).text

    def _hand_on(self, text: str) -> None:
        if len(text) > self._shown:
            self._show(text[self._shown :])
            self._shown = len(text)


def _begun(text: str, word: str) -> int:
    """How many characters at the end of `text` may be the beginning of `word`."""
    return next((size for size in range(min(len(word) - 1, len(text)), 0, -1) if word.startswith(text[-size:])), 0)
