"""What samples become, and which field is named in samples that cannot be used."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY
from pages import Page
from repository import test_budgets

from llama_ft.data.read.formats import (
    FORMATS,
    BadSample,
    Sample,
    alpaca_messages,
    chat_messages,
    find_format,
    is_desirable,
    labelled,
    pair_contents,
    plain_text,
    prompt_completion,
    tokenized_sample,
    tools_of,
)
from llama_ft.errors import UserError

sharegpt_messages = FORMATS["sharegpt"].read
USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "yes"}
NO = {"role": "assistant", "content": "no"}


def said(role: str, content: object, **more: object) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ("instruction input output id", "alpaca"),
        ("messages prompt prompt_id text", "messages"),
        ("conversations id", "sharegpt"),
        ("prompt completion", "prompt_completion"),
        ("text id", "text"),
        ("instruction output text", "alpaca"),
        ("input_ids text", "tokenized"),
        ("input_ids labels attention_mask", "tokenized"),
    ],
)
def test_the_format_is_found_by_the_columns(columns: str, expected: str) -> None:
    assert (
        find_format("my.jsonl", columns.split(), "auto")
        == find_format("x", columns.split(), expected)
        == expected
    )


@pytest.mark.parametrize(
    ("columns", "wanted", "text"),
    [
        ("txt id", "auto", "my.jsonl: its columns are id, txt, which fit no format"),
        ("prompt", "prompt_completion", "prompt_completion (prompt and completion)"),
        ("text", "alpacca", "--dataset_format is alpacca"),
        ("messages input_ids", "auto", "which fit messages and tokenized;"),
        (
            "prompt chosen rejected",
            "auto",
            "my.jsonl: it has pairs of a chosen and a rejected response.\nTrain on them with --objective dpo",
        ),
        ("prompt completion", "preference", "--dataset_format is preference"),
        (
            "prompt completion label",
            "auto",
            "its completions have labels, desirable or not.\n--objective kto",
        ),
    ],
)
def test_wrong_columns_are_listed_with_what_is_expected(
    columns: str, wanted: str, text: str
) -> None:
    with pytest.raises(UserError) as caught:
        find_format("my.jsonl", columns.split(), wanted)
    assert text in caught.value.messages[0]


def answered(**changes: object) -> Sample:
    """A chat whose answer is changed."""
    return {"messages": [USER, {**ANSWER, **changes}]}


@pytest.mark.parametrize(
    ("read", "sample", "text"),
    [
        (alpaca_messages, {"output": "yes"}, '"instruction" is missing'),
        (alpaca_messages, {"instruction": "Hi", "output": " "}, '"output" is " "'),
        (
            alpaca_messages,
            {"instruction": "Hi", "output": "yes", "input": ["a"]},
            '"input" is ["a"]; expected text',
        ),
        (
            alpaca_messages,
            {"instruction": "Hi", "output": "yes", "system": 5},
            '"system.content" is 5',
        ),
        (
            alpaca_messages,
            {"instruction": "Hi", "output": "yes", "history": "no"},
            '"history" is "no"; expected JSON',
        ),
        (
            alpaca_messages,
            {"instruction": "Hi", "output": "yes", "history": [["Hi", ""]]},
            '"history[0][1].content"',
        ),
        (chat_messages, {"messages": None}, '"messages" is null'),
        (chat_messages, {"tools": []}, '"messages" is missing'),
        (chat_messages, {"messages": ["Hi"]}, '"messages[0]" is "Hi"'),
        (
            chat_messages,
            answered(role="asistant"),
            '"messages[1].role" is "asistant"; expected assistant here',
        ),
        (
            chat_messages,
            {"messages": [ANSWER]},
            '"messages[0].role" is "assistant"; expected system or user here',
        ),
        (
            chat_messages,
            {"messages": [USER, ANSWER, USER]},
            '"messages[2]" is "user"; expected an assistant',
        ),
        (chat_messages, answered(content=None), '"messages[1].content" is null'),
        (
            chat_messages,
            {"messages": [USER, {"role": "assistant"}]},
            '"messages[1].content" is missing',
        ),
        (chat_messages, answered(content=""), '"messages[1].content" is empty'),
        (
            chat_messages,
            answered(content=[{"type": "image_url", "image_url": {}}]),
            '"messages[1].content[0]" is {',
        ),
        (chat_messages, answered(weight=2), '"messages[1].weight" is 2; expected 0'),
        (chat_messages, answered(tool_calls="f()"), '"messages[1].tool_calls" is "f()"'),
        (
            chat_messages,
            answered(tool_calls=[{"arguments": "{a"}]),
            '"messages[1].tool_calls[0].arguments" is "{a"; exp',
        ),
        *[
            (
                chat_messages,
                answered(tool_calls=[{"function": {"name": "f", "arguments": arguments}}]),
                '"messages[1].tool_calls[0].function.arguments" is ',
            )
            for arguments in ("[1]", [1], 5, False, '"Lima"', '"5"', '"\\"{}\\""')
        ],
        (
            sharegpt_messages,
            {"conversations": [{"from": "Human", "value": "Hi"}]},
            '"conversations[0].from" is "Human"',
        ),
        (prompt_completion, {"prompt": "Hi", "completion": [ANSWER]}, '"completion" is [{'),
        (
            prompt_completion,
            {"prompt": [USER], "completion": "yes"},
            '"completion" is "yes"; expected a list',
        ),
        (
            prompt_completion,
            {"prompt": [USER, ANSWER], "completion": [USER, ANSWER]},
            '"completion[0].role" is "user"',
        ),
        (
            labelled,
            {"prompt": "Hi", "completion": "yes"},
            '"label" is missing; expected true or false, 1 or 0',
        ),
        (
            labelled,
            {"prompt": "Hi", "completion": "yes", "label": 2},
            '"label" is 2; expected true',
        ),
        (pair_contents, {"prompt": "Hi", "chosen": "yes"}, '"rejected" is missing; expected text'),
        (
            pair_contents,
            {"prompt": "Hi", "chosen": "", "rejected": ""},
            '"chosen" is empty; expected text',
        ),
        (
            pair_contents,
            {"prompt": "Hi", "chosen": "a", "rejected": "a"},
            '"rejected" is "a"; expected another response',
        ),
        (
            pair_contents,
            {"chosen": "A: yes", "rejected": "B: no"},
            '"rejected" is "B: no"; expected the prompt that',
        ),
        (
            pair_contents,
            {"chosen": "A: yes", "rejected": "A: yes, but"},
            '"rejected" is "A: yes, but"; expected another',
        ),
        (
            pair_contents,
            {"chosen": [USER, ANSWER], "rejected": "no"},
            '"rejected" is "no"; expected a list of messages',
        ),
        (
            pair_contents,
            {"chosen": [USER, ANSWER], "rejected": []},
            '"rejected" is empty; expected a list of messages',
        ),
        (
            pair_contents,
            {"chosen": [ANSWER], "rejected": [NO]},
            '"prompt" is missing; expected text',
        ),
        (
            pair_contents,
            {"chosen": [USER, ANSWER], "rejected": [said("user", "Ho"), NO]},
            '"chosen[0]" is {"role": "user"',
        ),
        (
            pair_contents,
            {"chosen": [USER, ANSWER], "rejected": [USER, NO, USER]},
            '"rejected[2]" is "user"; expected an',
        ),
        (
            pair_contents,
            {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER, USER, ANSWER]},
            '"chosen[2]" is missing; expected a response to a prompt',
        ),
        (
            pair_contents,
            {"prompt": [said("user", "Ho")], "chosen": [USER, ANSWER], "rejected": [USER, NO]},
            '"chosen[1]" is {"role": "assistant", "content": "yes"}; expected a response to a prompt',
        ),
        (tokenized_sample, {"labels": [1]}, '"input_ids" is missing'),
        (
            tokenized_sample,
            {"input_ids": [1, 2], "labels": [1]},
            '"input_ids" has 2, "labels" has 1 entries; expected',
        ),
        (
            tokenized_sample,
            {"input_ids": [1, 2], "attention_mask": [1]},
            '"input_ids" has 2, "attention_mask" has 1 entries',
        ),
        (
            tokenized_sample,
            {"input_ids": [], "attention_mask": []},
            '"input_ids" has 0, "attention_mask" has 0 entries',
        ),
        (tokenized_sample, {"input_ids": [True], "labels": [1]}, '"input_ids" is [true]'),
        (plain_text, {"text": 5}, '"text" is 5'),
        (tools_of, {"tools": "[{"}, '"tools" is "[{"; expected JSON'),
        (tools_of, {"tools": ["f"]}, '"tools" is ["f"]; expected a list of objects'),
    ],
)
def test_the_wrong_field_is_named(
    read: Callable[[Sample], object], sample: Sample, text: str
) -> None:
    with pytest.raises(BadSample) as caught:
        read(sample)
    assert str(caught.value).startswith(text)


def test_tool_messages_follow_an_assistant_message_that_may_be_empty() -> None:
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "f"}}],
        "name": None,
    }
    tool = {"role": "tool", "content": "5"}
    checked = chat_messages({"messages": [USER, call, tool, tool, ANSWER]})
    assert [turn["role"] for turn in checked] == ["user", "assistant", "tool", "tool", "assistant"]
    assert checked[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f"}}],
    }


def test_tokens_without_labels_are_in_the_loss_unless_masked() -> None:
    assert tokenized_sample(
        {"input_ids": [1, 2, 3], "labels": None, "attention_mask": [0, 1, 1]}
    ) == ([2, 3], [2, 3])


def test_masks_of_tokens_take_them_out_of_the_loss() -> None:
    sample = {"input_ids": [1, 2, 3, 4], "completion_mask": [0, 0, 1, 1]}
    assert tokenized_sample(sample) == ([1, 2, 3, 4], [-100, -100, 3, 4])
    sample["assistant_masks"] = [False, True, True, False]
    assert tokenized_sample(sample) == ([1, 2, 3, 4], [-100, -100, 3, -100])
    sample = {"input_ids": [1, 2], "labels": [-100, 2], "loss_mask": [1, 1]}
    assert tokenized_sample(sample) == ([1, 2], [-100, 2])
    for mask in ([1], [1, 2], [1, None], "11", [0.0, 1.0]):
        with pytest.raises(BadSample, match='"loss_mask"'):
            tokenized_sample({"input_ids": [1, 2], "loss_mask": mask})


def test_openai_chats_keep_weights_and_get_the_text_and_arguments_that_templates_need() -> None:
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": '{"city": "Lima"}'},
    }
    parts = [{"type": "text", "text": "How warm"}, {"type": "text", "text": " is it?"}]
    turns = [
        said("user", parts),
        said("assistant", None, tool_calls=[call], weight=0),
        said("tool", "20"),
        ANSWER,
    ]
    checked = chat_messages({"messages": turns})
    assert checked[0]["content"] == "How warm is it?"
    assert checked[1]["weight"] == 0
    assert checked[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"city": "Lima"}}
    assert call["function"]["arguments"] == '{"city": "Lima"}'  # the sample itself is unchanged
    assert (
        chat_messages({"messages": [said("developer", "x"), USER, ANSWER]})[0]["role"] == "system"
    )


@pytest.mark.parametrize(
    "given", [{"city": "Lima"}, '{"city": "Lima"}', json.dumps('{"city": "Lima"}'), None, ""]
)
def test_arguments_become_an_object_also_if_they_are_encoded_twice(given: object) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": given}}
    [_, answer] = chat_messages(answered(content="", tool_calls=[call]))
    expected = {"city": "Lima"} if given else {}
    assert answer["tool_calls"][0]["function"]["arguments"] == expected


@pytest.mark.parametrize(
    ("tools", "expected"),
    [(None, None), ("", None), ([{"type": "f"}], [{"type": "f"}]), ('[{"a": 1}]', [{"a": 1}])],
)
def test_tools_are_a_list_or_its_json_text(tools: object, expected: object) -> None:
    assert tools_of({"tools": tools}) == expected


def test_sharegpt_conversations_become_messages() -> None:
    first = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Hi"}]
    second = [{"from": "gpt", "value": "Hello", "weight": 0}, {"from": "human", "value": "2 + 2?"}]
    turns = [*first, *second, {"from": "gpt", "value": "4", "weight": None}]
    messages = [
        said("system", "Be brief."),
        USER,
        said("assistant", "Hello", weight=0),
        said("user", "2 + 2?"),
    ]
    assert sharegpt_messages({"conversations": turns}) == [*messages, said("assistant", "4")]
    # some have OpenAI's keys there
    assert sharegpt_messages({"conversations": [USER, ANSWER]}) == [USER, ANSWER]


@pytest.mark.parametrize("history", [[["A", "B"], ["C", "D"]], '[["A", "B"], ["C", "D"]]'])
def test_system_and_history_of_alpaca_samples_become_messages(history: object) -> None:
    sample = {
        "instruction": "Hi",
        "input": "",
        "output": "yes",
        "system": "Be brief.",
        "history": history,
    }
    turns = [
        said("user", "A"),
        said("assistant", "B"),
        said("user", "C"),
        said("assistant", "D"),
        USER,
        ANSWER,
    ]
    assert alpaca_messages(sample) == [said("system", "Be brief."), *turns]
    assert alpaca_messages({**sample, "system": " ", "history": ""}) == [USER, ANSWER]
    assert alpaca_messages({**sample, "system": None, "history": None}) == [USER, ANSWER]


def test_a_system_column_is_the_system_message_of_a_chat_that_has_none() -> None:
    brief = said("system", "Be brief.")
    own = said("system", "Be kind.")
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "yes"}]
    assert sharegpt_messages({"system": "Be brief.", "conversations": turns}) == [
        brief,
        USER,
        ANSWER,
    ]
    assert chat_messages({"system": "Be brief.", "messages": [own, USER, ANSWER]}) == [
        own,
        USER,
        ANSWER,
    ]
    sample = {"system": "Be brief.", "prompt": [USER, ANSWER, USER], "completion": [ANSWER]}
    assert prompt_completion(sample) == [brief, USER, {**ANSWER, "weight": 0}, USER, ANSWER]
    sample = {"system": "Be brief.", "prompt": "Hi ", "completion": "yes"}
    assert prompt_completion(sample) == ("Be brief.\n\nHi ", "yes")


def test_prompt_and_completion_are_texts_or_a_chat_with_only_the_completion_in_the_loss() -> None:
    assert prompt_completion({"prompt": "Hi ", "completion": "yes"}) == ("Hi ", "yes")
    sample = {"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}
    assert prompt_completion(sample) == [USER, {**ANSWER, "weight": 0}, USER, ANSWER]


def test_pairs_are_texts_or_chats_with_or_without_a_column_for_the_prompt() -> None:
    texts = [("Hi ", "yes"), ("Hi ", "no")]
    assert pair_contents({"prompt": "Hi ", "chosen": "yes", "rejected": "no"}) == texts
    assert pair_contents({"chosen": "Hi yes", "rejected": "Hi no"}) == texts
    system = said("system", "Be brief.")
    earlier = {**ANSWER, "weight": 0}
    for prompt in ([USER, ANSWER, USER], [system, USER, ANSWER, USER]):
        before = [earlier if message is ANSWER else message for message in prompt]
        chats = [[*before, ANSWER], [*before, NO]]
        whole = {"chosen": [*prompt, ANSWER], "rejected": [*prompt, NO]}
        assert pair_contents({"prompt": prompt, "chosen": [ANSWER], "rejected": [NO]}) == chats
        assert pair_contents(whole) == pair_contents({**whole, "prompt": prompt}) == chats
        assert pair_contents({**whole, "prompt": "Hi"}) == chats, "as the Hub's sets repeat it"
    assert pair_contents({"prompt": "Hi", "chosen": [ANSWER], "rejected": [NO]}) == [
        [USER, ANSWER],
        [USER, NO],
    ]
    sample = {"system": "Be brief.", "chosen": [USER, ANSWER], "rejected": [USER, NO]}
    assert pair_contents(sample) == [[system, USER, ANSWER], [system, USER, NO]]
    assert FORMATS["preference"].read(sample) == [system, USER, ANSWER]


@pytest.mark.parametrize(
    ("label", "opposite"),
    [(True, False), (1, 0), ("True", "False"), ("true", "false"), ("1", "0"), (1.0, 0.0)],
)
def test_a_label_is_a_boolean_a_number_or_the_text_of_one(label: Any, opposite: Any) -> None:
    sample = {"prompt": [USER], "completion": [ANSWER], "label": label}
    assert labelled(sample) == [USER, ANSWER] and is_desirable(sample)
    assert not is_desirable({"label": opposite})


TOKENIZE = """
import sys
from pathlib import Path
from transformers import AutoTokenizer
from llama_ft import data
from llama_ft.config import DataConfig
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
for wanted in ("auto", "question_answers"):
    config = DataConfig(dataset="my_data.jsonl", dataset_format=wanted, chat_template="alpaca")
    request = data.DataRequest(context_length=99, want_validation=False)
    samples = data.prepare(config, tokenizer, request, cache=Path("cache")).train
    print([tokenizer.decode([label for label in labels if label >= 0]) for labels in samples["labels"]])
