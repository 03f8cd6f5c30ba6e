"""Files of prompts: what is read, what is rejected and where, and which tokens come of it. The
conversation, typed into stdin; in place of a model stands what answers by counting."""

import io
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import build_model
from datasets import Dataset
from transformers import AutoTokenizer

from llama_ft.errors import UserError
from llama_ft.inference.flags import InferenceFlags
from llama_ft.inference.generate import Answerer, GeneratedAnswer
from llama_ft.inference.load import open_model
from llama_ft.inference.prompts import answer_prompts, converse, read_prompts
from llama_ft.runtime import Ranks

TURN = {"role": "user", "content": "Hi"}
REPLY = {"role": "assistant", "content": "Hello."}
TEMPLATE = (
    "{% for turn in messages %}{% if turn.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "[{{ turn.role }}]{{ turn.content }}{% endfor %}{% if add_generation_prompt %}[answer]{% endif %}"
)


def write(file: Path, *rows: Any) -> Path:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    # as some editors save it
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8-sig")
    return file


def test_prompts_are_lines_of_text_or_samples_whose_other_keys_are_kept(tmp_path: Path) -> None:
    lines = read_prompts(str(write(tmp_path / "a.txt", "Wie heißt es?", "", "  two \r")))
    assert [asked for _, asked in lines] == ["Wie heißt es?", "  two "]
    parts = {
        "role": "user",
        "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": " there"}],
    }
    rows = [
        {"prompt": "Hi", "id": 7},
        {"messages": [TURN, REPLY, TURN]},
        {"messages": [TURN, REPLY], "weight": 2},
    ]
    rows.append({"messages": [parts]})
    read = read_prompts(str(write(tmp_path / "b.jsonl", *rows)))
    assert [asked for _, asked in read] == [
        "Hi",
        [TURN, REPLY, TURN],
        [TURN],
        [{"role": "user", "content": "Hi there"}],
    ], "training data end in an answer"
    assert [row for row, _ in read] == rows


def test_prompts_are_samples_in_every_format_of_the_training_data(tmp_path: Path) -> None:
    """With or without an answer at their end, which is left off."""
    human, gpt = ({"from": said["role"], "value": said["content"]} for said in (TURN, REPLY))
    rows: dict[str, Any] = {
        "alpaca": {"instruction": "Hi", "input": "you", "output": "Hello."},
        "alpaca without": {"instruction": "Hi", "input": "you"},
        "sharegpt": {"conversations": [human, gpt]},
        "sharegpt without": {"conversations": [human]},
        "completion": {"prompt": [TURN], "completion": [REPLY]},
        "text": {"prompt": "Hi", "completion": "Hello.", "system": "Be brief."},
        "common names": {"question": "Hi", "response": "Hello."},
    }
    asked = {}
    for name, row in rows.items():
        (tmp_path / "rows.json").write_text(json.dumps([row, row]))
        read = read_prompts(str(tmp_path / "rows.json"))
        assert len(read) == 2 and read[0] == read[1]
        asked[name] = read[0][1]
    alpaca = [{"role": "user", "content": "Hi\n\nyou"}]
    assert asked == {
        **dict.fromkeys(("alpaca", "alpaca without"), alpaca),
        "text": "Be brief.\n\nHi",
        **dict.fromkeys(("sharegpt", "sharegpt without", "completion", "common names"), [TURN]),
    }
    (tmp_path / "rows.csv").write_text("Ask;Reply\nHi;Hello.\n")
    [(row, messages)] = read_prompts(str(tmp_path / "rows.csv"), ["question=Ask"])
    assert (row, messages) == ({"instruction": "Hi", "Reply": "Hello."}, [TURN])
    Dataset.from_list([{"messages": [TURN, REPLY], "id": 7}]).to_parquet(tmp_path / "rows.parquet")
    [(row, messages)] = read_prompts(str(tmp_path / "rows.parquet"))
    assert row["id"] == 7 and messages == [TURN]


def test_columns_of_the_run_hold_for_prompts_that_have_them(tmp_path: Path) -> None:
    columns = ["instruction=frage", "output=antwort"]
    for row in ({"frage": "Hi", "antwort": "Hello."}, {"frage": "Hi"}, {"instruction": "Hi"}):
        [(_, asked)] = read_prompts(str(write(tmp_path / "a.jsonl", row)), run_columns=columns)
        assert asked == [TURN]
    both = str(write(tmp_path / "a.jsonl", {"frage": "other", "text": "Hi"}))
    [(_, asked)] = read_prompts(both, ["instruction=text"], run_columns=columns)
    assert asked == [TURN], "the flag comes first"


