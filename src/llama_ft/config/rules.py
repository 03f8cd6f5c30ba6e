"""Rules over several settings.

A rule is a function whose parameters are the fields it reads, the first being the one the message is about. It returns
what is wrong, or None. All rules run, so that everything is told at once; a rule that reads a field whose own value
could not be read is left out.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from llama_ft.config.data_names import has_splits, kind_of_data
from llama_ft.config.effect import without_effect
from llama_ft.config.fields import SETTINGS, values_of
from llama_ft.config.same_run import unknown_changes
from llama_ft.config.sections import Config
from llama_ft.config.tracking_names import (
    TRACKED_TEXTS,
    experiment_complaint,
    mlflow_tags_complaint,
    project_complaint,
    store_complaint,
    wandb_group_complaint,
    wandb_name_complaint,
    wandb_tags_complaint,
)
from llama_ft.config.wording import NO_PLACES, one_of, subject
from llama_ft.errors import UserError
from llama_ft.masking import holds_key, is_url_with_secret

SECRET_IN_URL = (
    "has a password, key or signature in its URL, and settings are written down.\nDownload it first, or use s3:// or "
    "gs:// with credentials from the environment, or put the password into ~/.netrc and\n"
    """set FSSPEC_HTTPS='{"client_kwargs": {"trust_env": true}}'."""
)
SECRET_IN_TEXT = (
    "has what looks like a key or a password, and settings are written down. Leave it out; of a git commit the first "
    "12 letters will do."
)
STEPS_BEFORE_PROFILE, PROFILED_STEPS = 3, 3  # of a process; llama-recipes' wait of 1, warm-up of 2, and 3 active ones
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B", re.IGNORECASE)
SIZE_BYTES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
SIZE_BYTES |= {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the bytes that `5GB`, `200MB` or `1.5 TB` stand for, decimal units as the hub counts them, or `80GiB`.

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


def _warm_up_ends_before_training_does(warmup_steps: int, max_train_step: int) -> str | None:
    if max_train_step == 0 or warmup_steps < max_train_step:
        return None
    return f"is {warmup_steps}, but training ends after {max_train_step} steps (max_train_step): lower --warmup_steps."


def _validation_is_a_fraction_of_one(validation: str | None) -> str | None:
    fraction = as_fraction(validation)
    if fraction is None or 0 < fraction < 1:
        return None
    return f"is {validation}; a fraction lies between 0 and 1, such as 0.05."


def _early_stopping_has_validation_data(
    early_stopping_patience: int, dataset: str | list[Any], validation: str | None, run_validation: bool
) -> str | None:
    needless = early_stopping_patience == 0 or not run_validation
    return None if needless or _brings_validation(dataset, validation) else _no_validation_data()


def _eval_steps_have_validation_data(
    eval_steps: int, dataset: str | list[Any], validation: str | None, run_validation: bool
) -> str | None:
    needless = eval_steps == 0 or not run_validation
    return None if needless or _brings_validation(dataset, validation) else _no_validation_data()


def _brings_validation(dataset: str | list[Any], validation: str | None) -> bool:
    """A file or a mix is training data only; the demo, a Python function and data with splits may bring more."""
    return validation is not None or (
        isinstance(dataset, str) and (has_splits(dataset) or kind_of_data(dataset) in ("demo", "function"))
    )


def _the_split_is_of_data_with_splits(dataset_split: str, dataset: str | list[Any]) -> str | None:
    if dataset_split == "train" or not isinstance(dataset, str) or has_splits(dataset):
        return None
    return f"is {dataset_split}, and {dataset} has no splits. Leave it out."


def _no_validation_data() -> str:
    return "has no effect without validation data. Add validation 0.05, or a file."


def _whole_weights_are_not_needed(init_lora_weights: str) -> str | None:
    if init_lora_weights not in ("pissa", "olora"):
        return None
    return (
        f"is {init_lora_weights}, which needs whole weights on one rank, and no rank has them. Use default or gaussian."
    )


def _adapters_go_somewhere(target_modules: list[str] | str) -> str | None:
    return None if target_modules else "names no layer. Use q_proj,v_proj or all-linear."


def _saved_modules_get_no_adapter(modules_to_save: list[str] | None, target_modules: list[str] | str) -> str | None:
    both = [name for name in modules_to_save or [] if isinstance(target_modules, list) and name in target_modules]
    return (
        f"names {one_of(both)}, which target_modules names too. A module has an adapter or is trained."
        if both
        else None
    )


def _quantized_weights_are_frozen(mode: str, use_peft: bool) -> str | None:
    if mode == "none" or use_peft:
        return None
    return (
        f"is {mode}, and quantized weights cannot be trained. Add use_peft, which trains adapters beside them, or "
        "leave it out and train the weights themselves."
    )


def _a_block_is_a_power_of_two(block_size: int) -> str | None:
    return f"is {block_size}; bitsandbytes has 32, 64, 128, ... 4096." if block_size.bit_count() != 1 else None


def _dora_reads_whole_weights(use_dora: bool, mode: str) -> str | None:
    if not use_dora or mode == "none":
        return None
    return f"needs the weights themselves at every step, and quantization {mode} does not keep them. Use plain LoRA."


def _fp16_runs_on_cuda(precision: str, device: str) -> str | None:
    wrong = precision == "fp16" and device == "cpu"
    return "is fp16, which is for GPUs without bf16. Use bf16_mixed or fp32 on the CPU." if wrong else None


def _flash_attention_runs_on_cuda(attn_implementation: str, device: str) -> str | None:
    wrong = attn_implementation.startswith("flash") and device == "cpu"
    return f"is {attn_implementation}, which needs CUDA. Use sdpa with device cpu." if wrong else None


def _flash_attention_computes_in_16_bits(attn_implementation: str, precision: str) -> str | None:
    wrong = attn_implementation.startswith("flash") and precision == "fp32"
    return f"is {attn_implementation}, which computes in 16 bits only. Use sdpa with precision fp32." if wrong else None


def _liger_runs_on_cuda(use_liger: bool, device: str) -> str | None:
    wrong = use_liger and device == "cpu"
    return "needs CUDA: Liger's kernels are written in Triton. Leave it out on the CPU." if wrong else None


def _activations_are_offloaded_from_cuda(activation_offload: bool, device: str) -> str | None:
    wrong = activation_offload and device == "cpu"
    return "needs CUDA: on the CPU activations are in host memory already. Leave it out." if wrong else None


def _compiling_pays_on_cuda(compile: bool, device: str) -> str | None:
    if not compile or device != "cpu":
        return None
    return "needs CUDA: on the CPU steps are no faster for it, and compiling a model of 4 M parameters takes 47 s."


def _one_of_both_fuses(compile: bool, use_liger: bool) -> str | None:
    wrong = compile and use_liger
    return "makes one kernel of what use_liger has kernels for. Leave one of them out." if wrong else None


def _graphs_move_nothing_to_the_host(compile: bool, activation_offload: bool) -> str | None:
    wrong = compile and activation_offload
    return "does not go with activation_offload: copies to the host are no part of a graph." if wrong else None


def _compiled_attention_takes_packs(compile: bool, precision: str, batching_strategy: str) -> str | None:
    if not compile or precision != "fp32" or batching_strategy != "packing":
        return None
    return "with precision fp32 needs padding: packed rows are then computed one by one. Use bf16_mixed, or padding."


def _snapshots_are_of_cuda(memory_snapshot: bool, device: str) -> str | None:
    wrong = memory_snapshot and device == "cpu"
    return "needs CUDA: it is the CUDA allocator's record. Leave it out on the CPU." if wrong else None


def _the_profile_fits_into_the_run(use_profiler: bool, max_train_step: int) -> str | None:
    first, last = STEPS_BEFORE_PROFILE + 1, STEPS_BEFORE_PROFILE + PROFILED_STEPS
    wrong = use_profiler and 0 < max_train_step < last
    return f"profiles steps {first} to {last}, and max_train_step is {max_train_step}. Use {last}." if wrong else None


def _the_counted_step_is_reached(flop_counter_start: int, flop_counter: bool, max_train_step: int) -> str | None:
    wrong = flop_counter and 0 < max_train_step < flop_counter_start
    return f"is {flop_counter_start}; training ends after {max_train_step} steps (max_train_step)." if wrong else None


def _compiled_layers_are_not_counted(flop_counter: bool, compile: bool) -> str | None:
    wrong = flop_counter and compile
    return "sees no operator inside of compiled layers. Leave compile out for this run." if wrong else None


def _auto_goes_by_the_plan(activation_checkpointing: str, no_plan: bool) -> str | None:
    wrong = activation_checkpointing == "auto" and no_plan
    return "is auto, which goes by the plan that no_plan leaves out. Leave out one of them." if wrong else None


def _selective_layers_are_gathered_whole(
    activation_checkpointing: str, fsdp_wrap_policy: str, enable_fsdp: bool
) -> str | None:
    # torch replays the operators of a layer one by one; gathering units inside it adds operators that were not there.
    wrong = activation_checkpointing == "selective" and enable_fsdp and fsdp_wrap_policy == "size"
    return "is selective, for which layers must be units. Use full, or fsdp_wrap_policy hybrid." if wrong else None


def _shard_size_is_a_size(max_shard_size: str) -> str | None:
    try:
        parse_size(max_shard_size)
    except ValueError:
        return f"is {max_shard_size}; expected a size such as 5GB or 200MB."
    return None


def _resume_auto_looks_into_output_dir(resume: str | None, output_dir: str | None) -> str | None:
    wrong = resume == "auto" and output_dir is None
    return "is auto, which looks for checkpoints in output_dir. Add the run's --output_dir." if wrong else None


def _resuming_overwrites_nothing(resume: str | None, overwrite: bool) -> str | None:
    wrong = resume == "auto" and overwrite
    return "is auto, which goes on with the run that overwrite deletes. Leave one of them out." if wrong else None


def _changes_are_settings(resume_allow_changes: list[str]) -> str | None:
    return unknown_changes(resume_allow_changes)


def _stop_after_is_a_time(stop_after: str | None) -> str | None:
    return _time_complaint(stop_after) if stop_after is not None else None


def _collective_timeout_is_a_time(collective_timeout: str) -> str | None:
    return _time_complaint(collective_timeout)


def _streams_have_no_end(streaming: bool, max_train_step: int) -> str | None:
    wrong = streaming and max_train_step == 0
    return "has no end that is known beforehand. Add --max_train_step, the optimizer steps to train." if wrong else None


def _streams_have_no_fraction(validation: str | None, streaming: bool) -> str | None:
    wrong = streaming and as_fraction(validation) is not None
    return f"is {validation}: with streaming nobody knows all rows. Use a file, or a split." if wrong else None


def _time_complaint(text: str) -> str | None:
    try:
        parse_duration(text)
    except ValueError:
        return f"is {text}; expected a time of up to a year, such as 3h50m, 45m or 90s."
    return None


RULES: tuple[Callable[..., str | None], ...] = (
    _warm_up_ends_before_training_does,
    _validation_is_a_fraction_of_one,
    _early_stopping_has_validation_data,
    _eval_steps_have_validation_data,
    _the_split_is_of_data_with_splits,
    _whole_weights_are_not_needed,
    _adapters_go_somewhere,
    _saved_modules_get_no_adapter,
    _quantized_weights_are_frozen,
    _a_block_is_a_power_of_two,
    _dora_reads_whole_weights,
    _fp16_runs_on_cuda,
    _flash_attention_runs_on_cuda,
    _flash_attention_computes_in_16_bits,
    _liger_runs_on_cuda,
    _activations_are_offloaded_from_cuda,
    _compiling_pays_on_cuda,
    _one_of_both_fuses,
    _graphs_move_nothing_to_the_host,
    _compiled_attention_takes_packs,
    _snapshots_are_of_cuda,
    _the_profile_fits_into_the_run,
    _the_counted_step_is_reached,
    _compiled_layers_are_not_counted,
    _auto_goes_by_the_plan,
    _selective_layers_are_gathered_whole,
    _shard_size_is_a_size,
    _resume_auto_looks_into_output_dir,
    _resuming_overwrites_nothing,
    _changes_are_settings,
    _stop_after_is_a_time,
    _collective_timeout_is_a_time,
    _streams_have_no_end,
    _streams_have_no_fraction,
    project_complaint,
    wandb_tags_complaint,
    wandb_name_complaint,
    wandb_group_complaint,
    experiment_complaint,
    mlflow_tags_complaint,
    store_complaint,
)


def broken_rules(
    values: Mapping[str, Any], places: Mapping[str, str] = NO_PLACES, invalid: frozenset[str] | set[str] = frozenset()
) -> list[str]:
    """Return a message for each rule that does not hold.

    Args:
        values: all settings by field name.
        places: field name -> where it was set.
        invalid: fields whose own value could not be read.
    """
    messages = []
    for rule in RULES:
        reads = list(inspect.signature(rule).parameters)
        if invalid.isdisjoint(reads):
            complaint = rule(*(values[name] for name in reads))
            if complaint:
                messages.append(f"{subject(reads[0], places)} {complaint}")
    return messages + _secrets(values, places, invalid) + without_effect(values, places, invalid)


def _secrets(values: Mapping[str, Any], places: Mapping[str, str], invalid: frozenset[str] | set[str]) -> list[str]:
    """Settings are written to config.yaml, checkpoints and the model's card, so no URL may bring a key, and no text
    for people either."""
    messages = []
    for name, value in values.items():
        if name in invalid or name == "mlflow_tracking_uri":  # which has its own rule
            continue
        if holds_secret(value):
            messages.append(f"{subject(name, places)} {SECRET_IN_URL}")
        elif name in TRACKED_TEXTS and any(map(holds_key, value if isinstance(value, list) else [value or ""])):
            messages.append(f"{subject(name, places)} {SECRET_IN_TEXT}")
    return messages


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
    by_field = {name: places[setting.dotted] for name, setting in SETTINGS.items() if setting.dotted in places}
    messages = broken_rules({**values_of(config), "device": device}, by_field)
    if messages:
        raise UserError(*messages)


def check_rules(config: Config) -> list[str]:
    """Check a `Config` that was built in Python, whose fields pydantic has checked one by one.

    Returns:
        One message per broken rule, naming settings as `train.warmup_steps`.
    """
    return broken_rules(values_of(config))
