"""Names people bring from elsewhere: what llama-recipes called a thing, what others call it, and slips of the pen."""

from dataclasses import dataclass

from llama_ft.config.fields import SECTIONS, SETTINGS, Setting
from llama_ft.config.wording import nearest

# llama-recipes' dotted prefixes, and the sections whose fields they may name.
LLAMA_RECIPES_PREFIXES: dict[str, tuple[str, ...]] = {
    "train_config": tuple(SECTIONS),
    "fsdp_config": ("fsdp", "train"),
    "lora_config": ("peft",),
    "wandb_config": ("tracking",),
}

# Names of the same thing in other trainers; some stand for a setting with a value.
ALIASES: dict[str, str] = {
    "learning_rate": "lr",
    "batch_size": "batch_size_training",
    "micro_batch_size": "batch_size_training",
    "per_device_train_batch_size": "batch_size_training",
    "eval_batch_size": "val_batch_size",
    "per_device_eval_batch_size": "val_batch_size",
    "gradient_accumulation": "gradient_accumulation_steps",
    "grad_accum": "gradient_accumulation_steps",
    "epochs": "num_epochs",
    "num_train_epochs": "num_epochs",
    "max_steps": "max_train_step",
    "max_train_steps": "max_train_step",
    "max_eval_steps": "max_eval_step",
    "max_seq_length": "context_length",
    "max_seq_len": "context_length",
    "max_length": "context_length",
    "seq_len": "context_length",
    "cutoff_len": "context_length",
    "max_grad_norm": "gradient_clipping_threshold",
    "clip_grad_norm": "gradient_clipping_threshold",
    "scheduler": "lr_scheduler",
    "lr_scheduler_type": "lr_scheduler",
    "warmup": "warmup_steps",
    "gradient_checkpointing": "activation_checkpointing",
    "bf16": "precision bf16_mixed",
    "fp16": "precision fp16",
    "fp32": "precision fp32",
    "dtype": "precision",
    "torch_dtype": "precision",
    "flash_attention": "attn_implementation flash_attention_2",
    "model": "model_name",
    "model_path": "model_name",
    "model_name_or_path": "model_name",
    "tokenizer": "tokenizer_name",
    "tokenizer_name_or_path": "tokenizer_name",
    "data": "dataset",
    "data_path": "dataset",
    "train_file": "dataset",
    "dataset_name": "dataset",
    "validation_file": "validation",
    "eval_dataset": "validation",
    "packing": "batching_strategy packing",
    "lora": "use_peft",
    "use_lora": "use_peft",
    "lora_r": "r",
    "lora_rank": "r",
    "rank": "r",
    "alpha": "lora_alpha",
    "lora_target_modules": "target_modules",
    "adapter": "from_peft_checkpoint",
    "load_in_8bit": "quantization 8bit",
    "load_in_4bit": "quantization 4bit",
    "bnb_4bit_quant_type": "quant_type",
    "bnb_4bit_compute_dtype": "compute_dtype",
    "llm_int8_threshold": "int8_threshold",
    "llm_int8_skip_modules": "skip_modules",
    "fsdp": "enable_fsdp",
    "cpu_offload": "fsdp_cpu_offload",
    "logging_steps": "log_steps",
    "save_total_limit": "keep_last",
    "resume_from_checkpoint": "resume",
    "output": "output_dir",
    "out_dir": "output_dir",
    "overwrite_output_dir": "overwrite",
    "project": "wandb_project",
    "entity": "wandb_entity",
    "tags": "wandb_tags",
    "run_name": "wandb_name",
    "torch_compile": "compile",
}

