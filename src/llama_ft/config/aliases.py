"""Names that are not ours: llama-recipes' own, usual names of other trainers, and typing errors."""

from dataclasses import dataclass

from llama_ft.config.messages import nearest
from llama_ft.config.settings import SECTIONS, SETTINGS, Setting

PEFT_METHOD = "peft_method can be lora or loha"
LIKENESS_OF_OURS = 0.8  # lrr is as near to lr, trian to train
TRANSLATIONS = "docs/from-*.md list the names of llama-recipes, torchtune, TRL and axolotl with those used here."

# llama-recipes' dotted prefixes, and the sections whose fields they may name.
LLAMA_RECIPES_PREFIXES: dict[str, tuple[str, ...]] = {
    "train_config": tuple(SECTIONS),
    "fsdp_config": ("fsdp", "train"),
    "lora_config": ("peft",),
    "quantization_config": ("quantization",),
    "wandb_config": ("tracking",),
}

# llama-recipes' names that differ: a setting, perhaps with a value, or else a sentence saying what to do instead.
LLAMA_RECIPES: dict[str, str] = {
    "one_gpu": "a run without torchrun is one process on one device. Leave it out",
    "pure_bf16": "use precision bf16_pure",
    "mixed_precision": "use precision bf16_mixed (the default), or fp32 for false",
    "use_fp16": "use precision bf16_mixed (the default), or fp16 on GPUs without bf16",
    "use_fast_kernels": "use attn_implementation; sdpa, which auto takes, has torch's fastest kernels",
    "hsdp": "use sharding_strategy HYBRID_SHARD",
    "replica_group_size": "use sharding_strategy HYBRID_SHARD and sharding_group_size: the replicas follow",
    "checkpoint_type": "checkpoints are always sharded, and the result is in Hugging Face format. Leave it out",
    "fsdp_activation_checkpointing": "use activation_checkpointing full",
    "enable_activation_checkpointing": "activation_checkpointing full",
    "activation_checkpointing_use_reentrant": "activation checkpointing is never reentrant. Leave it out",
    "enable_memory_monitoring": "memory peaks are always written to output_dir/metrics.jsonl. Leave it out",
    "memory_monitoring_interval": "memory peaks are written with every log_steps. Leave it out",
    "dist_checkpoint_root_folder": "use output_dir: checkpoints are written to output_dir/checkpoints",
    "dist_checkpoint_folder": "use output_dir: checkpoints are written to output_dir/checkpoints",
    "save_optimizer": "checkpoints always hold the optimizer. Use save_steps to say how often",
    "save_metrics": "metrics are always written to output_dir/metrics.jsonl. Leave it out",
    "use_double_quant": "scales are kept in fp32, so that they shard by rows. Leave it out",
    "quant_storage": "4-bit weights are stored as bytes and sharded by rows, whatever holds them. Leave it out",
    "freeze_LLM_only": "only language models are trained here. Use freeze_layers",
    "num_workers_dataloader": "rows are tokenized before training and need no workers. Leave it out",
    "custom_dataset.file": "use dataset path/to/file.py:function",
    "custom_dataset.train_split": "use dataset_split; a function of yours decides itself",
    "custom_dataset.test_split": "use validation; a function of yours decides itself",
    "data_path": "dataset",
    "task_type": "language models are trained as such. Leave it out",
    "inference_mode": "adapters are trained here. Leave it out",
    "adapter_len": PEFT_METHOD,
    "adapter_layers": PEFT_METHOD,
    "num_virtual_tokens": PEFT_METHOD,
    "project": "wandb_project",
    "entity": "wandb_entity",
    "tags": "wandb_tags",
    "job_type": "wandb_job_type",
    "group": "wandb_group",
    "notes": "wandb_notes",
}

# Usual names that are too unlike ours for a likeness of letters to find.
ALIASES: dict[str, str] = {
    "learning_rate": "lr",
    "micro_batch_size": "batch_size_training",
    "grad_accum": "gradient_accumulation_steps",
    "max_steps": "max_train_step",
    "seq_len": "context_length",
    "max_seq_length": "context_length",
    "cutoff_len": "context_length",
    "bf16": "precision bf16_mixed",
    "fp16": "precision fp16",
    "fp32": "precision fp32",
    "packing": "batching_strategy packing",
    "base_model": "model_name",
    "train_file": "dataset",
    "eval_dataset": "validation",
    "lora": "use_peft",
    "use_lora": "use_peft",
    "lora_r": "r",
    "lora_rank": "r",
    "rank": "r",
    "load_in_8bit": "quantization 8bit",
    "load_in_4bit": "quantization 4bit",
    "resume_from_checkpoint": "resume",
    "overwrite_output_dir": "overwrite",
}

