"""A conversation in the terminal, or with a program that writes lines to stdin: answers go to stdout, the rest to
stderr."""

import signal
import sys
from contextlib import suppress
from threading import Event
from typing import Any

from llama_ft.errors import RunFailure, UserError
from llama_ft.inference.generate import Answerer, Messages
from llama_ft.masking import printable
from llama_ft.runtime import Runtime, log

with suppress(ImportError):  # not every Python has it; input() then has no history
    import readline  # noqa: F401

HELP = "/reset starts again, /exit or Ctrl-D ends, Ctrl-C stops an answer; a space before a slash makes it a message."


def converse(answerer: Answerer, job: Runtime) -> None:
    """Talk until the input of rank 0 ends; all ranks answer together."""
    if not answerer.tokenizer.chat_template:
        raise UserError("--chat: this model's tokenizer has no chat template. --prompt takes text to continue.")
    messages: Messages = []
    is_answering, stop = False, Event()

    def interrupt(*_: Any) -> None:
        """Stop the answer, the second time at once."""
        if not is_answering or stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    if job.world_size == 1:  # else torchrun ends all ranks at Ctrl-C
        signal.set_wakeup_fd(-1)  # of runtime.signals, which would end the program
        signal.signal(signal.SIGINT, interrupt)
    if sys.stdin.isatty():
        log.info(HELP)
    while True:
        try:
            message = job.broadcast_from_rank0(_read)
            if message in (None, "/exit", "/quit"):
                return
            if message == "/reset":
                messages = []
            elif message.startswith("/"):
                log.info(HELP)
            elif message.strip():
                asked = _fitting([*messages, {"role": "user", "content": message}], answerer)
                ids = answerer.tokens(asked)
                stop.clear()
                is_answering = True
                [answer] = answerer.answer([ids], print_part if job.is_main else None, stop.is_set)
                print_part("\n" if job.is_main else "")
                if stop.is_set() or answer.is_truncated:
                    log.info("(stopped)" if stop.is_set() else "(truncated: --max_new_tokens N allows longer answers)")
                messages = [*asked, {"role": "assistant", "content": answer.text}]
        except KeyboardInterrupt:
            log.info("\n(Ctrl-D or /exit ends)")
        except RunFailure:
            raise
        except UserError as error:
            log.info(str(error))
        finally:
            is_answering = False


def _fitting(messages: Messages, answerer: Answerer) -> Messages:
    """Return a conversation without its oldest messages if it leaves too little of the context: less than the longest
    answer, and less than a quarter of it."""
    kept, needed = messages, min(answerer.longest_answer(1), answerer.context // 4)
    while len(kept) > 1 and len(answerer.tokens(kept)) > answerer.context - needed:
        kept = kept[2:]
    if len(kept) < len(messages):
        log.info(f"(the oldest {len(messages) - len(kept)} messages are dropped: the context is full)")
    return kept


def print_part(text: str) -> None:
    """Print a part of an answer. In a terminal control characters are replaced: a model is not to move the cursor."""
    print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)


def _read() -> str | None:
    """Return the next line; None at the end of the input."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        with suppress(EOFError):
            return input("> ")
        return None
    line = sys.stdin.readline()
    return line.rstrip("\r\n") if line else None
