"""Rules over several settings: impossible combinations, and settings that other settings make
ineffective.

A setting without effect is an error, too: whoever sets it expects one. All rules run, so that
everything is reported at once.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from llama_ft.config.data_names import has_splits, is_url, kind_of_data
from llama_ft.config.objectives import (
    OBJECTIVES,
    PASSES,
    PREFERENCE,
    PROMPTS,
    UNPAIRED,
    PassEntry,
    first_pass_of,
    has_setting,
    objectives_text,
    own_settings,
)
from llama_ft.config.settings.settings import SETTINGS, Config, values_of
from llama_ft.config.wording.messages import describe_setting, format_value
from llama_ft.errors import UserError
from llama_ft.masking import is_url_with_secret

SECRET = (
    "has what looks like a password, a key or a signature, and settings are saved in files. Remove it: s3:// and "
    "gs:// take credentials from the environment, MLflow takes MLFLOW_TRACKING_TOKEN; download the rest first."
)
PATTERNS_OF_SIZE = {"rank_pattern", "alpha_pattern"}
NEED_VALIDATION = ("early_stopping_patience", "eval_steps", "score", "num_generations_eval")
# of a process; llama-recipes' wait of 1, warm-up of 2, and 3 active ones
STEPS_BEFORE_PROFILE = 3
PROFILED_STEPS = 3


def as_fraction(validation: Any) -> float | None:
    """Return the number that validation is, or None where it names data."""
    try:
        return float(validation) if isinstance(validation, str) else None
    except ValueError:
        return None


def brings_validation(s: Any) -> bool:
    """Tell whether settings, by field name as attributes, may bring validation data: a file or a
    mixture is training data only; the demo, a Python function and data with splits bring more."""
    if s.validation is not None:
        return True
    if not isinstance(s.dataset, str):
        return False
    return has_splits(s.dataset) or kind_of_data(s.dataset) in ("demo", "function")


def has_decay(s: Any) -> bool:
    """Return whether some weights decay. Settings as of `brings_validation`."""
    return bool(s.weight_decay or any(group.get("weight_decay") for group in s.groups))


def best_metrics(s: Any) -> list[str]:
    """Return the metrics that best_by can name. Settings as of `brings_validation`."""
    endings = ["loss", *OBJECTIVES[s.objective].metrics]
    if s.score:
        endings.append("score")
    sets = list(s.validation) if isinstance(s.validation, dict) else []
    beginnings = ["eval", *(f"eval/{name}" for name in sets)]
    return [f"{beginning}/{ending}" for beginning in beginnings for ending in endings]


def is_out_of_range(validation: Any) -> bool:
    """Return whether validation is a number that is not a fraction of the samples."""
    share = as_fraction(validation)
    return share is not None and not 0 < share < 1


# The field that the message is about, what is wrong, and the message, where {} stands for the
# field's value.
Rule = tuple[str, Callable[[Any], Any], str]


def _streams_before(first_pass: PassEntry, s: Any) -> bool:
    return s.streaming and first_pass_of(s) is first_pass


def _lacks_column(first_pass: PassEntry, s: Any) -> bool:
    """Return whether a pass without a model or file would read a column that built-in datasets lack."""
    is_built_in = isinstance(s.dataset, str) and kind_of_data(s.dataset) in ("demo", "ready")
    is_given = any(getattr(s, name) for name in first_pass.paths)
    return is_built_in and not is_given and first_pass_of(s) is first_pass


def _reads(dataset_format: str, s: Any) -> bool:
    """Return whether the objective's samples have this format if none is set."""
    return OBJECTIVES[s.objective].formats[:1] == (dataset_format,)


def _has_one_response(s: Any) -> bool:
    """Return whether the objective learns from one response per sample, of any format."""
    return not OBJECTIVES[s.objective].formats


