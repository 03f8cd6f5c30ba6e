"""For every token in the loss: its prefix is the prompt that inference renders, and the text is
what the template writes for the response as the last message. The reference is
`apply_chat_template` of Transformers."""

import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from template_chats import CALL, CALLED, SPECIAL, STOCK, TOOLS, assistant, system, tool, user
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import _compile_jinja_template

from llama_ft.data import Encoder
from llama_ft.data.chat.chat_template import BUILT_IN
from llama_ft.data.read.formats import BadSample, Message
from llama_ft.data.tokenize.encoder import Encoded

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]
TEMPLATES = STOCK | {f"built-in {name}": template for name, template in BUILT_IN.items()}
OPENED = "<think>\n"


LONG_REASONING = (
    "A thought that is longer than all that is before it.\n\nAnd then more words, to be sure."
)


class Chat(NamedTuple):
    messages: list[Message]
    tools: list[Any] | None = None


PLAIN = Chat([user("Q1"), assistant("first"), user("Q2"), assistant("second")])
CHATS = {
    "one response": Chat(PLAIN.messages[:2]),
    "plain": PLAIN,
    "system": Chat([system("Sys"), *PLAIN.messages, user("Q3"), assistant("third")]),
    "tags": Chat(
        [
            user("Q1"),
            assistant("<think>\nwhy one\n</think>\n\nfirst"),
            user("Q2"),
            assistant("<think>\nwhy two\n</think>\n\nsecond"),
        ]
    ),
    "field": Chat(
        [
            user("Q1"),
            assistant("first", reasoning_content="why one"),
            user("Q2"),
            assistant("second", reasoning_content="why two"),
        ]
    ),
    "some reasoning": Chat(
        [
            user("Q1"),
            assistant("first", reasoning_content="why one"),
            user("Q2"),
            assistant("second"),
        ]
    ),
    "tools": Chat([*CALLED, user("Q2"), assistant("second")], TOOLS),
    "tools and reasoning": Chat(
        [
            user("Q1"),
            assistant("", reasoning_content="why call", tool_calls=CALL),
            tool("eleven"),
            assistant("first", reasoning_content="why one"),
            user("Q2"),
            assistant("second", reasoning_content="why two"),
        ],
        TOOLS,
    ),
    # Longer than the answers before it and their headings.
    "reasoning in the last response": Chat(
        [
            *PLAIN.messages,
            user("Q3"),
            assistant("third", reasoning_content=LONG_REASONING),
        ]
    ),
    "reasoning in the second response": Chat(
        [
            *PLAIN.messages[:2],
            user("Q2"),
            assistant("second", reasoning_content=LONG_REASONING),
            user("Q3"),
            assistant("third"),
        ]
    ),
    "weight 0": Chat(
        [
            user("Q1"),
            assistant("first", weight=0),
            user("Q2"),
            assistant("second", reasoning_content=LONG_REASONING),
            user("Q3"),
            assistant("third", weight=1),
        ]
    ),
    "empty result": Chat(
        [
            system("Sys"),
            *CALLED[:2],
            tool(""),
            assistant("first"),
            user("Q2"),
            assistant("", reasoning_content=LONG_REASONING, tool_calls=CALL),
            tool("twelve"),
            assistant("second"),
        ],
        TOOLS,
    ),
    "two calls at once": Chat(
        [
            user("Q1"),
            assistant("", tool_calls=CALL * 2),
            tool("eleven"),
            tool("nine"),
            assistant("first"),
        ],
        TOOLS,
    ),
    "two calls in turn": Chat(
        [
            user("Q1"),
            assistant("Let us see.", tool_calls=CALL),
            tool("eleven"),
            assistant("", tool_calls=CALL),
            tool("twelve"),
            assistant("first"),
        ],
        TOOLS,
    ),
}


