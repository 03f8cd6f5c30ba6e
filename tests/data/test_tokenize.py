"""Which tokens are trained on, token by token. In the expectations [a] is trained on and a is not."""

from collections.abc import Callable

import pytest
from tokenizers.processors import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from llama_ft.data import Demo, Encoder, ensure_chat_template
from llama_ft.data.formats import BadRow
from llama_ft.data.tokenize import Encoded, answer_mask

ALPACA = {"instruction": "Hi", "output": "yes"}
CHAT = {
    "messages": [
        {"role": "system", "content": "no"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "Hi Hi"},
        {"role": "assistant", "content": "no yes"},
    ]
}


def shown(tokenizer: PreTrainedTokenizerFast, encoded: Encoded) -> str:
    tokens = tokenizer.convert_ids_to_tokens(encoded.input_ids)
    assert all(label in (-100, token) for token, label in zip(encoded.input_ids, encoded.labels, strict=True))
    trained = [label != -100 for label in encoded.labels]
    return " ".join(f"[{token}]" if mine else token for token, mine in zip(tokens, trained, strict=True))


def test_llama3_style_template_trains_the_answer_and_its_end_of_turn(llama3: PreTrainedTokenizerFast) -> None:
    assert shown(llama3, Encoder(llama3, 100).encode(ALPACA, "alpaca")) == (
        "<|begin_of_text|> <|start_header_id|> user <|end_header_id|> ĊĊ Hi <|eot_id|> "
        "<|start_header_id|> assistant <|end_header_id|> ĊĊ [yes] [<|eot_id|>]"
    )


def test_llama3_style_template_trains_every_answer_of_a_long_chat(llama3: PreTrainedTokenizerFast) -> None:
    assert shown(llama3, Encoder(llama3, 100).encode(CHAT, "messages")) == (
        "<|begin_of_text|> <|start_header_id|> system <|end_header_id|> ĊĊ no <|eot_id|> "
        "<|start_header_id|> user <|end_header_id|> ĊĊ Hi <|eot_id|> "
        "<|start_header_id|> assistant <|end_header_id|> ĊĊ [yes] [<|eot_id|>] "
        "<|start_header_id|> user <|end_header_id|> ĊĊ Hi Ġ Hi <|eot_id|> "
        "<|start_header_id|> assistant <|end_header_id|> ĊĊ [no] [Ġyes] [<|eot_id|>]"
    )


def test_bos_is_not_doubled_though_the_tokenizer_adds_its_own(llama3: PreTrainedTokenizerFast) -> None:
    assert llama3("Hi")["input_ids"][0] == llama3.bos_token_id
    encoded = Encoder(llama3, 100).encode(ALPACA, "alpaca")
    assert encoded.input_ids.count(llama3.bos_token_id) == 1


def test_chatml_does_not_train_the_line_break_after_a_turn(chatml: PreTrainedTokenizerFast) -> None:
    assert shown(chatml, Encoder(chatml, 100).encode(CHAT, "messages")) == (
        "<|im_start|> system Ċ no <|im_end|> Ċ <|im_start|> user Ċ Hi <|im_end|> Ċ "
        "<|im_start|> assistant Ċ [yes] [<|im_end|>] Ċ "
        "<|im_start|> user Ċ Hi Ġ Hi <|im_end|> Ċ <|im_start|> assistant Ċ [no] [Ġyes] [<|im_end|>] Ċ"
    )


def test_input_of_an_alpaca_row_follows_the_instruction(chatml: PreTrainedTokenizerFast) -> None:
    assert shown(chatml, Encoder(chatml, 100).encode({**ALPACA, "input": "no"}, "alpaca")) == (
        "<|im_start|> user Ċ Hi ĊĊ no <|im_end|> Ċ <|im_start|> assistant Ċ [yes] [<|im_end|>] Ċ"
    )


