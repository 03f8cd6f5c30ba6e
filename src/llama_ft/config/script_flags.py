"""Flags of the recipes that have only a few of their own: as strict as the training recipe's, told in the same way."""

import argparse
from collections.abc import Mapping
from typing import NoReturn

from llama_ft.config.wording import nearest
from llama_ft.errors import UserError


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


def _underscored(word: str) -> str:
    flag, equals, value = word.partition("=")
    return flag[:2] + flag[2:].replace("-", "_") + equals + value if word.startswith("--") else word
