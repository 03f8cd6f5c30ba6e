"""Which characters of a chat are trained on, under templates as models have them; and which
template a run has.

In the expectations [a] is trained on and a is not.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from llama_ft.config.paths import BUILT_IN_TEMPLATES
from llama_ft.data import Encoder, ensure_chat_template
from llama_ft.data.chat import template_limits
from llama_ft.data.chat.chat_template import BUILT_IN, render_chat
from llama_ft.data.chat.loss_mask import ChatDiffers, ChatRenderer, drop_reasoning
from llama_ft.data.read.formats import BadSample, Message
from llama_ft.errors import UserError

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]


def said(role: str, content: str, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


system, user, assistant, tool = (
    partial(said, role) for role in ("system", "user", "assistant", "tool")
)
CALL = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
ONE = [user("Hi"), assistant("yes")]
TWO = [user("Hi"), assistant("yes"), user("Hi"), assistant("no")]
WITH_SYSTEM = [system("no"), *TWO]
WITH_TOOLS = [user("Hi"), assistant("", tool_calls=CALL), tool("no"), assistant("yes")]

# Stock templates, cut down to what matters: none has a generation block.
QWEN3 = """
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}{{- '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}
    {%- set parts = m.content.split('</think>') %}
    {%- set thought = parts[0].split('<think>')[-1].strip() if parts | length > 1 else '' %}
    {%- set said = parts[-1].lstrip('\n') %}
    {{- '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' }}
    {%- if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or thought) %}
        {{- '<think>\n' + thought + '\n</think>\n\n' }}
    {%- endif %}
    {{- said }}
    {%- for c in m.tool_calls or [] %}
        {{- '\n' if said else '' }}{{- '<tool_call>\n' + c.function | tojson + '\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""
GEMMA = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}{% set turns = messages[1:] %}
{%- else %}{% set first = '' %}{% set turns = messages %}{% endif %}
{%- for m in turns %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (first if loop.first else '') }}
    {{- m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{% endif %}
"""
PHI3 = """
{%- for m in messages %}{{- '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{% else %}{{- eos_token }}{% endif %}
"""
# Version 3's: system prompt and tools stand before the last question, and nothing opens an answer.
MISTRAL = """
{%- if messages[0].role == 'system' %}{% set sys = messages[0].content %}{% set turns = messages[1:] %}
{%- else %}{% set turns = messages %}{% endif %}
{%- set questions = turns | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for m in turns %}
    {%- if m.role == 'user' %}
        {%- if tools and m == questions[-1] %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + (sys + '\n\n' if sys and m == questions[-1] else '') + m.content + '[/INST]' }}
    {%- elif m.tool_calls %}{{- '[TOOL_CALLS] ' + m.tool_calls[0].function | tojson + eos_token }}
    {%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}
    {%- else %}{{- ' ' + m.content | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""
# Qwen 3.5's without thinking: the generation prompt has empty reasoning content.
NO_THINKING = QWEN3.replace(
    "assistant\n' }}{% endif %}", "assistant\n<think>\n\n</think>\n\n' }}{% endif %}"
).replace("{%- set said", "{%- set thought = m.reasoning_content or thought %}{%- set said")
# What the tools return stands between the calls and the text of the same turn, which has no end
# before it.
GEMMA4 = """
{{- bos_token }}
{%- for m in messages if m.role != 'tool' %}
    {{- '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
    {%- if m.tool_calls %}
        {{- '<|tool_call>' + m.tool_calls[0].function | tojson + '<tool_call|><|tool_response>' }}
        {%- for r in messages if r.role == 'tool' %}{{- 'value:' + r.content + '<tool_response|>' }}{% endfor %}
    {%- endif %}
    {{- m.content + '<turn|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|turn>model\n' }}{% endif %}
"""
LLAMA31 = """
{%- for m in messages %}
    {{- '<|' + m.role + '|>' + (m.tool_calls[0].function | tojson if m.tool_calls else m.content) + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}
"""
NO_SYSTEM = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
TOKENS = {
    NO_SYSTEM: [],
    "{% for m in messages %}{{ m.role }}{% endfor %}": [],
    QWEN3: ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"],
    NO_THINKING: [
        "<|im_start|>",
        "<|im_end|>",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
    ],
    GEMMA4: [
        "<s>",
        "<|turn>",
        "<turn|>",
        "<|tool_call>",
        "<tool_call|>",
        "<|tool_response>",
        "<tool_response|>",
    ],
    LLAMA31: ["<|user|>", "<|assistant|>", "<|tool|>", "<|eot_id|>"],
    GEMMA: ["<s>", "</s>", "<start_of_turn>", "<end_of_turn>"],
    PHI3: ["</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"],
    MISTRAL: ["<s>", "</s>"],
    BUILT_IN["llama3"]: [
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ],
    BUILT_IN["chatml"]: ["<|im_start|>", "<|im_end|>"],
    BUILT_IN["mistral"]: ["<s>", "</s>", "[INST]", "[/INST]"],
    BUILT_IN["alpaca"]: ["<s>", "</s>"],
}


NEXT = " next sample: "


@pytest.fixture
def tokens(make_tokenizer: MakeTokenizer) -> Callable[..., str]:
    """The tokens of a chat under a template, those trained on in brackets, with NEXT between the
    samples that it becomes."""

    def shown(
        template: str, messages: list[Message], labels: str = "auto", tools: list[Any] | None = None
    ) -> str:
        special = TOKENS[template]
        named = {"bos_token": "<s>", "eos_token": "</s>"}
        named = {name: token for name, token in named.items() if token in special}
        tokenizer = make_tokenizer(special, template, **named)
        sample = {"messages": messages, "tools": tools}
        samples = []
        for encoded in Encoder(tokenizer, 10_000, labels=labels).encode(sample, "messages"):
            assert all(
                label in (-100, token)
                for token, label in zip(encoded.input_ids, encoded.labels, strict=True)
            )
            names = tokenizer.convert_ids_to_tokens(encoded.input_ids)
            trained = [label != -100 for label in encoded.labels]
            shown = [
                f"[{name}]" if mine else name for name, mine in zip(names, trained, strict=True)
            ]
            samples.append(" ".join(shown))
        return NEXT.join(samples)

    return shown


@pytest.fixture
def text(make_tokenizer: MakeTokenizer) -> Callable[..., str]:
    """The text of a chat under a template, what is trained on between [[ and ]], with NEXT between
    the samples that it becomes."""

    def shown(
        template: str,
        messages: list[Message],
        labels: str = "assistant",
        tools: list[Any] | None = None,
    ) -> str:
        tokenizer = make_tokenizer(TOKENS[template], template, bos_token="<s>", eos_token="</s>")
        renderer = ChatRenderer(tokenizer, labels)
        try:
            rendered, spans, _ = renderer.render(messages, tools)
        except ChatDiffers as chat:
            return NEXT.join(shown(template, piece, labels, tools) for piece in chat.pieces)
        for start, end in reversed(spans):
            rendered = f"{rendered[:start]}[[{rendered[start:end]}]]{rendered[end:]}"
        return rendered

    return shown


QWEN_START = "<|im_start|> assistant Ċ"
QWEN_HI = "<|im_start|> user Ċ Hi <|im_end|> Ċ"
QWEN_EMPTY = "[<think>] [ĊĊ] [</think>] [ĊĊ]"
LLAMA_HI = "<|start_header_id|> user <|end_header_id|> ĊĊ Hi <|eot_id|>"
LLAMA_OPEN = f"{LLAMA_HI} <|start_header_id|> assistant <|end_header_id|> ĊĊ"


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (
            QWEN3,
            WITH_SYSTEM,
            f"<|im_start|> system Ċ no <|im_end|> Ċ {QWEN_HI} {QWEN_START} {QWEN_EMPTY} [yes] "
            f"[<|im_end|>] Ċ{NEXT}"
            f"<|im_start|> system Ċ no <|im_end|> Ċ {QWEN_HI} {QWEN_START} yes <|im_end|> Ċ "
            f"{QWEN_HI} {QWEN_START} {QWEN_EMPTY} [no] [<|im_end|>] Ċ",
        ),
        (
            GEMMA,
            [system("no"), user("Hi"), assistant("  yes\n"), user("Hi"), assistant("no ")],
            "<s> <start_of_turn> user Ċ no ĊĊ Hi <end_of_turn> Ċ <start_of_turn> m o d e l Ċ [yes] [<end_of_turn>] Ċ "
            "<start_of_turn> user Ċ Hi <end_of_turn> Ċ <start_of_turn> m o d e l Ċ [no] [<end_of_turn>] Ċ",
        ),
        (
            PHI3,
            WITH_SYSTEM,
            "<|system|> Ċ no <|end|> Ċ <|user|> Ċ Hi <|end|> Ċ <|assistant|> Ċ [yes] [<|end|>] Ċ "
            "<|user|> Ċ Hi <|end|> Ċ <|assistant|> Ċ [no] [<|end|>] Ċ </s>",
        ),
        (
            MISTRAL,
            [system("no"), user("Hi"), assistant("yes"), user("yes"), assistant("no")],
            f"<s> [ I N S T ] Ġno ĊĊ Hi [ / I N S T ] [Ġyes] [</s>]{NEXT}"
            "<s> [ I N S T ] Ġ Hi [ / I N S T ] Ġyes </s> [ I N S T ] Ġno ĊĊ yes [ / I N S T ] [Ġno] [</s>]",
        ),
        (
            BUILT_IN["llama3"],
            WITH_SYSTEM,
            "<|begin_of_text|> <|start_header_id|> system <|end_header_id|> ĊĊ no <|eot_id|> "
            f"{LLAMA_OPEN} [yes] [<|eot_id|>] {LLAMA_OPEN} [no] [<|eot_id|>]",
        ),
        (
            BUILT_IN["mistral"],
            WITH_SYSTEM,
            "<s> [INST] Ġno ĊĊ Hi [/INST] [Ġyes] [</s>] [INST] Ġ Hi [/INST] [Ġno] [</s>]",
        ),
    ],
)
def test_the_labels_of_chats_token_by_token(
    tokens: Callable[..., str], template: str, messages: list[Message], expected: str
) -> None:
    assert tokens(template, messages) == expected


CALLED = '{"name": "f", "arguments": {"x": 1}}'


@pytest.mark.parametrize(
    ("template", "tools", "expected"),
    [
        (
            MISTRAL,
            TOOLS,
            '<s>[AVAILABLE_TOOLS] [{"type": "function", "function": {"name": "f", "parameters": {}}}]'
            f"[/AVAILABLE_TOOLS][INST] Hi[/INST][[[TOOL_CALLS] {CALLED}</s>]]"
            "[TOOL_RESULTS] no[/TOOL_RESULTS] [[yes</s>]]",
        ),
        (
            BUILT_IN["llama3"],
            None,
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n"
            '[[{"name": "f", "parameters": {"x": 1}}<|eot_id|>]]<|start_header_id|>ipython<|end_header_id|>\n\nno'
            "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n[[yes<|eot_id|>]]",
        ),
        (
            BUILT_IN["chatml"],
            None,
            "<|im_start|>user\nHi<|im_end|>\n"
            f"<|im_start|>assistant\n[[<tool_call>\n{CALLED}\n</tool_call><|im_end|>]]\n"
            "<|im_start|>tool\n<tool_response>\nno\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n[[yes<|im_end|>]]\n",
        ),
        (
            BUILT_IN["mistral"],
            None,
            f'<s>[INST] Hi[/INST][[[TOOL_CALLS] [{CALLED}]</s>]][TOOL_RESULTS] {{"content": "no"}}[/TOOL_RESULTS]'
            "[[ yes</s>]]",
        ),
    ],
)
def test_tool_calls_are_in_the_loss(
    text: Callable[..., str], template: str, tools: Any, expected: str
) -> None:
    assert text(template, WITH_TOOLS, tools=tools) == expected


@pytest.mark.parametrize(
    ("template", "chat", "tools", "lost"),
    [
        (GEMMA, TWO, TOOLS, "tools"),
        (BUILT_IN["alpaca"], WITH_TOOLS, None, "tool_calls"),
        (NO_SYSTEM, [system("Be brief."), *ONE], None, "the system message"),
        (
            LLAMA31,
            [user("Hi"), assistant("I ask.", tool_calls=CALL), tool("no"), assistant("yes")],
            None,
            "the text",
        ),
        (
            GEMMA4,
            [user("Hi"), assistant("yes", reasoning_content="Well."), *ONE],
            None,
            '"reasoning_content" of messages\\[1\\]',
        ),
        (
            NO_SYSTEM,
            [user("Hi"), assistant("yes", thinking="hm")],
            None,
            '"thinking" of messages\\[1\\]',
        ),
        (
            "{% for m in messages %}{{ m.role }}{% endfor %}",
            ONE,
            None,
            "the content of messages\\[1\\]",
        ),
    ],
)
def test_chats_with_content_that_a_template_drops_are_rejected(
    text: Callable[..., str], template: str, chat: list[Message], tools: Any, lost: str
) -> None:
    with pytest.raises(BadSample, match=f"drops {lost}"):
        text(template, chat, tools=tools)


def test_reasoning_content_is_in_the_loss_where_the_template_writes_it(
    text: Callable[..., str],
) -> None:
    chat = [
        user("Hi"),
        assistant("<think>\na\n</think>\n\nyes"),
        user("Hi"),
        assistant("<think>\nb\n</think>\n\nno"),
    ]
    assert text(QWEN3, chat) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        f"[[<think>\na\n</think>\n\nyes<|im_end|>]]\n{NEXT}"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[<think>\nb\n</think>\n\nno<|im_end|>]]\n"
    )


@pytest.mark.parametrize(
    "answer", [assistant("<think>\nb\n</think>\n\nno"), assistant("no", reasoning_content="b")]
)
def test_reasoning_content_is_rejected_if_the_generation_prompt_closes_it(
    text: Callable[..., str], answer: Message
) -> None:
    with pytest.raises(BadSample, match=r'"messages\[3\]".* --reasoning_content drop'):
        text(NO_THINKING, [*ONE, user("Hi"), answer])
    hi = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert text(NO_THINKING, [*ONE, user("Hi"), *drop_reasoning([answer])]) == (
        f"{hi}<think>\n\n</think>\n\n[[yes<|im_end|>]]\n{NEXT}"
        f"{hi}yes<|im_end|>\n{hi}<think>\n\n</think>\n\n[[no<|im_end|>]]\n"
    )


@pytest.mark.parametrize("written", ["<think></think>", "</think>", ""])
def test_training_starts_after_reasoning_content_that_the_generation_prompt_opens(
    make_tokenizer: MakeTokenizer, written: str
) -> None:
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}"
        "{{ '<think>' + m.thinking + '</think>' if m.thinking else 'WRITTEN' }}{% endif %}"
        "{{ m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|><think>' }}{% endif %}"
    ).replace("WRITTEN", written)
    tokenizer = make_tokenizer(["</s>", "<think>", "</think>"], template, eos_token="</s>")
    renderer = ChatRenderer(tokenizer)
    rendered, [(start, end)], prompts = renderer.render([user("Hi"), assistant("yes")])
    closing = "</think>" if written else "\n</think>\n\n"
    assert rendered[:start] == "<|user|>Hi</s><|assistant|><think>"
    assert rendered[start:end] == f"{closing}yes</s>"
    assert prompts == [start]
    rendered, [(start, end)], _ = renderer.render([user("Hi"), assistant("yes", thinking="no")])
    assert rendered[:start] == "<|user|>Hi</s><|assistant|><think>"
    assert rendered[start:end] == "no</think>yes</s>"


