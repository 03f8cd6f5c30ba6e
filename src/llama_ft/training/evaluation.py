"""Evaluate the model during training: its mean loss on the validation set, and its answers to
prompts."""

import copy
import math
import os
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from llama_ft import door
from llama_ft.config import TrainConfig
from llama_ft.data import (
    BatchLayout,
    Media,
    check_ids,
    evaluation_batches,
    example_lengths,
    group_size,
    stop_token_ids,
)
from llama_ft.data.chat.chat_template import Tools
from llama_ft.data.read.formats import BadSample, Message
from llama_ft.data.read.media import PATHS, media_paths, text_of, user_message
from llama_ft.data.tokenize.prompt_tokens import (
    PromptFormat,
    chat_prompt,
    response_text,
    text_prompt,
)
from llama_ft.errors import UserError
from llama_ft.models import BuiltModel
from llama_ft.models.sharding.fsdp import free_unsharded
from llama_ft.models.sharding.kept_units import (
    all_unsharded_if_they_fit,
    units_kept_if_they_fit,
)
from llama_ft.runtime import Ranks, log, sent
from llama_ft.runtime.rank0 import on_rank0
from llama_ft.training.objectives.base import Objective, logged_means

LARGEST_EXPONENT = 700.0  # math.exp overflows above 709
PROMPT_LENGTH = 80  # characters of a prompt in a message


