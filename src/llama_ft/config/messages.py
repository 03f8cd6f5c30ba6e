"""How messages name a setting, show a value and guess what was meant."""

import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llama_ft.config.settings import SETTINGS, Setting

NO_PLACES: Mapping[str, str] = {}
LONGEST_SHOWN = 100
LIKENESS_OF_A_SLIP = 0.6  # as difflib.get_close_matches has it
LIKENESS_OF_FILES = {True: 0.65, False: 0.8}  # with the same ending, with another; nope and NOTICE have 0.6


def is_flag(place: str) -> bool:
    """Tell the places of the command line (`--lr`) from those of a file (`configs/mine.yaml:12`)."""
    return place.startswith("--")


def subject(name: str, places: Mapping[str, str]) -> str:
    """Name a setting with the place where it was set.

    Args:
        name: field name.
        places: field name -> place.

    Returns:
        `--lr` as typed, `configs/mine.yaml:12: train.lr`, or `train.lr` where no place is known.
    """
    place = places.get(name, "")
    if is_flag(place):
        return place
    return f"{place}: {SETTINGS[name].dotted}" if place else SETTINGS[name].dotted


def show(value: Any) -> str:
    """Show a value as it would be typed."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return "[" + ",".join(map(str, value)) + "]"
    return "a mapping" if isinstance(value, dict) else str(value)


def expected(setting: Setting) -> str:
    """Say what a setting takes: `a number`, or its choices."""
    if setting.choices:
        return one_of(setting.choices)
    kinds = {
        "switch": "true or false",
        "whole number": "a whole number",
        "number": "a number",
        "text": "text",
        "data": "a name, or a list of parts with path, weight and split",
        "names": "a list of names",
    }
    return kinds.get(setting.kind, "a list of names, or all-linear")


def brief(text: str) -> str:
    """Show what may be much too long."""
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}... ({len(text)} characters)"


def size_text(size_bytes: float) -> str:
    """Show a size in memory or on disk: `1.22 GiB`, `48.5 MiB`."""
    return f"{size_bytes / 2**30:,.2f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:,.1f} MiB"


def one_of(words: Iterable[str]) -> str:
    """Join words as `a, b or c`."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def nearest(word: str, candidates: Iterable[str], least: float = LIKENESS_OF_A_SLIP) -> str | None:
    """Return the candidate that word is most likely a slip of, if any is near, `least` of at most 1."""
    scores = {candidate: _likeness(word.lower(), candidate.lower()) for candidate in candidates}
    best = max(scores, key=lambda candidate: scores[candidate], default=None)
    return best if best is not None and scores[best] >= least else None


def _likeness(word: str, candidate: str) -> float:
    """Compare whole words, and the beginning too: bf61 is near bf16_mixed, and warmup near warmup_steps."""
    whole = difflib.SequenceMatcher(None, word, candidate).ratio()
    if len(word) < 4:
        return whole
    beginning = difflib.SequenceMatcher(None, word, candidate[: len(word)]).ratio()
    return max(whole, beginning - 0.05)


def nearest_file(path: Path) -> str:
    """Return ` Did you mean <path>?` with the entry of the same folder whose name is nearest, or nothing. One with
    another ending has to be nearer than one with the same."""
    try:
        entries = [entry.name for entry in path.parent.iterdir() if entry.name != path.name]  # a link may lead nowhere
    except OSError:
        return ""
    # What a shared ending adds to the likeness says nothing: compare what stands before it.
    for is_same, least in LIKENESS_OF_FILES.items():
        names = {
            name.removesuffix(path.suffix): name for name in entries if (Path(name).suffix == path.suffix) is is_same
        }
        if match := nearest(path.name.removesuffix(path.suffix), names, least):
            return f" Did you mean {path.parent / names[match]}?"
    return ""
