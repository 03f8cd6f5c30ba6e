"""Traces of agents in the forms that people have. The reference is a chat in OpenAI's form, written by
hand, and `apply_chat_template` of Transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from template_chats import SPECIAL, STOCK, said
from transformers import PreTrainedTokenizerFast

from llama_ft.config.settings.settings import DataConfig
from llama_ft.data import DataRequest, Encoder, ensure_chat_template, prepare
from llama_ft.data.chat.chat_template import BUILT_IN
from llama_ft.data.chat.loss_mask import drop_reasoning
from llama_ft.data.read.formats import BadSample, Message, Sample, chat_messages, tools_of
from llama_ft.errors import UserError

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]
SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string", "description": "where"}},
    "required": ["path"],
}
OPENAI_TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": f"To {name}.", "parameters": SCHEMA},
    }
    for name in ("read_file", "list_folder")
]
ANTHROPIC_TOOLS = [
    {"name": name, "description": f"To {name}.", "input_schema": SCHEMA}
    for name in ("read_file", "list_folder")
]


def called(name: str, path: str, call_id: str) -> dict[str, Any]:
    function = {"name": name, "arguments": {"path": path}}
    return {"id": call_id, "type": "function", "function": function}


def block(kind: str, **values: Any) -> dict[str, Any]:
    return {"type": kind, **values}


def used(name: str, path: str, call_id: str) -> dict[str, Any]:
    return block("tool_use", id=call_id, name=name, input={"path": path})


def result(content: Any, call_id: str) -> dict[str, Any]:
    return block("tool_result", tool_use_id=call_id, content=content)


def thought(text: str) -> dict[str, Any]:
    return block("thinking", thinking=text, signature="EqQB")


def text(words: str) -> dict[str, Any]:
    return block("text", text=words)


MISTRAL = Path(__file__).with_name("chat_templates") / "mistral.jinja"
TEMPLATES = {**STOCK, "mistral": MISTRAL.read_text()}
LIST, READ = "toolu_01list0000", "toolu_01read0000"
ANTHROPIC: Sample = {
    "system": [block("text", text="Fix it.", cache_control={"type": "ephemeral"})],
    "messages": [
        said("user", "Why red?"),
        said("assistant", [thought("Look first."), used("list_folder", "src", LIST)]),
        said("user", [result("RESULT a.py", LIST)]),
        said("assistant", [thought("Then read."), used("read_file", "a.py", READ)]),
        said("user", [result([text('RESULT "x"'), text(" = 1\n")], READ)]),
        said("assistant", [thought("Clear."), text("A typo.")]),
    ],
    "tools": ANTHROPIC_TOOLS,
}
BY_HAND: list[Message] = [
    said("system", "Fix it."),
    said("user", "Why red?"),
    said(
        "assistant",
        "",
        reasoning_content="Look first.",
        tool_calls=[called("list_folder", "src", LIST)],
    ),
    said("tool", "RESULT a.py", tool_call_id=LIST),
    said(
        "assistant",
        "",
        reasoning_content="Then read.",
        tool_calls=[called("read_file", "a.py", READ)],
    ),
    said("tool", 'RESULT "x" = 1\n', tool_call_id=READ),
    said("assistant", "A typo.", reasoning_content="Clear."),
]


def with_text_arguments(messages: list[Message]) -> list[Message]:
    changed: list[Message] = json.loads(json.dumps(messages))
    for message in changed:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        if "tool_calls" in message:
            message["content"] = None
    return changed


FORMS: dict[str, Sample] = {
    "Anthropic": ANTHROPIC,
    "Anthropic, a message per block": {
        **ANTHROPIC,
        "messages": [
            said(message["role"], [part])
            for message in ANTHROPIC["messages"][1:]
            for part in message["content"]
        ],
    },
    "OpenAI": {"messages": with_text_arguments(BY_HAND), "tools": json.dumps(OPENAI_TOOLS)},
    "objects as arguments": {"messages": BY_HAND, "tools": OPENAI_TOOLS},
    "Anthropic in JSON text": {**ANTHROPIC, "messages": json.dumps(ANTHROPIC["messages"])},
    "thinking": {
        "messages": [
            {("thinking" if key == "reasoning_content" else key): message[key] for key in message}
            for message in BY_HAND
        ],
        "tools": OPENAI_TOOLS,
    },
}
FORMS["Anthropic, a message per block"]["messages"].insert(0, said("user", "Why red?"))


@pytest.fixture
def tokenizer_of(make_tokenizer: MakeTokenizer) -> Callable[[str], PreTrainedTokenizerFast]:
    def make(name: str) -> PreTrainedTokenizerFast:
        template = TEMPLATES[name]
        special = {"<s>", "</s>", *SPECIAL.findall(template), "<|user|>", "<|observation|>"}
        return make_tokenizer(sorted(special), template, bos_token="<s>", eos_token="</s>")

    return make


def runs_in_loss(tokenizer: PreTrainedTokenizerFast, labels: list[int]) -> list[str]:
    runs = []
    run = list[int]()
    for label in [*labels, -100]:
        if label != -100:
            run.append(label)
        elif run:
            runs.append(str(tokenizer.decode(run)))
            run = []
    return runs


# By family: the key of reasoning content, None without any; and whether ids must have nine letters.
FAMILIES = {
    "qwen3": ("reasoning_content", False),
    "qwen3_5_think": ("reasoning_content", False),
    "qwen2_5": (None, False),
    "llama3_1": (None, False),
    "gptoss": ("thinking", False),
    "mistral": (None, True),
    "glm4moe": ("reasoning_content", False),
    "nemotron_3_nano": ("reasoning_content", False),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", FORMS)
def test_traces_are_rendered_as_a_chat_written_by_hand_and_only_responses_are_in_the_loss(
    tokenizer_of: Callable[[str], PreTrainedTokenizerFast], family: str, form: str
) -> None:
    key, has_short_ids = FAMILIES[family]
    tokenizer = tokenizer_of(family)
    reasoning: Any = "keep" if key else "drop"
    encoder = Encoder(tokenizer, 100_000, reasoning_content=reasoning)
    sample = FORMS[form]
    chat = BY_HAND if key else drop_reasoning(BY_HAND)
    if family == "mistral":  # writes the system message only if the user's is the last
        messages = sample["messages"]
        if "system" not in sample:
            messages = messages[1:]
        sample = {"messages": messages, "tools": sample["tools"]}
        chat = chat[1:]
    encoded = encoder.encode(sample, "messages")
    chat = [
        {(key or "") if name == "reasoning_content" else name: one[name] for name in one}
        for one in chat
    ]
    if has_short_ids:
        short = json.dumps(chat)
        for index, call_id in enumerate((LIST, READ)):
            written = tokenizer.decode(encoded[0].input_ids)
            ids = [part[:9] for part in written.split('"id": "')[1:]]
            short = short.replace(call_id, ids[index])
            assert (
                written.count(ids[index]) == 2 and ids[index].isalnum()
            )  # of the call, its result
        chat = json.loads(short)
    expected = []
    whole = []
    for index, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        tools: Any = OPENAI_TOOLS
        prompt = tokenizer.apply_chat_template(
            chat[:index], tools=tools, tokenize=False, add_generation_prompt=True
        )
        rendered = tokenizer.apply_chat_template(chat[: index + 1], tools=tools, tokenize=False)
        # gpt-oss writes what is before the prompt's end differently in the whole chat.
        before, end_of_prompt, response = rendered.rpartition(prompt[-40:])
        assert end_of_prompt and (before + end_of_prompt == prompt or family == "gptoss")
        expected.append(response.strip())
        whole.append(prompt + response)
    in_loss = [run.strip() for one in encoded for run in runs_in_loss(tokenizer, one.labels)]
    assert in_loss == expected
    assert not any("RESULT" in run for run in in_loss)
    texts = [str(tokenizer.decode(one.input_ids)) for one in encoded]
    # gpt-oss drops the reasoning content of calls as soon as the answer follows
    assert texts == (whole[-2:] if family == "gptoss" else whole[-1:])


@pytest.mark.parametrize(("family", "samples"), [("qwen3", 3), ("gptoss", 6)])
def test_steps_of_an_agent_share_a_sample_and_each_follows_its_prompt(
    tokenizer_of: Callable[[str], PreTrainedTokenizerFast], family: str, samples: int
) -> None:
    key = FAMILIES[family][0]
    chat: list[Message] = []
    for turn in range(3):
        chat.append(said("user", f"Why {turn}?"))
        for step in range(4):
            call = called("read_file", f"{turn}{step}.py", f"call_{turn}{step}")
            reasoning = {key: f"Read {turn} {step}."}
            chat.append(said("assistant", "", tool_calls=[call], **reasoning))
            chat.append(said("tool", f"RESULT {turn} {step}", tool_call_id=call["id"]))
        chat.append(said("assistant", f"A typo {turn}.", **{key: f"Clear {turn}."}))
    tokenizer = tokenizer_of(family)
    encoded = Encoder(tokenizer, 100_000).encode(
        {"messages": chat, "tools": OPENAI_TOOLS}, "messages"
    )
    found = []
    for one in encoded:
        for start, label in enumerate(one.labels):
            if label != -100 and one.labels[start - 1] == -100:
                response = runs_in_loss(tokenizer, one.labels[start:])[0]
                found.append((tokenizer.decode(one.input_ids[:start]), response))
    expected = []
    for index, message in enumerate(chat):
        if message["role"] == "assistant":
            tools: Any = OPENAI_TOOLS
            prompt = tokenizer.apply_chat_template(
                chat[:index], tools=tools, tokenize=False, add_generation_prompt=True
            )
            rendered = str(
                tokenizer.apply_chat_template(chat[: index + 1], tools=tools, tokenize=False)
            )
            expected.append((prompt, rendered.rpartition(str(prompt)[-30:])[2].rstrip()))
    assert len(encoded) == samples
    assert sorted(found) == sorted(expected)


def test_tools_and_messages_of_anthropic_become_those_of_openai() -> None:
    assert chat_messages(ANTHROPIC) == BY_HAND
    assert tools_of(ANTHROPIC) == OPENAI_TOOLS


def test_a_user_may_speak_after_results_and_an_error_or_nothing_is_a_result() -> None:
    calls = [used("read_file", "a", "1"), used("read_file", "b", "2")]
    failed = {**result("No such file.", "1"), "is_error": True}
    nothing = block("tool_result", tool_use_id="2")
    messages = [
        said("user", [text("Go"), text(" on.")]),
        said("assistant", [text("I read."), *calls]),
        said("user", [failed, nothing, text("Stop!")]),
        said("assistant", "Stopped.", weight=0),
    ]
    assert chat_messages({"messages": messages}) == [
        said("user", "Go on."),
        said(
            "assistant",
            "I read.",
            tool_calls=[called("read_file", "a", "1"), called("read_file", "b", "2")],
        ),
        said("tool", "No such file.", tool_call_id="1"),
        said("tool", "", tool_call_id="2"),
        said("user", "Stop!"),
        said("assistant", "Stopped.", weight=0),
    ]


def test_calls_that_are_messages_of_their_own_become_calls_of_the_assistant() -> None:
    call = {"name": "f", "arguments": {"x": 1}}
    expected = [
        said("user", "Hi"),
        said("assistant", "", tool_calls=[{"type": "function", "function": call}] * 2),
        said("tool", "5"),
        said("tool", "6"),
        said("assistant", "Done."),
    ]
    assert expected == chat_messages(
        {
            "conversations": [
                {"from": "human", "value": "Hi"},
                {"from": "function_call", "value": json.dumps([call, call])},
                {"from": "observation", "value": "5"},
                {"from": "observation", "value": "6"},
                {"from": "gpt", "value": "Done."},
            ]
        },
        "conversations",
    )
    messages = [
        said("user", "Hi"),
        said("tool_call", json.dumps(call)),
        said("tool_call", json.dumps(call)),
        said("tool", "5"),
        said("tool", "6"),
        said("assistant", "Done."),
    ]
    assert chat_messages({"messages": messages}) == expected
    old = {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "f", "arguments": '{"x": 1}'},
    }
    messages = [
        said("user", "Hi"),
        old,
        said("function", "5", name="f"),
        said("assistant", "Done."),
    ]
    assert chat_messages({"messages": messages})[1]["tool_calls"] == [
        {"type": "function", "function": call}
    ]


ASK = said("user", "Hi")
DONE = said("assistant", "Done.")
CALL = said("assistant", [used("read_file", "a", "1")])
OPENAI_CALL = said("assistant", None, tool_calls=[called("read_file", "a", "1")])


def with_call(**function: Any) -> list[Message]:
    call = {"id": "1", "type": "function", "function": function}
    return [ASK, said("assistant", None, tool_calls=[call]), said("tool", "5"), DONE]


MALFORMED: dict[str, tuple[list[Message], str]] = {
    "result without a call": (
        [ASK, said("assistant", "Let me look."), said("tool", "5"), DONE],
        '"messages[2]" is the result of a tool, and the assistant message before it has no tool call',
    ),
    "result of another call": (
        [ASK, OPENAI_CALL, said("tool", "5", tool_call_id="2"), DONE],
        '"messages[2]" is the result of the tool call 2, which the assistant message before it does not '
        "have; expected 1.",
    ),
    "Anthropic result of another call": (
        [ASK, CALL, said("user", [result("5", "2")]), DONE],
        '"messages[2].content[0]" is the result of the tool call 2',
    ),
    "Anthropic result first": (
        [said("user", [result("5", "2")]), DONE],
        '"messages[0].content[0].role" is "tool"; expected system or user here.',
    ),
    "result without an id": (
        [ASK, CALL, said("user", [block("tool_result", content="5")]), DONE],
        '"messages[2].content[0].tool_use_id" is missing',
    ),
    "call without an id": (
        [ASK, said("assistant", [block("tool_use", name="f", input={})])],
        '"messages[1].content[0].id" is missing',
    ),
    "call without a name": (
        with_call(arguments={}),
        '"messages[1].tool_calls[0].function.name" is missing',
    ),
    "arguments that are not JSON": (
        with_call(name="f", arguments="{x: 1}"),
        '"messages[1].tool_calls[0].function.arguments" is "{x: 1}"; expected JSON.',
    ),
    "arguments that are a list": (
        with_call(name="f", arguments="[1]"),
        '"messages[1].tool_calls[0].function.arguments" is "[1]"; expected an object.',
    ),
    "input that is not an object": (
        [ASK, said("assistant", [block("tool_use", id="1", name="f", input="x")])],
        '"messages[1].content[0].input" is "x"; expected an object of arguments.',
    ),
    "unknown role": (
        [ASK, said("critic", "No."), DONE],
        '"messages[1].role" is "critic"; expected assistant here.',
    ),
    "unknown block": (
        [ASK, said("assistant", [text("See."), block("server_tool_use", id="1")])],
        '"messages[1].content[1]" is {"type": "server_tool_use"',
    ),
    "unknown block in a trace": (
        [ASK, said("assistant", [thought("Hm."), block("server_tool_use", id="1")])],
        '"messages[1].content[1]" is {"type": "server_tool_use", "id": "1"}; expected a block of type '
        "thinking, text, tool_use from the assistant.",
    ),
    "unknown block in a result": (
        [ASK, CALL, said("user", [result([block("document")], "1")]), DONE],
        '"messages[2].content[0].content[0]" is {"type": "document"}',
    ),
    "blocks in another order": (
        [ASK, said("assistant", [used("f", "a", "1"), text("Done.")])],
        '"messages[1].content[1]" is a block of type text after one of type tool_use',
    ),
    "result after text": (
        [ASK, CALL, said("user", [text("See:"), result("5", "1")]), DONE],
        '"messages[2].content[1]" is a tool_result after a block of type text',
    ),
    "a call of the user": (
        [said("user", [used("f", "a", "1")]), DONE],
        '"messages[0].content[0]" is {"type": "tool_use"',
    ),
    "nothing but reasoning content": (
        [ASK, said("assistant", [thought("Hm.")])],
        '"messages[1].content" is empty; expected what the assistant says.',
    ),
    "no content": ([ASK, said("assistant", [])], '"messages[1].content" is empty'),
    "a call that is not JSON": (
        [ASK, said("function_call", "f(1)"), said("tool", "5"), DONE],
        '"messages[1].content" is "f(1)"; expected JSON of a tool call.',
    ),
    "a trace that ends with a result": (
        [ASK, CALL, said("user", [result("5", "1")])],
        '"messages[2].content[0]" is "tool"; expected an assistant\'s message as the last.',
    ),
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_a_malformed_trace_is_one_message_with_its_place(fault: str) -> None:
    messages, expected = MALFORMED[fault]
    with pytest.raises(BadSample) as raised:
        chat_messages({"messages": messages})
    assert str(raised.value).startswith(expected)


def test_malformed_traces_are_a_user_error_with_line_and_way_out(
    tokenizer_of: Callable[[str], PreTrainedTokenizerFast], tmp_path: Path
) -> None:
    file = tmp_path / "traces.jsonl"
    bad = [{"messages": messages} for messages, _ in list(MALFORMED.values())[:3]]
    file.write_text("".join(json.dumps(sample) + "\n" for sample in [ANTHROPIC, *bad, bad[0]]))
    config = DataConfig(dataset=str(file), tokenize_processes=1)
    request = DataRequest(context_length=4000, want_validation=False)
    with pytest.raises(UserError) as raised:
        prepare(config, tokenizer_of("qwen3"), request, cache=tmp_path)
    lines = "\n".join(raised.value.messages).splitlines()
    for number in (2, 3, 4, 5):
        assert sum(line.startswith(f"{file}:{number}: ") for line in lines) == 1
    assert "4 bad samples" in str(lines) and "--skip_bad_rows" in lines[-1]


TWO_CALLS = [
    ASK,
    said(
        "assistant",
        "",
        tool_calls=[called("read_file", "a", "1"), called("list_folder", "b", "2")],
    ),
    said("tool", "RESULT 5", tool_call_id="1"),
    said("tool", "RESULT 6", tool_call_id="2"),
    DONE,
]
NO_RESULTS = STOCK["qwen3"].replace("{{- content }}\n        {{- '\\n</tool_response>' }}", "")
DROPS = {
    "the second call": (
        STOCK["gptoss"],
        TWO_CALLS,
        "drops 1 of 1 tool call (list_folder) of messages[1]",
    ),
    "results": (NO_RESULTS, TWO_CALLS, "drops the result of a tool, messages[3]"),
    "calls": (BUILT_IN["alpaca"], TWO_CALLS, "the chat template alpaca drops tool_calls"),
    "tools": (
        STOCK["qwen3"].replace("tool | tojson", "tools[0] | tojson"),
        [ASK, DONE],
        "drops the definition of the tool list_folder",
    ),
}


@pytest.mark.parametrize("what", DROPS)
def test_a_template_that_drops_a_part_of_a_trace_is_one_message(
    make_tokenizer: MakeTokenizer, tmp_path: Path, what: str
) -> None:
    template, messages, expected = DROPS[what]
    special = sorted({"<s>", "</s>", *SPECIAL.findall(template)})
    tokenizer = make_tokenizer(special, template, bos_token="<s>", eos_token="</s>")
    sample = {"messages": messages, "tools": OPENAI_TOOLS if what == "tools" else None}
    file = tmp_path / "traces.jsonl"
    file.write_text((json.dumps(sample) + "\n") * 7)
    config = DataConfig(dataset=str(file), tokenize_processes=1)
    request = DataRequest(context_length=4000, want_validation=False)
    with pytest.raises(UserError) as raised:
        prepare(config, tokenizer, request, cache=tmp_path)
    [message] = raised.value.messages
    assert message.startswith(f"{file}:1: ") and expected in message.splitlines()[0]
    assert "--chat_template" in message and "7 bad samples" in message


def test_the_report_counts_calls_and_results(
    tokenizer_of: Callable[[str], PreTrainedTokenizerFast], tmp_path: Path
) -> None:
    file = tmp_path / "traces.jsonl"
    samples = [ANTHROPIC, {"messages": TWO_CALLS}, {"messages": [ASK, DONE]}]
    file.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    config = DataConfig(dataset=str(file), tokenize_processes=1)
    request = DataRequest(context_length=4000, want_validation=False)
    tokenizer = tokenizer_of("qwen3")
    ensure_chat_template(tokenizer)
    data = prepare(config, tokenizer, request, cache=tmp_path)
    line = "training: 4 tool calls and 4 tool results in 2 samples; the chat template writes all of them"
    assert line in data.summary
    train = data.facts()["train"]
    assert (train["tool_calls"], train["tool_results"], train["tool_samples"]) == (4, 4, 2)
    assert not data.warnings


def test_encrypted_reasoning_is_left_out_with_a_warning(
    tokenizer_of: Callable[[str], PreTrainedTokenizerFast], tmp_path: Path
) -> None:
    response = said("assistant", [block("redacted_thinking", data="EmwK"), text("Done.")])
    file = tmp_path / "traces.jsonl"
    file.write_text((json.dumps({"messages": [ASK, response]}) + "\n") * 2)
    config = DataConfig(dataset=str(file), tokenize_processes=1)
    request = DataRequest(context_length=4000, want_validation=False)
    data = prepare(config, tokenizer_of("llama3_1"), request, cache=tmp_path)
    [warning] = data.warnings
    assert warning.startswith("2 samples: redacted_thinking is left out") and ":1)." in warning