def perplexity(loss: float) -> float:
    """Return exp(loss), at most exp(700), because floats overflow above exp(709)."""
    return math.exp(min(loss, LARGEST_EXPONENT))


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Switch the model to eval mode for the block, and back to training mode also if the evaluation
    is abandoned: then a checkpoint is saved."""
    model.eval()
    try:
        yield
    finally:
        free_unsharded(model)
        model.train()


@dataclass(frozen=True)
class SetScore:
    """The answers to a validation set: the sum of their scores, their number, and the first ones
    with question, answer, reference and score. `passes`: K -> pass@K, if there are several answers
    per sample."""

    total: float
    count: int
    samples: list[dict[str, Any]]
    passes: dict[int, float] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """Return the mean score and pass@K by name."""
        passes = {f"pass_at_{k}": share for k, share in self.passes.items()}
        return {"score": self.total / self.count, **passes}


class Scores:
    """Scores of generated answers to validation sets. This class has none, as a run without --score;
    an extension has a subclass.

    Args:
        settings: score and those whose names begin with it.
        sets: the validation sets by name.
        tokenizer: of the run.
    """

    def __init__(
        self, settings: TrainConfig, sets: Mapping[str, Dataset], tokenizer: PreTrainedTokenizerBase
    ) -> None:
        pass

    def score(self, built: BuiltModel, layout: BatchLayout, ranks: Ranks) -> dict[str, SetScore]:
        """Answer all questions, and return the scores by the name of the set. All ranks call it."""
        return {}  # also for reward models, which cannot generate


def open_scores(
    settings: TrainConfig, sets: Mapping[str, Dataset], tokenizer: PreTrainedTokenizerBase
) -> Scores:
    """Return what scores answers to these validation sets; see `Scores`.

    Raises:
        UserError: the samples do not fit the settings.
    """
    scores: Scores = (door.scores(settings) or Scores)(settings, sets, tokenizer)
    return scores


@dataclass(frozen=True)
class LossSums:
    """Sums over a validation set: `loss` and the objective's other values by name, and the number
    of losses, which are those of tokens or of pairs."""

    sums: dict[str, float]
    count: int

    def metrics(self, has_perplexity: bool) -> dict[str, float]:
        """Return the means, and the perplexity if the losses are those of tokens."""
        means = logged_means(self.sums, self.count)
        if has_perplexity:
            means["perplexity"] = perplexity(means["loss"])
        return means


def evaluation_metrics(
    losses: Mapping[str, LossSums], scores: Mapping[str, SetScore], has_perplexity: bool
) -> dict[str, float]:
    """Return the metrics of all validation sets together, then those of each set with a name.

    Args:
        losses: by the name of the set; a single one has the name "".
        scores: of answers; empty without --score.
        has_perplexity: the losses are those of tokens.
    """
    metrics = together(losses.values()).metrics(has_perplexity)
    if scores:
        metrics |= _all_scores(list(scores.values())).metrics()
    for name in filter(None, losses):
        for key, value in losses[name].metrics(has_perplexity).items():
            metrics[f"{name}/{key}"] = value
        if name in scores:
            for key, value in scores[name].metrics().items():
                metrics[f"{name}/{key}"] = value
    return metrics


def _all_scores(sets: list[SetScore]) -> SetScore:
    """Return the scores of several validation sets as those of one."""
    total = math.fsum(one.total for one in sets)
    count = sum(one.count for one in sets)
    passes = dict[int, float]()
    for k in sets[0].passes:
        passes[k] = math.fsum(one.passes[k] * one.count for one in sets) / count
    return SetScore(total, count, [], passes)


def together(sets: Iterable[LossSums]) -> LossSums:
    """Return the sums of several validation sets as those of one."""
    sums = Counter[str]()
    count = 0
    for one in sets:
        sums.update(one.sums)
        count += one.count
    return LossSums(dict(sums), count)


@torch.no_grad()
def loss_sums(
    built: BuiltModel,
    objective: Objective,
    validation: Dataset,
    layout: BatchLayout,
    max_batches: int,
    ranks: Ranks,
) -> LossSums:
    """Return sums over the validation set, without dropout.

    Args:
        built: the model in training mode, also afterwards.
        objective: computes the loss of a batch.
        validation: tokenized samples. The ranks share them; each counts once.
        layout: of the batches.
        max_batches: maximum batches per rank; 0 = all samples.
        ranks: the ranks.

    Raises:
        Stopped: a signal has asked to stop; the evaluation is abandoned.
    """
    count = 0
    # float64: a validation set has too many losses for a sum in float32
    zero = torch.zeros((), dtype=torch.float64, device=ranks.device)
    sums = defaultdict[str, torch.Tensor](zero.clone)
    lengths = example_lengths(validation)
    batches = evaluation_batches(lengths, layout, max_batches, group_size(validation))
    with evaluating(built.model):
        for indices in batches:
            ranks.check_stop()
            batch = layout.collate(validation, indices)
            summed = objective.loss(built, batch, ranks)
            sums["loss"] += summed.loss
            for name, value in summed.logged.items():
                sums[name] += value
            count += summed.count
    local = [value.item() for value in sums.values()]
    # each rank has the sums of its own samples
    gathered = ranks.all_gather_floats(*local, count)  # [ranks, sums + 1]
    *totals, total_count = gathered.sum(dim=0).tolist()
    return LossSums(dict(zip(sums, totals, strict=True)), int(total_count))


class SamplePrompt(NamedTuple):
    """A prompt to answer: the messages of a chat, or a text to continue without the chat template.

    Attributes:
        prompt: messages or text.
        tools: JSON schemas of functions, for a chat.
        response: the reference, if there is one.
    """

    prompt: list[Message] | str
    tools: Tools | None = None
    response: Message | None = None

    @property
    def question(self) -> str:
        """The last message of the prompt, for people."""
        if isinstance(self.prompt, str):
            return self.prompt
        return text_of(self.prompt[-1]["content"])

    @property
    def paths(self) -> list[str]:
        """The paths of the prompt's media."""
        return [] if isinstance(self.prompt, str) else media_paths(self.prompt)

    def encode(self, tokenizer: PreTrainedTokenizerBase, media: Media | None) -> list[int]:
        """Return the tokens, as in training. Raises BadSample if the chat template rejects it."""
        if isinstance(self.prompt, str):
            return text_prompt(tokenizer, self.prompt)
        if not tokenizer.chat_template:  # trained on text or on tokens
            return text_prompt(tokenizer, self.question)
        return chat_prompt(tokenizer, self.prompt, self.tools, media)

    def reference(self, tokenizer: PreTrainedTokenizerBase) -> str | None:
        """Return the text of the response, None without one. Tool calls are shown as the template
        writes them."""
        if self.response is None:
            return None
        if self.response.get("tool_calls") and not isinstance(self.prompt, str):
            written = response_text(tokenizer, [*self.prompt, self.response], self.tools)
            if written is not None:
                return written
        return text_of(self.response["content"])


