"""The attempts of a run: its start, and each resume whose steps are part of it. A resume may change
settings, so no record of a run may say that its last settings always held.

An attempt is a dict of facts.json and trainer.json:

    {"step": 8, "time": "2026-11-28T16:20:00+00:00", "ranks": 2, "global_batch": 16,
     "changed": {"train.lr": [0.01, 0.001]}, "versions": {"torch": ["2.12.0", "2.13.0"]}}

`step` is the number of optimizer steps that were done before. `changed` has the old and the new
value of each setting that differs from the attempt before, by its dotted name.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from llama_ft.config.reading.dump import SETTINGS_OF_ONE_RUN
from llama_ft.config.settings.settings import SETTINGS
from llama_ft.config.wording.messages import format_value

Attempts = Sequence[Mapping[str, Any]]
OTHER_CONTENT = " (other content)"  # of a dataset or a model whose name has not changed


def changed_settings(
    before: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[Any]]:
    """Return dotted name -> [old, new] of the settings that differ, except those that each launch
    has of its own, such as resume. Both arguments are settings by section."""
    changed = {}
    for section, settings in now.items():
        for name, value in settings.items():
            old = before.get(section, {}).get(name, SETTINGS[name].default)
            if old != value and name not in SETTINGS_OF_ONE_RUN:
                changed[f"{section}.{name}"] = [old, value]
    return changed


def readable_attempts(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the attempts in facts.json; none if they are missing or corrupted."""
    attempts = facts.get("attempts", [])
    try:
        for attempt in attempts:
            is_whole = isinstance(attempt["step"], int)
            pairs = [*attempt["changed"].values(), *attempt.get("versions", {}).values()]
            if not is_whole or any(len(pair) != 2 for pair in pairs):
                return []
        return list(attempts)
    except (TypeError, KeyError, AttributeError):
        return []


def value_over_time(dotted: str, last: Any, attempts: Attempts) -> Any:
    """Return the value of a setting: `last`, or if a resume has changed it, the text `0.01 until
    step 8, then 0.001`."""
    until = list[str]()
    for attempt in attempts:
        if dotted in attempt["changed"]:
            old, _ = attempt["changed"][dotted]
            until.append(f"{format_value(old)} until step {attempt['step']:,}")
    return f"{', '.join(until)}, then {format_value(last)}" if until else last


def describe_changes(attempt: Mapping[str, Any], earlier: Mapping[str, Any] | None) -> list[str]:
    """Return one text per difference of an attempt from the one before: `train.lr: 0.01 -> 0.001`.
    The first attempt has none."""
    pairs = dict[str, Sequence[Any]](attempt["changed"])
    if earlier is not None:
        for name in ("ranks", "global_batch"):
            was, is_now = earlier.get(name), attempt.get(name)
            if was is not None and was != is_now:
                pairs[name.replace("_", " ")] = (was, is_now)
    pairs |= attempt.get("versions", {})
    return [
        f"{name}: {format_value(old)} -> {format_value(new)}" for name, (old, new) in pairs.items()
    ]


def describe_attempts(attempts: Attempts) -> list[str]:
    """Return one line per resume that has changed something."""
    lines = []
    for earlier, attempt in zip(attempts, attempts[1:], strict=False):
        changes = describe_changes(attempt, earlier)
        if changes:
            lines.append(f"after step {attempt['step']:,}: {'; '.join(changes)}")
    return lines
