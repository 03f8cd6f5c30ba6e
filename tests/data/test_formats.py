"""What is said about rows that cannot be used."""

import pytest

from llama_ft.data.formats import (
    BadRow,
    alpaca_messages,
    chat_messages,
    find_format,
    plain_text,
    prompt_completion,
    sharegpt_messages,
    token_row,
    tools_of,
)
from llama_ft.errors import UserError

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "yes"}


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"instruction", "output"}, "alpaca"),
        ({"instruction", "input", "output", "id"}, "alpaca"),
        ({"messages"}, "messages"),
        ({"messages", "prompt", "prompt_id", "text"}, "messages"),
        ({"conversations", "id"}, "sharegpt"),
        ({"prompt", "completion"}, "prompt_completion"),
        ({"text", "id"}, "text"),
        ({"instruction", "output", "text"}, "alpaca"),
        ({"input_ids"}, "tokenized"),
        ({"input_ids", "text"}, "tokenized"),
        ({"input_ids", "labels", "attention_mask"}, "tokenized"),
    ],
)
def test_format_is_told_by_the_columns(columns: set[str], expected: str) -> None:
    assert find_format("my.jsonl", columns, "auto") == expected


@pytest.mark.parametrize(
    ("columns", "wanted", "text"),
    [
        ({"txt", "id"}, "auto", "my.jsonl: its columns are id, txt.\nExpected are instruction, output and"),
        ({"prompt"}, "prompt_completion", "--dataset_format prompt_completion needs prompt and completion, but its"),
        ({"messages", "input_ids"}, "auto", "which fit messages and tokenized.\n--dataset_format says"),
        ({"text"}, "messages", "my.jsonl: --dataset_format messages needs messages, but its columns are text."),
        ({"messages", "instruction", "output"}, "auto", "which fit alpaca and messages.\n--dataset_format says"),
    ],
)
def test_wrong_columns_are_listed_with_what_is_expected(columns: set[str], wanted: str, text: str) -> None:
    with pytest.raises(UserError) as caught:
        find_format("my.jsonl", columns, wanted)
    assert text in caught.value.messages[0]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"output": "yes"}, '"instruction" is missing; expected the question as text.'),
        ({"instruction": "Hi", "output": " "}, '"output" is empty; expected the answer as text.'),
        ({"instruction": "Hi", "output": 5}, '"output" is 5; expected the answer as text.'),
        ({"instruction": "Hi", "output": "yes", "input": ["a"]}, '"input" is a list of 1; expected text.'),
        ({"instruction": "Hi", "output": "yes", "system": 5}, '"system.content" is 5; expected text.'),
        (
            {"instruction": "Hi", "output": "yes", "history": [["Hi"]]},
            '"history" is a list of 1; expected a list of pairs of question and answer.',
        ),
        (
            {"instruction": "Hi", "output": "yes", "history": "no"},
            '"history" is "no"; expected pairs of question and answer as JSON.',
        ),
        (
            {"instruction": "Hi", "output": "yes", "history": [["Hi", ""]]},
            '"history[0][1].content" is empty; expected what the assistant says.',
        ),
    ],
)
def test_what_is_wrong_in_an_alpaca_row(row: dict, text: str) -> None:
    with pytest.raises(BadRow) as caught:
        alpaca_messages(row)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("turns", "text"),
    [
        (None, '"messages" is missing; expected a list of turns of role and content.'),
        ("Hi", '"messages" is "Hi"; expected a list of turns of role and content.'),
        ([], '"messages" is empty; expected turns of role and content.'),
        (["Hi"], '"messages[0]" is "Hi"; expected an object of role and content.'),
        ([{"content": "Hi"}], '"messages[0].role" is missing; expected system, user, assistant or tool.'),
        (
            [{"role": "system", "content": ""}, USER, {"role": "asistant", "content": "yes"}],
            '"messages[2].role" is "asistant"; expected system, user, assistant or tool.',
        ),
        ([{"role": ["user"]}], '"messages[0].role" is a list of 1; expected system, user, assistant or tool.'),
        ([ANSWER], '"messages[0].role", the first, is "assistant"; expected system or user.'),
        ([USER, USER, ANSWER], '"messages[1].role", after "user", is "user"; expected assistant.'),
        ([USER, ANSWER, ANSWER], '"messages[2].role", after "assistant", is "assistant"; expected user or tool.'),
        (
            [USER, {"role": "system", "content": "x"}],
            '"messages[1].role", after "user", is "system"; expected assistant.',
        ),
        ([USER, ANSWER, USER], '"messages[2].role", the last, is "user"; expected assistant.'),
        ([USER, {"role": "assistant"}], '"messages[1].content" is missing; expected text.'),
        ([USER, {"role": "assistant", "content": ["a"]}], '"messages[1].content" is a list of 1; expected text.'),
        (
            [USER, {"role": "assistant", "content": ""}],
            '"messages[1].content" is empty; expected what the assistant says.',
        ),
    ],
)
def test_what_is_wrong_in_a_chat(turns: object, text: str) -> None:
    with pytest.raises(BadRow) as caught:
        chat_messages({"messages": turns})
    assert str(caught.value) == text


