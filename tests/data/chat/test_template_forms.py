"""What a template needs: the form of messages, one of several templates, an end of responses, and
limits for each chat. The reference is `apply_chat_template` of Transformers."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from template_chats import CALL, CALLED, SPECIAL, STOCK, TOOLS, assistant, tool, user
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from llama_ft.config.settings.settings import DataConfig
from llama_ft.data import DataRequest, Encoder, ensure_chat_template, prepare
from llama_ft.data.chat import template_limits
from llama_ft.data.chat.chat_template import stop_token_ids
from llama_ft.data.read.formats import BadSample, Message
from llama_ft.errors import UserError

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]
TWO_TURNS = [user("Q1"), assistant("first"), user("Q2"), assistant("second")]
CALL_AT_THE_END = [*TWO_TURNS, user("Q3"), assistant("", tool_calls=CALL)]
BODY = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def tokenizer_of(make_tokenizer: MakeTokenizer) -> Callable[..., PreTrainedTokenizerFast]:
    def make(template: Any) -> PreTrainedTokenizerFast:
        text = template if isinstance(template, str) else "".join(template.values())
        special = {"<s>", "</s>", *SPECIAL.findall(text), "<|user|>", "<|observation|>"}
        return make_tokenizer(sorted(special), template, bos_token="<s>", eos_token="</s>")

    return make


def in_loss(
    tokenizer: PreTrainedTokenizerFast, messages: list[Message], tools: Any = None, **more: Any
) -> list[str]:
    """Return the texts of neighboring tokens in the loss, of all samples of a chat."""
    texts = []
    encoder = Encoder(tokenizer, 100_000, **more)
    for encoded in encoder.encode({"messages": messages, "tools": tools}, "messages"):
        run = list[int]()
        for label in [*encoded.labels, -100]:
            if label != -100:
                run.append(label)
            elif run:
                texts.append(str(tokenizer.decode(run)))
                run = []
    return texts


def with_text_arguments(messages: list[Message]) -> list[Message]:
    changed = []
    for message in messages:
        if "tool_calls" in message:
            [call] = message["tool_calls"]
            function = {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}
            message = {**message, "tool_calls": [{**call, "function": function}]}
        changed.append(message)
    return changed


@pytest.mark.parametrize("name", ["deepseekv3", "deepseek_r1_distill"])
@pytest.mark.parametrize("as_text", [True, False])
def test_a_template_that_puts_arguments_together_as_text_gets_text(
    tokenizer_of: Callable[..., PreTrainedTokenizerFast], name: str, as_text: bool
) -> None:
    tokenizer = tokenizer_of(STOCK[name])
    chat = with_text_arguments(CALLED)
    chat[1] = {**chat[1], "content": None}  # as in OpenAI's API
    [expected], _ = render_jinja_template(
        [chat], chat_template=STOCK[name], **tokenizer.special_tokens_map
    )
    written = in_loss(tokenizer, chat if as_text else CALLED)
    assert '{"x": 11}' in written[0] and "first" in written[1]
    for text in written:
        assert text.removeprefix("</think>\n\n").removeprefix("\n</think>\n\n") in expected
    # as an object where the template takes objects
    assert '"arguments": {"x": 11}' in in_loss(tokenizer_of(STOCK["qwen2_5"]), chat, TOOLS)[0]


GLM_CHATS = {
    "two turns": (TWO_TURNS, None),
    "calls": (CALLED, TOOLS),
    "a call at the end": (CALL_AT_THE_END, TOOLS),
    "reasoning": ([user("Q1"), assistant("first", reasoning_content="why")], None),
}


@pytest.mark.parametrize("title", GLM_CHATS)
def test_the_next_roles_marker_ends_responses_if_it_is_a_stop_token(
    tokenizer_of: Callable[..., PreTrainedTokenizerFast], title: str
) -> None:
    messages, tools = GLM_CHATS[title]
    tokenizer = tokenizer_of(STOCK["glm4moe"])
    ids = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    written = in_loss(tokenizer, messages, tools, stop_ids=ids)
    without = in_loss(tokenizer, messages, tools)
    responses = [message for message in messages if message["role"] == "assistant"]
    assert len(written) == len(without) == len(responses)
    for text, plain, message in zip(written, without, responses, strict=True):
        end = "<|observation|>" if message.get("tool_calls") else "<|user|>"
        assert text == plain + end
    # The marker of the next role is where the template writes it.
    whole = str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))
    assert "first<|user|>" in whole or messages[-1]["content"] == "first"
    # A stop token that the template does not write there ends nothing.
    other = [tokenizer.eos_token_id]
    assert in_loss(tokenizer, messages, tools, stop_ids=other) == without


def test_other_templates_do_not_change_with_stop_tokens(
    tokenizer_of: Callable[..., PreTrainedTokenizerFast],
) -> None:
    for name in ("llama3", "qwen3", "gemma3", "phi3_5", "deepseekv3", "gptoss"):
        tokenizer = tokenizer_of(STOCK[name])
        every = sorted(tokenizer.get_added_vocab().values())
        assert in_loss(tokenizer, TWO_TURNS, stop_ids=every) == in_loss(tokenizer, TWO_TURNS)


def test_a_template_without_an_end_of_responses_is_a_warning(
    tokenizer_of: Callable[..., PreTrainedTokenizerFast], tmp_path: Path
) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": TWO_TURNS}) + "\n")
    tokenizer = tokenizer_of(STOCK["glm4moe"])
    found = {}
    for name, ids in {"none": [], "user": tokenizer.convert_tokens_to_ids(["<|user|>"])}.items():
        request = DataRequest(context_length=400, want_validation=False, stop_ids=ids)
        found[name] = prepare(DataConfig(dataset=str(file)), tokenizer, request, cache=tmp_path)
    [warning] = found["none"].warnings
    assert "does not learn when to stop" in warning and "--chat_template" in warning
    assert not found["user"].warnings
    # not from the cache of the other
    counts = {name: one.report.train.target_tokens for name, one in found.items()}
    assert counts["user"] == counts["none"] + 2


NAMED = {
    "default": BODY,
    "tool_use": "{{ tools | tojson }}" + BODY.replace("m.content", "m.content ~ m.tool_calls"),
    "rag": "{{ documents[0].text }}",
}


def test_of_several_templates_the_one_that_transformers_chooses_renders_each_chat(
    tokenizer_of: Callable[..., PreTrainedTokenizerFast],
) -> None:
    tokenizer = tokenizer_of(NAMED)
    assert ensure_chat_template(tokenizer) == ""
    encoder = Encoder(tokenizer, 100_000)
    for messages, tools in ((TWO_TURNS, None), (CALLED, TOOLS), (TWO_TURNS, TOOLS)):
        [encoded] = encoder.encode({"messages": messages, "tools": tools}, "messages")
        expected = tokenizer.apply_chat_template(messages, tools=tools, return_dict=False)
        assert encoded.input_ids == expected
    assert stop_token_ids(tokenizer, None) == [tokenizer.eos_token_id]
    assert tokenizer.chat_template == NAMED


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["rag"], "templates rag, and .* chats without tools"),
        (["rag", "tool_use"], "templates rag, tool_use, and .* chats without tools"),
    ],
)
def test_several_templates_of_which_transformers_chooses_none_are_one_error(
    tokenizer_of: Callable[..., PreTrainedTokenizerFast],
    tmp_path: Path,
    names: list[str],
    message: str,
) -> None:
    tokenizer = tokenizer_of({name: NAMED[name] for name in names})
    file = tmp_path / "chats.jsonl"
    file.write_text((json.dumps({"messages": TWO_TURNS}) + "\n") * 3)
    request = DataRequest(context_length=400, want_validation=False)
    with pytest.raises(UserError, match=message) as raised:
        prepare(DataConfig(dataset=str(file)), tokenizer, request, cache=tmp_path)
    assert len(raised.value.messages) == 1
    with pytest.raises(ValueError, match="no default"):
        tokenizer.apply_chat_template(TWO_TURNS)


def test_a_template_that_needs_tools_is_accepted_and_its_end_is_known(
    tokenizer_of: Callable[..., PreTrainedTokenizerFast],
) -> None:
    needs = "{% if not tools %}{{ raise_exception('this template needs tools') }}{% endif %}" + BODY
    tokenizer = tokenizer_of(needs.replace("</s>", "<|end_of_turn|>"))
    assert ensure_chat_template(tokenizer) == ""
    [end] = tokenizer.convert_tokens_to_ids(["<|end_of_turn|>"])
    assert stop_token_ids(tokenizer, 1) == [1, end]
    with pytest.raises(BadSample, match="this template needs tools"):
        Encoder(tokenizer, 400).encode({"messages": TWO_TURNS}, "messages")


IF_LONG = "{% if messages|length > N %}"
TOO_MUCH = {
    "loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "text": "{{ 'a' * 10 ** 10 }}",
    "power": "{{ 7 ** (10 ** 9) }}",
    "padding": "{{ 'a'.ljust(10 ** 11) }}",
}


@pytest.mark.parametrize(
    ("kind", "length"),
    [
        ("text", 3),
        ("loop", 200),
        ("text", 200),
        pytest.param("loop", 3, marks=pytest.mark.slow),
        pytest.param("power", 3, marks=pytest.mark.slow),
        pytest.param("power", 200, marks=pytest.mark.slow),
        ("padding", 200),
    ],
)
def test_limits_of_templates_hold_for_each_chat(
    tokenizer_of: Callable[..., PreTrainedTokenizerFast],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    length: int,
) -> None:
    monkeypatch.setattr(template_limits, "CPU_SECONDS", 1)
    tokenizer = tokenizer_of(
        IF_LONG.replace("N", str(length)) + TOO_MUCH[kind] + "{% endif %}" + BODY
    )
    started = time.process_time()
    with pytest.raises(UserError, match="does not end within|more than 1 GiB"):
        ensure_chat_template(tokenizer)
        encoder = Encoder(tokenizer, 400)
        assert encoder.encode({"messages": TWO_TURNS[:2]}, "messages")
        encoder.encode({"messages": TWO_TURNS * 60}, "messages")
    assert time.process_time() - started < 5


def test_a_long_text_of_a_template_is_a_bad_sample(
    tokenizer_of: Callable[..., PreTrainedTokenizerFast],
) -> None:
    tokenizer = tokenizer_of("{{ messages[0].content * 10 ** 7 }}" + BODY)
    with pytest.raises(BadSample, match="20,.* characters; expected at most 10,000,000"):
        Encoder(tokenizer, 400).encode({"messages": TWO_TURNS}, "messages")


def test_a_result_of_a_tool_is_never_in_the_loss(
    tokenizer_of: Callable[..., PreTrainedTokenizerFast],
) -> None:
    tokenizer = tokenizer_of(STOCK["glm4moe"])
    ids = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    chat = [*CALLED[:2], tool("eleven"), tool("nine"), assistant("first")]
    assert not any("eleven" in text for text in in_loss(tokenizer, chat, TOOLS, stop_ids=ids))
