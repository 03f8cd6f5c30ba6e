"""Answers of what is written stop where the template of the training ends them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from template_chats import SPECIAL, STOCK
from tiny_llama import tiny_llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from llama_ft.data.chat.chat_template import BUILT_IN
from llama_ft.export.export_settings import write_adapter_settings, write_model_settings

# Template -> what its publisher's models write at the end of an answer.
ENDS = {
    "alpaca": "</s>",
    "chatml": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "mistral": "</s>",
    "cohere2": "<|END_RESPONSE|>",  # the first of two tokens
    "deepseekv3": "<｜end▁of▁sentence｜>",
    "gemma3": "<end_of_turn>",
    "gemma4_v5": "<turn|>",
    "glm4moe": "<|user|>",  # which the next message begins with: the base model stops there
    "gptoss": "<|return|>",
    "lfm2_2_5": "<|im_end|>",
    "lfm2_v2": "<|im_end|>",
    "llama3_1": "<|eot_id|>",
    "nemotron_3_nano": "<|im_end|>",
    "nemotron_3_ultra": "<|im_end|>",
    "phi3_5": "<|end|>",
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
}


STOPS_OF_BASE = ("<|user|>",)


def save_base(folder: Path, template: str, end: str) -> PreTrainedTokenizerFast:
    """A base model, which stops at <base_end> and has no template, whose answer to everything is
    `end`. The tokenizer of the run has the template."""
    names = dict.fromkeys(["<s>", "</s>", "<base_end>", end, *SPECIAL.findall(template)])
    backend = Tokenizer(
        models.BPE(
            {byte: n for n, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []
        )
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(list(names))
    eos = end if end.startswith("<｜") else "</s>"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token=eos, pad_token="<base_end>"
    )
    tokenizer.save_pretrained(folder)
    model = tiny_llama(num_hidden_layers=1, vocab_size=len(tokenizer))
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight.fill_(1)
        model.lm_head.weight.zero_()
        model.lm_head.weight[tokenizer.convert_tokens_to_ids(end)] = 1
    stops = ["<base_end>", *([end] if end in STOPS_OF_BASE else [])]
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(stops)
    model.generation_config.bos_token_id = None
    model.save_pretrained(folder)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("name", ENDS)
def test_generation_stops_at_the_end_of_the_first_answer(name: str, tmp_path: Path) -> None:
    end = ENDS[name]
    base = tmp_path / "base"
    tokenizer = save_base(base, {**STOCK, **BUILT_IN}[name], end)
    config = LlamaConfig.from_pretrained(base)
    out = tmp_path / "model"
    out.mkdir()
    write_model_settings(out, config, torch.float32, tokenizer, base)
    shutil.copy(base / "model.safetensors", out)
    written = AutoTokenizer.from_pretrained(out)
    chat = [{"role": "user", "content": "Hi"}]
    prompt = written.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model = AutoModelForCausalLM.from_pretrained(out)
    answer = model.generate(**prompt, max_new_tokens=6, do_sample=False)[0]
    assert written.convert_ids_to_tokens(answer[prompt["input_ids"].shape[1] :]) == [end]
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    write_adapter_settings(adapter, tokenizer, base)
    stops = [
        json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
        for folder in (out, adapter)
    ]
    assert stops[0] == stops[1]
    assert AutoTokenizer.from_pretrained(adapter).chat_template == tokenizer.chat_template
