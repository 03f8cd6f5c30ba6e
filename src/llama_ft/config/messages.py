"""Parts of error messages: the name and place of a setting, its value, and a suggestion for an
unknown name.

Unknown names are names of llama-recipes, common names of other trainers, or typing errors.
"""

import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llama_ft.config.settings import SECTIONS, SETTINGS, Setting
from llama_ft.masking import mask_keys

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

# Names of other trainers that are not spelled similarly, and the setting (perhaps with a value)
# that replaces them.
# a flag, not a setting
CONFIG = Setting("", "config", "text", (), False, None, "The YAML config that is read first.")
ALIASES: dict[str, str] = {
    "data_path": "dataset",
    "pure_bf16": "precision bf16_pure",
    "mixed_precision": "precision bf16_mixed",
    "use_fp16": "precision fp16",
    "use_fast_kernels": "attn_implementation sdpa",
    "hsdp": "sharding_strategy HYBRID_SHARD",
    "replica_group_size": "sharding_group_size",
    **dict.fromkeys(("dist_checkpoint_root_folder", "dist_checkpoint_folder"), "output_dir"),
    **{
        f"{name}_activation_checkpointing": "activation_checkpointing full"
        for name in ("enable", "fsdp")
    },
    **{
        name: f"wandb_{name}"
        for name in ("project", "entity", "tags", "job_type", "group", "notes")
    },
    "model": "model_name",
    **dict.fromkeys(("lora", "use_lora"), "use_peft"),
    **dict.fromkeys(("qlora", "use_qlora"), "quantization 4bit"),
    **dict.fromkeys(
        ("batch_size", "micro_batch_size", "per_device_train_batch_size"), "batch_size_training"
    ),
    **dict.fromkeys(("dataset_name", "train_file"), "dataset"),
    "optim": "optimizer",
    "gradient_checkpointing": "activation_checkpointing full",
    "learning_rate": "lr",
    "max_steps": "max_train_step",
    "max_seq_length": "context_length",
    "load_in_8bit": "quantization 8bit",
    "load_in_4bit": "quantization 4bit",
    "bf16": "precision bf16_mixed",
    "fp16": "precision fp16",
    "lora_r": "r",
    "lora_rank": "r",
}

# Earlier names of settings, which still work: --label_smoothing, --no_plan and, in a YAML file,
# no_plan with the opposite value.
EARLIER_NAMES: dict[str, str] = {
    "label_smoothing": "dpo_label_smoothing",
    "plan": "plan_memory",
    "use_double_quant": "double_quant",  # llama-recipes' name
}

# Names that are flags of another program.
OTHER_PROGRAMS: dict[str, str] = dict.fromkeys(
    ("nproc", "nproc_per_node", "num_processes", "num_gpus"),
    " is not a setting. torchrun starts several ranks:\n"
    "torchrun --nproc_per_node 2 recipes/finetuning.py ... --enable_fsdp",
)

# Values that are spelled like another value, and what to say instead of "Did you mean".
UNSUPPORTED_VALUES: dict[tuple[str, str], str] = dict.fromkeys(
    (("objective", "grpo"), ("objective", "ppo")),
    "GRPO and PPO are not supported. Use TRL, axolotl or LLaMA-Factory for them.",
)


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
    shown = mask_keys(text[:MOST_SHOWN])
    return shown if len(text) <= MOST_SHOWN else f"{shown}... ({len(text):,} characters)"


def size_text(size_bytes: float) -> str:
    """Return a number of bytes as text: `1.22 GiB`, `48.5 MiB`."""
    return (
        f"{size_bytes / 2**30:,.2f} GiB"
        if size_bytes >= 2**30
        else f"{size_bytes / 2**20:,.1f} MiB"
    )


MOST_ERRORS = 20  # messages of one command
MOST_SHOWN = 1000  # characters of a value
LONGEST_NAME = 100  # names of settings are shorter, and difflib takes quadratic time
TYPO_SIMILARITY = 0.75  # at a lower similarity, unrelated names with a few common letters match too


def nearest(word: str, candidates: Iterable[str], least: float = 0.6) -> str | None:
    """Return the candidate most similar to `word`, or None if none has a similarity (0 to 1) of at
    least `least`."""
    if len(word) > LONGEST_NAME:
        return None
    names = {candidate.lower(): candidate for candidate in candidates}
    match = difflib.get_close_matches(word.lower(), names, n=1, cutoff=least)
    return names[match[0]] if match else None


def missing_file(file: Path) -> str:
    """Return the error message for a file that does not exist."""
    # without suffixes, which make all short names similar
    names = {path.name.partition(".")[0]: path for path in file.parent.glob("[!.]*")}
    similar = nearest(file.name.partition(".")[0], names, TYPO_SIMILARITY)
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
    page = f" {TRANSLATIONS}" if field in ALIASES else ""
    names = [name for name in SETTINGS if name != "mode"]  # --quantization
    others = SECTIONS if as_key else ["config"]
    match = nearest(field, [*names, *ALIASES, "quantization", *others], TYPO_SIMILARITY)
    if match is None:
        return f" is not {what}. --help lists them all, and {TRANSLATIONS}"
    meant, _, value = ALIASES.get(match, match).partition(" ")
    setting = known(meant)
    if setting is None:
        return f" is not {what}. Did you mean {'' if as_key else '--'}{meant}?"
    if not as_key:
        shown = setting.flag
    elif setting.name == "mode":
        shown = "quantization:"  # a section of YAML may be only the mode
    else:
        shown = setting.dotted
    return f" is not {what}. Did you mean {f'{shown} {value}'.rstrip()}?{page}"


def explain_section(name: str, keys: Iterable[str]) -> str:
    """Return the text that follows an unknown section of a YAML file, which holds `keys`."""
    belong = {SETTINGS[key].section: None for key in keys if key in SETTINGS}  # in order
    if not belong or nearest(name, SECTIONS, TYPO_SIMILARITY):
        return explain_unknown(name, as_key=True)
    return f" is not a section. Its settings belong to {' and '.join(belong)}."
