"""Generate answers with Transformers' generate: greedy or sampled, one streamed or many in a batch,
on several ranks.

In fp32 a greedy answer depends neither on the other prompts of the batch nor on the number of
ranks, because padding is on the left and masked.
"""

import copy
import sys
from collections.abc import Callable
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, LogitsProcessorList

from llama_ft.data import check_ids, pad_token_id
from llama_ft.data.read.formats import BadSample
from llama_ft.data.tokenize.prompt_tokens import chat_prompt, text_prompt
from llama_ft.errors import RunFailure, UserError
from llama_ft.inference.flags import InferenceFlags
from llama_ft.inference.load import LoadedModel
from llama_ft.models import vocabulary_size
from llama_ft.models.sharding.kept_units import units_kept_if_they_fit
from llama_ft.runtime import Ranks
from llama_ft.training import free_unsharded
from llama_ft.training.evaluation import prompt_arguments, towers_in_root

# defaults of Transformers
DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "repetition_penalty": 1.0}
SAMPLING_SETTINGS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "top_h",
    "epsilon_cutoff",
    "eta_cutoff",
)
Messages = list[dict[str, Any]]
Show = Callable[[str], None]


class GeneratedAnswer(NamedTuple):
    """A generated answer without special tokens, and whether it was truncated at the token
    limit."""

    text: str
    is_truncated: bool


def resolve_sampling(options: InferenceFlags, config: GenerationConfig) -> dict[str, Any]:
    """Return values for the keys of DEFAULTS: the requested ones, else those of
    generation_config.json (`config`)."""
    values = dict[str, Any](DEFAULTS)
    names = set[str]()
    for name in DEFAULTS:
        from_flag = getattr(options, name)
        from_config = getattr(config, name, None)
        if from_flag is not None:
            values[name] = from_flag
            names.add(name)
        elif from_config is not None:
            values[name] = from_config
    is_sampled = options.do_sample
    if is_sampled is None:
        is_sampled = config.do_sample or not names.isdisjoint({"temperature", "top_p", "top_k"})
    if not is_sampled:
        values["temperature"] = 0.0
    return values