def sample_prompts(
    settings: TrainConfig,
    chat: list[Message] | None,
    tools: Tools | None = None,
    prompt_format: PromptFormat = "chat",
) -> list[SamplePrompt]:
    """Return the prompts to answer: those of sample_prompts, with the images of sample_images if
    there are some; else that of a chat; none without sample_tokens.

    Args:
        settings: of the run.
        chat: of the data; its last message is the reference response.
        tools: of this chat.
        prompt_format: text: prompts are texts to continue, as in the training samples.
    """
    if not settings.sample_tokens:
        return []
    if not settings.sample_prompts:
        return [SamplePrompt(chat[:-1], tools, chat[-1])] if chat else []
    prompts = []
    files = settings.sample_images or []
    for number, prompt in enumerate(settings.sample_prompts):
        if files:
            file = os.path.abspath(os.path.expanduser(files[min(number, len(files) - 1)]))
            prompts.append(SamplePrompt([user_message(prompt, [file])]))
        elif prompt_format == "text":
            prompts.append(SamplePrompt(prompt))
        else:
            prompts.append(SamplePrompt([{"role": "user", "content": prompt}]))
    return prompts


def check_sample_prompts(
    prompts: Sequence[SamplePrompt],
    tokenizer: PreTrainedTokenizerBase,
    vocabulary_size: int | None,
    media: Media | None,
) -> None:
    """Raise a UserError if a sample prompt cannot be answered.

    Args:
        prompts: the result of `sample_prompts`.
        tokenizer: with its chat template.
        vocabulary_size: of the model; None if it is not known.
        media: of the run; None if all samples are text.
    """
    for sample_prompt in prompts:
        prompt = textwrap.shorten(sample_prompt.question, PROMPT_LENGTH, placeholder=" ...")
        name = f'--sample_prompts "{prompt}"'
        if sample_prompt.response is not None:
            name = f'the sample answer to "{prompt}" (--sample_prompts names other prompts)'
        try:
            ids = sample_prompt.encode(tokenizer, media)
        except BadSample as error:
            raise UserError(f"{name}: {error}") from error
        if not ids:
            raise UserError(f"{name}: it has no tokens.")
        check_ids(max(ids), name, tokenizer, vocabulary_size)


@torch.no_grad()
def answer_prompts(
    built: BuiltModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[SamplePrompt],
    new_tokens: int,
    layout: BatchLayout,
    ranks: Ranks,
) -> list[dict[str, Any]]:
    """Return the model's greedy answers, each with its question and, if known, the reference; the
    paths of the question's images are the value of PATHS. All ranks must call it, because each has only its
    shard of the weights.

    Args:
        built: the model, in training mode, also afterwards.
        tokenizer: with its chat template. Without one, the last message of a chat is a text to
            continue.
        questions: the result of `sample_prompts`.
        new_tokens: maximum number of tokens in an answer.
        layout: of the run's batches: what makes their tensors, and the token that fills answers that end
            before the longest one.
        ranks: the ranks.

    Raises:
        Stopped: a signal has asked to stop; the answers are abandoned.
    """
    if not questions:
        return []
    prompts = [one.encode(tokenizer, layout.media) for one in questions]
    model = built.model
    # config.json of Llava has none
    ends = stop_token_ids(tokenizer, model.generation_config.eos_token_id)
    before = model.generation_config
    config = copy.deepcopy(before)
    config.update(do_sample=False, pad_token_id=layout.pad_token_id, eos_token_id=ends or None)
    model.generation_config = config
    longest = longest_answer(model, prompts, new_tokens)
    try:
        generator = AnswerGenerator(built, tokenizer, layout.media, ranks)
        texts = generator.same(prompts, longest)
    finally:
        model.generation_config = before
    answers = []
    for one, text in zip(questions, texts, strict=True):
        answer: dict[str, Any] = {"question": one.question, "answer": text}
        reference = one.reference(tokenizer)
        if reference is not None:
            answer["reference"] = reference
        if one.paths:
            answer[PATHS] = one.paths
        answers.append(answer)
    return answers


