"""Evaluate the model during training: its mean loss on the validation set, and its answers to
prompts."""

import math
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from llama_ft.config import TrainConfig
from llama_ft.data import (
    BatchLayout,
    collate,
    evaluation_batches,
    example_lengths,
    group_size,
    stop_token_ids,
)
from llama_ft.models import BuiltModel
from llama_ft.runtime import Ranks, log
from llama_ft.training.objective import Objective, logged_means
from llama_ft.training.step import free_unsharded

LARGEST_EXPONENT = 700.0  # math.exp overflows above 709


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


@torch.no_grad()
def mean_loss(
    built: BuiltModel,
    objective: Objective,
    validation: Dataset,
    layout: BatchLayout,
    max_batches: int,
    ranks: Ranks,
) -> tuple[float, int, dict[str, float]]:
    """Return the mean loss over the validation set without dropout, the number of loss tokens or
    pairs, and the means of the objective's other values.

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
            batch = collate(
                validation, indices, layout.pad_token_id, layout.is_packed, layout.images
            )
            summed = objective.loss(built, batch, ranks)
            sums["loss"] += summed.loss
            for name, value in summed.logged.items():
                sums[name] += value
            count += summed.count
    local = [value.item() for value in sums.values()]
    gathered = ranks.all_gather_floats(*local, count)  # [ranks, sums + 1]
    *totals, total_count = gathered.sum(dim=0).tolist()
    means = logged_means(dict(zip(sums, totals, strict=True)), total_count)
    loss = means.pop("loss")
    return loss, int(total_count), means


def sample_chats(
    settings: TrainConfig, known: list[dict[str, str]] | None
) -> list[list[dict[str, str]]]:
    """Return the conversations to answer: one per prompt of sample_prompts, else `known`, which
    ends with its reference response; none without sample_tokens."""
    if not settings.sample_tokens:
        return []
    if settings.sample_prompts:
        return [[{"role": "user", "content": prompt}] for prompt in settings.sample_prompts]
    return [known] if known else []


@torch.no_grad()
def answer_prompts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: list[list[dict[str, str]]],
    new_tokens: int,
    pad_token_id: int,
    ranks: Ranks,
) -> list[dict[str, str]]:
    """Return the model's greedy answers, each with its question and, if known, the reference. All
    ranks must call it, because each has only its shard of the weights.

    Args:
        model: in training mode, also afterwards.
        tokenizer: with its chat template. Without one, the last message of a question is a text
            to continue.
        conversations: messages of each, up to the question or to the reference response.
        new_tokens: maximum number of tokens in an answer.
        pad_token_id: fills answers that end before the longest one.
        ranks: the ranks.

    Raises:
        Stopped: a signal has asked to stop; the answers are abandoned.
    """
    if not conversations:
        return []
    questions = []
    for messages in conversations:
        has_reference = messages[-1]["role"] == "assistant"
        questions.append(messages[:-1] if has_reference else messages)
    prompts = _encode_questions(tokenizer, questions)
    width = max(len(prompt) for prompt in prompts)
    # Padding is on the left and masked, so any token can be used.
    padded = []
    masks = []
    for prompt in prompts:
        padding = width - len(prompt)
        padded.append(prompt[:1] * padding + prompt)
        masks.append([0] * padding + [1] * len(prompt))
    # config.json of Llava has none
    ends = stop_token_ids(tokenizer, model.generation_config.eos_token_id)
    # All ranks call the model equally often, also those whose answers have ended. `prepend`: before
    # FSDP's own hook, which starts to gather weights.
    check = model.register_forward_pre_hook(lambda *_: ranks.check_stop(), prepend=True)
    try:
        with evaluating(model):
            tokens = model.generate(  # type: ignore[operator]  # a mixin's method, which nn.Module's annotation hides
                # FSDP2 moves inputs to the GPU, generate() does not
                input_ids=torch.tensor(padded).to(model.device),
                attention_mask=torch.tensor(masks).to(model.device),
                max_new_tokens=new_tokens,
                do_sample=False,
                use_cache=True,
                # ranks whose answers have ended must join the all-gathers of weights
                synced_gpus=ranks.world_size > 1,
                pad_token_id=pad_token_id,
                eos_token_id=ends or None,
            )
    finally:
        check.remove()
    answers = []
    responses = tokens[:, width:].tolist()
    for messages, question, token_ids in zip(conversations, questions, responses, strict=True):
        # padding follows the first end token
        end = next((place for place, token in enumerate(token_ids) if token in ends), None)
        text = str(tokenizer.decode(token_ids[:end], skip_special_tokens=True))
        answer = {"question": question[-1]["content"], "answer": text.strip()}
        if len(question) < len(messages):
            answer["reference"] = messages[-1]["content"]
        answers.append(answer)
    return answers


def _encode_questions(
    tokenizer: PreTrainedTokenizerBase, questions: list[list[dict[str, str]]]
) -> list[list[int]]:
    prompts: Any
    if tokenizer.chat_template:
        prompts = tokenizer.apply_chat_template(
            questions, add_generation_prompt=True, return_dict=False
        )
    else:  # trained on text or on tokens
        prompts = tokenizer([question[-1]["content"] for question in questions])["input_ids"]
    return list(prompts)


def log_answers(when: str, answers: list[dict[str, str]]) -> None:
    """Log the result of `answer_prompts`, if there is any, under a heading such as "before
    fine-tuning"."""
    if not answers:
        return
    lines = ["", when.capitalize()]
    for answer in answers:
        for name, text in answer.items():
            label = f"{name}:"
            lines.append(f"  {label:<10} {textwrap.shorten(text, 240, placeholder=' ...')}")
    log.info("\n".join([*lines, ""]))
