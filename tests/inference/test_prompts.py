"""Files of prompts: what is read, what is refused and where, and which tokens come of it."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from llama_ft.errors import RunFailure, UserError
from llama_ft.inference.prompts import Encoding, answers_to, choose_encoding, read_prompts

TURN = {"role": "user", "content": "Hi"}
REPLY = {"role": "assistant", "content": "Hello."}
TEMPLATE = (
    "{% for turn in messages %}{% if turn.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "[{{ turn.role }}]{{ turn.content }}{% endfor %}{% if add_generation_prompt %}[answer]{% endif %}"
)


@pytest.fixture
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(tiny_model)
    return tokenizer


def write(file: Path, *rows: Any) -> Path:
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def mistakes(*given: Any, **settings: Any) -> str:
    with pytest.raises(UserError) as told:
        read_prompts(*given, **settings)
    return str(told.value)


def test_prompts_are_lines_or_rows_whose_other_keys_are_kept(tmp_path: Path) -> None:
    lines = read_prompts(write(tmp_path / "a.txt", "one", "", "  two \r"), "answer")
    assert [(it.number, it.line, it.asked) for it in lines] == [(0, 1, "one"), (1, 3, "  two ")]
    rows = [{"prompt": "Hi", "id": 7}, {"messages": [TURN, REPLY, TURN]}, {"messages": [TURN, REPLY], "weight": 2}]
    read = read_prompts(write(tmp_path / "b.jsonl", *rows), "answer")
    assert [it.asked for it in read] == ["Hi", [TURN, REPLY, TURN], [TURN]], "training data end in an answer"
    assert [it.row for it in read] == rows


@pytest.mark.parametrize(("name", "line"), [("a.txt", "Wie heißt es?"), ("a.jsonl", '{"prompt": "Wie heißt es?"}')])
def test_a_byte_order_mark_is_no_part_of_the_first_prompt(name: str, line: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(f"{line}\n", encoding="utf-8-sig")
    assert [it.asked for it in read_prompts(tmp_path / name, "answer")] == ["Wie heißt es?"]


def test_rows_that_are_no_prompts_are_told_by_their_lines(tmp_path: Path) -> None:
    rows = [
        {"prompt": "good"}, "{", [1], {"question": "Hi"}, {"prompt": " "}, {"prompt": "a", "messages": [TURN]},
        {"messages": []}, {"messages": [{"role": "asker", "content": "Hi"}]}, {"messages": [{"role": "user"}]},
        {"messages": [REPLY]}, {"prompt": "a", "answer": "b"}, "}", "}",
    ]  # fmt: skip
    file = write(tmp_path / "rows.jsonl", *rows)
    told = mistakes(file, "answer").splitlines()
    assert [line.split(": ")[1] for line in told[:10]] == [f"{file}:{line}" for line in range(2, 12)]
    parts = (
        "Expecting property name", "expected an object", 'with "prompt" or "messages".', '"prompt" is " "',
        'with "prompt" or "messages".', "expected a list of messages", '"messages[0].role" is "asker"; expected system',
        "content", "no message of a user", "--output_key names another",
    )  # fmt: skip
    for line, part in zip(told, parts, strict=False):
        assert part in line
    assert told[10] == "error: ... and 2 more lines."
    assert "holds no prompts" in mistakes(write(tmp_path / "none.txt", "", " "), "answer")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    assert "cannot be read" in mistakes(tmp_path / "bytes.txt", "answer")


def test_a_prompt_is_written_by_the_chat_template_or_taken_as_it_is(tokenizer: PreTrainedTokenizerBase) -> None:
    def text(encoding: Encoding, asked: Any) -> str:
        return str(tokenizer.decode(encoding.tokens(asked)))

    plain = choose_encoding(tokenizer, no_chat_template=False, system=None)
    assert not plain.is_chat and text(plain, "Once upon") == "Once upon"
    with pytest.raises(UserError, match="no chat template"):
        choose_encoding(tokenizer, no_chat_template=False, system="Be brief.")
    tokenizer.chat_template = TEMPLATE
    chat = choose_encoding(tokenizer, no_chat_template=False, system="Be brief.")
    assert text(chat, "Hi") == "[system]Be brief.[user]Hi[answer]"
    assert text(chat, [{"role": "system", "content": "Be long."}, TURN]) == "[system]Be long.[user]Hi[answer]"
    assert text(choose_encoding(tokenizer, True, None), "Hi") == "Hi"
    with pytest.raises(UserError, match="a chat template is needed"):
        plain.tokens([TURN])
    with pytest.raises(UserError, match="rejects it .no tools"):
        chat.tokens([TURN, {"role": "tool", "content": "3"}])


def test_contents_of_text_parts_become_text_and_other_parts_are_told(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": " there"}]
    row = {"messages": [{"role": "user", "content": parts}], "id": 1}
    [prompt] = read_prompts(write(tmp_path / "parts.jsonl", row), "answer")
    assert prompt.asked == [{"role": "user", "content": "Hi there"}] and prompt.row == row
    row["messages"][0]["content"] = [{"type": "image_url"}]
    told = mistakes(write(tmp_path / "image.jsonl", row), "answer")
    assert '"messages[0].content[0]" is of type "image_url"; expected text parts only.' in told


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"prompt": null}', '"prompt" is null; expected text or a list of messages'),
        ("[" * 100_000, "maximum recursion depth"),
        ('{"prompt": "Hi", "id": "\\ud800"}', "'utf-8' codec can't encode character"),
    ],
)
def test_lines_that_no_answer_can_stand_in_are_told(line: str, told: str, tmp_path: Path) -> None:
    assert f"rows.jsonl:2: {told}" in mistakes(write(tmp_path / "rows.jsonl", {"prompt": "Hi"}, line), "answer")


def test_answers_are_written_as_they_come_and_a_full_disk_is_named(tmp_path: Path) -> None:
    file = tmp_path / "new" / "answers.jsonl"
    with answers_to(file, overwrite=False) as answers:
        answers.write("\u2028 é\n")
    assert file.read_bytes() == "\u2028 é\n".encode()
    with pytest.raises(RunFailure, match=r"answers\.jsonl: cannot be written \(File exists\)"):
        answers_to(file, overwrite=False).__enter__()
    full = tmp_path / "full.jsonl"
    full.symlink_to("/dev/full")
    with (
        pytest.raises(RunFailure, match=r"full\.jsonl: cannot be written \(No space left on device\)"),
        answers_to(full, overwrite=True) as answers,
    ):
        answers.write("one\n")
        answers.flush()