def test_tokenizer_without_template_gets_the_built_in_one(plain: PreTrainedTokenizerFast) -> None:
    assert "### Instruction:" in ensure_chat_template(plain)
    encoder = Encoder(plain, 100)
    assert shown(plain, encoder.encode(ALPACA, "alpaca")) == (
        "<s> ### Ġ Instruction : Ċ Hi ĊĊ ### Ġ Response : Ċ [yes] [</s>]"
    )
    assert shown(plain, encoder.encode({**ALPACA, "input": "no"}, "alpaca")) == (
        "<s> ### Ġ Instruction : Ċ Hi ĊĊ ### Ġ Input : Ċ no ĊĊ ### Ġ Response : Ċ [yes] [</s>]"
    )
    assert shown(plain, encoder.encode(CHAT, "messages")) == (
        "<s> no ĊĊ ### Ġ Instruction : Ċ Hi ĊĊ ### Ġ Response : Ċ [yes] [</s>] ĊĊ "
        "### Ġ Instruction : Ċ Hi Ġ Hi ĊĊ ### Ġ Response : Ċ [no] [Ġyes] [</s>]"
    )


def test_built_in_template_does_without_special_tokens(make_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> None:
    tokenizer = make_tokenizer([], None)
    ensure_chat_template(tokenizer)
    assert shown(tokenizer, Encoder(tokenizer, 100).encode(ALPACA, "alpaca")) == (
        "### Ġ Instruction : Ċ Hi ĊĊ ### Ġ Response : Ċ [yes]"
    )


def test_a_template_of_ones_own_is_kept(chatml: PreTrainedTokenizerFast) -> None:
    template = chatml.chat_template
    assert ensure_chat_template(chatml) == ""
    assert chatml.chat_template == template


def test_demo_template_trains_every_answer_and_agrees_with_transformers_mask(demo: Demo) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo.model_dir)
    encoded = Encoder(tokenizer, 100).encode(CHAT, "messages")
    trained = [i for i, label in zip(encoded.input_ids, encoded.labels, strict=True) if label != -100]
    assert tokenizer.decode(trained) == "yes<|end|>no yes<|end|>"
    assert tokenizer.decode(encoded.input_ids) == (
        "<|begin|><|system|>no<|end|><|user|>Hi<|end|><|assistant|>yes<|end|><|user|>Hi Hi<|end|>"
        "<|assistant|>no yes<|end|>"
    )
    reference = tokenizer.apply_chat_template(CHAT["messages"], return_assistant_tokens_mask=True, return_dict=True)
    assert encoded.input_ids == reference["input_ids"]
    assert [int(label != -100) for label in encoded.labels] == reference["assistant_masks"]


def test_offsets_without_white_space_give_the_same_mask(chatml: PreTrainedTokenizerFast) -> None:
    row = {"instruction": "Hi", "output": "\n\nyes no\n\n"}
    before = shown(chatml, Encoder(chatml, 100).encode(row, "alpaca"))
    chatml.backend_tokenizer.post_processor = ByteLevel(trim_offsets=True)
    assert shown(chatml, Encoder(chatml, 100).encode(row, "alpaca")) == before
    assert before.endswith("assistant ĊĊ [Ċ] [yes] [Ġno] [ĊĊ] [<|im_end|>] Ċ")


def test_every_byte_of_a_character_of_several_tokens_is_trained(chatml: PreTrainedTokenizerFast) -> None:
    encoded = Encoder(chatml, 100).encode({"instruction": "é", "output": "é"}, "alpaca")
    assert shown(chatml, encoded).endswith("user Ċ Ã © <|im_end|> Ċ <|im_start|> assistant Ċ [Ã] [©] [<|im_end|>] Ċ")


def test_token_over_the_edge_of_an_answer_is_trained_if_the_answer_has_its_letters(
    make_tokenizer: Callable[..., PreTrainedTokenizerFast],
) -> None:
    template = (
        "{% for m in messages %}{{ ('Answer: ' if m.role == 'assistant' else '') + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Answer: ' }}{% endif %}"
    )
    tokenizer = make_tokenizer(["</s>"], template, eos_token="</s>")
    assert shown(tokenizer, Encoder(tokenizer, 100).encode(ALPACA, "alpaca")) == "Hi </s> Answer : [Ġyes] [</s>]"


def test_token_of_white_space_over_the_edge_of_an_answer_is_not_trained() -> None:
    text = "A:\n\n\nyes"  # the prompt ends after the first line break
    assert answer_mask(text, [(0, 2), (2, 4), (4, 5), (5, 8)], [(3, 8)]) == [False, False, True, True]