def test_samples_with_the_same_fault_are_one_line(tmp_path: Path) -> None:
    file = str(write(tmp_path / "a.jsonl", *[{"id": 1}] * 21, {"prompt": "good"}, "{"))
    with pytest.raises(UserError) as refused:
        read_prompts(file)
    first, second, last = refused.value.messages
    assert first.startswith(f"{file}:1: ") and first.endswith("(20 more samples likewise)")
    assert second.startswith(f"{file}:23: ") and "likewise" not in second
    assert last.startswith("--prompts: 22 bad samples")


@pytest.mark.parametrize(
    "row",
    ["{", [1], {"question": "Hi"}, {"prompt": " "}, {"messages": [REPLY]}]
    + [{"prompt": "a", "completion": "b", "answer": "c"}],
)
def test_samples_that_are_not_prompts_are_reported_with_their_lines(
    row: Any, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"rows\.jsonl:2: "):
        read_prompts(str(write(tmp_path / "rows.jsonl", {"prompt": "good"}, row)))


def test_all_bad_samples_are_named_at_once_and_can_be_skipped(tmp_path: Path) -> None:
    lines = [{"prompt": "good"}, "{", {"prompt": " "}, {"prompt": "better"}, {"prompt": 3}]
    file = str(write(tmp_path / "rows.jsonl", *lines))
    with pytest.raises(UserError) as refused:
        read_prompts(file)
    places = [message.split(": ")[0] for message in refused.value.messages]
    assert places == [f"{file}:2", f"{file}:3", f"{file}:5", "--prompts"]
    assert "3 bad samples. --skip_bad_rows" in refused.value.messages[-1]
    read = read_prompts(file, skip_bad_rows=True)
    assert [asked for _, asked in read] == ["good", "better"]
    with pytest.raises(UserError, match="holds no prompts"):
        read_prompts(str(write(tmp_path / "bad.jsonl", {"prompt": " "})), skip_bad_rows=True)