def test_tool_turns_follow_an_assistant_that_may_say_nothing() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}], "name": None}
    tool = {"role": "tool", "content": "5"}
    checked = chat_messages({"messages": [USER, call, tool, tool, ANSWER]})
    assert [turn["role"] for turn in checked] == ["user", "assistant", "tool", "tool", "assistant"]
    assert checked[1] == {"role": "assistant", "content": "", "tool_calls": [{"type": "function"}]}


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"labels": [1]}, '"input_ids" is missing; expected a list of integers.'),
        ({"input_ids": []}, '"input_ids" is empty; expected tokens.'),
        ({"input_ids": [1], "labels": "1"}, '"labels" is "1"; expected a list of integers.'),
        ({"input_ids": [1, 2], "labels": [1]}, '"input_ids" has 2 entries and "labels" 1; expected as many.'),
        ({"input_ids": [1, 2.5], "labels": [1, 1]}, '"input_ids[1]" is 2.5; expected an integer.'),
        ({"input_ids": [True], "labels": [1]}, '"input_ids[0]" is True; expected an integer.'),
        (
            {"input_ids": [1], "labels": [1], "attention_mask": [1, 1]},
            '"input_ids" has 1 entries and "attention_mask" 2; expected as many.',
        ),
    ],
)
def test_what_is_wrong_in_a_tokenized_row(row: dict, text: str) -> None:
    with pytest.raises(BadRow) as caught:
        token_row(row)
    assert str(caught.value) == text


def test_tokens_without_labels_are_all_trained_on_but_for_those_masked_out() -> None:
    assert token_row({"input_ids": [1, 2, 3], "labels": None, "attention_mask": [0, 1, 1]}) == ([2, 3], [2, 3])


def said(role: str, content: object, **more: object) -> dict:
    return {"role": role, "content": content, **more}


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (said("assistant", "x", weight=2), '"messages[1].weight" is 2; expected 0 (not trained on) or 1.'),
        (said("assistant", "x", weight="0"), '"messages[1].weight" is "0"; expected 0 (not trained on) or 1.'),
        (
            said("assistant", [{"type": "text"}]),
            '"messages[1].content[0]" is of type "text"; expected text parts only.',
        ),
        (
            said("assistant", [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]),
            '"messages[1].content[1]" is of type "image_url"; expected text parts only.',
        ),
        (said("assistant", None, tool_calls="f()"), '"messages[1].tool_calls" is "f()"; expected a list of objects.'),
        (
            said("assistant", None, tool_calls=[{"function": {"name": "f", "arguments": "{a"}}]),
            '"messages[1].tool_calls[0].function.arguments" is "{a"; expected the arguments as JSON.',
        ),
    ],
)
def test_what_is_wrong_in_weights_parts_and_tool_calls(answer: dict, text: str) -> None:
    with pytest.raises(BadRow) as caught:
        chat_messages({"messages": [USER, answer]})
    assert str(caught.value) == text


def test_openai_rows_keep_weights_and_get_text_and_arguments_as_templates_want_them() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Lima"}'}}
    parts = [{"type": "text", "text": "How warm"}, {"type": "text", "text": " is it?"}]
    turns = [said("user", parts), said("assistant", None, tool_calls=[call], weight=0), said("tool", "20"), ANSWER]
    checked = chat_messages({"messages": turns})
    assert checked[0]["content"] == "How warm is it?"
    assert checked[1]["weight"] == 0
    assert checked[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"city": "Lima"}}
    assert call["function"]["arguments"] == '{"city": "Lima"}'  # the row itself stays as it is


@pytest.mark.parametrize(
    ("tools", "expected"),
    [(None, None), ([], None), ("", None), ([{"type": "f"}], [{"type": "f"}]), ('[{"type": "f"}]', [{"type": "f"}])],
)
def test_tools_are_a_list_or_its_json_text(tools: object, expected: object) -> None:
    assert tools_of({"tools": tools}) == expected


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("[{", '"tools" is "[{"; expected a list of tools as JSON.'),
        ({"type": "f"}, '"tools" is an object of type; expected a list of objects, or one as JSON text.'),
        (["f"], '"tools" is a list of 1; expected a list of objects, or one as JSON text.'),
    ],
)
def test_what_is_wrong_in_tools(tools: object, text: str) -> None:
    with pytest.raises(BadRow) as caught:
        tools_of({"tools": tools})
    assert str(caught.value) == text


def test_sharegpt_turns_become_messages() -> None:
    turns = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Hello", "weight": 0},
        {"from": "human", "value": "2 + 2?"},
        {"from": "gpt", "value": "4", "weight": None},
    ]
    assert sharegpt_messages({"conversations": turns}) == [
        said("system", "Be brief."),
        said("user", "Hi"),
        said("assistant", "Hello", weight=0),
        said("user", "2 + 2?"),
        said("assistant", "4"),
    ]
    assert sharegpt_messages({"conversations": [USER, ANSWER]}) == [USER, ANSWER]  # some have OpenAI's keys there


