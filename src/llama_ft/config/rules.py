"""Rules over several settings: impossible combinations, and settings that have no effect beside others.

A setting without effect is an error, too: whoever sets it expects one. All rules run, so that everything is reported at
once; a rule that reads a field whose own value could not be read is left out.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from llama_ft.config.data_names import has_splits, kind_of_data
from llama_ft.config.messages import NO_PLACES, is_flag, nearest, subject
from llama_ft.config.settings import SETTINGS, Config, values_of
from llama_ft.errors import UserError
from llama_ft.masking import holds_key, is_url_with_secret

SECRET_IN_URL = (
    "has a password, key or signature in its URL, and settings are written down.\nDownload it first, or use s3:// or "
    "gs:// with credentials from the environment, or put the password into ~/.netrc and\n"
    """set FSSPEC_HTTPS='{"client_kwargs": {"trust_env": true}}'."""
)
SECRET_IN_STORE = (
    "has a password or a key in its URL, and settings are written down. Leave them out and set "
    "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN."
)
SECRET_IN_TEXT = "has what looks like a key or a password, and settings are written down. Leave it out."
# What stands in them is shown to everybody who sees the run.
TRACKED_TEXTS = [name for name in SETTINGS if name.startswith(("wandb_", "mlflow_")) and name != "mlflow_tracking_uri"]
STEPS_BEFORE_PROFILE, PROFILED_STEPS = 3, 3  # of a process; llama-recipes' wait of 1, warm-up of 2, and 3 active ones
LAST_PROFILED = STEPS_BEFORE_PROFILE + PROFILED_STEPS
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B", re.IGNORECASE)
SIZE_BYTES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
SIZE_BYTES |= {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the bytes that `5GB`, `200MB` or `1.5 TB` stand for, decimal units as the Hub counts them, or `80GiB`.

    Raises:
        ValueError: the text is no such size, or is zero.
    """
    match = SIZE.fullmatch(text.strip())
    size_bytes = int(float(match[1]) * SIZE_BYTES[(match[2] or "").upper()]) if match else 0
    if size_bytes == 0:
        raise ValueError(f"{text} is not a size")
    return size_bytes


def parse_duration(text: str) -> int:
    """Return the seconds that `3h50m`, `90s` or `1d` stand for.

    Raises:
        ValueError: the text is no such time, is zero, or longer than a year.
    """
    match = DURATION.fullmatch(text.replace(" ", ""))
    days, hours, minutes, seconds = (int(number or 0) for number in match.groups()) if match else (0, 0, 0, 0)
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not 0 < total <= 366 * 24 * 3600:  # libraries overflow at some length
        raise ValueError(f"{text} is not a time")
    return total


def as_fraction(validation: str | None) -> float | None:
    """Return the number that validation is, or None where it names data."""
    try:
        return float(validation) if validation is not None else None
    except ValueError:
        return None


