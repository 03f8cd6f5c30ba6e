"""Parts of error messages: the name and place of a setting, its value, and a suggestion for an unknown name.

Unknown names are names of llama-recipes, common names of other trainers, or typing errors.
"""

import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llama_ft.config.settings import SECTIONS, SETTINGS, Setting

PEFT_METHOD = "peft_method can be lora or loha"
TRANSLATIONS = "docs/migrate translates other trainers' names."

# Prefixes of llama-recipes' dotted names, and the sections whose fields they can mean.
LLAMA_RECIPES_PREFIXES: dict[str, tuple[str, ...]] = {
    "train_config": tuple(SECTIONS),
    "fsdp_config": ("fsdp", "train"),
    "lora_config": ("peft",),
    "quantization_config": ("quantization",),
    "wandb_config": ("tracking",),
}

# Names of llama-recipes that have no equivalent here, and what to do instead.
REMOVED = (
    "one_gpu checkpoint_type activation_checkpointing_use_reentrant enable_memory_monitoring save_metrics "
    "memory_monitoring_interval use_double_quant quant_storage num_workers_dataloader task_type inference_mode"
)
LLAMA_RECIPES: dict[str, str] = {
    **dict.fromkeys(REMOVED.split(), "docs/migrate/llama-recipes.md says why. Remove it"),
    "pure_bf16": "use precision bf16_pure",
    "mixed_precision": "use precision bf16_mixed (the default), or fp32 for false",
    "use_fp16": "use precision bf16_mixed (the default), or fp16 on GPUs without bf16",
    "use_fast_kernels": "use attn_implementation; sdpa, which auto takes, has torch's fastest kernels",
    "hsdp": "use sharding_strategy HYBRID_SHARD",
    "replica_group_size": "use sharding_strategy HYBRID_SHARD and sharding_group_size",
    "fsdp_activation_checkpointing": "use activation_checkpointing full",
    "dist_checkpoint_root_folder": "use output_dir: checkpoints are written to output_dir/checkpoints",
    "dist_checkpoint_folder": "use output_dir: checkpoints are written to output_dir/checkpoints",
    "save_optimizer": "checkpoints always hold the optimizer. Use save_steps to say how often",
    "freeze_LLM_only": "only the language model is trained. Use freeze_layers",
    "custom_dataset.file": "use dataset path/to/file.py:function",
    "custom_dataset.train_split": "use dataset_split; a dataset function decides by itself",
    "custom_dataset.test_split": "use validation; a dataset function decides by itself",
    # Configuration classes of llama-recipes for features that do not exist here.
    "samsum_dataset": "use dataset samsum, and dataset_split",
    "grammar_dataset": "use dataset grammar, and dataset_split",
    "alpaca_dataset": "use dataset alpaca, or a file of columns instruction, input and output",
    "llamaguard_toxicchat_dataset": "use dataset path/to/file.py:function, which returns the samples",
    **dict.fromkeys("llama_adapter_config adapter_len adapter_layers".split(), PEFT_METHOD),
    **dict.fromkeys("prefix_config num_virtual_tokens".split(), PEFT_METHOD),
}

# Names of other trainers that are not spelled similarly, and the setting (perhaps with a value) that replaces them.
CONFIG = Setting("", "config", "text", (), False, None, "The YAML config that is read first.")  # a flag, not a setting
ALIASES: dict[str, str] = {
    "data_path": "dataset",
    "enable_activation_checkpointing": "activation_checkpointing full",
    **{name: f"wandb_{name}" for name in ("project", "entity", "tags", "job_type", "group", "notes")},
    "model": "model_name",
    "lora": "use_peft",
    "batch_size": "batch_size_training",
    "per_device_train_batch_size": "batch_size_training",
    "gradient_checkpointing": "activation_checkpointing full",
    "learning_rate": "lr",
    "max_steps": "max_train_step",
    "max_seq_length": "context_length",
    "load_in_8bit": "quantization 8bit",
    "load_in_4bit": "quantization 4bit",
}


