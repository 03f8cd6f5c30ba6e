"""Is a resumed run still the run that it was? Which settings may differ, and which would make it another one."""

from collections.abc import Mapping
from typing import Any

from llama_ft.config.messages import NO_PLACES, show, subject
from llama_ft.config.settings import SETTINGS
from llama_ft.errors import UserError

# Where and how fast the same thing is computed, and what is written down about it. Everything else that differs makes
# another run. The rows of a step are kept apart from this: see checkpoint/resume.py.
MAY_DIFFER = {
    "model_name", "dataset", "validation",  # the same if they hold the same
    "tokenizer_name", "trust_remote_code", "chat_template", "dataset_split", "dataset_format",
    "show_samples", "tokenize_processes",
    "attn_implementation", "use_liger", "compile", "device", "device_memory_fraction", "accumulate_unsharded",
    "activation_checkpointing", "activation_checkpointing_k", "activation_offload", "stop_after", "collective_timeout",
    "batch_size_training", "gradient_accumulation_steps",
    "run_validation", "val_batch_size", "eval_steps", "max_eval_step", "log_steps", "sample_tokens",
    "early_stopping_patience", "early_stopping_min_delta", "skip_bad_rows",
    "enable_fsdp", "low_cpu_fsdp", "sharding_strategy", "sharding_group_size", "fsdp_wrap_policy", "min_num_params",
    "fsdp_cpu_offload",
    "output_dir", "overwrite", "resume", "resume_allow_changes", "save_model", "save_steps", "save_every_epoch",
    "save_async", "keep_last", "save_dtype", "max_shard_size",
    "use_wandb", "wandb_project", "wandb_entity", "wandb_name", "wandb_tags", "wandb_mode", "use_tensorboard",
    "wandb_group", "wandb_job_type", "wandb_notes", "wandb_log_model",
    "use_mlflow", "mlflow_tracking_uri", "mlflow_experiment", "mlflow_name", "mlflow_tags", "mlflow_log_model",
    "no_plan", "memory_snapshot", "use_profiler", "profiler_dir", "flop_counter", "flop_counter_start",
}  # fmt: skip

# With others of these, other parameters are trained than those that the checkpoint has values of.
RESHAPES = {
    "use_peft", "r", "target_modules", "modules_to_save", "bias", "use_dora", "freeze_layers", "num_freeze_layers",
    "resize_embeddings",
}  # fmt: skip


def check_same_run(
    saved: Mapping[str, Any], now: Mapping[str, Any], allowed: list[str], places: Mapping[str, str] = NO_PLACES
) -> None:
    """Refuse to resume a run with settings that would make it another one.

    Args:
        saved: what trainer.json says about the run: `config`, the resolved configuration as dicts by section, and
            `contents`, model_name, dataset, validation -> a checksum of what they hold.
        now: the same of the run that is to go on; what they hold may not be known yet.
        allowed: settings that may differ all the same.
        places: dotted name -> where it was set.

    Raises:
        UserError: naming all that differ, old and new.
    """
    before, after = _flat(saved["config"]), _flat(now["config"])
    then, contents = saved["contents"], now.get("contents", {})
    by_field = {name: places[setting.dotted] for name, setting in SETTINGS.items() if setting.dotted in places}
    changed = {}
    for name, value in after.items():
        what = f"{subject(name, by_field)} is {show(value)}"
        if contents.get(name, then.get(name)) != then.get(name, contents.get(name)):
            how = "" if name == "model_name" else ", or another tokenizer or chat template writes its rows"
            was = f"and holds something else now{how}" if before.get(name) == value else f"was {show(before.get(name))}"
            changed[name] = f"{what}, {was}"
        elif name not in MAY_DIFFER and before.get(name, SETTINGS[name].default) != value:
            changed[name] = f"{what}, was {show(before.get(name, SETTINGS[name].default))}"
    for name in allowed:
        changed.pop(name, None)
    if changed:
        way_on = "Set them as they were, or begin anew with another --output_dir."
        if reshaped := [name for name in changed if name in RESHAPES]:
            way_on += f"\nWith another {', '.join(reshaped)} other parameters are trained than the checkpoint holds."
        else:
            way_on += f" To go on all the same, add\n--resume_allow_changes {','.join(changed)}"
        told = "\n".join(changed.values())
        raise UserError(f"--resume: this would be another run than the one that was saved:\n{told}\n{way_on}")


def _flat(config: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for section in config.values() for name, value in section.items()}