class Read:
    """The settings by field name as attributes, and which of them a rule has read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values, self.names = values, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return self._values[name]

    def brings_validation(self) -> bool:
        """A file or a mixture is training data only; the demo, a Python function and data with splits bring more."""
        dataset = self.dataset
        return self.validation is not None or (
            isinstance(dataset, str) and (has_splits(dataset) or kind_of_data(dataset) in ("demo", "function"))
        )

    def fails(self, parse: Callable[[str], int], text: str | None) -> bool:
        """Whether a text is not what `parse` takes."""
        try:
            return text is not None and not parse(text)
        except ValueError:
            return True


NEEDS_CUDA = "needs CUDA. Leave it out on the CPU."
NO_VALIDATION = "has no effect without validation data. Add validation 0.05, or a file."
A_TIME = "is {}; expected a time of up to a year, such as 3h50m, 45m or 90s."
# The field that the message is about, what is wrong, and the message, where {} stands for the field's value.
RULES: tuple[tuple[str, Callable[[Read], Any], str], ...] = (
    ("warmup_steps", lambda s: 0 < s.max_train_step <= s.warmup_steps,
     "is {}, but training ends after {max_train_step} steps (max_train_step): lower --warmup_steps."),
    ("validation", lambda s: not 0 < (0.5 if (share := as_fraction(s.validation)) is None else share) < 1,
     "is {}; a fraction lies between 0 and 1, such as 0.05."),
    ("early_stopping_patience", lambda s: s.early_stopping_patience and s.run_validation and not s.brings_validation(),
     NO_VALIDATION),
    ("eval_steps", lambda s: s.eval_steps and s.run_validation and not s.brings_validation(), NO_VALIDATION),
    ("dataset_split",
     lambda s: s.dataset_split != "train" and isinstance(s.dataset, str) and not has_splits(s.dataset),
     "is {}, and {dataset} has no splits. Leave it out."),
    ("init_lora_weights", lambda s: s.init_lora_weights in ("pissa", "olora"),
     "is {}, which needs whole weights on one rank, and no rank has them. Use default or gaussian."),
    ("target_modules", lambda s: not s.target_modules, "names no layer. Use q_proj,v_proj or all-linear."),
    ("modules_to_save",
     lambda s: isinstance(s.target_modules, list) and {*s.target_modules} & {*(s.modules_to_save or [])},
     "is {}, and target_modules names one of them, too. A module has an adapter or is trained."),
    ("mode", lambda s: s.mode != "none" and not s.use_peft,
     "is {}, and quantized weights cannot be trained. Add use_peft, which trains adapters, or leave it out and train "
     "the weights themselves."),
    ("block_size", lambda s: s.block_size.bit_count() != 1, "is {}; bitsandbytes has 32, 64, 128, ... 4096."),
    ("use_dora", lambda s: s.use_dora and s.mode != "none",
     "needs the weights themselves at every step, and quantization {mode} does not keep them. Use plain LoRA."),
    ("precision", lambda s: s.precision == "fp16" and s.device == "cpu",
     "is fp16, which is for GPUs without bf16. Use bf16_mixed or fp32 on the CPU."),
    ("attn_implementation", lambda s: s.attn_implementation.startswith("flash") and s.device == "cpu",
     "is {}, which needs CUDA. Use sdpa with device cpu."),
    ("attn_implementation", lambda s: s.attn_implementation.startswith("flash") and s.precision == "fp32",
     "is {}, which computes in 16 bits only. Use sdpa with precision fp32."),
    ("use_liger", lambda s: s.use_liger and s.device == "cpu", NEEDS_CUDA),
    ("activation_offload", lambda s: s.activation_offload and s.device == "cpu", NEEDS_CUDA),
    ("compile", lambda s: s.compile and s.device == "cpu", NEEDS_CUDA),
    ("memory_snapshot", lambda s: s.memory_snapshot and s.device == "cpu", NEEDS_CUDA),
    ("compile", lambda s: s.compile and s.use_liger,
     "cannot be combined with use_liger: both fuse the same operations. Remove one."),
    ("compile", lambda s: s.compile and s.activation_offload,
     "cannot be combined with activation_offload: copies to the host are no part of a graph. Remove one."),
    ("compile", lambda s: s.compile and s.precision == "fp32" and s.batching_strategy == "packing",
     "with precision fp32 needs padding: packed samples are then computed one by one. Use bf16_mixed, or padding."),
    ("use_profiler", lambda s: s.use_profiler and 0 < s.max_train_step < LAST_PROFILED,
     f"profiles up to step {LAST_PROFILED}, and max_train_step is {{max_train_step}}. Use {LAST_PROFILED}."),
    ("flop_counter_start", lambda s: s.flop_counter and 0 < s.max_train_step < s.flop_counter_start,
     "is {}; training ends after {max_train_step} steps (max_train_step)."),
    ("flop_counter", lambda s: s.flop_counter and s.compile, "sees no operator inside of compiled layers. Remove one."),
    ("activation_checkpointing", lambda s: s.activation_checkpointing == "auto" and s.no_plan,
     "is auto, which needs the plan that no_plan leaves out. Remove one."),
    # torch replays the operators of a layer one by one; all-gathers inside it add operators that were not there.
    ("activation_checkpointing",
     lambda s: s.activation_checkpointing == "selective" and s.enable_fsdp and s.fsdp_wrap_policy == "size",
     "is selective, for which layers must be FSDP units. Use full, or fsdp_wrap_policy hybrid."),
    ("max_shard_size", lambda s: s.fails(parse_size, s.max_shard_size), "is {}; expected a size such as 5GB or 200MB."),
    ("resume", lambda s: s.resume == "auto" and s.output_dir is None,
     "is auto, which looks for checkpoints in output_dir. Add the run's --output_dir."),
    ("resume", lambda s: s.resume == "auto" and s.overwrite,
     "is auto, which resumes the run that overwrite deletes. Remove one."),
    ("resume_allow_changes", lambda s: [name for name in s.resume_allow_changes if name not in SETTINGS],
     "names {}; not all of them are settings.{hint}"),
    ("stop_after", lambda s: s.fails(parse_duration, s.stop_after), A_TIME),
    ("collective_timeout", lambda s: s.fails(parse_duration, s.collective_timeout), A_TIME),
    ("streaming", lambda s: s.streaming and s.max_train_step == 0,
     "has no end that is known beforehand. Add --max_train_step, the optimizer steps to train."),
    ("validation", lambda s: s.streaming and as_fraction(s.validation) is not None,
     "is {}: with streaming nobody knows all samples. Use a file, or a split."),
)  # fmt: skip

PEFT_FIELDS = [name for name, setting in SETTINGS.items() if setting.section == "peft" and name != "use_peft"]
ADAPTER_FIELDS = [name for name in PEFT_FIELDS if name not in ("peft_method", "from_peft_checkpoint")]
VALIDATION_FIELDS = "val_batch_size eval_steps max_eval_step early_stopping_patience early_stopping_min_delta".split()
FSDP_FIELDS = "sharding_strategy sharding_group_size fsdp_wrap_policy min_num_params fsdp_cpu_offload".split()


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def _is_not(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value not in values


# Fields that have an effect only while another field has a fitting value, and the rest of "... has no effect ...".
CONDITIONS: tuple[tuple[list[str], str, Callable[[Any], Any], str], ...] = (
    (["num_freeze_layers"], "freeze_layers", bool, "without freeze_layers"),
    (["freeze_layers"], "use_peft", _is(False), "with use_peft, which keeps all of the model's own weights"),
    (["accumulate_unsharded"], "use_peft", _is(False), "with use_peft: LoRA always accumulates that way"),
    (["use_kahan_summation"], "optimizer", _is("anyprecision"), "unless optimizer is anyprecision"),
    (["use_kahan_summation"], "precision", _is("bf16_pure"),
     "unless precision is bf16_pure: fp32 weights lose nothing to rounding"),
    (["momentum"], "optimizer", _is("SGD"), "unless optimizer is SGD"),
    (["gamma"], "lr_scheduler", _is("step"), "unless lr_scheduler is step"),
    (["activation_checkpointing_k"], "activation_checkpointing", _is("every_k"),
     "unless activation_checkpointing is every_k"),
    (["activation_offload"], "activation_checkpointing", _is_not("off"), "without activation_checkpointing"),
    (["shuffle_buffer"], "streaming", bool, "without streaming: all samples are shuffled"),
    (["num_epochs"], "streaming", _is(False), "with streaming, which goes on until max_train_step"),
    (["gradient_clipping_threshold"], "gradient_clipping", bool, "without gradient_clipping"),
    (VALIDATION_FIELDS, "run_validation", bool, "with run_validation off"),
    (["early_stopping_min_delta"], "early_stopping_patience", bool, "without early_stopping_patience"),
    (FSDP_FIELDS, "enable_fsdp", bool, "without enable_fsdp"),
    (["fsdp_cpu_offload"], "device", _is_not("cpu"),
     "on the CPU: parameters and optimizer are in host memory already"),
    (["device_memory_fraction"], "device", _is_not("cpu"), "on the CPU: it limits GPUs"),
    (["sharding_group_size"], "sharding_strategy", _is("HYBRID_SHARD"), "unless sharding_strategy is HYBRID_SHARD"),
    (["min_num_params"], "fsdp_wrap_policy", _is_not("transformer"),
     "with fsdp_wrap_policy transformer; it belongs to size and hybrid"),
    (PEFT_FIELDS, "use_peft", bool, "without use_peft"),
    (["skip_modules"], "mode", _is_not("none"), "without quantization"),
    (["quant_type", "block_size", "compute_dtype"], "mode", _is("4bit"), "unless quantization is 4bit"),
    (["int8_threshold"], "mode", _is("8bit"), "unless quantization is 8bit"),
    (["int8_threshold"], "device", _is_not("cpu"),
     "on the CPU: the weights are dequantized there and no input is rounded"),
    (ADAPTER_FIELDS, "from_peft_checkpoint", _is(None),
     "with from_peft_checkpoint: the saved adapter's own settings are used"),
    (["overwrite"], "output_dir", bool, "without output_dir: a new directory is made"),
    (["resume_allow_changes"], "resume", bool, "without resume"),
    (["save_dtype", "max_shard_size"], "save_model", bool, "with save_model off"),
    (["profiler_dir"], "use_profiler", bool, "without use_profiler"),
    (["flop_counter_start"], "flop_counter", bool, "without flop_counter"),
    ([name for name in SETTINGS if name.startswith("wandb_")], "use_wandb", bool, "without use_wandb"),
    ([name for name in SETTINGS if name.startswith("mlflow_")], "use_mlflow", bool, "without use_mlflow"),
    (["wandb_log_model", "mlflow_log_model"], "save_model", bool, "with save_model off"),
)  # fmt: skip


def broken_rules(
    values: Mapping[str, Any], places: Mapping[str, str] = NO_PLACES, invalid: frozenset[str] | set[str] = frozenset()
) -> list[str]:
    """Return a message for each rule that does not hold.

    Args:
        values: all settings by field name.
        places: field name -> where it was set.
        invalid: fields whose own value could not be read; they hold their defaults here.
    """
    messages: dict[tuple[str, str], str] = {}
    for name, is_broken, text in RULES:
        read = Read(values)
        if is_broken(read) and invalid.isdisjoint(read.names | {name}):
            value = values[name]
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            meant = (
                [match for it in value if (match := nearest(it, SETTINGS))] if name == "resume_allow_changes" else []
            )
            hint = f" Did you mean {','.join(meant)}?" if meant else ""
            messages[name, text] = f"{subject(name, places)} {text.format(shown, **values, hint=hint)}"
    for name, value in values.items():
        if name in invalid:
            continue
        if holds_secret(value):
            said = SECRET_IN_STORE if name == "mlflow_tracking_uri" else SECRET_IN_URL
            messages[name, "secret"] = f"{subject(name, places)} {said}"
        elif name in TRACKED_TEXTS and any(map(holds_key, value if isinstance(value, list) else [str(value or "")])):
            messages[name, "secret"] = f"{subject(name, places)} {SECRET_IN_TEXT}"
    for fields, on, fits, otherwise in CONDITIONS:
        if on not in invalid and not fits(values[on]):
            for name in fields:
                if name not in invalid and _asks_for_something(name, values[name], places):
                    messages.setdefault((name, ""), f"{subject(name, places)} has no effect {otherwise}.")
    return list(messages.values())


def _asks_for_something(name: str, value: Any, places: Mapping[str, str]) -> bool:
    """A default written in a file is a record (config.yaml holds them all); a default typed as a flag is a wish."""
    return value != SETTINGS[name].default or (is_flag(places.get(name, "")) and bool(value))


def drop_overridden(values: dict[str, Any], places: dict[str, str]) -> dict[str, Any]:
    """Set back what a YAML config sets and a flag made moot: the command line wins.

    `--config lora.yaml --use_peft False` is full fine-tuning, not an error about the config's r.

    Args:
        values: all settings by field name.
        places: field name -> where it was set; those set back are removed.

    Returns:
        The settings that hold.
    """
    moot = {
        name
        for fields, on, fits, _ in CONDITIONS
        if is_flag(places.get(on, "")) and not fits(values[on])
        for name in fields
        if name in places and not is_flag(places[name])
    }
    for name in moot:
        del places[name]
    return {name: SETTINGS[name].default if name in moot else value for name, value in values.items()}


def holds_secret(value: Any) -> bool:
    """Tell whether a setting, or a part of it, is a URL with a password or a key in it."""
    if isinstance(value, dict):
        return any(map(holds_secret, value.values()))
    return any(map(holds_secret, value)) if isinstance(value, list) else is_url_with_secret(str(value))


def check_device(config: Config, places: Mapping[str, str], device: str) -> None:
    """Check the rules again with the device that `auto` came to be.

    Args:
        config: all settings.
        places: dotted name -> where it was set, as `load` returns them.
        device: cuda or cpu.

    Raises:
        UserError: the settings ask for what this device cannot do.
    """
    fields = {name: places[setting.dotted] for name, setting in SETTINGS.items() if setting.dotted in places}
    if messages := broken_rules({**values_of(config), "device": device}, fields):
        raise UserError(*messages)


def check_rules(config: Config) -> list[str]:
    """Return one message per rule that a `Config` built in Python breaks, naming settings as `train.warmup_steps`."""
    return broken_rules(values_of(config))
