"""Settings that have an effect only together with others. Refused rather than ignored: whoever sets them expects it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llama_ft.config.fields import SETTINGS
from llama_ft.config.wording import NO_PLACES, is_flag, subject

PEFT_FIELDS = tuple(name for name, setting in SETTINGS.items() if setting.section == "peft" and name != "use_peft")
ADAPTER_FIELDS = tuple(name for name in PEFT_FIELDS if name not in ("peft_method", "from_peft_checkpoint"))
WANDB_FIELDS = tuple(name for name in SETTINGS if name.startswith("wandb_"))
MLFLOW_FIELDS = tuple(name for name in SETTINGS if name.startswith("mlflow_"))


@dataclass(frozen=True)
class Condition:
    """Fields that do something only while another field has a fitting value.

    Args:
        fields: the names of the fields.
        on: the field they depend on.
        fits: whether a value of that field lets them have an effect.
        otherwise: the rest of "<field> has no effect ..." when it does not.
    """

    fields: tuple[str, ...]
    on: str
    fits: Callable[[Any], bool]
    otherwise: str


CONDITIONS = (
    Condition(("num_freeze_layers",), "freeze_layers", bool, "without freeze_layers"),
    Condition(
        ("freeze_layers",), "use_peft", lambda on: not on, "with use_peft, which keeps all of the model's own weights"
    ),
    Condition(
        ("accumulate_unsharded",), "use_peft", lambda on: not on, "with use_peft: LoRA always accumulates that way"
    ),
    Condition(
        ("use_kahan_summation",), "optimizer", lambda it: it == "anyprecision", "unless optimizer is anyprecision"
    ),
    Condition(
        ("use_kahan_summation",),
        "precision",
        lambda it: it == "bf16_pure",
        "unless precision is bf16_pure: fp32 weights lose nothing to rounding",
    ),
    Condition(("momentum",), "optimizer", lambda it: it == "SGD", "unless optimizer is SGD"),
    Condition(("gamma",), "lr_scheduler", lambda it: it == "step", "unless lr_scheduler is step"),
    Condition(
        ("activation_checkpointing_k",),
        "activation_checkpointing",
        lambda it: it == "every_k",
        "unless activation_checkpointing is every_k",
    ),
    Condition(
        ("activation_offload",), "activation_checkpointing", lambda it: it != "off", "without activation_checkpointing"
    ),
    Condition(("shuffle_buffer",), "streaming", bool, "without streaming: all rows are shuffled"),
    Condition(("num_epochs",), "streaming", lambda on: not on, "with streaming, which goes on until max_train_step"),
    Condition(("gradient_clipping_threshold",), "gradient_clipping", bool, "without gradient_clipping"),
    Condition(
        (
            "val_batch_size",
            "eval_steps",
            "max_eval_step",
            "early_stopping_patience",
            "early_stopping_min_delta",
        ),
        "run_validation",
        bool,
        "with run_validation off",
    ),
    Condition(("early_stopping_min_delta",), "early_stopping_patience", bool, "without early_stopping_patience"),
    Condition(
        ("sharding_strategy", "sharding_group_size", "fsdp_wrap_policy", "min_num_params", "fsdp_cpu_offload"),
        "enable_fsdp",
        bool,
        "without enable_fsdp",
    ),
    Condition(
        ("fsdp_cpu_offload",),
        "device",
        lambda it: it != "cpu",
        "on the CPU: parameters and optimizer are in host memory already",
    ),
    Condition(("device_memory_fraction",), "device", lambda it: it != "cpu", "on the CPU: it limits GPUs"),
    Condition(
        ("sharding_group_size",),
        "sharding_strategy",
        lambda it: it == "HYBRID_SHARD",
        "unless sharding_strategy is HYBRID_SHARD",
    ),
    Condition(
        ("min_num_params",),
        "fsdp_wrap_policy",
        lambda it: it != "transformer",
        "with fsdp_wrap_policy transformer; it belongs to size and hybrid",
    ),
    Condition(PEFT_FIELDS, "use_peft", bool, "without use_peft"),
    Condition(("skip_modules",), "mode", lambda it: it != "none", "without quantization"),
    Condition(
        ("quant_type", "block_size", "compute_dtype"), "mode", lambda it: it == "4bit", "unless quantization is 4bit"
    ),
    Condition(("int8_threshold",), "mode", lambda it: it == "8bit", "unless quantization is 8bit"),
    Condition(
        ("int8_threshold",),
        "device",
        lambda it: it != "cpu",
        "on the CPU: the weights are dequantized there and no input is rounded",
    ),
    Condition(
        ADAPTER_FIELDS,
        "from_peft_checkpoint",
        lambda it: it is None,
        "with from_peft_checkpoint: the saved adapter's own settings are used",
    ),
    Condition(("overwrite",), "output_dir", bool, "without output_dir: a new directory is made"),
    Condition(("resume_allow_changes",), "resume", bool, "without resume"),
    Condition(("save_dtype", "max_shard_size"), "save_model", bool, "with save_model off"),
    Condition(("profiler_dir",), "use_profiler", bool, "without use_profiler"),
    Condition(("flop_counter_start",), "flop_counter", bool, "without flop_counter"),
    Condition(WANDB_FIELDS, "use_wandb", bool, "without use_wandb"),
    Condition(MLFLOW_FIELDS, "use_mlflow", bool, "without use_mlflow"),
    Condition(("wandb_log_model", "mlflow_log_model"), "save_model", bool, "with save_model off"),
)


def without_effect(
    values: Mapping[str, Any], places: Mapping[str, str] = NO_PLACES, invalid: frozenset[str] | set[str] = frozenset()
) -> list[str]:
    """Return a message for each setting that asks for something it does not get.

    Args:
        values: all settings by field name.
        places: field name -> where it was set.
        invalid: fields whose value could not be read; they hold their defaults here and are left alone.
    """
    messages: dict[str, str] = {}
    for condition in CONDITIONS:
        if condition.on in invalid or condition.fits(values[condition.on]):
            continue
        for name in condition.fields:
            if name not in invalid and _asks_for_something(name, values[name], places):
                messages.setdefault(name, f"{subject(name, places)} has no effect {condition.otherwise}.")
    return list(messages.values())


def _asks_for_something(name: str, value: Any, places: Mapping[str, str]) -> bool:
    """A default written in a file is a record (config.yaml holds them all); a default typed as a flag is a wish."""
    return value != SETTINGS[name].default or (is_flag(places.get(name, "")) and bool(value))


def drop_overridden(values: dict[str, Any], places: dict[str, str]) -> dict[str, Any]:
    """Set back what a recipe file sets and a flag of the command line made moot: the command line wins.

    `--config lora.yaml --use_peft False` is a full fine-tuning, not a mistake about the recipe's r.

    Args:
        values: all settings by field name.
        places: field name -> where it was set; those set back are removed.

    Returns:
        The settings that hold.
    """
    moot = {
        name
        for condition in CONDITIONS
        if is_flag(places.get(condition.on, "")) and not condition.fits(values[condition.on])
        for name in condition.fields
        if name in places and not is_flag(places[name])
    }
    for name in moot:
        del places[name]
    return {name: SETTINGS[name].default if name in moot else value for name, value in values.items()}
