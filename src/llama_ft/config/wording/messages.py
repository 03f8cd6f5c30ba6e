"""Parts of error messages: the name and place of a setting, its value, and a suggestion for an
unknown name.

Unknown names are names of llama-recipes, common names of other trainers, or typing errors.
"""

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llama_ft.config.settings.settings import SECTIONS, SETTINGS, Setting
from llama_ft.config.wording.other_names import EXPORTING, SAME_AS, WITHOUT_COUNTERPART
from llama_ft.masking import mask_secrets

TRANSLATIONS = "docs/migrate translates other trainers' names."

# Prefixes of llama-recipes' dotted names, and the sections whose fields they can mean.
LLAMA_RECIPES_PREFIXES: dict[str, tuple[str, ...]] = {
    "train_config": tuple(SECTIONS),
    "fsdp_config": ("fsdp", "train"),
    "lora_config": ("peft",),
    "quantization_config": ("quantization",),
    "wandb_config": ("tracking",),
}

# Names of llama-recipes without a setting here, and the prefixes of its configs for what does not
# exist here.
LLAMA_RECIPES = set(
    "one_gpu checkpoint_type activation_checkpointing_use_reentrant enable_memory_monitoring save_metrics "
    "memory_monitoring_interval quant_storage num_workers_dataloader task_type inference_mode "
    "save_optimizer custom_dataset samsum_dataset grammar_dataset alpaca_dataset "
    "llamaguard_toxicchat_dataset llama_adapter_config adapter_len adapter_layers prefix_config "
    "num_virtual_tokens".split()
)

# a flag, not a setting
CONFIG = Setting("", "config", "text", (), False, None, "The YAML config that is read first.")

# Other names of settings, which work, too: --label_smoothing, --context_parallel_size, --no_plan and,
# in a YAML file, no_plan with the opposite value.
EARLIER_NAMES: dict[str, str] = {
    "label_smoothing": "dpo_label_smoothing",
    "plan": "plan_memory",
    "use_double_quant": "double_quant",  # llama-recipes' name
    "context_parallel_size": "sequence_parallel_size",
}

# Names that are flags of another program.
OTHER_PROGRAMS: dict[str, str] = dict.fromkeys(
    ("nproc", "nproc_per_node", "num_processes", "num_gpus"),
    " is not a setting. torchrun starts several ranks:\n"
    "torchrun --nproc_per_node 2 recipes/finetuning.py ... --enable_fsdp",
)

# Values that are spelled like another value, and what to say instead of "Did you mean".
UNSUPPORTED_VALUES: dict[tuple[str, str], str] = {
    ("objective", "ppo"): "PPO is not supported. Use TRL for it, or another objective.",
}


def describe_setting(name: str, origins: Mapping[str, str]) -> str:
    """Return the name of a setting together with the place where it was set.

    Args:
        name: field name.
        origins: field name -> place.

    Returns:
        `--lr` as typed, `configs/mine.yaml:12: train.lr`, or `train.lr` if no place is known.
    """
    if (origin := origins.get(name, "")).startswith("--"):  # the flag of a tool or a setting
        return origin
    return f"{origin}: {SETTINGS[name].dotted}" if origin else SETTINGS[name].dotted


def format_value(value: Any) -> str:
    """Return a value as a user would type it, or the beginning of a long one."""
    text = str(value)
    if isinstance(value, dict):
        text = json.dumps(value)
    elif isinstance(value, list):
        has_parts = bool(value) and isinstance(value[0], dict)
        text = json.dumps(value) if has_parts else f"[{','.join(map(str, value))}]"
    elif value is None or isinstance(value, bool):
        text = text.lower()
    shown = mask_secrets(text[:MOST_SHOWN])
    return shown if len(text) <= MOST_SHOWN else f"{shown}... ({len(text):,} characters)"


def size_text(size_bytes: float) -> str:
    """Return a number of bytes as text: `1.22 GiB`, `48.5 MiB`."""
    return (
        f"{size_bytes / 2**30:,.2f} GiB"
        if size_bytes >= 2**30
        else f"{size_bytes / 2**20:,.1f} MiB"
    )


# seconds, name, and the shortest duration that is printed in this unit
TIME_UNITS = (
    (3600, "h", 5400),
    (60, "min", 90),
    (1, "s", 1),
)


def time_text(seconds: float) -> str:
    """Return a duration as text: `63 ms`, `5.2 s`, `14 min`, `3.5 h`."""
    for size, name, least in TIME_UNITS:
        if seconds >= least:
            digits = 0 if seconds >= 10 * size else 1
            return f"{seconds / size:,.{digits}f} {name}"
    return f"{seconds * 1000:.0f} ms"