class Answerer:
    """Generates answers. If the tokenizer has no chat template, prompts are texts to continue.

    Args:
        opened: the model and its tokenizer. Its generation config is changed.
        options: the sampling. With enable_fsdp all ranks must call `answer` together, each with its
            own prompts.
        ranks: the ranks; torch's random number generator is seeded on all of them.
    """

    def __init__(self, opened: LoadedModel, options: InferenceFlags, ranks: Ranks) -> None:
        self._built = opened.built
        self.model = opened.model
        self.tokenizer = opened.tokenizer
        self._media = opened.media
        form = opened.prompt_format if options.prompt_format == "auto" else options.prompt_format
        # Whether prompts of text are asked without the chat template, if there is one.
        self.asks_text = form == "text" and bool(self.tokenizer.chat_template)
        self._options = options
        self._ranks = ranks
        text_config = self.model.config.get_text_config()
        self.context = getattr(text_config, "max_position_embeddings", None) or sys.maxsize
        self.vocabulary = vocabulary_size(self.model.config)
        self._pad = pad_token_id(self.tokenizer, self.vocabulary)
        config = copy.deepcopy(self.model.generation_config)
        self.sampling = resolve_sampling(options, config)
        ends = config.eos_token_id  # one or several
        self._ends = set(ends) if isinstance(ends, list) else {ends}
        is_sampled = self.sampling["temperature"] > 0
        unused = () if is_sampled else SAMPLING_SETTINGS  # Transformers would warn about them
        changed = {
            **self.sampling,
            **dict.fromkeys(unused),
            "do_sample": is_sampled,
            "num_beams": 1,
        }
        changed |= {"max_length": None, "num_return_sequences": 1, "return_dict_in_generate": False}
        vars(config).update(changed)
        self.model.generation_config = config
        # A single prompt is answered by all ranks, with the same random numbers.
        offset = ranks.data.rank if options.prompts else 0
        torch.manual_seed(options.seed + offset)

    def tokens(
        self,
        prompt: Messages | str,
        tools: Messages | None = None,
    ) -> list[int]:
        """Return the token ids of a prompt with `tools`, of one with media as a `MediaPrompt`.
        Raises UserError if the chat template rejects it, a file cannot be read, or a token is
        outside the model's vocabulary."""
        try:
            ids = self._encode(prompt, tools)
        except BadSample as error:
            raise UserError(str(error)) from error
        check_ids(max(ids, default=0), "the prompt", self.tokenizer, self.vocabulary)
        return ids

    def _encode(self, prompt: Messages | str, tools: Messages | None) -> list[int]:
        system = self._options.system_prompt
        if isinstance(prompt, str) and self.asks_text:
            # As samples with a column `system` are written.
            return text_prompt(self.tokenizer, f"{system}\n\n{prompt}" if system else prompt)
        if isinstance(prompt, str) and not (self.tokenizer.chat_template or system):
            return text_prompt(self.tokenizer, prompt)
        if not self.tokenizer.chat_template:
            raise UserError("a conversation needs a chat template, and the tokenizer has none.")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if system and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": system}, *messages]
        # Training renders every sample with one fixed date. An answer uses today's date.
        return chat_prompt(self.tokenizer, messages, tools, self._media, is_today=True)

    def longest_answer(self, prompt_tokens: int) -> int:
        """Return the maximum number of tokens in the answer to a prompt of this length. Raises
        UserError if it is 0."""
        if not 0 < prompt_tokens < self.context:
            raise UserError(
                f"the prompt has {prompt_tokens} tokens, and the model {self.context} positions."
            )
        return min(self._options.max_new_tokens, self.context - prompt_tokens)

    @torch.no_grad()
    def answer(
        self,
        prompts: list[list[int]],
        show: Show | None = None,
    ) -> list[GeneratedAnswer]:
        """Generate answers to prompts in one batch.

        Args:
            prompts: token ids. All must have the same `longest_answer`, because positions end with
                the context.
            show: called with each new part of the answer's text; for a single prompt.
        """
        is_sharded = self._options.enable_fsdp and self._ranks.shard.size > 1
        arguments = prompt_arguments(self.model, prompts, self._media, self._ranks.device)
        width = arguments["input_ids"].shape[1]
        shown = 0

        def check_and_show(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            """Raise an error for NaN and infinities, which `generate` would accept, and show the
            new text.

            The whole answer is decoded each time. TextStreamer decodes line by line, and loses a
            space of the indentation with Llama 2's tokenizer."""
            nonlocal shown
            # a single -inf is allowed: it excludes a token
            if not scores.amax(dim=-1).isfinite().all():
                raise RunFailure(
                    "The model's logits are not finite: its weights are corrupted, or it needs --precision bf16."
                )
            if show is not None:
                # Replacement characters at the end are the first bytes of an incomplete character.
                text = self._text(tokens[0, width:].tolist()).rstrip("\N{REPLACEMENT CHARACTER}")
                show(text[shown:])
                shown = max(shown, len(text))  # an incomplete character may hide the one before it
            return scores

        with (
            units_kept_if_they_fit(self._built, self._ranks),
            towers_in_root(self.model, self._media),
        ):
            sequences = self.model.generate(  # type: ignore[operator]  # a mixin's method
                **arguments,
                max_new_tokens=self.longest_answer(width),
                pad_token_id=self._pad,
                logits_processor=LogitsProcessorList([check_and_show]),
                # A rank whose answers have ended continues until all have: every rank must all-gather.
                synced_gpus=is_sharded,
            )
        if is_sharded:
            free_unsharded(self.model)
        answers = []
        for sequence in sequences[: len(prompts)]:
            generated = sequence[width:].tolist()
            is_truncated = self._ends.isdisjoint(generated)
            answers.append(GeneratedAnswer(self._text(generated), is_truncated))
        if show is not None:
            show(answers[0].text[shown:])
        return answers

    def _text(self, tokens: list[int]) -> str:
        """Decode the tokens before the end. If other answers of the batch are longer, padding
        follows the end."""
        before_end = list(takewhile(lambda token: token not in self._ends, tokens))
        return str(self.tokenizer.decode(before_end, skip_special_tokens=True))
