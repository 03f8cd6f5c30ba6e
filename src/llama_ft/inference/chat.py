"""A conversation in the terminal, or with whatever writes lines to stdin: answers go to stdout, all else to stderr."""

import json
import signal
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields, replace
from pathlib import Path
from types import FrameType

from llama_ft.config.inference_flags import is_utf8
from llama_ft.config.paths import failing
from llama_ft.config.script_flags import number, whole_number
from llama_ft.config.wording import brief, nearest
from llama_ft.errors import RunFailure, UserError
from llama_ft.inference.generate import Answer, Answerer, Sampling, Show
from llama_ft.inference.prompts import SYSTEM_ROLES, Encoding, Messages, check_turns
from llama_ft.masking import printable
from llama_ft.runtime import Runtime

with suppress(ImportError):  # not every Python has it; input() then has no history
    import readline  # noqa: F401

HELP = """\
/help                 this
/system [TEXT]        the system prompt; without TEXT: none. The conversation begins anew
/reset                begin anew
/undo                 forget the last question and its answer
/retry                answer the last question again
/save FILE            write the conversation to FILE: one row as --dataset reads it
/load FILE            go on with it
/set [NAME VALUE]     temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens, seed or stop; alone: show
/exit                 end, as /quit and Ctrl-D do
A line that ends in \\ goes on in the next; lines between \"\"\" and \"\"\" are one message; // begins one with a slash.
Ctrl-C stops an answer."""
COMMANDS = tuple(line[1:].split()[0] for line in HELP.splitlines() if line.startswith("/")) + ("quit",)
READERS: dict[str, Callable[[str], float]] = {
    "temperature": number(),
    "top_p": number(1),
    "top_k": whole_number(0),
    "min_p": number(1),
    "repetition_penalty": number(above_zero=True),
    "max_new_tokens": whole_number(1),
    "seed": whole_number(0),
}
ROOM = 4  # of the context, this part or less is kept for the answer

Ask = Callable[[list[int], int, Sampling, Show, Callable[[], bool]], Answer]


def lead(answerer: Answerer, job: Runtime) -> Ask:
    """On rank 0: how to ask the model, with the other ranks where there are any."""

    def ask(ids: list[int], number: int, sampling: Sampling, show: Show, stopped: Callable[[], bool]) -> Answer:
        if job.world_size > 1:
            job.from_main(lambda: (ids, number, sampling))
        return answerer.answer([ids], [number], sampling, show, stopped if job.world_size == 1 else None)[0]

    return ask


def follow(answerer: Answerer, job: Runtime) -> None:
    """On the other ranks: answer what rank 0 asks until it has no more questions."""
    while (asked := _asked(job)) is not None:
        ids, number, sampling = asked
        answerer.answer([ids], [number], sampling)


