"""What is said about rows that cannot be used."""

import pytest

from llama_ft.data.formats import BadRow, alpaca_messages, chat_messages, find_format, token_row
from llama_ft.errors import UserError

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "yes"}


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"instruction", "output"}, "alpaca"),
        ({"instruction", "input", "output", "id"}, "alpaca"),
        ({"messages"}, "messages"),
        ({"input_ids", "labels", "attention_mask"}, "tokenized"),
    ],
)
def test_format_is_told_by_the_columns(columns: set[str], expected: str) -> None:
    assert find_format("my.jsonl", columns, "auto") == expected


@pytest.mark.parametrize(
    ("columns", "wanted", "text"),
    [
        ({"text", "id"}, "auto", "my.jsonl: its columns are id, text.\nExpected are instruction, output and"),
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
        ({"input_ids": [1]}, '"labels" is missing; expected a list of integers.'),
        ({"input_ids": [1, 2], "labels": [1]}, '"input_ids" has 2 entries and "labels" 1; expected as many.'),
        ({"input_ids": [1, 9], "labels": [1, 9]}, '"input_ids[1]" is 9; expected 0 to 8, the tokenizer\'s ids.'),
        ({"input_ids": [1, 2], "labels": [1, -1]}, '"labels[1]" is -1; expected -100 or 0 to 8.'),
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
        token_row(row, vocabulary_size=9)
    assert str(caught.value) == text