DOUBLE_QUANT = (
    "scales are kept in fp32: double quantization puts 256 of them in a block, across rows, and rows are what is "
    "sharded. It would save 0.4 bits a weight. Leave it out"
)
# llama-recipes' flags whose meaning is gone, with what to do instead.
GONE: dict[str, str] = {
    "one_gpu": "a run without torchrun is one process on one device. Leave it out",
    "pure_bf16": "use precision bf16_pure",
    "mixed_precision": "use precision bf16_mixed (the default) or fp32",
    "use_fp16": "use precision bf16_mixed (the default), or fp16 on GPUs without bf16",
    "use_fast_kernels": "use attn_implementation; sdpa, which auto takes, has torch's fastest kernels",
    "hsdp": "use sharding_strategy HYBRID_SHARD",
    "replica_group_size": "use sharding_strategy HYBRID_SHARD and sharding_group_size: the replicas follow",
    "checkpoint_type": "checkpoints are always sharded, and the result is in Hugging Face format. Leave it out",
    "fsdp_activation_checkpointing": "use activation_checkpointing full",
    "dist_checkpoint_root_folder": "use output_dir: checkpoints are written to output_dir/checkpoints",
    "dist_checkpoint_folder": "use output_dir: checkpoints are written to output_dir/checkpoints",
    "save_optimizer": "checkpoints always hold the optimizer. Use save_steps to say how often",
    "save_metrics": "metrics are always written to output_dir/metrics.jsonl. Leave it out",
    "use_double_quant": DOUBLE_QUANT,
    "bnb_4bit_use_double_quant": DOUBLE_QUANT,
    "quant_storage": "4-bit weights are stored as bytes and sharded by rows, whatever holds them. Leave it out",
    "freeze_LLM_only": "only language models are trained here. Use freeze_layers",
    "num_workers_dataloader": "rows are tokenized before training and need no workers. Leave it out",
    "custom_dataset.file": "use dataset path/to/file.py:function",
    "custom_dataset.data_path": "use dataset path/to/file.py:function",
    "custom_dataset.train_split": "the function that dataset names decides. Leave it out",
    "custom_dataset.test_split": "use validation",
    "lora_config.task_type": "language models are trained as such. Leave it out",
    "lora_config.inference_mode": "adapters are trained here. Leave it out",
    "wandb_config.job_type": "use wandb_tags",
    "wandb_config.group": "use wandb_tags",
    "wandb_config.notes": "use wandb_tags",
}
GONE_PREFIXES: dict[str, str] = {
    "samsum_dataset": "use dataset samsum, and dataset_split",
    "grammar_dataset": "use dataset grammar, and dataset_split",
    "alpaca_dataset": "use dataset alpaca, or a file of columns instruction, input and output",
    "llama_adapter_config": "peft_method lora is the one that exists",
    "prefix_config": "peft_method lora is the one that exists",
}


@dataclass(frozen=True)
class Guess:
    """What an unknown name was probably meant to be: a setting, and maybe its value."""

    setting: Setting
    value: str | None

    @property
    def as_flag(self) -> str:
        name = "--quantization" if self.setting.name == "mode" else f"--{self.setting.name}"
        return f"{name} {self.value}" if self.value else name

    @property
    def as_key(self) -> str:
        name = "quantization" if self.setting.name == "mode" else self.setting.dotted
        return f"{name}: {self.value}" if self.value else name


def known(name: str) -> Setting | None:
    """Find the setting that a plain, dotted or llama-recipes name (`lr`, `train.lr`, `lora_config.r`) stands for."""
    prefix, dot, field = name.rpartition(".")
    if not dot:
        return SETTINGS["mode"] if name == "quantization" else SETTINGS.get(name)
    if prefix == "wandb_config":
        field = f"wandb_{field}"
    setting = SETTINGS.get(field)
    if setting and setting.section in (prefix, *LLAMA_RECIPES_PREFIXES.get(prefix, ())):
        return setting
    return None


def gone(name: str) -> str | None:
    """Say what replaces a name of llama-recipes that has no meaning here."""
    prefix, _, field = name.rpartition(".")
    return GONE.get(name) or GONE_PREFIXES.get(prefix) or GONE.get(field)


def guess(name: str) -> Guess | None:
    """Guess the setting that an unknown name was meant to be: by another trainer's name, else by likeness."""
    field = name.rpartition(".")[2].lower()
    setting_name, _, value = ALIASES.get(field, field).partition(" ")
    setting = known(setting_name)
    if setting is None:
        match = nearest(field, [*SETTINGS, "quantization", *ALIASES])
        setting_name, _, value = ALIASES.get(match or "", match or "").partition(" ")
        setting = known(setting_name)
    return Guess(setting, value or None) if setting else None
