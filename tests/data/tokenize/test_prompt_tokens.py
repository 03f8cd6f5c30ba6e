"""Prompts are asked as training writes them: the tokens before a response are equal."""

from collections.abc import Callable
from typing import Any

import pytest
from template_chats import CALLED, SPECIAL, STOCK, TOOLS, assistant, user
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from llama_ft.data import Encoder
from llama_ft.data.read.formats import BadSample
from llama_ft.data.tokenize.prompt_tokens import chat_prompt, response_text, text_prompt

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]


@pytest.mark.parametrize("added", ["$A", "<s> $A", "$A </s>", "<s> $A </s>"])
def test_a_text_has_the_tokens_that_training_has_before_the_completion(
    plain: PreTrainedTokenizerFast, added: str
) -> None:
    names = [("<s>", plain.bos_token_id), ("</s>", plain.eos_token_id)]
    plain.backend_tokenizer.post_processor = TemplateProcessing(single=added, special_tokens=names)
    for prompt in ("Hi", "<s>Hi", "Hi there, user:"):
        sample = {"prompt": prompt, "completion": " yes"}
        [encoded] = Encoder(plain, 400).encode(sample, "prompt_completion")
        start = encoded.labels.index(next(label for label in encoded.labels if label != -100))
        asked = text_prompt(plain, prompt)
        assert asked == encoded.input_ids[:start]
        assert plain.eos_token_id not in asked
        assert asked.count(plain.bos_token_id) == ("<s>" in added or "<s>" in prompt)


def test_a_chat_has_the_tokens_that_transformers_gives_it(make_tokenizer: MakeTokenizer) -> None:
    accepted = 0
    for name, template in STOCK.items():
        special = sorted({"<s>", "</s>", *SPECIAL.findall(template)})
        tokenizer = make_tokenizer(special, template, bos_token="<s>", eos_token="</s>")
        for chat, tools in (([user("Hi")], None), (CALLED[:3], TOOLS)):
            options: Any = {"tools": tools, "date_string": "26 Jul 2024", "return_dict": False}
            try:
                asked = chat_prompt(tokenizer, chat, tools)
            except BadSample:
                continue
            if "deepseek" in name and tools:
                continue  # apply_chat_template rejects arguments that are objects
            expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, **options)
            assert asked == expected, name
            accepted += 1
    assert accepted > 30


def test_a_tool_call_is_shown_as_the_template_writes_it(make_tokenizer: MakeTokenizer) -> None:
    special = sorted(set(SPECIAL.findall(STOCK["qwen3_instruct_2507"])))
    tokenizer = make_tokenizer(special, STOCK["qwen3_instruct_2507"], eos_token="<|im_end|>")
    written = response_text(tokenizer, CALLED[:2], TOOLS)
    assert written is not None and '{"name": "add", "arguments": {"x": 11}}' in written
    assert response_text(tokenizer, [user("Hi"), assistant("yes")]) == "yes"