"""


@pytest.mark.slow
def test_the_format_of_the_tutorial_changes_one_file(
    save_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Page("docs/development/add-a-format.md")
    shutil.copytree(
        REPOSITORY / "src",
        tmp_path / "src",
        ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"),
    )
    shutil.copytree(REPOSITORY / "configs", tmp_path / "configs")
    (tmp_path / "change.diff").write_text(page.blocks("diff")[0])
    (sample,) = page.blocks("json")
    (tmp_path / "my_data.jsonl").write_text(json.dumps(json.loads(sample)))
    command = [sys.executable, "-c", TOKENIZE, str(save_model(tmp_path / "model"))]
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    subprocess.run(["git", "apply", "change.diff"], cwd=tmp_path, check=True)
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines() == ["['4</s>']"] * 2, done.stderr
    # the copy passes lint and budgets
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    for check in (["check"], ["format", "--check"]):
        lint = [sys.executable, "-m", "ruff", *check, "src"]
        linted = subprocess.run(lint, cwd=tmp_path, capture_output=True, text=True)
        assert linted.returncode == 0, linted.stdout
    monkeypatch.setattr(test_budgets, "SOURCE", tmp_path / "src" / "llama_ft")
    test_budgets.test_no_folder_and_no_file_exceeds_its_budget()