def test_a_prompt_is_formatted_by_the_chat_template_or_used_as_it_is(
    tiny_model: Path, tmp_path: Path, runtime: Ranks
) -> None:
    opened = open_model(str(tiny_model), InferenceFlags(precision="fp32"), runtime, build_model())

    def text(asked: Any, system: str | None = None) -> str:
        answerer = Answerer(opened, InferenceFlags(system_prompt=system), runtime)
        return str(opened.tokenizer.decode(answerer.tokens(asked)))

    assert text("Once upon") == "Once upon"
    for wrong in ([TURN], None):
        with pytest.raises(UserError, match="needs a chat template"):
            text(wrong or "Hi", system=None if wrong else "Be brief.")
    opened.tokenizer.chat_template = TEMPLATE
    assert text("Hi", "Be brief.") == "[system]Be brief.[user]Hi[answer]"
    opened.tokenizer.chat_template = (
        "{% for tool in tools or [] %}({{ tool.name }}){% endfor %}" + TEMPLATE
    )
    with_tools = Answerer(opened, InferenceFlags(), runtime).tokens([TURN], [{"name": "add"}])
    assert opened.tokenizer.decode(with_tools) == "(add)[user]Hi[answer]"
    assert (
        text([{"role": "system", "content": "Be long."}, TURN], "Be brief.")
        == "[system]Be long.[user]Hi[answer]"
    )
    of_texts = opened._replace(prompt_format="text")  # the fine-tuning had no chat template
    expected = {"auto": "Hi", "text": "Hi", "chat": "[user]Hi[answer]"}
    for form, written in expected.items():
        flags = InferenceFlags(prompt_format=form)  # type: ignore[arg-type]
        ids = Answerer(of_texts, flags, runtime).tokens("Hi")
        assert opened.tokenizer.decode(ids).removeprefix("(add)") == written
    as_text = Answerer(opened, InferenceFlags(prompt_format="text"), runtime)
    assert opened.tokenizer.decode(as_text.tokens("Hi")) == "Hi"
    with pytest.raises(UserError, match="rejects this chat: no tools"):
        text([TURN, {"role": "tool", "content": "3"}])

    options = InferenceFlags(output=f"{tmp_path}/new/answers.jsonl", max_new_tokens=3, batch_size=2)
    rows: list[Any] = [({"id": n}, "word " * (1 + n % 2)) for n in range(5)]
    assert answer_prompts(rows, Answerer(opened, options, runtime), options, runtime) <= 5
    answers = [
        json.loads(line) for line in (tmp_path / "new" / "answers.jsonl").read_text().splitlines()
    ]
    assert [row["id"] for row in answers] == [0, 1, 2, 3, 4] and answers[0]["answer"] == answers[2][
        "answer"
    ]
    with pytest.raises(UserError, match=r"prompt 2: the prompt has .* \(1 more sample likewise\)"):
        long = ({}, "word " * 300)
        answer_prompts(
            [rows[0], long, rows[1], long], Answerer(opened, options, runtime), options, runtime
        )
    skipping = InferenceFlags(
        output=f"{tmp_path}/short.jsonl", max_new_tokens=3, skip_bad_rows=True
    )
    usable = [({}, "word " * 300), rows[1], ({}, "word " * 301), rows[2]]
    answer_prompts(usable, Answerer(opened, skipping, runtime), skipping, runtime)
    answered = (tmp_path / "short.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in answered] == [1, 2]
    with pytest.raises(FileExistsError):
        answer_prompts(rows, Answerer(opened, options, runtime), options, runtime)


CHAT_TEMPLATE = "{% for turn in messages %}[{{ turn.role }}]{{ turn.content }}{% endfor %}"


class Counts(Answerer):
    """Answers by counting, with the chat template and the limits of a real one."""

    def __init__(self, tokenizer: Any, options: InferenceFlags, context: int) -> None:
        self.tokenizer = tokenizer
        self._media = None
        self.asks_text = False
        self._options = options
        self.context = context
        self.vocabulary = len(tokenizer)
        self.asked: list[str] = []

    def answer(self, prompts: Any, show: Any = None) -> list[GeneratedAnswer]:
        self.longest_answer(len(prompts[0]))
        self.asked += [str(self.tokenizer.decode(prompt)) for prompt in prompts]
        show(f"answer {len(self.asked)}")
        if "stop" in self.asked[-1]:
            raise KeyboardInterrupt
        return [GeneratedAnswer(f"answer {len(self.asked)}", is_truncated=False)]


@pytest.fixture
def typed(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, runtime: Ranks
) -> Iterator[Callable[..., Counts]]:
    """Have a conversation of given lines."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = CHAT_TEMPLATE
    handler = signal.getsignal(signal.SIGINT)
    wakeup = signal.set_wakeup_fd(-1)

    def talk(
        *lines: str, system: str | None = None, context: int = 4096, asks_text: bool = False
    ) -> Counts:
        answerer = Counts(
            tokenizer, InferenceFlags(system_prompt=system, max_new_tokens=20), context
        )
        answerer.asks_text = asks_text
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        converse(answerer, runtime)
        return answerer

    yield talk
    signal.signal(signal.SIGINT, handler)
    signal.set_wakeup_fd(wakeup)


def test_a_model_that_was_trained_on_texts_gets_each_message_alone_and_as_text(
    typed: Callable[..., Counts],
) -> None:
    assert typed("one", "two", asks_text=True).asked == ["one", "two"]
    talk = typed("one", system="Be brief.", asks_text=True)
    assert talk.asked == ["Be brief.\n\none"]  # as training joins the columns system and prompt


def test_only_answers_go_to_stdout_and_each_prompt_has_the_earlier_messages(
    typed: Callable[..., Counts], capsys: pytest.CaptureFixture[str]
) -> None:
    talk = typed(
        "one", "", "two", " /three", "/help", "/reset", "four", "/exit", "five", system="Be brief."
    )
    assert capsys.readouterr().out == "answer 1\nanswer 2\nanswer 3\nanswer 4\n"
    assert talk.asked[0] == "[system]Be brief.[user]one"
    assert talk.asked[1] == "[system]Be brief.[user]one[assistant]answer 1[user]two"
    assert talk.asked[2].endswith("[assistant]answer 2[user] /three")
    assert talk.asked[3:] == ["[system]Be brief.[user]four"]
    talk = typed("one", "word " * 100, "stop two", "three", context=150)
    assert talk.asked[1] == "[user]one[assistant]answer 1[user]stop two", (
        "only what cannot be asked is forgotten"
    )
    assert talk.asked[2].endswith("[user]stop two[assistant]answer 2[user]three"), (
        "what Ctrl-C has let come is kept"
    )