class Reference:
    """What Transformers renders."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, chat: Chat, takes_parts: bool = False
    ) -> None:
        self.tokenizer = tokenizer
        self.chat = chat
        self.takes_parts = takes_parts
        template = _compile_jinja_template(str(tokenizer.chat_template))
        template.globals["strftime_now"] = datetime(2024, 7, 26).strftime

    def text(self, messages: list[Message], is_open: bool = False) -> str:
        if self.takes_parts:
            messages = [
                {**message, "content": [{"type": "text", "text": message["content"]}]}
                for message in messages
            ]
        rendered = self.tokenizer.apply_chat_template(
            messages,
            tools=self.chat.tools,
            add_generation_prompt=is_open,
            tokenize=False,
            date_string="26 Jul 2024",
        )
        return str(rendered)

    def prompt(self, index: int) -> str:
        return self.text(self.chat.messages[:index], is_open=True)

    def response(self, index: int) -> str:
        """The text after the prompt, perhaps with white space or EOS behind its end."""
        message = self.chat.messages[index]
        prompt = self.prompt(index)
        text = self.text(self.chat.messages[: index + 1])
        if text.startswith(prompt):
            return text[len(prompt) :]
        # The template writes messages before this one differently, or the prompt opens reasoning
        # content, which the template does not write for this message.
        earlier = self.chat.messages[:index]
        heading = prompt.removeprefix(self.text(earlier)).removesuffix(OPENED)
        last_content = earlier[-1]["content"]
        after = (
            text[text.rindex(last_content) :] if last_content else text[len(self.text(earlier)) :]
        )
        written = after.partition(heading)[2]
        if not prompt.endswith(OPENED):
            return written
        if written.startswith("<think>"):
            return written.removeprefix("<think>")
        tagged = re.match(r"<think>\n(.*?)\n</think>", str(message["content"]))
        reasoning = message.get("reasoning_content") or (tagged[1] if tagged else "")
        return f"{reasoning}\n</think>\n\n{written.lstrip()}"


def runs(encoded: Encoded) -> list[tuple[int, int]]:
    """Return the ranges of neighboring tokens in the loss."""
    found = []
    positions = range(len(encoded.labels))
    for is_trained, run in groupby(positions, lambda at: encoded.labels[at] != -100):
        places = list(run)
        if is_trained:
            found.append((places[0], places[-1] + 1))
    return found


def violations(reference: Reference, samples: list[Encoded]) -> list[str]:
    """Check the samples of a chat; return what is wrong."""
    tokenizer = reference.tokenizer
    messages = reference.chat.messages
    wrong = []
    wanted = [
        index
        for index, message in enumerate(messages)
        if message["role"] == "assistant" and message.get("weight") != 0
    ]
    trained = [(sample, first, last) for sample in samples for first, last in runs(sample)]
    if len(trained) != len(wanted):
        return [f"{len(trained)} responses in the loss of {len(wanted)}"]
    prompts = {index: reference.prompt(index) for index in wanted}
    ids_of = {
        index: tokenizer(prompt, add_special_tokens=False)["input_ids"]
        for index, prompt in prompts.items()
    }
    at_inference = {}
    for sample, first, last in trained:
        before = sample.input_ids[:first]
        # A chat that stays one sample may have other tokens where an earlier prompt ends.
        same = [i for i in wanted if tokenizer.decode(ids_of[i]) == tokenizer.decode(before)]
        if len(same) != 1 or same[0] in at_inference:
            wrong.append(f"prompt of {same}: {tokenizer.decode(before)!r}")
            continue
        [index] = same
        before_answer = messages[index - 1]["content"] or reference.text(messages[:index])
        heading = prompts[index].rpartition(before_answer)[2]
        ending = tokenizer(heading, add_special_tokens=False)["input_ids"]
        if before[-len(ending) :] != ids_of[index][-len(ending) :]:
            wrong.append(f"{index}: end of the prompt {tokenizer.decode(before)!r}")
        text = str(tokenizer.decode(sample.input_ids[first:last]))
        expected = reference.response(index)
        rest = expected.removeprefix(text).strip()
        if not expected.startswith(text) or rest not in ("", tokenizer.eos_token):
            wrong.append(f"{index}: text {text!r}, expected {expected!r}")
        parts = [messages[index].get("reasoning_content", ""), messages[index]["content"]]
        if messages[index].get("tool_calls"):
            parts += ["add", "11"]
        for part in parts:
            visible = part.replace("<think>\n", "").strip()
            if not all(line in text for line in visible.splitlines()):
                wrong.append(f"{index}: {part!r} is not in the loss")
        at_inference[index] = prompts[index] + text
    fewest = fewest_samples(reference, dict(sorted(at_inference.items())))
    if len(samples) != fewest:
        wrong.append(f"{len(samples)} samples, not {fewest}")
    return wrong


def fewest_samples(reference: Reference, at_inference: dict[int, str]) -> int:
    """Return how many chats hold each response as at inference. One holds the responses that the
    template writes so, if the last of them ends the chat."""
    remaining = list(at_inference)
    count = 0
    while remaining:
        last = remaining.pop()
        text = reference.text(reference.chat.messages[: last + 1])
        if text.startswith(at_inference[last]):
            remaining = [index for index in remaining if not text.startswith(at_inference[index])]
        count += 1
    return count


@pytest.fixture
def tokenizer_of(make_tokenizer: MakeTokenizer) -> Callable[[str], PreTrainedTokenizerFast]:
    def make(template: str) -> PreTrainedTokenizerFast:
        special = {"<s>", "</s>", *SPECIAL.findall(template)}
        return make_tokenizer(sorted(special), template, bos_token="<s>", eos_token="</s>")

    return make


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_loss_token_has_the_prefix_and_the_text_of_inference(
    tokenizer_of: Callable[[str], PreTrainedTokenizerFast], name: str
) -> None:
    check_all_chats(tokenizer_of(TEMPLATES[name]))


def check_all_chats(tokenizer: PreTrainedTokenizerFast, takes_parts: bool = False) -> None:
    """Check the samples of all CHATS that the template accepts."""
    encoder = Encoder(tokenizer, 100_000)
    accepted = []
    for title, chat in CHATS.items():
        sample = {"messages": chat.messages, "tools": chat.tools}
        try:
            samples = encoder.encode(sample, "messages")
        except BadSample as error:
            # nothing is dropped in silence
            assert re.search("drops|rejects this chat|differently|ends with empty", str(error)), (
                title
            )
            continue
        accepted.append(title)
        assert not violations(Reference(tokenizer, chat, takes_parts), samples), title
    assert {"one response", "plain"} <= set(accepted)


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of chat templates in the wheel of TRL 1.16."""
    folder = tmp_path_factory.mktemp("trl")
    options = ["--no-deps", "--disable-pip-version-check", "--retries", "0", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", "trl==1.16.0", *options]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        pytest.skip("the package index does not answer")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"TRL 1.16 cannot be downloaded: {error.stderr.splitlines()[-1]}")
    [wheel] = folder.glob("trl-*.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder / "trl" / "chat_templates"


# They take contents that are lists of parts.
TAKES_PARTS = {"idefics3", "idefics3_training", "smolvlm", "smolvlm_training"}
NOT_COMPARED = {
    "llava_next",  # writes a space of the response into the prompt
    "llava_next_training",
    "diffusion_gemma_training",  # its generation blocks leave out a part of the response
}


@pytest.mark.slow
def test_under_each_template_of_trl_each_loss_token_is_that_of_inference(
    tokenizer_of: Callable[[str], PreTrainedTokenizerFast], published: Path
) -> None:
    checked = 0
    for file in sorted(published.glob("*.jinja")):
        if file.stem not in NOT_COMPARED:
            check_all_chats(tokenizer_of(file.read_text()), file.stem in TAKES_PARTS)
            checked += 1
    assert checked >= 60


@pytest.mark.parametrize("name", TEMPLATES)
def test_without_reasoning_content_each_loss_token_is_that_of_inference(
    tokenizer_of: Callable[[str], PreTrainedTokenizerFast], name: str
) -> None:
    tokenizer = tokenizer_of(TEMPLATES[name])
    encoder = Encoder(tokenizer, 100_000, reasoning_content="drop")
    for title in ("tags", "field", "some reasoning"):
        samples = encoder.encode({"messages": CHATS[title].messages}, "messages")
        assert not violations(Reference(tokenizer, PLAIN), samples), title


def test_reasoning_templates_accept_chats_with_tools_and_reasoning(
    tokenizer_of: Callable[[str], PreTrainedTokenizerFast],
) -> None:
    chat = CHATS["tools and reasoning"]
    sample = {"messages": chat.messages, "tools": chat.tools}
    counts = {}
    for name in ("qwen3", "qwen3_5_think", "nemotron_3_nano", "glm4moe", "gptoss", "gemma4_v5"):
        samples = Encoder(tokenizer_of(STOCK[name]), 100_000).encode(sample, "messages")
        counts[name] = len(samples)
    # one for each question; gpt-oss drops the reasoning of calls before the last answer, too
    assert counts == {**dict.fromkeys(counts, 2), "gptoss": 3}
    # a template that drops the reasoning content of earlier messages, behind a prompt that opens it
    sample = {"messages": CHATS["tags"].messages}
    samples = Encoder(tokenizer_of(STOCK["deepseek_r1_distill"]), 100_000).encode(
        sample, "messages"
    )
    assert len(samples) == 2


def test_the_last_response_alone_is_in_the_loss_with_labels_completion(
    tokenizer_of: Callable[[str], PreTrainedTokenizerFast],
) -> None:
    for name, template in STOCK.items():
        tokenizer = tokenizer_of(template)
        encoder = Encoder(tokenizer, 100_000, labels="completion")
        [sample] = encoder.encode({"messages": PLAIN.messages}, "messages")
        [(first, last)] = runs(sample)
        reference = Reference(tokenizer, PLAIN)
        ids = tokenizer(reference.prompt(3), add_special_tokens=False)["input_ids"]
        assert sample.input_ids[:first] == ids, name
        assert reference.response(3).startswith(str(tokenizer.decode(sample.input_ids[first:last])))