def _asked(job: Runtime) -> tuple[list[int], int, Sampling] | None:
    """What rank 0 asks next; None: nothing more."""
    return job.from_main(lambda: None)


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
        self._can_stop = can_stop
        self._ask, self._sampling, self._context = ask, sampling, context
        self._encoding = replace(encoding, system=None)
        self._messages: Messages = []
        self._begin(encoding.system)
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
                    if not is_utf8(message):
                        raise UserError("This is not UTF-8.")
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

    def _begin(self, system: str | None) -> None:
        self._messages = [{"role": "system", "content": system}] if system else []

    @contextmanager
    def _own_ctrl_c(self) -> Iterator[None]:
        """Ctrl-C stops an answer, or at the second time what computes it; it does not end the program, as
        runtime.stopping would have it."""

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
        """A message or a command, which may take several lines; and whether it is a block, always a message."""
        line = self._line("> ")
        if not line.lstrip().startswith('"""'):
            while line.endswith("\\"):
                line = line[:-1] + "\n" + self._line(". ")
            return line, False
        text = line.lstrip()[3:]
        while not text.rstrip().endswith('"""'):
            text += "\n" + self._line(". ")
        return text.rstrip()[:-3].strip("\n"), True

    def _answer(self) -> None:
        """Answer the last turn and keep what was said; where that is not possible, forget the turn."""
        try:
            ids = self._fit()
        except UserError:
            self._messages.pop()
            raise
        shown: list[str] = []

        def show(text: str) -> None:
            shown.append(text)
            print_part(text)

        self._answering, self._stopped = True, False
        try:
            answer = self._ask(ids, self._answers, self._sampling, show, lambda: self._stopped)
            said, cut = answer.text, answer.is_cut
        except KeyboardInterrupt:
            said, cut = "".join(shown), False
        finally:
            self._answering = False
        self._answers += 1
        print(flush=True)
        if self._stopped:
            _tell("(stopped)")
        elif cut:
            _tell("(cut: /set max_new_tokens N allows longer answers)")
        self._messages.append({"role": "assistant", "content": said})

    def _fit(self) -> list[int]:
        """Tokens of the conversation, of which the oldest turns are dropped where it has become too long."""
        messages, dropped = list(self._messages), 0  # nothing is dropped for a question that is too long by itself
        while True:
            ids = self._encoding.tokens(messages)
            room = min(self._sampling.max_new_tokens, (self._context or 0) // ROOM)
            if self._context is None or len(ids) + room <= self._context:
                break
            first = int(messages[0]["role"] in SYSTEM_ROLES)
            questions = [n for n, turn in enumerate(messages) if n > first and turn["role"] == "user"]
            if not questions:
                if len(ids) < self._context:
                    break
                raise UserError(f"This is {len(ids)} tokens, and the model has {self._context} positions.")
            del messages[first : questions[0]]
            dropped += questions[0] - first
        if dropped:
            _tell(f"(the oldest {dropped} turns are dropped: the model has {self._context} positions)")
        self._messages = messages
        return ids

    def _command(self, line: str) -> bool:
        """Do what a command says; False: it ends the conversation."""
        name, _, rest = line[1:].partition(" ")
        rest = rest.strip()
        if name in ("exit", "quit"):
            return False
        if name == "help":
            _tell(HELP)
        elif name == "system":
            self._begin(rest or None)
            _tell("(system prompt set; the conversation begins anew)" if rest else "(no system prompt)")
        elif name == "reset":
            self._messages = [turn for turn in self._messages[:1] if turn["role"] in SYSTEM_ROLES]
            _tell("(the conversation begins anew)")
        elif name in ("undo", "retry"):
            self._back(name == "retry")
        elif name in ("save", "load"):
            if not rest:
                raise UserError(f"/{name} needs the name of a file.")
            try:
                (self._save if name == "save" else self._load)(Path(rest).expanduser())
            except (OSError, ValueError, RuntimeError) as error:  # also a name too long, and the ~ of nobody
                raise UserError(f"/{name} {brief(rest)}: not possible ({failing(error)}).") from error
        elif name == "set":
            self._set(rest)
        else:
            meant = nearest(name, COMMANDS)
            hint = f"Did you mean /{meant}?" if meant else "/help lists them; // begins a message with a slash."
            raise UserError(f"/{name} is not a command. {hint}")
        return True

    def _back(self, again: bool) -> None:
        last = max((n for n, turn in enumerate(self._messages) if turn["role"] == "user"), default=None)
        if last is None:
            raise UserError("There is no question yet.")
        del self._messages[last + again :]
        if again:
            self._answer()
        else:
            _tell("(the last question is forgotten)")

    def _save(self, file: Path) -> None:
        if file.exists() and file.resolve() not in self._saved:
            raise UserError(f"{file}: is there already. Choose another name.")
        text = json.dumps({"messages": self._messages}, ensure_ascii=False)
        file.write_bytes(f"{text}\n".encode())  # encoded before the file is opened
        self._saved.add(file.resolve())
        _tell(f"({len(self._messages)} turns are in {file})")

    def _load(self, file: Path) -> None:
        try:
            messages = check_turns(json.loads(file.read_text(encoding="utf-8-sig"))["messages"], "messages")
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise UserError(f"{file}: holds no conversation as /save writes it ({error}).") from error
        self._messages = messages
        _tell(f"({len(messages)} turns; the last is the {messages[-1]['role']}'s)")

    def _set(self, words: str) -> None:
        name, _, value = words.partition(" ")
        if not words:
            shown = (f"{field.name} {getattr(self._sampling, field.name)}" for field in fields(Sampling))
            _tell("\n".join(shown))
        elif name == "stop":
            self._sampling = replace(self._sampling, stop=(value.strip(),) if value.strip() else ())
            _tell(f"(stop {value.strip() or 'nothing'})")
        elif name not in READERS:
            raise UserError(f"/set {name}: it is one of {', '.join(READERS)} and stop.")
        else:
            try:
                self._sampling = replace(self._sampling, **{name: READERS[name](value.strip())})  # type: ignore[arg-type]
            except ArgumentTypeError as error:
                raise UserError(f"/set {name}: {error}.") from error
            _tell(f"({self._sampling.describe})")


def print_part(text: str) -> None:
    """Print a part of an answer. What a model has learned to say is not to move a terminal's cursor or ring its bell; a
    file or program gets it as it is."""
    print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)


def _tell(text: str) -> None:
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)