def _needs_objective(dataset_format: str) -> Rule:
    """Return the rule that samples of this format are for other objectives."""
    names = objectives_text(lambda entry: entry.formats[:1] == (dataset_format,))
    what_to_do = "Choose one." if " or " in names else "Add it."
    return (
        "dataset_format",
        lambda s: s.dataset_format == dataset_format and _has_one_response(s),
        f"is {{}}, which needs objective {names}. {what_to_do}",
    )


def _waits_for_validation(name: str, s: Any) -> bool:
    """Return whether a setting of evaluations is set, and there is no validation data."""
    is_set = getattr(s, name) != SETTINGS[name].default
    return is_set and s.run_validation and not brings_validation(s)


# Rules that look at their own field only.
VALUE_RULES: tuple[Rule, ...] = (
    (
        "validation",
        lambda s: is_out_of_range(s.validation),
        "is {}; expected a fraction between 0 and 1, such as 0.05.",
    ),
    (
        "save_to",
        lambda s: s.save_to is not None and not is_url(s.save_to),
        "is {}; expected a URL such as s3://bucket/run. For a local directory, set output_dir.",
    ),
    (
        "resume_allow_changes",
        lambda s: not {*(s.resume_allow_changes or ())} <= SETTINGS.keys(),
        "is {}; expected names of settings, such as lr,num_epochs.",
    ),
    (
        "block_size",
        lambda s: s.block_size.bit_count() != 1,
        "is {}; bitsandbytes supports 32, 64, 128, ... 4096.",
    ),
)
RULES: tuple[Rule, ...] = (
    (
        "sequence_parallel_size",
        lambda s: s.sequence_parallel_size > 1 and s.batching_strategy != "packing",
        "is {}, but only packed sequences can be shared. Use batching_strategy packing, or leave it out.",
    ),
    (
        "sequence_parallel_size",
        lambda s: s.sequence_parallel_size > 1 and OBJECTIVES[s.objective].make_steps is not None,
        "is {}, but the answers of objective {objective} are padded, and only packed sequences can be shared. "
        "Leave it out.",
    ),
    *[
        (
            name,
            partial(_waits_for_validation, name),
            "has no effect without validation data. Add validation 0.05, or a file.",
        )
        for name in NEED_VALIDATION
    ],
    (
        "score",
        lambda s: s.score and (s.truncation == "split" or s.labels == "all"),
        "is {}, which needs whole samples with a prompt. It supports neither truncation split nor labels all.",
    ),
    (
        "sample_images",
        lambda s: s.sample_images and len(s.sample_images) not in (1, len(s.sample_prompts or ())),
        "is {}; expected one image, or one per prompt of sample_prompts.",
    ),
    ("min_lr", lambda s: s.min_lr > s.lr, "is {}, above lr {lr}. Lower it."),
    (
        "modules_to_save",
        lambda s: (
            isinstance(s.target_modules, list)
            and {*s.target_modules} & {*(s.modules_to_save or [])}
        ),
        "is {}, but target_modules names one of them, too. A module gets an adapter or is fully trained, not both.",
    ),
    (
        "target_parameters",
        lambda s: s.target_parameters and (s.lora_dropout or s.use_dora),
        "is {}, but adapters of parameters support neither dropout nor DoRA. Remove lora_dropout and use_dora.",
    ),
    (
        "init_lora_weights",
        lambda s: s.init_lora_weights.startswith("pissa") and (s.lora_dropout or has_decay(s)),
        "is {}, which supports neither lora_dropout nor weight_decay. Remove them.",
    ),
    (
        "init_lora_weights",
        lambda s: (
            s.init_lora_weights.startswith("pissa") and not PATTERNS_OF_SIZE.isdisjoint(s.options)
        ),
        "is {}, which needs one rank: it supports neither rank_pattern nor alpha_pattern. Remove them from options.",
    ),
    (
        "groups",
        lambda s: s.use_peft and any(group.get("freeze") for group in s.groups),
        "freezes weights, but with use_peft only adapters are trained. Name the layers that get one by "
        "target_modules, or by exclude_modules in options.",
    ),
    (
        "train_vision",
        lambda s: s.use_peft and s.train_vision == "all",
        "is {}, but with use_peft towers have no adapters. Use train_vision projector, or leave use_peft out.",
    ),
    (
        "options",
        lambda s: (
            isinstance(s.target_modules, str)
            and not {"layers_to_transform", "layers_pattern"}.isdisjoint(s.options)
        ),
        "selects layers, which PEFT supports only for a list of target_modules, such as q_proj,v_proj.",
    ),
    (
        "options",
        lambda s: "layers_pattern" in s.options and "layers_to_transform" not in s.options,
        "is {}, but layers_pattern needs layers_to_transform. Add it.",
    ),
    (
        "mode",
        lambda s: s.mode != "none" and not s.use_peft,
        "is {}, but quantized weights cannot be trained. Add use_peft, which trains adapters.",
    ),
    (
        "init_lora_weights",
        lambda s: s.init_lora_weights.startswith("pissa") and s.mode != "none",
        "is {}, which needs unquantized weights. Remove quantization, or leave it out.",
    ),
    (
        "use_dora",
        lambda s: s.use_dora and s.mode != "none",
        "does not support quantization {mode}. Use plain LoRA.",
    ),
    (
        "precision",
        lambda s: s.precision == "fp16" and s.device == "cpu",
        "is fp16, which is for GPUs without bf16. Use bf16_mixed or fp32 on the CPU.",
    ),
    (
        "compile",
        lambda s: s.compile and s.use_liger is True,
        "cannot be combined with use_liger: both fuse the same operations. Remove one.",
    ),
    (
        "compile",
        lambda s: s.compile and s.activation_offload,
        "cannot be combined with activation_offload: compiled graphs cannot copy to the host. Remove one.",
    ),
    (
        "compile",
        lambda s: s.compile and s.precision == "fp32" and s.batching_strategy == "packing",
        "does not support packing with precision fp32. Use bf16_mixed, or batching_strategy padding.",
    ),
    (
        "flop_counter",
        lambda s: s.flop_counter and s.compile,
        "cannot count inside compiled layers. Remove one.",
    ),
    (
        "activation_checkpointing",
        lambda s: s.activation_checkpointing == "auto" and not s.plan_memory,
        "is auto, which needs plan_memory. Remove --no_plan, or choose off, selective or full.",
    ),
    # torch replays the operators of a layer one by one; all-gathers inside it add operators that
    # were not there.
    (
        "activation_checkpointing",
        lambda s: (
            s.activation_checkpointing == "selective"
            and s.enable_fsdp
            and s.fsdp_wrap_policy == "size"
        ),
        "is selective, which needs decoder layers as FSDP units. Use full, or fsdp_wrap_policy hybrid.",
    ),
    (
        "tiled_mlp",
        lambda s: isinstance(s.tiled_mlp, int) and s.compile,
        "cannot be combined with compile: pieces are computed again outside of the compiled layer. Remove one.",
    ),
    (
        "tiled_mlp",
        lambda s: isinstance(s.tiled_mlp, int) and s.enable_fsdp and s.fsdp_wrap_policy == "size",
        "needs decoder layers as FSDP units, not fsdp_wrap_policy size. Use hybrid or transformer.",
    ),
    (
        "resume",
        lambda s: s.resume == "auto" and s.output_dir is None,
        "is auto, which looks for checkpoints in output_dir. Add the run's --output_dir.",
    ),
    (
        "resume",
        lambda s: s.resume is not None and is_url(s.resume) and s.output_dir is None,
        "is a URL, whose checkpoint is fetched into output_dir. Add --output_dir.",
    ),
    (
        "resume",
        lambda s: s.resume == "auto" and s.overwrite,
        "auto and overwrite contradict each other: one continues the run, the other deletes it. Remove one.",
    ),
    (
        "streaming",
        lambda s: s.streaming and s.max_train_step == 0,
        "needs max_train_step: streams have no known end.",
    ),
    (
        "validation",
        lambda s: s.streaming and as_fraction(s.validation) is not None,
        "is {}: a fraction cannot be taken from a stream. Use a file, or a split.",
    ),
    *[
        ("streaming", partial(_streams_before, first_pass), first_pass.why_no_stream)
        for first_pass in PASSES
    ],
    *[
        ("objective", partial(_lacks_column, first_pass), first_pass.why_no_column)
        for first_pass in PASSES
        if first_pass.why_no_column
    ],
    (
        "dataset_format",
        lambda s: s.dataset_format not in ("auto", PREFERENCE) and _reads(PREFERENCE, s),
        "is {}, but objective {objective} needs preference pairs. Use dataset_format preference, or leave it out.",
    ),
    (
        "dataset_format",
        lambda s: s.dataset_format not in ("auto", UNPAIRED) and _reads(UNPAIRED, s),
        "is {}, but objective {objective} needs completions with a label, or pairs. Leave it out: both are recognized.",
    ),
    _needs_objective(PREFERENCE),
    _needs_objective(UNPAIRED),
    (
        "dataset_format",
        lambda s: s.dataset_format not in ("auto", PROMPTS) and _reads(PROMPTS, s),
        "is {}, but objective {objective} needs prompts, and finds those of any format. Leave it out.",
    ),
    _needs_objective(PROMPTS),
    (
        "truncation",
        lambda s: s.truncation == "split" and not _has_one_response(s),
        "is {}, which would separate the responses of a pair. Use right, left or drop.",
    ),
    (
        "labels",
        lambda s: s.labels != "auto" and not _has_one_response(s),
        "is {}, but objective {objective} compares whole responses. Leave it out.",
    ),
)