MOST_ERRORS = 20  # messages of one command
MOST_SHOWN = 1000  # characters of a value
LONGEST_NAME = 100  # names of settings are shorter, and difflib takes quadratic time
TYPO_SIMILARITY = 0.75  # at a lower similarity, unrelated names with a few common letters match too


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate of which `word` is a misspelling, or None. Another name with a few common
    letters may mean something else, so it is not suggested."""
    if len(word) > LONGEST_NAME:
        return None
    names = {candidate.lower(): candidate for candidate in candidates}
    similar = difflib.get_close_matches(word.lower(), names, n=5, cutoff=TYPO_SIMILARITY)
    for name in similar:
        if is_misspelling(word.lower(), name):
            return names[name]
    return None


def is_misspelling(word: str, name: str) -> bool:
    """Return whether a text is a misspelling of a name: a few other letters within its words, other
    separators, or only the first or the last words of the name."""
    typed = re.split(r"[\W_]+", word)
    meant = re.split(r"[\W_]+", name)
    if len(typed) == len(meant):
        pairs = zip(typed, meant, strict=True)
        return all(_edits(one, other) <= _most_edits(one, other) for one, other in pairs)
    if _edits("".join(typed), "".join(meant)) <= 1:
        return True
    count = len(typed)
    return count > 1 and typed in (meant[:count], meant[-count:])


def _most_edits(word: str, name: str) -> int:
    longest = max(len(word), len(name))
    return int(longest > 2) + int(longest > 7)


def _edits(word: str, name: str) -> int:
    """Return the number of letters to insert, delete, replace or swap with the next one, to get from
    one text to the other."""
    before: list[int] = []
    row = list(range(len(name) + 1))
    for i, letter in enumerate(word):
        earlier, before, row = before, row, [i + 1]
        for j, other in enumerate(name):
            replaced = before[j] + (letter != other)
            row.append(min(before[j + 1] + 1, row[j] + 1, replaced))
            is_swapped = i and j and letter == name[j - 1] and word[i - 1] == other
            if is_swapped:
                row[-1] = min(row[-1], earlier[j - 1] + 1)
    return row[-1]


def missing_file(file: Path) -> str:
    """Return the error message for a file that does not exist."""
    # without suffixes, which make all short names similar
    names = {path.name.partition(".")[0]: path for path in file.parent.glob("[!.]*")}
    similar = nearest(file.name.partition(".")[0], names)
    return f"no such file. Did you mean {names[similar]}?" if similar else "no such file."


def known(name: str) -> Setting | None:
    """Return the setting of a plain, dotted or llama-recipes name (`lr`, `train.lr`,
    `lora_config.r`), or None."""
    if name == "config":
        return CONFIG
    if name in ("quantization", "train_config.quantization"):
        return SETTINGS["mode"]
    prefix, dot, field = name.rpartition(".")
    field = EARLIER_NAMES.get(field, field)
    setting = SETTINGS.get(f"wandb_{field}" if prefix == "wandb_config" else field)
    is_here = not dot or (
        setting and setting.section in (prefix, *LLAMA_RECIPES_PREFIXES.get(prefix, ()))
    )
    return setting if is_here else None


def is_other_name(dotted: str) -> bool:
    """Return whether other trainers have this key of a section."""
    field = dotted.rpartition(".")[2]
    return not {dotted, field}.isdisjoint((*SAME_AS, *WITHOUT_COUNTERPART, *EXPORTING))


def explain_unknown(name: str, as_key: bool = False) -> str:
    """Return the text that follows an unknown name in an error message.

    Args:
        name: the unknown name, plain or with a prefix.
        as_key: the name is a key of a YAML file, not a flag.
    """
    prefix, _, field = name.rpartition(".")
    if {prefix, field} & LLAMA_RECIPES:
        return (
            ", known from llama-recipes, is not used here: docs/migrate/llama-recipes.md says why."
        )
    if field in OTHER_PROGRAMS:
        return OTHER_PROGRAMS[field]
    what = "a setting" if as_key else "a flag"
    if field in EXPORTING:
        return f" is not {what} of a run. Afterwards, recipes/export.py RUN OUT {EXPORTING[field]}."
    if {name, field} & WITHOUT_COUNTERPART:
        return (
            f" is not {what}. It has no counterpart here: docs/migrate says what happens instead."
        )
    replaced = SAME_AS.get(name) or SAME_AS.get(field)
    names = [name for name in SETTINGS if name != "mode"]  # --quantization
    others = SECTIONS if as_key else ["config"]
    match = replaced or nearest(field, [*names, "quantization", *others])
    if match is None:  # a misspelled name of another trainer
        theirs = nearest(field, SAME_AS)
        match = replaced = SAME_AS[theirs] if theirs else None
    if match is None:
        return f" is not {what}. --help all lists them, and {TRANSLATIONS}"
    meant = " and ".join(_as_written(part, as_key) for part in match.split(" and "))
    page = f" {TRANSLATIONS}" if replaced else ""
    return f" is not {what}. Did you mean {meant}?{page}"


def _as_written(name_and_value: str, as_key: bool) -> str:
    """Return a setting, perhaps with a value, as it is written on a command line or in a YAML
    file."""
    name, _, value = name_and_value.partition(" ")
    setting = known(name)
    if setting is None:  # a section
        return name if as_key else f"--{name}"
    if not as_key:
        shown = setting.flag
    elif setting.name == "mode":
        shown = "quantization:"  # a section of YAML may be only the mode
    else:
        shown = setting.dotted
    return f"{shown} {value}".rstrip()


def explain_section(name: str, keys: Iterable[str]) -> str:
    """Return the text that follows an unknown section of a YAML file, which holds `keys`."""
    belong = {SETTINGS[key].section: None for key in keys if key in SETTINGS}  # in order
    if not belong or nearest(name, SECTIONS):
        return explain_unknown(name, as_key=True)
    return f" is not a section. Its settings belong to {' and '.join(belong)}."
