"""The conversation with its commands, typed into stdin; in place of a model stands what answers by counting."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from llama_ft.inference.chat import Chat
from llama_ft.inference.generate import Answer, Sampling
from llama_ft.inference.prompts import Encoding

TEMPLATE = "{% for turn in messages %}[{{ turn.role }}]{{ turn.content }}{% endfor %}"
GREEDY = Sampling(0.0, 1.0, 50, 0.0, 1.0, 20, 42, ())


class Typed:
    """What a person has typed, and what came of it."""

    def __init__(self, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        self.tokenizer.chat_template = TEMPLATE
        self._patch, self._capsys = monkeypatch, capsys
        self.asked: list[str] = []
        self.numbers: list[int] = []
        self.samplings: list[Sampling] = []

    def __call__(self, *lines: str, system: str | None = None, context: int | None = None) -> tuple[str, str]:
        def ask(ids: list[int], number: int, sampling: Sampling, show: Any, stopped: Any) -> Answer:
            self.asked.append(str(self.tokenizer.decode(ids)))
            self.numbers.append(number)
            self.samplings.append(sampling)
            show(f"answer {len(self.asked)}")
            return Answer(f"answer {len(self.asked)}", is_cut=False)

        self.asked.clear()
        self.numbers.clear()
        self._patch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        Chat(ask, Encoding(self.tokenizer, is_chat=True, system=system), GREEDY, context).run()
        captured = self._capsys.readouterr()
        return captured.out, captured.err


@pytest.fixture
def typed(tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Typed:
    return Typed(tiny_model, monkeypatch, capsys)


def test_answers_alone_go_to_stdout_and_each_question_has_the_earlier_turns(typed: Typed) -> None:
    out, err = typed("one", "", "two", "//three", system="Be brief.")
    assert out == "answer 1\nanswer 2\nanswer 3\n" and err == ""
    assert typed.asked[0] == "[system]Be brief.[user]one"
    assert typed.asked[1] == "[system]Be brief.[user]one[assistant]answer 1[user]two"
    assert typed.asked[2].endswith("[user]/three")


def test_a_developers_turn_stays_as_a_system_prompt_does(typed: Typed, tmp_path: Path) -> None:
    turns = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "one"}]
    (tmp_path / "chat.json").write_text(json.dumps({"messages": turns}))
    typed(f"/load {tmp_path / 'chat.json'}", *["a question of some length"] * 5, context=150)
    assert all(asked.startswith("[developer]Be brief.") for asked in typed.asked)
    typed(f"/load {tmp_path / 'chat.json'}", "/reset", "two")
    assert typed.asked == ["[developer]Be brief.[user]two"]


def test_a_message_may_have_several_lines(typed: Typed) -> None:
    typed("one\\", "more", '"""', "a", "", 'b"""', '"""in one"""', '"""', "// sum", '"""', '"""/etc/hosts is', '"""')
    assert [asked.rpartition("[user]")[2] for asked in typed.asked] == [
        "one\nmore", "a\n\nb", "in one", "// sum", "/etc/hosts is",
    ]  # fmt: skip


def test_turns_are_forgotten_and_asked_again(typed: Typed) -> None:
    typed("one", "two", "/retry", "/undo", "three", "/reset", "four", "/system Be odd.", "five", "/exit", "six")
    assert typed.asked[2] == typed.asked[1] and typed.numbers == [0, 1, 2, 3, 4, 5], "another answer is drawn"
    assert typed.asked[3:] == ["[user]one[assistant]answer 1[user]three", "[user]four", "[system]Be odd.[user]five"]
    _, err = typed("/undo", "/retry", "/nope", "/sett x", "/save", "/help")
    assert err.count("no message yet") == 2
    assert "/nope is not a command" in err and "/sett is not a command" in err
    assert "/save : not possible (Is a directory)" in err or "/save : not possible (File exists)" in err
    assert "/retry                answer the last" in err
    assert not typed.asked


def test_a_conversation_is_saved_as_a_row_of_data_and_loaded_again(typed: Typed, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    typed("one", f"/save {file}", "two", f"/save {file}")
    saved = json.loads(file.read_text())
    assert [turn["content"] for turn in saved["messages"]] == ["one", "answer 1", "two", "answer 2"]
    _, err = typed(f"/save {file}", f"/load {file}", "three", f"/load {tmp_path}", "/load /gone")
    assert typed.asked == ["[user]one[assistant]answer 1[user]two[assistant]answer 2[user]three"]
    assert "File exists" in err and "Is a directory" in err and "no such file" in err
    for text in ('{"messages": [{"role": "cat"}]}', "[" * 100_000):
        file.write_text(text)
        assert "not possible (" in typed(f"/load {file}")[1]
    row = {"messages": [{"role": "user", "content": [{"type": "text", "text": "parts"}]}]}
    file.write_text(json.dumps(row), encoding="utf-8-sig")  # as some editors save it
    typed(f"/load {file}", "/retry")
    assert typed.asked == ["[user]parts"]


def test_what_cannot_be_is_told_and_the_conversation_goes_on(typed: Typed) -> None:
    _, err = typed(
        "one", "/save ~nosuchuser/x", f"/save {'n' * 5000}", "/load ~nosuchuser/x", "/set repetition_penalty 0",
        "/set temperature", "half \udcff", "two",
    )  # fmt: skip
    assert typed.asked == ["[user]one", "[user]one[assistant]answer 1[user]two"] and len(err) < 1000
    assert err.count("not possible (") == 3 and "File name too long" in err
    assert "/set repetition_penalty 0: must be greater than 0." in err
    assert "/set temperature: the value is empty." in err and "This is not UTF-8." in err


def test_settings_change_what_comes_after(typed: Typed) -> None:
    _, err = typed(
        "/set temperature 0.7", "/set stop ###", "/set top_k many", "/set heat 1", "/set", "one", "/set stop", "two"
    )
    first, second = typed.samplings[-2:]
    assert (first.temperature, first.stop, second.stop) == (0.7, ("###",), ())
    assert "/set top_k many: must be a valid integer." in err and "/set heat: it is one of" in err
    assert "max_new_tokens 20" in err


def test_the_oldest_turns_are_dropped_where_they_no_longer_fit(typed: Typed) -> None:
    system = "Be brief."
    _, err = typed(*["a question of some length"] * 5, system=system, context=150)
    lengths = [len(typed.tokenizer(asked)["input_ids"]) for asked in typed.asked]
    assert max(lengths) + 20 <= 150 and lengths[0] < lengths[1] < lengths[2] == lengths[4]
    assert all(asked.startswith("[system]Be brief.[user]a question") for asked in typed.asked)
    assert "are dropped: the model has 150 positions" in err
    _, err = typed("word " * 100, "short", context=150)
    assert "tokens, and the model has 150 positions" in err
    assert typed.asked == ["[user]short"], "what cannot be asked is forgotten"
    _, err = typed("one", "word " * 100, "two", context=150)
    assert typed.asked[1] == "[user]one[assistant]answer 1[user]two" and "dropped" not in err, "and nothing else is"