PEFT_FIELDS = [
    name for name, setting in SETTINGS.items() if setting.section == "peft" and name != "use_peft"
]
ADAPTER_FIELDS = [
    name for name in PEFT_FIELDS if name not in ("peft_method", "from_peft_checkpoint")
]
VALIDATION_FIELDS = "val_batch_size eval_steps max_eval_step early_stopping_patience early_stopping_min_delta".split()
VALIDATION_FIELDS += ["score", "best_by", "num_generations_eval"]
NEED_CUDA = "use_liger activation_offload compile memory_snapshot fsdp_cpu_offload device_memory_fraction".split()
NEED_CUDA += ["int8_threshold"]
FSDP_FIELDS = (
    "sharding_strategy sharding_group_size fsdp_wrap_policy min_num_params fsdp_cpu_offload".split()
)
SCHEDULES_TO_MIN_LR = ("cosine", "linear", "warmup_stable_decay")
# The fields, another field, and a function that tells whether the other field's value fits.
Condition = tuple[list[str], str, Callable[[Any], Any]]
# Fields that have an effect only while another field has a fitting value.
CONDITIONS: tuple[Condition, ...] = (
    (["num_freeze_layers"], "freeze_layers", bool),
    (
        ["freeze_layers", "freeze_LLM_only", "accumulate_unsharded"],
        "use_peft",
        lambda value: not value,
    ),
    (["freeze_layers"], "freeze_LLM_only", lambda value: not value),
    (["use_kahan_summation"], "optimizer", lambda value: value == "anyprecision"),
    # fp32 weights lose nothing to rounding
    (["use_kahan_summation"], "precision", lambda value: value == "bf16_pure"),
    (["momentum"], "optimizer", lambda value: value == "SGD"),
    (
        ["adam_beta1", "adam_beta2", "adam_epsilon"],
        "optimizer",
        lambda value: value in ("AdamW", "AdamW8bit"),
    ),
    (["warmup_steps"], "warmup_ratio", lambda value: value == 0),
    (["min_lr"], "lr_scheduler", lambda value: value in SCHEDULES_TO_MIN_LR),
    (["decay_ratio"], "lr_scheduler", lambda value: value == "warmup_stable_decay"),
    (["loraplus_lr_ratio"], "use_peft", bool),
    (["loraplus_lr_ratio"], "peft_method", lambda value: value == "lora"),
    (["gamma"], "lr_scheduler", lambda value: value == "step"),
    (["activation_checkpointing_k"], "activation_checkpointing", lambda value: value == "every_k"),
    (["activation_offload"], "activation_checkpointing", lambda value: value != "off"),
    (["shuffle_buffer"], "streaming", bool),
    (["sample_prompts", "sample_steps"], "sample_tokens", bool),
    (["sample_images"], "sample_prompts", bool),
    (["num_epochs", "deduplicate"], "streaming", lambda value: not value),
    (["gradient_clipping_threshold"], "gradient_clipping", bool),
    (VALIDATION_FIELDS, "run_validation", bool),
    (["early_stopping_min_delta"], "early_stopping_patience", bool),
    (["score_tokens", "score_samples", "score_answers", "score_batch_size"], "score", bool),
    (["eval_tasks_limit"], "eval_tasks", bool),
    *[([name], "objective", partial(has_setting, name)) for name in own_settings()],
    (
        ["gradient_accumulation_steps"],
        "objective",
        lambda value: OBJECTIVES[value].make_steps is None,
    ),
    (["server_timeout", "server_requests", "staleness"], "server", bool),
    # the first step on answers has the weights that have sampled them: nothing is clipped
    (["epsilon", "epsilon_high"], "num_iterations", lambda value: value > 1),
    (["validation_output"], "validation", lambda value: as_fraction(value) is not None),
    (FSDP_FIELDS, "enable_fsdp", bool),
    (NEED_CUDA, "device", lambda value: value != "cpu"),
    (["sharding_group_size"], "sharding_strategy", lambda value: value == "HYBRID_SHARD"),
    (["min_num_params"], "fsdp_wrap_policy", lambda value: value != "transformer"),
    (PEFT_FIELDS, "use_peft", bool),
    (["skip_modules"], "mode", lambda value: value != "none"),
    (
        ["quant_type", "block_size", "double_quant", "compute_dtype"],
        "mode",
        lambda value: value == "4bit",
    ),
    (["int8_threshold"], "mode", lambda value: value == "8bit"),
    # the saved adapter's own settings are used
    (
        [*ADAPTER_FIELDS, "train_vision"],
        "from_peft_checkpoint",
        lambda value: value is None,
    ),
    (["overwrite"], "output_dir", bool),
    (["label_smoothing_factor"], "loss_type", lambda value: value == "nll"),
    (["teacher_quantization"], "teacher_model", bool),
    (["resume_allow_changes"], "resume", bool),
    (["save_dtype", "max_shard_size", "wandb_log_model", "mlflow_log_model"], "save_model", bool),
    (["profiler_dir"], "use_profiler", bool),
    (["flop_counter_start"], "flop_counter", bool),
    ([name for name in SETTINGS if name.startswith("wandb_")], "use_wandb", bool),
    ([name for name in SETTINGS if name.startswith("mlflow_")], "use_mlflow", bool),
)

