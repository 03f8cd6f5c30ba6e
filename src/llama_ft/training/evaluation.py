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
from llama_ft.data import collate, evaluation_batches, example_lengths, group_size, stop_token_ids
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
    settings: TrainConfig,
    pad_token_id: int,
    pack_length: int | None,
    ranks: Ranks,
) -> tuple[float, int, dict[str, float]]:
    """Return the mean loss over the validation set without dropout, the number of loss tokens or
    pairs, and the means of the objective's other values.

    Args:
        built: the model in training mode, also afterwards.
        objective: computes the loss of a batch.
        validation: tokenized samples. The ranks share them; each counts once.
        settings: val_batch_size and max_eval_step.
        pad_token_id: fills padded samples.
        pack_length: tokens of a packed sequence; None: no packing.
        ranks: the ranks.

    Raises:
        Stopped: a signal has asked to stop; the evaluation is abandoned.
    """
    ranks_and_rank = (ranks.world_size, ranks.rank)
    sizes = (settings.val_batch_size, settings.max_eval_step)
    group = group_size(validation)
    count = 0
    sums = defaultdict[str, torch.Tensor](
        lambda: torch.zeros((), dtype=torch.float64, device=ranks.device)
    )
    batches = evaluation_batches(
        example_lengths(validation), *ranks_and_rank, *sizes, pack_length, group
    )
    with evaluating(built.model):
        for indices in batches:
            ranks.check_stop()
            batch = collate(validation, indices, pad_token_id, pack_length is not None)
            summed = objective.loss(built, batch, ranks)
            for name, value in {"loss": summed.loss, **summed.logged}.items():
                sums[name] += value
            count += summed.count
    *totals, total = (
        ranks.all_gather_floats(*(value.item() for value in sums.values()), count)
        .sum(dim=0)
        .tolist()
    )
    means = logged_means(dict(zip(sums, totals, strict=True)), total)
    return means.pop("loss"), int(total), means


def sample_chats(
    settings: TrainConfig, known: list[dict[str, str]] | None
) -> list[list[dict[str, str]]]:
    """Return the conversations to answer: one per prompt of sample_prompts, else `known`, which
    ends with its reference response; none without sample_tokens."""
    chats = [[{"role": "user", "content": prompt}] for prompt in settings.sample_prompts or ()]
    return (chats or ([known] if known else [])) if settings.sample_tokens else []


@torch.no_grad()
def show_answers(
    when: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: list[list[dict[str, str]]],
    new_tokens: int,
    pad_token_id: int,
    ranks: Ranks,
) -> list[dict[str, str]]:
    """Log and return the model's greedy answers, each with its question and, if known, the
    reference. All ranks must call it, because each has only its shard of the weights.

    Args:
        when: heading, such as "before fine-tuning".
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
    questions = [
        conversation[:-1] if conversation[-1]["role"] == "assistant" else conversation
        for conversation in conversations
    ]
    prompts: Any
    if tokenizer.chat_template:
        prompts = tokenizer.apply_chat_template(
            questions, add_generation_prompt=True, return_dict=False
        )
    else:  # trained on text or on tokens
        prompts = tokenizer([question[-1]["content"] for question in questions])["input_ids"]
    width = max(map(len, prompts))
    # Padding is on the left and masked, so any token can be used.
    ids = torch.tensor([prompt[:1] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    # config.json of Llava has none
    ends = stop_token_ids(tokenizer, model.generation_config.eos_token_id)
    # All ranks call the model equally often, also those whose answers have ended. `prepend`: before
    # FSDP's own hook, which starts to gather weights.
    check = model.register_forward_pre_hook(lambda *_: ranks.check_stop(), prepend=True)
    try:
        with evaluating(model):
            # synced_gpus: ranks whose answers have ended must join the all-gathers of weights.
            tokens = model.generate(  # type: ignore[operator]  # a mixin's method, which nn.Module's annotation hides
                input_ids=ids.to(
                    model.device
                ),  # FSDP2 moves inputs to the GPU, generate() does not
                attention_mask=mask.to(model.device),
                max_new_tokens=new_tokens,
                do_sample=False,
                use_cache=True,
                synced_gpus=ranks.world_size > 1,
                pad_token_id=pad_token_id,
                eos_token_id=ends or None,
            )
    finally:
        check.remove()
    answers = []
    lines = list[str]()
    for messages, question, token_ids in zip(
        conversations, questions, tokens[:, width:].tolist(), strict=True
    ):
        # padding follows
        end = next((place for place, token in enumerate(token_ids) if token in ends), None)
        answer = str(tokenizer.decode(token_ids[:end], skip_special_tokens=True)).strip()
        shown = {"question": question[-1]["content"], "answer": answer}
        if len(question) < len(messages):
            shown["reference"] = messages[-1]["content"]
        answers.append(shown)
        lines += [
            f"  {name + ':':<10} {textwrap.shorten(text, 240, placeholder=' ...')}"
            for name, text in shown.items()
        ]
    log.info("\n".join([f"\n{when.capitalize()}", *lines, ""]))
    return answers
