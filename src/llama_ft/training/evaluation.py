"""What the model makes of the validation set: its mean loss, and the answer to one of its prompts."""

import math
import textwrap

import torch
from datasets import Dataset
from transformers import BatchEncoding, PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from llama_ft.config import TrainConfig
from llama_ft.data import collate, evaluation_batches, group_size, row_lengths, stop_token_ids
from llama_ft.runtime import Runtime, log
from llama_ft.training.objective import Objective
from llama_ft.training.step import free_unsharded

LARGEST_EXPONENT = 700.0  # math.exp overflows above 709


def perplexity(loss: float) -> float:
    """Its exponential, or what floats have next to that."""
    return math.exp(min(loss, LARGEST_EXPONENT))


@torch.no_grad()
def mean_loss(
    model: PreTrainedModel,
    objective: Objective,
    validation: Dataset,
    settings: TrainConfig,
    pad_token_id: int,
    pack_length: int | None,
    runtime: Runtime,
) -> tuple[float, int]:
    """Mean loss over the validation set, dropout off, and of how many loss tokens or pairs it is.

    Args:
        model: left in training mode.
        objective: makes the loss of a batch.
        validation: tokenized samples, sharded across ranks; each counts once.
        settings: val_batch_size and max_eval_step.
        pad_token_id: fills rows of a batch up to the longest.
        pack_length: tokens of a packed sequence; None: no packing.
        runtime: the ranks.
    """
    ranks, sizes = (runtime.world_size, runtime.rank), (settings.val_batch_size, settings.max_eval_step)
    group = group_size(validation)
    model.eval()
    loss, count = torch.zeros((), dtype=torch.float64, device=runtime.device), 0
    for indices in evaluation_batches(row_lengths(validation), *ranks, *sizes, pack_length, group):
        batch = collate(validation, indices, pad_token_id, pack_length is not None)
        summed = objective.loss(model, batch, runtime)
        loss += summed.loss
        count += summed.count
    free_unsharded(model)
    model.train()
    loss_sum, total = runtime.all_gather_floats(loss.item(), count).sum(dim=0).tolist()
    return loss_sum / total, int(total)


@torch.no_grad()
def show_answer(
    when: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversation: list[dict[str, str]] | None,
    new_tokens: int,
    pad_token_id: int,
    runtime: Runtime,
) -> dict[str, str] | None:
    """Print and return the model's greedy answer to a conversation's last question, with the question and the
    reference. All ranks run it: each has only its shard of the weights.

    Args:
        when: "Before" or "After" fine-tuning.
        model: left in training mode.
        tokenizer: with its chat template.
        conversation: messages, of which the last is the reference; None: nothing is shown.
        new_tokens: at most so many; 0: nothing is shown.
        pad_token_id: of the batches.
        runtime: the ranks.
    """
    if conversation is None or new_tokens == 0:
        return None
    *question, reference = conversation
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert isinstance(prompt, BatchEncoding)
    prompt = prompt.to(model.device)  # where its shards are: FSDP2 moves inputs on to the GPU, generate() does not
    model.eval()
    # synced_gpus: ranks whose answer has ended keep taking part in the gathering of weights.
    tokens = model.generate(  # type: ignore[operator]  # a mixin's method, which nn.Module's annotation hides
        **prompt,
        max_new_tokens=new_tokens,
        do_sample=False,
        use_cache=True,
        synced_gpus=runtime.world_size > 1,
        pad_token_id=pad_token_id,
        eos_token_id=stop_token_ids(tokenizer, model.config.eos_token_id) or None,
    )
    free_unsharded(model)
    model.train()
    answer = str(tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)).strip()
    shown = {"question": question[-1]["content"], "answer": answer, "reference": reference["content"]}
    lines = [f"  {name + ':':<10} {textwrap.shorten(it, 240, placeholder=' ...')}" for name, it in shown.items()]
    log.info("\n".join([f"\n{when} tuning", *lines, ""]))
    return shown
