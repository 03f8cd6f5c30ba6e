"""How messages name a setting, show a value and guess what was meant."""

import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llama_ft.config.settings import SETTINGS

NO_PLACES: Mapping[str, str] = {}


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
    if is_flag(place := places.get(name, "")):  # of any tool; the rest is of settings
        return place
    return f"{place}: {SETTINGS[name].dotted}" if place else SETTINGS[name].dotted


def show(value: Any) -> str:
    """Show a value as it would be typed."""
    if isinstance(value, list):
        has_dicts = any(isinstance(item, dict) for item in value)
        return json.dumps(value, ensure_ascii=False) if has_dicts else f"[{','.join(map(str, value))}]"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def size_text(size_bytes: float) -> str:
    """Show a size in memory or on disk: `1.22 GiB`, `48.5 MiB`."""
    return f"{size_bytes / 2**30:,.2f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:,.1f} MiB"


def nearest(word: str, candidates: Iterable[str], least: float = 0.6) -> str | None:
    """Return the candidate that word is most likely a slip of, if any is near, `least` of at most 1."""
    names = {candidate.lower(): candidate for candidate in candidates}
    match = difflib.get_close_matches(word.lower(), names, n=1, cutoff=least)
    return names[match[0]] if match else None


def nearest_file(path: Path) -> str:
    """Return ` Did you mean <path>?` with the entry of the same folder whose name is nearest, or nothing."""
    try:
        others = [entry for entry in path.parent.iterdir() if entry.name != path.name]
    except OSError:
        return ""
    entries = {entry.stem: entry for entry in sorted(others, key=lambda entry: entry.suffix == path.suffix)}
    return f" Did you mean {entries[match]}?" if (match := nearest(path.stem, entries, 0.65)) else ""