# What to do about a setting without effect, by the setting that makes it so.
WAYS_OUT = {"sample_tokens": " Set the longest answer too, such as sample_tokens 64."}


def broken_values(values: Mapping[str, Any], origins: Mapping[str, str]) -> list[str]:
    """Return a message for each value that is wrong by itself. Arguments: see `broken_rules`."""
    return list(_broken(VALUE_RULES, values, origins).values())


def _broken(
    rules: tuple[Rule, ...], values: Mapping[str, Any], origins: Mapping[str, str]
) -> dict[tuple[str, str], str]:
    """Return the field and text of each rule that does not hold -> its message."""
    messages = {}
    settings = SimpleNamespace(**values)
    for name, is_broken, text in rules:
        if is_broken(settings):
            shown = format_value(values[name]).strip("[]")
            messages[name, text] = (
                f"{describe_setting(name, origins)} {text.format(shown, **values)}"
            )
    return messages


def broken_rules(
    values: Mapping[str, Any],
    origins: Mapping[str, str] = {},
) -> list[str]:
    """Return a message for each rule that does not hold.

    Args:
        values: all settings by field name, each valid in itself.
        origins: field name -> where it was set.
    """
    # Keys: the field, and the text of its rule. A secret and the conditions share the text "": a
    # field gets one of these messages only.
    messages = _broken(RULES, values, origins)
    # Defaults are those of sft: another objective replaces one that nobody has named.
    choices = {"loss_type": [*OBJECTIVES[values["objective"]].loss_types]}
    if values["run_validation"]:
        choices["best_by"] = best_metrics(SimpleNamespace(**values))
    for name, known in choices.items():
        value = values[name]
        if known and value not in known and _asks_for_something(name, value, origins):
            problem = f"is {value}; with objective {values['objective']}, this run has {', '.join(known)}."
            messages[name, ""] = f"{describe_setting(name, origins)} {problem}"
    for name, value in values.items():
        if is_url_with_secret(str(value)):
            messages[name, ""] = f"{describe_setting(name, origins)} {SECRET}"
    for fields, other, fits in CONDITIONS:
        if fits(values[other]):
            continue
        other_flag = SETTINGS[other].flag.removeprefix("--")
        problem = f"has no effect with {other_flag} {format_value(values[other])}."
        if values[other] in (None, []):
            problem = f"has no effect without {other_flag}."
        for name in fields:
            if _asks_for_something(name, values[name], origins):
                way_out = WAYS_OUT.get(other, "")
                message = f"{describe_setting(name, origins)} {problem}{way_out}"
                messages.setdefault((name, ""), message)
    return list(messages.values())


