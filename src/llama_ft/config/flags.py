"""Read the command line. argv is checked before fire sees it.

fire alone would call the recipe and only then reject a stray word, take the last of a repeated flag, turn `--no_x`
into `_x=False` and `1e5` into a float. So every flag is checked and rewritten as `--name=value` first, and fire, told
to leave values as text, does what is left.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import fire
from fire.decorators import SetParseFn

from llama_ft.config.fields import SETTINGS, Setting
from llama_ft.config.names import guess, known, told_apart
from llama_ft.config.values import FALSE_WORDS, TRUE_WORDS, Given, from_text
from llama_ft.config.wording import expected, nearest

NEGATIVE_NUMBER = re.compile(r"-(\.?\d|inf|nan)", re.IGNORECASE)
TYPOGRAPHIC_DASHES = ("\u2013", "\u2014")  # what word processors and web pages make of --


@dataclass(frozen=True)
class Word:
    """One flag of argv as typed, with its value if it has one; or a stray word (flag empty)."""

    flag: str
    value: str | None
    before: str

    @property
    def name(self) -> str:
        return self.flag[2:].replace("-", "_")


def _is_flag(word: str) -> bool:
    return word.startswith(("-", *TYPOGRAPHIC_DASHES)) and not NEGATIVE_NUMBER.match(word) and word != "-"


def _words(argv: list[str]) -> Iterator[Word]:
    """Pair every flag with its value: what follows `=`, or the next word unless that is a flag too."""
    before = ""
    position = 0
    while position < len(argv):
        word = argv[position]
        position += 1
        if not _is_flag(word):
            yield Word("", word, before)
            continue
        flag, equals, text = word.partition("=")
        value: str | None = text if equals else None
        if not equals and position < len(argv) and not _is_flag(argv[position]):
            value = argv[position]
            position += 1
        before = f"{flag} {value}" if value is not None else flag
        yield Word(flag, value, before)


def split_words(argv: list[str], names: set[str]) -> tuple[list[tuple[str, str, str | None]], list[str]]:
    """Take the flags of these names out of a command line.

    Returns:
        (name, flag as typed, value or None) of each of them, and the words of all others.
    """
    own, others = [], list[str]()
    for word in _words(argv):
        if word.flag.startswith("--") and word.name in names:
            own.append((word.name, word.flag, word.value))
        elif not word.flag:
            others.append(word.value or "")
        else:
            others.append(word.flag if word.value is None else f"{word.flag}={word.value}")
    return own, others


def read_flags(argv: list[str]) -> tuple[Given, str | None]:
    """Read what the command line sets.

    Args:
        argv: the words after the script's name, without --help.

    Returns:
        Values, places (the flag as typed) and mistakes; and the value of --config. Nothing is raised.
    """
    given = Given()
    normal: dict[str, str] = {}
    for word in _words(argv):
        name, value, mistake = _read(word)
        if mistake and name:
            given.doubtful.add(name)
        if not mistake and name in given.places:
            first = given.places[name]
            again = "twice" if first == word.flag else f"twice, as {first} and {word.flag}"
            mistake = f"{word.flag}: given {again}."
        if mistake:
            given.mistakes.append(mistake)
        else:
            given.places[name] = word.flag
            normal[name] = value
    texts = _through_fire(normal)
    given.places.pop("config", None)
    recipe = texts.pop("config", None)
    for name, text in texts.items():
        setting = known(name)
        assert setting is not None  # _read lets known names through only
        given.values[name] = from_text(setting, text)
    return given, recipe


def _through_fire(flags: dict[str, str]) -> dict[str, str]:
    """Hand the checked flags to fire, and take what it understood."""
    collected: dict[str, Any] = {}

    @SetParseFn(str)
    def collect(**values: str) -> None:
        collected.update(values)

    fire.Fire(collect, command=[f"--{name}={value}" for name, value in flags.items()])
    return collected


def _read(word: Word) -> tuple[str, str, str | None]:
    """Return field name, value as text, and what is wrong with the word, if anything (then the name is a guess)."""
    if not word.flag:
        return "", "", _stray(word)
    if not word.flag.startswith("--"):
        return _meant(word.flag.lstrip("-\u2013\u2014").replace("-", "_")), "", _one_dash(word)
    if word.name == "config":
        return (
            ("config", word.value, None)
            if word.value
            else ("config", "", "--config needs a file, as configs/mine.yaml.")
        )
    setting, negated = _setting(word.name)
    if setting is None:
        return _meant(word.name), "", _unknown(word)
    value, mistake = _text(word, setting, negated)
    return setting.name, value, mistake


def _like_config(name: str) -> bool:
    return "." not in name and nearest(name, ["config"]) is not None


def _meant(name: str) -> str:
    meant = guess(name)
    return "config" if _like_config(name) else meant.setting.name if meant else ""


def _setting(name: str) -> tuple[Setting | None, bool]:
    """Find the setting of a flag, and whether it was written as --no_x or --nox."""
    setting = known(name)
    if setting or not name.startswith("no"):
        return setting, False
    return known(name.removeprefix("no").removeprefix("_")), True


def _text(word: Word, setting: Setting, negated: bool) -> tuple[str, str | None]:
    """Return the value of a flag as text, or what is wrong with it."""
    shorthand = setting.name == "mode"  # --quantization: bare means 8bit, as in llama-recipes
    switch = setting.kind == "switch" or shorthand
    off, on = ("none", "8bit") if shorthand else ("false", "true")
    if negated and not switch:
        return "", f"{word.flag}: {setting.name} is not a switch; --no_ goes with switches only."
    if negated and word.value is not None:
        return "", f"{word.flag} {word.value}: {word.flag} stands alone, or is --{setting.name} {word.value}."
    if negated:
        return off, None
    if word.value is None:
        return (on, None) if switch else ("", f"{word.flag} needs a value: {expected(setting)}.")
    if not word.value.strip():
        return "", f"{word.flag}: the value is empty."
    if shorthand and word.value.lower() in (*TRUE_WORDS, *FALSE_WORDS):
        return (on if word.value.lower() in TRUE_WORDS else off), None
    return word.value, None


def _unknown(word: Word) -> str:
    """Say what an unknown flag may have meant."""
    said = told_apart(word.name, word.value)
    if not said and word.name.startswith("no_"):
        said = told_apart(word.name.removeprefix("no_"), "false")
    if said:
        return word.flag + said
    if _like_config(word.name):
        return f"{word.flag} is not a flag. Did you mean --config?"
    meant = guess(word.name)
    hint = f"Did you mean {meant.as_flag}?" if meant else "--help lists them all."
    return f"{word.flag} is not a flag. {hint}"


def _one_dash(word: Word) -> str:
    name = word.flag.lstrip("-\u2013\u2014").replace("-", "_")
    setting = known(name)
    meant = guess(name)
    hint = f" Did you mean --{name}?" if setting else f" Did you mean {meant.as_flag}?" if name and meant else ""
    return f"{word.flag}: flags begin with two plain dashes.{hint}"


def _stray(word: Word) -> str:
    """Say what a word without a flag may have meant."""
    text = word.value or ""
    name, _, value = text.partition("=")
    if "=" in text and _setting(name.replace("-", "_"))[0]:
        return f'"{text}" is not a flag. Did you mean --{text}?'
    if "=" in text and (said := told_apart(name, value)):  # torchtune's way of writing them
        return f'"{text}" is not a flag. {name}{said}'
    if "=" in text and name.rpartition(".")[2] in SETTINGS and (meant := guess(name)):  # model.lora_alpha=16
        return f'"{text}" is not a flag. Did you mean {meant.as_flag} {value}?'
    if text.endswith((".yaml", ".yml")):
        return f'"{text}" stands alone. Did you mean --config {text}?'
    if word.before:
        return f'"{text}" after {word.before} stands alone: a flag takes one value, and lists are written a,b,c.'
    return f'"{text}" stands alone: a value follows its flag, as in --lr 1e-4.'
