"""Flags of the recipes that have only a few of their own: as strict as the training recipe's, told in the same way."""

import argparse
import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from llama_ft.config.wording import brief, nearest
from llama_ft.errors import UserError

MOST_DIGITS = 18
PRECISIONS = ("auto", "bf16", "fp16", "fp32", "bf16_mixed", "bf16_pure")
# Flags that say which model is loaded, and how: they mean the same in every recipe that has them.
MODEL_FLAGS: dict[str, dict[str, Any]] = {
    "model_name": {"metavar": "NAME", "help": "another way to name MODEL; with --peft_model its base"},
    "peft_model": {"metavar": "FOLDER", "help": "another way to name a saved adapter"},
    "base_model": {
        "metavar": "NAME",
        "help": "folder or hub name of the model that was tuned; default: where the run or the adapter found it",
    },
    "tokenizer_name": {
        "metavar": "NAME",
        "help": "folder or hub name of the tokenizer; default: the one of what is loaded",
    },
    "quantization": {"choices": ["none", "8bit", "4bit"], "help": "of frozen weights; default: as the run had it"},
    "precision": {
        "choices": PRECISIONS,
        "help": "what is computed in; auto (default): bf16 where the device computes that itself, else fp32",
    },
    "device": {"default": "auto", "choices": ["auto", "cuda", "cpu"], "help": "auto (default): a GPU, if any"},
    "enable_fsdp": {"action": "store_true", "help": "under torchrun: share weights out over the ranks"},
    "trust_remote_code": {"action": "store_true", "help": "let the model bring Python code"},
}


class ScriptFlags(argparse.ArgumentParser):
    """An ArgumentParser that takes whole names only, with - or _ between words, each once unless its action is to
    append, and tells the nearest name.

    Args:
        description: what the script does; its first paragraph is shown.
        gone: names from elsewhere that are refused, with what to do instead.
    """

    def __init__(self, description: str, gone: Mapping[str, str] | None = None) -> None:
        super().__init__(description=description.partition("\n\n")[0], allow_abbrev=False)
        self._gone = gone or {}

    def add_model_flags(self, *names: str, **meanings: str) -> None:
        """Add the flags of MODEL_FLAGS of these names.

        Args:
            names: of the flags, in the order of --help.
            meanings: what to say of one, in place of what is said of it there.
        """
        for name in names:
            about = MODEL_FLAGS[name]
            self.add_argument(f"--{name}", **{**about, "help": meanings.get(name, about["help"])})

    def read(self, argv: list[str]) -> argparse.Namespace:
        """The flags of `argv`.

        Raises:
            UserError: one message for every word that is not understood.
            SystemExit: 0 after --help.
        """
        words = [_underscored(word) for word in argv]
        flags = [word.partition("=")[0] for word in words if word.startswith("--")]
        actions = {name: action for name, action in self._option_string_actions.items() if name.startswith("--")}
        given = [actions[flag].dest if flag in actions else flag for flag in flags]  # a flag may have two names
        several = {name for name, action in actions.items() if isinstance(action, argparse._AppendAction)}
        twice = [f"{f}: given twice." for n, f in enumerate(flags) if given.index(given[n]) < n and f not in several]
        known = {name.removeprefix("--") for name in actions}
        mistakes = twice + [self._unknown(flag, known) for flag in dict.fromkeys(flags) if flag[2:] not in known]
        options, strays = argparse.Namespace(), list[str]()
        try:
            options, strays = self.parse_known_intermixed_args(words)  # words that stand alone may be anywhere
        except UserError as error:
            mistakes += error.messages
        if mistakes or strays:
            names = [action.metavar for action in self._get_positional_actions() if action.nargs == "?"]
            why = f"there is one {names[0]}, and a value follows its flag" if names else "a value follows its flag"
            raise UserError(*(mistakes or [f'"{word}" stands alone: {why}.' for word in strays]))
        return options

    def error(self, message: str) -> NoReturn:
        """What argparse itself finds wrong, such as a flag without its value."""
        raise UserError(message.removeprefix("argument ") + ".")

    def _unknown(self, flag: str, known: set[str]) -> str:
        if instead := self._gone.get(flag[2:]):
            return f"{flag} is not a flag here: {instead}."
        meant = nearest(flag[2:], known)
        return f"{flag} is not a flag. " + (f"Did you mean --{meant}?" if meant else "--help lists them all.")


def whole_number(least: int) -> Callable[[str], int]:
    """Read whole numbers from `least` on: an argument's `type`."""

    def read(text: str) -> int:
        is_number = text.isascii() and text.isdigit()
        if is_number and len(text) > MOST_DIGITS:
            raise argparse.ArgumentTypeError(f"expected at most {MOST_DIGITS} digits, not {len(text)}")
        if not is_number or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least}, not {brief(text) or 'nothing'}")
        return int(text)

    return read


def number(most: float = math.inf, above_zero: bool = False) -> Callable[[str], float]:
    """Read numbers from 0, or above it, to `most`: an argument's `type`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value <= most or value == math.inf or (above_zero and not value):
            limits = ("above 0" if above_zero else "from 0") + ("" if most == math.inf else f" to {most:g}")
            raise argparse.ArgumentTypeError(f"expected a number {limits}, not {brief(text) or 'nothing'}")
        return value

    return read


def _underscored(word: str) -> str:
    flag, equals, value = word.partition("=")
    return flag[:2] + flag[2:].replace("-", "_") + equals + value if word.startswith("--") else word
