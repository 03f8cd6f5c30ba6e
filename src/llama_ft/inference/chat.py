"""A conversation in the terminal, or with a program that writes lines to stdin: answers go to stdout, the rest to
stderr."""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields, replace
from pathlib import Path
from types import FrameType

from llama_ft.config.load import convert
from llama_ft.errors import RunFailure, UserError, reason
from llama_ft.inference.flags import InferenceFlags
from llama_ft.inference.generate import Answer, Answerer, Sampling, Show
from llama_ft.inference.prompts import SYSTEM_ROLES, Encoding, Messages, check_messages
from llama_ft.masking import printable
from llama_ft.runtime import Runtime

with suppress(ImportError):  # not every Python has it; input() then has no history
    import readline  # noqa: F401

HELP = """\
/help                 show this
/system [TEXT]        start again with this system prompt; without TEXT: with none
/reset                start again
/undo                 forget the last message and its answer
/retry                answer the last message again
/save FILE            write the conversation to FILE: one sample as --dataset reads it
/load FILE            continue the conversation in FILE
/set [NAME VALUE]     temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens, seed or stop; alone: show
/exit                 end, as /quit and Ctrl-D do
A line that ends in \\ continues in the next; lines between \"\"\" and \"\"\" are one message; // starts with a slash.
Ctrl-C stops an answer."""
COMMANDS = tuple(line[1:].split()[0] for line in HELP.splitlines() if line.startswith("/")) + ("quit",)
NUMBERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens", "seed")
ROOM = 4  # of the context, this part or less is kept for the answer

Ask = Callable[[list[int], int, Sampling, Show, Callable[[], bool]], Answer]


def converse(answerer: Answerer, encoding: Encoding, sampling: Sampling, job: Runtime) -> None:
    """Talk on rank 0 until its input ends; the other ranks compute along.

    Args:
        answerer: the model.
        encoding: with the chat template and the system prompt.
        sampling: how it answers, until /set.
        job: the ranks.

    Raises:
        UserError: there is no chat template.
    """
    if not encoding.is_chat:
        raise UserError("--chat: this model's tokenizer has no chat template. --prompt takes text to continue.")
    is_alone = job.world_size == 1

    def ask(ids: list[int], number: int, sampling: Sampling, show: Show, stopped: Callable[[], bool]) -> Answer:
        job.broadcast_from_rank0(lambda: (ids, number, sampling))
        return answerer.answer([ids], [number], sampling, show, stopped if is_alone else None)[0]

    if job.is_main:
        Chat(ask, encoding, sampling, answerer.context, can_stop=is_alone).run()
    while (asked := job.broadcast_from_rank0(_nothing_more)) is not None:  # on rank 0 the end of all questions
        ids, number, sampling = asked
        answerer.answer([ids], [number], sampling)


def _nothing_more() -> tuple[list[int], int, Sampling] | None:
    return None