def test_a_response_of_nothing_but_reasoning_content_cannot_lose_it() -> None:
    with pytest.raises(BadSample, match=r'"messages\[1\]" has nothing but reasoning content'):
        drop_reasoning([user("Hi"), assistant("<think>\nhm\n</think>")])
    kept = drop_reasoning([user("<think>a</think>"), assistant("", thinking="a", tool_calls=CALL)])
    assert kept == [user("<think>a</think>"), assistant("", tool_calls=CALL)]


@pytest.mark.parametrize("template", [GEMMA, MISTRAL, PHI3, BUILT_IN["chatml"], BUILT_IN["alpaca"]])
def test_weights_and_labels_select_the_responses_in_the_loss(
    text: Callable[..., str], template: str
) -> None:
    def trained(messages: list[Message], labels: str) -> list[str]:
        shown = text(template, messages, labels)
        return [part.split("]]")[0].strip().split("<")[0] for part in shown.split("[[")[1:]]

    chat = [
        system("S"),
        user("A"),
        assistant("B"),
        user("C"),
        assistant("D"),
        user("E"),
        assistant("F"),
    ]
    weighted = [{**turn, "weight": 0} if turn["content"] in ("B", "D") else turn for turn in chat]
    assert trained(chat, "assistant") == ["B", "D", "F"]
    assert trained(chat, "completion") == ["F"]
    assert trained(weighted, "assistant") == ["F"]
    assert trained([*chat[:-1], {**chat[-1], "weight": 0}], "completion") == []
    whole = text(template, chat, "all")
    assert whole.startswith("[[") and whole.endswith("]]") and whole.count("[[") == 1
    outside = [part.split("[[")[0] for part in text(template, weighted, "all").split("]]")]
    assert [part.strip().split("<")[0] for part in outside if part] == ["B", "D"]