def test_template_without_generation_prompt_trains_no_heading(
    make_tokenizer: Callable[..., PreTrainedTokenizerFast],
) -> None:
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
    tokenizer = make_tokenizer(["</s>"], template, eos_token="</s>")
    assert shown(tokenizer, Encoder(tokenizer, 100).encode(ALPACA, "alpaca")) == (
        "user : Ġ Hi </s> assistant : [Ġyes] [</s>]"
    )


def test_template_that_puts_an_empty_thought_before_the_last_answer_only(
    make_tokenizer: Callable[..., PreTrainedTokenizerFast],
) -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{{ '<think></think>' if loop.last and m.role == 'assistant' else '' }}{{ m.content + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    special = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    tokenizer = make_tokenizer(special, template, eos_token="<|im_end|>")
    assert shown(tokenizer, Encoder(tokenizer, 100).encode(CHAT, "messages")) == (
        "<|im_start|> system Ċ no <|im_end|> Ċ <|im_start|> user Ċ Hi <|im_end|> Ċ "
        "<|im_start|> assistant Ċ [yes] [<|im_end|>] Ċ <|im_start|> user Ċ Hi Ġ Hi <|im_end|> Ċ "
        "<|im_start|> assistant Ċ [<think>] [</think>] [no] [Ġyes] [<|im_end|>] Ċ"
    )


def test_template_that_rewrites_earlier_turns_is_refused_for_the_row(
    make_tokenizer: Callable[..., PreTrainedTokenizerFast],
) -> None:
    template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}{{ add_generation_prompt }}"
    tokenizer = make_tokenizer([], template)
    with pytest.raises(BadRow, match=r'"messages\[1\]": the chat template changes earlier turns'):
        Encoder(tokenizer, 100).encode(ALPACA, "alpaca")


def test_what_the_template_itself_refuses_is_told(make_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}Hi"
    with pytest.raises(BadRow, match="the chat template refuses this chat: no system role"):
        Encoder(make_tokenizer([], template), 100).encode(CHAT, "messages")


def test_long_row_loses_its_end(llama3: PreTrainedTokenizerFast) -> None:
    whole = Encoder(llama3, 100).encode(ALPACA, "alpaca")
    cut = Encoder(llama3, 12).encode(ALPACA, "alpaca")
    assert cut.truncated and not whole.truncated
    assert cut.input_ids == whole.input_ids[:12]
    assert shown(llama3, cut).endswith("ĊĊ [yes]")


def test_target_tokens_leave_out_the_first_position(llama3: PreTrainedTokenizerFast) -> None:
    row = {"input_ids": [1, 2, 3], "labels": [1, -100, 3]}
    assert Encoder(llama3, 100).encode(row, "tokenized").target_tokens == 1


def test_pad_token_that_is_the_eos_token_is_still_trained(llama3: PreTrainedTokenizerFast) -> None:
    llama3.pad_token = llama3.eos_token
    assert Encoder(llama3, 100).encode(ALPACA, "alpaca").labels[-1] == llama3.pad_token_id


def test_tokenized_row_loses_what_its_attention_mask_hides(llama3: PreTrainedTokenizerFast) -> None:
    row = {"input_ids": [0, 5, 6], "labels": [-100, 5, 6], "attention_mask": [0, 1, 1]}
    assert Encoder(llama3, 100).encode(row, "tokenized") == ([5, 6], [5, 6], False)


def test_line_breaks_that_an_answer_shares_with_the_prompt_are_not_trained(plain: PreTrainedTokenizerFast) -> None:
    ensure_chat_template(plain)
    row = {"instruction": "Hi", "output": "\nyes"}
    assert shown(plain, Encoder(plain, 100).encode(row, "alpaca")).endswith("### Ġ Response : ĊĊ [yes] [</s>]")


def test_half_a_character_is_a_bad_row(llama3: PreTrainedTokenizerFast) -> None:
    with pytest.raises(BadRow, match=r"\\ud83d is half of a character"):
        Encoder(llama3, 100).encode({"instruction": "Hi \ud83d", "output": "yes"}, "alpaca")
    assert Encoder(llama3, 100).encode({"instruction": "Hi \U0001f600", "output": "yes"}, "alpaca").target_tokens > 0