def longest_answer(model: PreTrainedModel, prompts: list[list[int]], new_tokens: int) -> int:
    """Return the maximum number of new tokens, at most `new_tokens`, for which the model has
    positions."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is None:
        return new_tokens
    return max(1, min(new_tokens, context - max(map(len, prompts))))


def prompt_arguments(
    model: PreTrainedModel, prompts: list[list[int]], media: Media | None, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return the arguments of `generate` for prompts in one batch, on a device: tokens with padding on
    the left, their mask, and what `media` makes of the prompts, of which it may add one."""
    arguments = dict[str, torch.Tensor]()
    if media is not None:
        prompts, arguments = media.prompt_arguments(model, prompts)
    width = max(len(prompt) for prompt in prompts)
    padded = []
    masks = []
    for prompt in prompts:
        padding = width - len(prompt)
        # It is masked. The prompt's first token, so that the repetition penalty sees no token that is
        # not in the prompt.
        padded.append(list(prompt[:1]) * padding + list(prompt))
        masks.append([0] * padding + [1] * len(prompt))
    arguments |= {"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(masks)}
    # FSDP2 moves inputs to the GPU, generate() does not
    return {name: sent(values, device) for name, values in arguments.items()}


def towers_in_root(model: PreTrainedModel, media: Media | None) -> AbstractContextManager[None]:
    """Return a context in which `generate` may run towers of a sharded model."""
    return nullcontext() if media is None else media.towers_in_root(model)


@dataclass(frozen=True)
class AnswerGenerator:
    """Generates the model's answers to prompts in one batch: texts without special tokens and white
    space around them.

    Attributes:
        built: the model, in training mode, also afterwards. Its generation_config says how to generate,
            with a list of the tokens that end an answer.
        tokenizer: decodes the answers.
        media: what makes tensors of what is not text, if there is any.
        ranks: the ranks.
    """

    built: BuiltModel
    tokenizer: PreTrainedTokenizerBase
    media: Media | None
    ranks: Ranks

    def own(self, prompts: list[list[int]], new_tokens: int) -> list[str]:
        """Return the answers to this rank's prompts. All ranks must call it equally often.

        Args:
            prompts: token ids of each.
            new_tokens: maximum number of tokens in an answer.

        Raises:
            Stopped: a signal has asked to stop; the answers are abandoned.
        """
        with evaluating(self.built.model), units_kept_if_they_fit(self.built, self.ranks):
            # ranks whose answers have ended must join the all-gathers of weights
            is_synced = self.ranks.world_size > 1
            return self._generate(prompts, new_tokens, self.ranks.check_stop, is_synced)

    def same(self, prompts: list[list[int]], new_tokens: int) -> list[str]:
        """Return the same as `own`, for prompts that are the same on all ranks. Rank 0 generates the
        answers, and the others wait, if all units can be unsharded for so long."""
        with (
            evaluating(self.built.model),
            all_unsharded_if_they_fit(self.built, self.ranks) as are_unsharded,
        ):
            if are_unsharded:
                return on_rank0(
                    self.ranks, lambda look: self._generate(prompts, new_tokens, look, False)
                )
        return self.own(prompts, new_tokens)

    @torch.no_grad()
    def _generate(
        self,
        prompts: list[list[int]],
        new_tokens: int,
        look: Callable[[], None],
        is_synced: bool,
    ) -> list[str]:
        """Return answers. `look` is called before each token. `is_synced`: all ranks call it, and
        generate until the longest answer of all has ended."""
        model = self.built.model
        arguments = prompt_arguments(model, prompts, self.media, model.device)
        width = arguments["input_ids"].shape[1]
        # All ranks call it equally often. `prepend`: before FSDP's own hook, which starts to gather
        # weights.
        check = model.register_forward_pre_hook(lambda *_: look(), prepend=True)
        try:
            with towers_in_root(model, self.media):
                tokens = model.generate(  # type: ignore[operator]  # a mixin's method, which nn.Module's annotation hides
                    **arguments,
                    max_new_tokens=new_tokens,
                    use_cache=True,
                    synced_gpus=is_synced,
                )
        finally:
            check.remove()
        return _texts(tokens[: len(prompts), width:].tolist(), self.tokenizer, model)


def _texts(
    answers: list[list[int]], tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
) -> list[str]:
    """Return the texts of answers up to their ends."""
    texts = []
    ends = set[int](model.generation_config.eos_token_id or ())
    for token_ids in answers:
        # padding follows the first end token
        end = next((place for place, token in enumerate(token_ids) if token in ends), None)
        text = str(tokenizer.decode(token_ids[:end], skip_special_tokens=True))
        texts.append(text.strip())
    return texts


def log_answers(when: str, answers: list[dict[str, Any]]) -> None:
    """Log the result of `answer_prompts`, if there is any, under a heading such as "before
    fine-tuning"."""
    if not answers:
        return
    lines = ["", when.capitalize()]
    for answer in answers:
        for name, value in answer.items():
            label = f"{name}:"
            text = ", ".join(value) if name == PATHS else value
            lines.append(f"  {label:<10} {textwrap.shorten(text, 240, placeholder=' ...')}")
    log.info("\n".join([*lines, ""]))