def test_the_settings_know_the_built_in_templates() -> None:
    assert set(BUILT_IN) == set(BUILT_IN_TEMPLATES)


def test_chatml_begins_with_the_bos_that_the_tokenizer_adds(
    llama3: PreTrainedTokenizerFast,
) -> None:
    ensure_chat_template(llama3, "chatml", add_tokens=True)
    [encoded] = Encoder(llama3, 100).encode({"messages": ONE}, "messages")
    assert [
        index for index, token in enumerate(encoded.input_ids) if token == llama3.bos_token_id
    ] == [0]


def test_a_template_file_is_used_and_saved_with_the_tokenizer(
    plain: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}")
    assert str(file) in ensure_chat_template(plain, str(file))
    plain.save_pretrained(tmp_path / "saved")
    again = PreTrainedTokenizerFast.from_pretrained(tmp_path / "saved")
    assert again.apply_chat_template(ONE, tokenize=False) == "user:Hi</s>assistant:yes</s>"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{% for m in messages %}\n\n{{ m.content + }}{% endfor %}", "mine.jinja, line 3: "),
        (b"{{ messages | shorten }}", "mine.jinja, line 1: No filter named 'shorten'"),
    ],
)
def test_an_unusable_template_file_is_rejected(
    plain: PreTrainedTokenizerFast, tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "mine.jinja"
    file.write_bytes(content)
    with pytest.raises(UserError, match=message):
        ensure_chat_template(plain, str(file))


LOOP = b"{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
MACRO = b"{% macro deeper() %}{{ deeper() }}{% endmacro %}{{ deeper() }}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{{ 'a' * 10 ** 11 }}", "takes more than 1 GiB"),
        (b"{{ messages[0].content * 10 ** 9 }}", "takes more than 1 GiB"),
        (MACRO, "nested too deeply"),
        (b"{{ " + b"(" * 5000 + b"1" + b")" * 5000 + b" }}", "nested too deeply"),
        (b"{% if 1 %}" * 3000 + b"{% endif %}" * 3000, "nested too deeply"),
        ("{{ 'é' }}".encode("latin-1"), "not a template .*codec can't decode"),
        (b" " * 2**21, "not a template .larger than 1,048,576 bytes"),
    ],
)
def test_a_template_that_exceeds_a_limit_is_rejected(
    plain: PreTrainedTokenizerFast, tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "mine.jinja"
    file.write_bytes(content)
    with pytest.raises(UserError, match=f"(?s)mine.jinja.*{message}"):
        ensure_chat_template(plain, str(file))


@pytest.mark.parametrize("content", [LOOP, b"{{ 7 ** (10 ** 9) }}"])
def test_a_template_that_does_not_end_is_rejected(
    plain: PreTrainedTokenizerFast, tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_limits, "CPU_SECONDS", 1)
    file = tmp_path / "mine.jinja"
    file.write_bytes(content)
    with pytest.raises(UserError, match="(?s)mine.jinja.*does not end within 1 s"):
        ensure_chat_template(plain, str(file))


@pytest.mark.parametrize("wanted", [None, "chatml"])
def test_a_template_without_its_tokens_is_rejected_unless_they_may_be_added(
    plain: PreTrainedTokenizerFast, wanted: str | None
) -> None:
    plain.chat_template = BUILT_IN["chatml"]
    with pytest.raises(
        UserError, match=r"(?s)writes <\|im_start\|>, <\|im_end\|>: .*resize_embeddings"
    ):
        ensure_chat_template(plain, wanted)
    before = len(plain)
    assert "new tokens: <|im_start|>, <|im_end|>" in ensure_chat_template(
        plain, wanted, add_tokens=True
    )
    assert len(plain) == before + 2
    assert plain.eos_token == "<|im_end|>"  # what ends an answer has to end generation
    [encoded] = Encoder(plain, 100).encode({"messages": ONE}, "messages")
    assert plain.convert_ids_to_tokens([label for label in encoded.labels if label != -100]) == [
        "yes",
        "<|im_end|>",
    ]


def test_templates_render_the_same_text_on_every_day() -> None:
    template = "{{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }} {{ date_string }}"
    assert render_chat(template, {}, ONE)[0] == "2024-07-26 00:00:00.000000 26 Jul 2024"