def subject(name: str, places: Mapping[str, str]) -> str:
    """Return the name of a setting together with the place where it was set.

    Args:
        name: field name.
        places: field name -> place.

    Returns:
        `--lr` as typed, `configs/mine.yaml:12: train.lr`, or `train.lr` if no place is known.
    """
    if (place := places.get(name, "")).startswith("--"):  # the flag of a tool or a setting
        return place
    return f"{place}: {SETTINGS[name].dotted}" if place else SETTINGS[name].dotted


def show(value: Any) -> str:
    """Return a value as a user would type it."""
    if isinstance(value, list):
        return json.dumps(value) if value and isinstance(value[0], dict) else f"[{','.join(map(str, value))}]"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def size_text(size_bytes: float) -> str:
    """Return a number of bytes as text: `1.22 GiB`, `48.5 MiB`."""
    return f"{size_bytes / 2**30:,.2f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:,.1f} MiB"


LIKE_A_SLIP = 0.75  # at a lower similarity, unrelated names with a few common letters match too


def nearest(word: str, candidates: Iterable[str], least: float = 0.6) -> str | None:
    """Return the candidate most similar to `word`, or None if none has a similarity (0 to 1) of at least `least`."""
    names = {candidate.lower(): candidate for candidate in candidates}
    match = difflib.get_close_matches(word.lower(), names, n=1, cutoff=least)
    return names[match[0]] if match else None


def nearest_file(path: Path) -> str:
    """Return ` Did you mean <path>?` with the most similar entry of the same directory, or an empty text."""
    try:
        others = [entry for entry in path.parent.iterdir() if entry.name != path.name]
    except OSError:
        return ""
    entries = {entry.stem: entry for entry in sorted(others, key=lambda entry: entry.suffix == path.suffix)}
    return f" Did you mean {entries[match]}?" if (match := nearest(path.stem, entries, 0.65)) else ""


def known(name: str) -> Setting | None:
    """Return the setting of a plain, dotted or llama-recipes name (`lr`, `train.lr`, `lora_config.r`), or None."""
    if name == "config":
        return CONFIG
    if name in ("quantization", "train_config.quantization"):
        return SETTINGS["mode"]
    prefix, dot, field = name.rpartition(".")
    setting = SETTINGS.get(f"wandb_{field}" if prefix == "wandb_config" else field)
    is_here = not dot or (setting and setting.section in (prefix, *LLAMA_RECIPES_PREFIXES.get(prefix, ())))
    return setting if is_here else None


def explain_unknown(name: str, as_key: bool = False) -> str:
    """Return the text that follows an unknown name in an error message.

    Args:
        name: the unknown name, plain or with a prefix.
        as_key: the name is a key of a YAML file, not a flag.
    """
    prefix, _, field = name.rpartition(".")
    if here := LLAMA_RECIPES.get(prefix) or LLAMA_RECIPES.get(name) or LLAMA_RECIPES.get(field):
        return f", known from llama-recipes, is not used here: {here}."
    what, page = ("a setting" if as_key else "a flag"), f" {TRANSLATIONS}" if field in ALIASES else ""
    names = [name for name in SETTINGS if name != "mode"]  # --quantization
    match = nearest(field, [*names, *ALIASES, "quantization", *(SECTIONS if as_key else ["config"])], LIKE_A_SLIP)
    if match is None:
        return f" is not {what}. --help lists them all, and {TRANSLATIONS}"
    meant, _, value = ALIASES.get(match, match).partition(" ")
    setting = known(meant)
    if setting is None:
        return f" is not {what}. Did you mean {'' if as_key else '--'}{meant}?"
    shown = setting.flag if not as_key else "quantization:" if setting.name == "mode" else setting.dotted
    return f" is not {what}. Did you mean {f'{shown} {value}'.rstrip()}?{page}"
