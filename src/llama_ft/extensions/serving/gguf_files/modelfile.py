"""Ollama's Modelfile: the model, the chat template in Ollama's language, and the stop tokens.

Ollama has Go templates. A Jinja template is translated if it writes each message between texts that
depend on its role alone, and a system message at the start or in the first prompt. What it writes
is read off chats with marked contents, and compared with further chats.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from llama_ft.errors import UserError
from llama_ft.extensions.serving.adapter_files import read_json

MODELFILE = "Modelfile"
Chat = list[dict[str, str]]
Render = Callable[[Chat, bool], str]
# private-use characters, which no template writes
FIRST, ANSWER, SECOND, SYSTEM = "\ue5b1", "\ue5b2", "\ue5b3", "\ue5b4"


def said(*contents: str, system: str | None = None) -> Chat:
    """Return a chat of prompts and answers in turn."""
    roles = ("user", "assistant")
    chat = [
        {"role": roles[number % 2], "content": content} for number, content in enumerate(contents)
    ]
    return ([] if system is None else [{"role": "system", "content": system}]) + chat


CHECKED = [
    said("Hi"),
    said("Hi", "Hello.", "And\nyou?"),
    said("1", "2", "3", "4", "5"),
    said("Hi", system="Be brief."),
    said("Hi", "Hello.", "And you?", system="Be brief."),
]


@dataclass(frozen=True)
class GoTemplate:
    """What a template writes around the parts of a chat."""

    start: str  # before the first message
    before_user: str
    after_user: str
    before_answer: str
    after_answer: str
    before_system: str  # in place of `start`
    after_system: str
    is_system_in_prompt: bool  # it stands at the start of the first prompt, before after_system

    def render(self, chat: Chat) -> str:
        """Return the text of a chat, with the beginning of an answer."""
        system = next((said["content"] for said in chat if said["role"] == "system"), "")
        text = self.start
        in_prompt = ""
        if system and self.is_system_in_prompt:
            in_prompt = system + self.after_system
        elif system:
            text = self.before_system + system + self.after_system
        for message in chat:
            if message["role"] == "user":
                text += self.before_user + in_prompt + message["content"] + self.after_user
                in_prompt = ""
            elif message["role"] == "assistant":
                text += self.before_answer + message["content"] + self.after_answer
        return text + self.before_answer

    def go(self) -> str:
        """Return the template in Ollama's language."""
        start = self.start
        before_content = ""
        if self.is_system_in_prompt:
            start = "{{ $system := .System }}" + start
            shown = "{{ $system }}" + self.after_system + '{{ $system = "" }}'
            before_content = "{{ if $system }}" + shown + "{{ end }}"
        elif self.before_system + self.after_system:
            system = self.before_system + "{{ .System }}" + self.after_system
            start = "{{ if .System }}" + system + "{{ else }}" + start + "{{ end }}"
        user = self.before_user + before_content + "{{ .Content }}" + self.after_user
        answer = self.before_answer + "{{ .Content }}" + self.after_answer
        messages = '{{ if eq .Role "user" }}' + user
        messages += '{{ else if eq .Role "assistant" }}' + answer + "{{ end }}"
        return start + "{{ range .Messages }}" + messages + "{{ end }}" + self.before_answer


def translate(render: Render) -> GoTemplate | None:
    """Return a template in parts, or None if it is not of this form. `render` gets a chat and
    whether the beginning of an answer follows."""
    try:
        template = _read_off(render)
        is_same = all(template.render(chat) == render(chat, True) for chat in CHECKED)
    except Exception:  # of a template that rejects a chat
        return None
    return template if is_same else None


def _read_off(render: Render) -> GoTemplate:
    head, rest = render(said(FIRST, ANSWER, SECOND), False).split(FIRST)
    to_answer, rest = rest.split(ANSWER)
    to_user, after_user = rest.split(SECOND)
    before_user = commonprefix([head[::-1], to_user[::-1]])[::-1]
    start = head.removesuffix(before_user)
    system_head, rest = render(said(FIRST, system=SYSTEM), False).split(SYSTEM)
    after_system, _ = rest.split(FIRST)
    is_in_prompt = not after_system.endswith(before_user)
    if is_in_prompt and system_head != head:
        raise ValueError("the system message stands elsewhere")
    return GoTemplate(
        start=start,
        before_user=before_user,
        after_user=after_user,
        before_answer=to_answer.removeprefix(after_user),
        after_answer=to_user.removesuffix(before_user),
        before_system="" if is_in_prompt else system_head,
        after_system=after_system if is_in_prompt else after_system.removesuffix(before_user),
        is_system_in_prompt=is_in_prompt,
    )


def write_modelfile(folder: Path, lines: Sequence[str]) -> None:
    """Write the Modelfile of a model or adapter.

    Args:
        folder: with the tokenizer and generation_config.json.
        lines: FROM, and ADAPTER.

    Raises:
        UserError: there is no tokenizer, or the chat template cannot be translated.
    """
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserError(
            "--for ollama: the chat template and the stop tokens are those of the tokenizer, and its files "
            "are missing or cannot be read. Export the run, or copy them to the adapter."
        ) from error
    text = "\n".join(lines) + "\n"
    if tokenizer.chat_template:
        text += f'TEMPLATE """{_go_template(tokenizer)}"""\n'
    stops = read_json(folder / "generation_config.json").get("eos_token_id")
    ids = stops if isinstance(stops, list) else [stops]
    for number in ids:
        token = None if number is None else tokenizer.convert_ids_to_tokens(number)
        if token:
            text += f'PARAMETER stop "{token}"\n'
    (folder / MODELFILE).write_text(text)


def _go_template(tokenizer: Any) -> str:
    bos = tokenizer.bos_token or ""
    adds_bos = bool(bos) and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]

    def render(chat: Chat, is_open: bool) -> str:
        text: str = tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=is_open
        )
        return text.removeprefix(bos) if adds_bos else text  # the server adds it, too

    template = translate(render)
    problem = "it does more than write each message between texts of its role"
    if template is not None:
        go = template.go()
        if '"""' not in go:
            return go
        problem = "it writes quotes"
    raise UserError(
        f"--for ollama: the chat template cannot be translated for Ollama: {problem}.\n"
        "Use --for llama.cpp: llama-server reads the template itself, with --jinja."
    )