def _asks_for_something(name: str, value: Any, origins: Mapping[str, str]) -> bool:
    """Return whether somebody set this value to get something. A flag does, even with the default.
    A default in a file does not, because config.yaml holds all defaults; neither does false."""
    is_flag = origins.get(name, "").startswith("--")
    if is_flag and bool(value):
        return True
    return value != SETTINGS[name].default and value is not False


def drop_overridden(
    values: dict[str, Any],
    origins: dict[str, str],
) -> dict[str, Any]:
    """Return the values, with a default where a flag makes a value of the YAML config ineffective.
    `--config lora.yaml --use_peft False` is full fine-tuning, not an error about the config's r.
    The origins of such values are removed from `origins`."""
    overridden = set[str]()
    for fields, other, fits in CONDITIONS:
        is_flag = origins.get(other, "").startswith("--")
        if not is_flag or fits(values[other]):
            continue
        for name in fields:
            if name in origins and not origins[name].startswith("--"):
                overridden.add(name)
    for name in overridden:
        del origins[name]
    defaults = {name: SETTINGS[name].default for name in overridden}
    return values | defaults


def needs_first_pass(config: Config) -> bool:
    """Return whether the objective needs a pass over all samples before training."""
    return first_pass_of(SimpleNamespace(**values_of(config))) is not None


def check_device(config: Config, origins: Mapping[str, str], device: str) -> None:
    """Check the rules again with the device that `auto` became.

    Args:
        config: all settings.
        origins: dotted name -> where it was set, as `load` returns them.
        device: cuda or cpu.

    Raises:
        UserError: the settings ask for what this device cannot do.
    """
    by_field = {
        name: origins[setting.dotted]
        for name, setting in SETTINGS.items()
        if setting.dotted in origins
    }
    values = values_of(config)
    values["device"] = device
    messages = broken_rules(values, by_field)
    if messages:
        raise UserError(*messages)
