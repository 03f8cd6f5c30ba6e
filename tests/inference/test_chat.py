"""The conversation, typed into stdin; in place of a model stands what answers by counting."""

import io
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from llama_ft.inference.chat import converse
from llama_ft.inference.flags import InferenceFlags
from llama_ft.inference.generate import Answer, Answerer
from llama_ft.runtime import Runtime

TEMPLATE = "{% for turn in messages %}[{{ turn.role }}]{{ turn.content }}{% endfor %}"


class Counts(Answerer):
    """Answers by counting, with the chat template and the limits of a real one."""

    def __init__(self, tokenizer: Any, options: InferenceFlags, context: int) -> None:
        self.tokenizer, self._options, self.context = tokenizer, options, context
        self.asked: list[str] = []

    def answer(self, prompts: Any, show: Any = None, stopped: Any = None) -> list[Answer]:
        self.longest_answer(len(prompts[0]))
        self.asked += [str(self.tokenizer.decode(prompt)) for prompt in prompts]
        show(f"answer {len(self.asked)}")
        return [Answer(f"answer {len(self.asked)}", is_truncated=False)]


@pytest.fixture
def typed(tiny_model: Path, monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> Iterator[Callable[..., Counts]]:
    """Have a conversation of given lines."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = TEMPLATE
    handler, wakeup = signal.getsignal(signal.SIGINT), signal.set_wakeup_fd(-1)

    def talk(*lines: str, system: str | None = None, context: int = 4096) -> Counts:
        answerer = Counts(tokenizer, InferenceFlags(system_prompt=system, max_new_tokens=20), context)
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        converse(answerer, runtime)
        return answerer

    yield talk
    signal.signal(signal.SIGINT, handler)
    signal.set_wakeup_fd(wakeup)


def test_answers_alone_go_to_stdout_and_each_question_has_the_earlier_turns(
    typed: Callable[..., Counts], capsys: pytest.CaptureFixture[str]
) -> None:
    talk = typed("one", "", "two", " /three", "/help", "/reset", "four", "/exit", "five", system="Be brief.")
    assert capsys.readouterr().out == "answer 1\nanswer 2\nanswer 3\nanswer 4\n"
    assert talk.asked[0] == "[system]Be brief.[user]one"
    assert talk.asked[1] == "[system]Be brief.[user]one[assistant]answer 1[user]two"
    assert talk.asked[2].endswith("[assistant]answer 2[user] /three")
    assert talk.asked[3:] == ["[system]Be brief.[user]four"]


def test_the_oldest_turns_are_dropped_where_they_no_longer_fit(
    typed: Callable[..., Counts], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "llama_ft")
    talk = typed(*["a question of some length"] * 5, system="Be brief.", context=150)
    lengths = [len(talk.tokenizer(asked)["input_ids"]) for asked in talk.asked]
    assert max(lengths) + 20 <= 150 and lengths[0] < lengths[1] < lengths[2] == lengths[4]
    assert all(asked.startswith("[system]Be brief.[user]a question") for asked in talk.asked)
    assert "are dropped" in caplog.text
    talk = typed("one", "word " * 100, "two", context=150)
    assert talk.asked[1] == "[user]one[assistant]answer 1[user]two", "what cannot be asked is forgotten, nothing else"