# llama-recipes' configurations of what does not exist here, and what takes their place.
GONE_PREFIXES: dict[str, str] = {
    "samsum_dataset": "use dataset samsum, and dataset_split",
    "grammar_dataset": "use dataset grammar, and dataset_split",
    "alpaca_dataset": "use dataset alpaca, or a file of columns instruction, input and output",
    "llamaguard_toxicchat_dataset": "use dataset path/to/file.py:function, which makes rows of it",
    "llama_adapter_config": PEFT_METHOD,
    "prefix_config": PEFT_METHOD,
}


@dataclass(frozen=True)
class Guess:
    """What an unknown name was probably meant to be: a setting, and maybe its value."""

    setting: Setting
    value: str | None

    def shown(self, as_key: bool) -> str:
        """Name it as YAML does (train.lr), or as a flag."""
        if as_key:
            key = "quantization" if self.setting.name == "mode" else self.setting.dotted
            return f"{key}: {self.value}" if self.value else key
        return f"{self.setting.flag} {self.value}" if self.value else self.setting.flag


def known(name: str) -> Setting | None:
    """Find the setting that a plain, dotted or llama-recipes name (`lr`, `train.lr`, `lora_config.r`) stands for."""
    if name in ("quantization", "train_config.quantization"):
        return SETTINGS["mode"]
    prefix, dot, field = name.rpartition(".")
    setting = SETTINGS.get(f"wandb_{field}" if prefix == "wandb_config" else field)
    is_here = not dot or (setting and setting.section in (prefix, *LLAMA_RECIPES_PREFIXES.get(prefix, ())))
    return setting if is_here else None


def explain_unknown(
    name: str, value: str | None = None, as_key: bool = False, otherwise: str = "--help lists them all."
) -> str:
    """Return what to say after an unknown name.

    Args:
        name: the name, plain or with a prefix.
        value: what it is set to, as typed: "false" is not answered with what the name says.
        as_key: the name is a key of a YAML file, not a flag.
        otherwise: what to say if nobody knows what was meant.
    """
    prefix, _, field = name.rpartition(".")
    if here := GONE_PREFIXES.get(prefix) or LLAMA_RECIPES.get(name) or LLAMA_RECIPES.get(field):
        meant, is_off = _as_guess(here), (value or "").lower() in ("false", "no", "off", "0")
        if is_off and (meant.value is not None if meant else here.startswith("use ") and "false" not in here):
            return f" is llama-recipes' name; for {value} leave it out."
        if meant is None:
            return f", known from llama-recipes, is not used here: {here}."
        return f" is llama-recipes' name; here it is {meant.shown(as_key)}."
    meant = meant_by(name)
    if not as_key and "." not in name and nearest(name, ["config"]):
        return " is not a flag. Did you mean --config?"
    what = "a setting" if as_key else "a flag"
    return f" is not {what}. " + (f"Did you mean {meant.shown(as_key)}?" if meant else otherwise)


def meant_by(name: str) -> Guess | None:
    """Guess the setting that an unknown name was meant to be: by another name of it, else by likeness."""
    field = name.rpartition(".")[2].lower()
    others = ALIASES | {old: here for old, here in LLAMA_RECIPES.items() if _as_guess(here)}
    match = field if known(field) or field in others else nearest(field, [*SETTINGS, "quantization", *others])
    return _as_guess(others.get(match, match)) if match else None


def is_foreign(name: str) -> bool:
    """Whether an unknown name is more than a typing error, so that the pages about other trainers may help."""
    field = name.rpartition(".")[2]
    return nearest(field, [*SETTINGS, *SECTIONS, "config", "quantization"], LIKENESS_OF_OURS) is None


def _as_guess(here: str) -> Guess | None:
    """The setting, and perhaps its value, that an entry names; None if the entry is a sentence."""
    setting_name, _, value = here.partition(" ")
    setting = known(setting_name)
    return Guess(setting, value or None) if setting and " " not in value else None