@pytest.mark.parametrize(
    ("turns", "text"),
    [
        (None, '"conversations" is missing; expected a list of turns of from and value.'),
        (
            [{"from": "Human", "value": "Hi"}],
            '"conversations[0].from" is "Human"; expected system, human, gpt or tool.',
        ),
        ([{"from": 1, "value": "Hi"}], '"conversations[0].from" is 1; expected system, human, gpt or tool.'),
        ([{"from": "human"}], '"conversations[0].value" is missing; expected text.'),
        ([{"from": "human", "value": 5}], '"conversations[0].value" is 5; expected text.'),
        (
            [{"from": "gpt", "value": "Hi"}],
            '"conversations[0].from", the first, is "assistant"; expected system or user.',
        ),
        ([{"from": "human", "value": "Hi"}], '"conversations[0].from", the last, is "user"; expected assistant.'),
    ],
)
def test_what_is_wrong_in_sharegpt_turns(turns: object, text: str) -> None:
    with pytest.raises(BadRow) as caught:
        sharegpt_messages({"conversations": turns})
    assert str(caught.value) == text


@pytest.mark.parametrize("history", [[["A", "B"], ["C", "D"]], '[["A", "B"], ["C", "D"]]'])
def test_system_and_history_of_alpaca_rows_are_turns(history: object) -> None:
    row = {"instruction": "Hi", "input": "", "output": "yes", "system": "Be brief.", "history": history}
    turns = [said("user", "A"), said("assistant", "B"), said("user", "C"), said("assistant", "D"), USER, ANSWER]
    assert alpaca_messages(row) == [said("system", "Be brief."), *turns]
    assert alpaca_messages({**row, "system": " ", "history": ""}) == [USER, ANSWER]
    assert alpaca_messages({**row, "system": None, "history": None}) == [USER, ANSWER]


def test_a_system_column_is_the_system_turn_of_a_chat_that_has_none() -> None:
    brief, own = said("system", "Be brief."), said("system", "Be kind.")
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "yes"}]
    assert sharegpt_messages({"system": "Be brief.", "conversations": turns}) == [brief, USER, ANSWER]
    first = {"from": "system", "value": "Be kind."}
    assert sharegpt_messages({"system": "Be brief.", "conversations": [first, *turns]}) == [own, USER, ANSWER]
    assert chat_messages({"system": "Be brief.", "messages": [USER, ANSWER]}) == [brief, USER, ANSWER]
    assert chat_messages({"system": "Be brief.", "messages": [own, USER, ANSWER]}) == [own, USER, ANSWER]
    assert chat_messages({"system": "", "messages": [USER, ANSWER]}) == [USER, ANSWER]
    row = {"system": "Be brief.", "prompt": [USER, ANSWER, USER], "completion": [ANSWER]}
    assert prompt_completion(row) == [brief, USER, {**ANSWER, "weight": 0}, USER, ANSWER]
    row = {"system": "Be brief.", "prompt": "Hi ", "completion": "yes"}
    assert prompt_completion(row) == ("Be brief.\n\nHi ", "yes")


def test_prompt_and_completion_are_texts_or_one_chat_whose_completion_alone_is_trained_on() -> None:
    assert prompt_completion({"prompt": "Hi ", "completion": "yes"}) == ("Hi ", "yes")
    row = {"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}
    assert prompt_completion(row) == [USER, {**ANSWER, "weight": 0}, USER, ANSWER]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"completion": "yes"}, '"prompt" is missing; expected the prompt as text.'),
        ({"prompt": "Hi", "completion": ""}, '"completion" is empty; expected the completion as text.'),
        ({"prompt": "Hi", "completion": [ANSWER]}, '"completion" is a list of 1; expected the completion as text.'),
        (
            {"prompt": [USER], "completion": "yes"},
            '"completion" is "yes"; expected a list of turns of role and content.',
        ),
        (
            {"prompt": [USER], "completion": [USER]},
            '"completion[0].role", after "user", is "user"; expected assistant.',
        ),
        (
            {"prompt": [USER, ANSWER], "completion": [USER, ANSWER]},
            '"completion[0].role" is "user"; expected assistant.',
        ),
        (
            {"prompt": [USER], "completion": [{"role": "assistant"}]},
            '"completion[0].content" is missing; expected text.',
        ),
    ],
)
def test_what_is_wrong_in_prompt_and_completion(row: dict, text: str) -> None:
    with pytest.raises(BadRow) as caught:
        prompt_completion(row)
    assert str(caught.value) == text


def test_plain_text_is_text() -> None:
    assert plain_text({"text": " once "}) == ("", " once ")
    with pytest.raises(BadRow, match='"text" is 5; expected what is trained on as text.'):
        plain_text({"text": 5})