class Chat:
    """A conversation.

    Args:
        ask: the model.
        encoding: with the chat template and the system prompt.
        sampling: how it answers, until /set.
        context: tokens it has positions for; None: unknown.
        can_stop: Ctrl-C stops an answer. Not with several ranks: torchrun ends them all.
    """

    def __init__(
        self, ask: Ask, encoding: Encoding, sampling: Sampling, context: int | None, can_stop: bool = True
    ) -> None:
        self._ask, self._sampling, self._context, self._can_stop = ask, sampling, context, can_stop
        self._encoding = replace(encoding, system=None)
        self._messages: Messages = []
        self._start(encoding.system)
        self._answers = 0  # the number that the next answer's random numbers come from
        self._answering, self._stopped = False, False
        self._saved = set[Path]()
        self._in_terminal = sys.stdin.isatty()

    def run(self) -> None:
        """Talk until the input ends."""
        if self._in_terminal:
            _tell("/help lists the commands, Ctrl-D ends.")
        with self._own_ctrl_c() if self._can_stop else nullcontext():
            while True:
                try:
                    message, is_block = self._read()
                    if not is_block and message.startswith("/") and not message.startswith("//"):
                        if not self._command(message):
                            return
                    elif message.strip():
                        content = message if is_block else message.removeprefix("/")
                        self._messages.append({"role": "user", "content": content})
                        self._answer()
                except EOFError:
                    if self._in_terminal:
                        _tell("")
                    return
                except KeyboardInterrupt:
                    _tell("\n(Ctrl-D or /exit ends)")
                except RunFailure:
                    raise
                except UserError as error:
                    _tell(str(error))

    def _start(self, system: str | None) -> None:
        self._messages = [{"role": "system", "content": system}] if system else []

    @contextmanager
    def _own_ctrl_c(self) -> Iterator[None]:
        """Ctrl-C stops an answer, the second time at once; it does not end the program, as runtime.signals does."""

        def interrupt(_: int, __: FrameType | None) -> None:
            if not self._answering or self._stopped:
                raise KeyboardInterrupt
            self._stopped = True

        wakeup, before = signal.set_wakeup_fd(-1), signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
            signal.set_wakeup_fd(wakeup)

    def _line(self, prompt: str) -> str:
        if self._in_terminal and sys.stdout.isatty():
            return input(prompt)
        if self._in_terminal:
            print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n").removesuffix("\r")

    def _read(self) -> tuple[str, bool]:
        """Read a message or a command, which may have several lines; and whether it is a block, always a message."""
        line = self._line("> ")
        is_block = line.lstrip().startswith('"""')
        if is_block:
            line = line.lstrip()[3:]
            while not line.rstrip().endswith('"""'):
                line += "\n" + self._line(". ")
            line = line.rstrip()[:-3].strip("\n")
        else:
            while line.endswith("\\"):
                line = line[:-1] + "\n" + self._line(". ")
        try:
            line.encode()
        except UnicodeEncodeError as error:
            raise UserError("This is not UTF-8.") from error
        return line, is_block

    def _answer(self) -> None:
        """Answer the last message and keep the answer; if that is not possible, forget the message."""
        self._answering, self._stopped = True, False
        try:
            answer = self._ask(self._fit(), self._answers, self._sampling, print_part, lambda: self._stopped)
        except BaseException:
            self._messages.pop()
            raise
        finally:
            self._answering = False
        self._answers += 1
        print(flush=True)
        if self._stopped:
            _tell("(stopped)")
        elif answer.is_cut:
            _tell("(truncated: /set max_new_tokens N allows longer answers)")
        self._messages.append({"role": "assistant", "content": answer.text})

    def _fit(self) -> list[int]:
        """Return the tokens of the conversation, without its oldest messages if it has become too long."""
        messages, dropped = list(self._messages), 0  # nothing is dropped for a message that is too long by itself
        room = min(self._sampling.max_new_tokens, (self._context or 0) // ROOM)
        while True:
            ids = self._encoding.tokens(messages)
            if self._context is None or len(ids) + room <= self._context:
                break
            first = int(messages[0]["role"] in SYSTEM_ROLES)
            questions = [n for n, message in enumerate(messages) if n > first and message["role"] == "user"]
            if not questions:
                if len(ids) < self._context:
                    break
                raise UserError(f"This is {len(ids)} tokens, and the model has {self._context} positions.")
            del messages[first : questions[0]]
            dropped += questions[0] - first
        if dropped:
            _tell(f"(the oldest {dropped} messages are dropped: the model has {self._context} positions)")
        self._messages = messages
        return ids

    def _command(self, line: str) -> bool:
        """Do what a command says; False: it ends the conversation."""
        name, _, rest = line[1:].partition(" ")
        rest = rest.strip()
        match name:
            case "exit" | "quit":
                return False
            case "help":
                _tell(HELP)
            case "system":
                self._start(rest or None)
                _tell("(a new conversation with this system prompt)" if rest else "(a new conversation)")
            case "reset":
                self._messages = [message for message in self._messages[:1] if message["role"] in SYSTEM_ROLES]
                _tell("(a new conversation)")
            case "undo" | "retry":
                self._back(name == "retry")
            case "save" | "load":
                try:
                    (self._save if name == "save" else self._load)(Path(rest).expanduser())
                except (OSError, ValueError, LookupError, TypeError, RuntimeError) as error:
                    raise UserError(f"/{name} {rest[:60]}: not possible ({reason(error)}).") from error
            case "set":
                self._set(rest)
            case _:
                raise UserError(f"/{name} is not a command. /help lists them; // starts a message with a slash.")
        return True

    def _back(self, again: bool) -> None:
        last = max((n for n, message in enumerate(self._messages) if message["role"] == "user"), default=None)
        if last is None:
            raise UserError("There is no message yet.")
        del self._messages[last + again :]
        if again:
            self._answer()
        else:
            _tell("(the last message is forgotten)")

    def _save(self, file: Path) -> None:
        text = json.dumps({"messages": self._messages}, ensure_ascii=False)
        with open(file, "wb" if file.resolve() in self._saved else "xb") as opened:
            opened.write(f"{text}\n".encode())
        self._saved.add(file.resolve())
        _tell(f"({len(self._messages)} messages are in {file})")

    def _load(self, file: Path) -> None:
        self._messages = check_messages(json.loads(file.read_text(encoding="utf-8-sig"))["messages"], "messages")
        _tell(f"({len(self._messages)} messages; the last is the {self._messages[-1]['role']}'s)")

    def _set(self, words: str) -> None:
        name, _, value = words.partition(" ")
        if not words:
            shown = (f"{field.name} {getattr(self._sampling, field.name)}" for field in fields(Sampling))
            _tell("\n".join(shown))
        elif name == "stop":
            self._sampling = replace(self._sampling, stop=(value.strip(),) if value.strip() else ())
            _tell(f"(stop {value.strip() or 'nothing'})")
        elif name not in NUMBERS:
            raise UserError(f"/set {name}: it is one of {', '.join(NUMBERS)} and stop.")
        else:
            flags, wrong = convert({name: value.strip()}, {name: f"--{name}"}, InferenceFlags)
            if wrong:
                raise UserError(f"/set {wrong[name].removeprefix('--')}")
            self._sampling = replace(self._sampling, **{name: getattr(flags, name)})
            _tell(f"({self._sampling.describe})")


def print_part(text: str) -> None:
    """Print a part of an answer. In a terminal control characters are replaced: a model is not to move the cursor."""
    print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)


def _tell(text: str) -> None:
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)
