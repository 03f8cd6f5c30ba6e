"""A prompt of the data answered by the model, before and after fine-tuning."""

import textwrap

import torch
from transformers import BatchEncoding, PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from llama_ft.data import stop_token_ids
from llama_ft.runtime import Runtime, log
from llama_ft.training.step import free_unsharded


def show_answer(
    when: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversation: list[dict[str, str]] | None,
    new_tokens: int,
    pad_token_id: int,
    runtime: Runtime,
) -> dict[str, str] | None:
    """Print and return the model's answer to a conversation's last question, with the question and the reference; None
    if `new_tokens` is 0 or there is no conversation."""
    if conversation is None or new_tokens == 0:
        return None
    *question, reference = conversation
    text = answer(model, tokenizer, question, new_tokens, pad_token_id, runtime)
    shown = {"question": question[-1]["content"], "answer": text, "reference": reference["content"]}
    lines = [f"  {name + ':':<10} {textwrap.shorten(it, 240, placeholder=' ...')}" for name, it in shown.items()]
    log.info("\n".join([f"\n{when} tuning", *lines, ""]))
    return shown


@torch.no_grad()
def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, str]],
    new_tokens: int,
    pad_token_id: int,
    runtime: Runtime,
) -> str:
    """The model's greedy answer of at most `new_tokens` to `messages`. All ranks run it: each has only its shard of the
    weights. The model is left in training mode."""
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
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
    text = tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return str(text).strip()
