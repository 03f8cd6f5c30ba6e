"""Record in checkpoints how each attempt of a run differs from the one before; see
`llama_ft.config.attempts`."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from llama_ft.checkpoint.reader import Checkpoint
from llama_ft.config.attempts import OTHER_CONTENT, changed_settings
from llama_ft.config.reading.load import with_present_names
from llama_ft.config.settings.settings import SETTINGS
from llama_ft.runtime import Ranks


def attempts_of(
    resumed: Checkpoint | None, now: Mapping[str, Any], ranks: Ranks
) -> list[dict[str, Any]]:
    """Return the attempts whose steps are in this run, with this one as the last. All ranks call it
    and get the same.

    An attempt that was killed before its first checkpoint leaves no step, and so is not there.

    Args:
        resumed: the checkpoint that the run resumes from; None for a new run.
        now: the description of this run for trainer.json, with its inputs.
        ranks: the ranks.
    """
    moment = ranks.broadcast_from_rank0(lambda: f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S+00:00}")
    attempt = _attempt(moment, ranks.world_size, now["global_batch"])
    if resumed is None:
        return [attempt]
    saved = resumed.trainer
    earlier = saved.get("attempts")
    if earlier is None:  # the checkpoint is from a version that did not record them
        earlier = [_attempt(None, None, saved.get("global_batch"))]
    before = with_present_names(saved["config"])
    attempt["step"] = resumed.step
    attempt["changed"] = changed_settings(before, now["config"]) | _other_contents(saved, now)
    versions = saved.get("versions", {})
    attempt["versions"] = {
        name: [versions[name], new]
        for name, new in now["versions"].items()
        if versions.get(name, new) != new
    }
    return [*earlier, attempt]


def _attempt(time: str | None, ranks: int | None, global_batch: int | None) -> dict[str, Any]:
    return {
        "step": 0,
        "time": time,
        "ranks": ranks,
        "global_batch": global_batch,
        "changed": {},
        "versions": {},
    }


def _other_contents(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the change of each input that has other content under the same name."""
    changed = {}
    before = saved.get("contents", {})
    for name, content in now["contents"].items():
        setting = SETTINGS[name]
        value = now["config"][setting.section][name]
        old = with_present_names(saved["config"]).get(setting.section, {}).get(name)
        if before.get(name, content) != content and old == value:
            changed[setting.dotted] = [value, f"{value}{OTHER_CONTENT}"]
    return changed
