"""Find settings that fit: a fixed list of changes, from the cheapest to the most expensive, each
planned like any run.

Changes that cost only speed come first and are combined: sharding, activation checkpointing,
micro-batches of one sample. Each of the others is added to them: sequence parallelism, more ranks,
optimizer states of fewer bits, LoRA, QLoRA, QLoRA with double quantization, QLoRA with half the
sample length, CPU offload. On small GPUs QLoRA is the first of them. A change that only gives up
more than another one that fits is not an answer.
"""

import dataclasses
import math
import shlex
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llama_ft import models
from llama_ft.config import Config
from llama_ft.config.reading.load import convert
from llama_ft.config.rules import CONDITIONS, broken_rules
from llama_ft.config.settings.settings import SETTINGS, values_of
from llama_ft.config.wording.messages import format_value, size_text
from llama_ft.errors import UserError
from llama_ft.plan.duration import describe_time, step_seconds
from llama_ft.plan.flags import PlanFlags
from llama_ft.plan.free_memory import free_text
from llama_ft.plan.predict import predict
from llama_ft.plan.types import UNTILED_TOKENS, Plan, PlanRequest, Recipe
from llama_ft.runtime.devices import PRECISIONS

USABLE = 0.97  # plans are right within 3% (measured with benchmarks/planner/plan.py)
MAX_PROPOSALS = 3
SMALL_GPU = 24 * 2**30  # bytes
MOST_RANKS = 8  # ranks are doubled up to here, the GPUs of most nodes
CAST_ONCE: dict[str, Any] = {"enable_fsdp": True, "sharding_strategy": "SHARD_GRAD_OP"}
SHARDED: dict[str, Any] = {"enable_fsdp": True, "sharding_strategy": "FULL_SHARD"}
# What tiled_mlp auto tries: matmuls of larger pieces are hardly faster, those of smaller ones slower.
TILES = (8192, 2048)
RANKS = "--nproc"  # a flag of recipes/plan.py; the only change that is not a setting
SHARED_BY = "sequence_parallel_size"
MORE = (RANKS, SHARED_BY, "gradient_accumulation_steps")  # a larger number gives up more

Change = tuple[dict[str, Any], str]  # settings by field name, and what they cost
Candidate = tuple[bool, dict[str, Any], str]  # whether it can be used, and a Change


class Fit(NamedTuple):
    """Changed settings with which a run fits."""

    config: Config
    flags: list[str]  # the changes as on a command line
    gives_up: str
    plan: Plan
    change: dict[str, Any]  # the last one, by field name


def answer_fit(
    request: PlanRequest,
    recipe: Recipe,
    planned: Plan,
    options: PlanFlags,
    report: Callable[[str], Any],
) -> tuple[str, int, dict[str, object]]:
    """Return the answer to --fit: a text, the exit code (0: the run fits, 3: with changes, 4: not),
    and values for --json. For the arguments see `find_fits`."""
    room = options.fit_bytes
    fits = find_fits(request, recipe, room, planned, bool(options.quick), report)
    is_fit = has_room(planned, room)
    runs = [(fit.plan, fit.config) for fit in fits]
    if not runs:
        runs = [(planned, request.config)]
    seconds = [step_seconds(*run, options.gpu) for run in runs]
    times = [
        describe_time(*run, s, options.price) if options.gpu else ""
        for run, s in zip(runs, seconds, strict=True)
    ]
    answers = [
        {
            "flags": fit.flags,
            "gives_up": fit.gives_up,
            "peak_bytes": fit.plan.device_bytes,
            "host_bytes": fit.plan.host_bytes,
            "step_seconds": s,
        }
        for fit, s in zip(fits, seconds, strict=False)
    ]
    values: dict[str, object] = {
        "fits_as_it_is": is_fit,
        "step_seconds": seconds[0] if is_fit else None,
        "fits": answers,
    }
    exit_code = 0
    if not is_fit:
        exit_code = 3 if fits else 4
    text = describe_fits(planned, fits, room, times)
    cheap, _ = ladder(request, room)
    if not is_fit and not any(fit.change == change for fit in fits for change, _ in cheap):
        text += offload_note(request, planned)
    return text, exit_code, values


def offload_note(request: PlanRequest, planned: Plan) -> str:
    """Return a line on --activation_offload, which is not among the changes: how many bytes of layer
    inputs it keeps on the host. "" if the run cannot use it or already does."""
    model_config = models.load_model_config(request.folder, request.config.model.trust_remote_code)
    text_config = model_config.get_text_config()
    layers = getattr(text_config, "num_hidden_layers", 0)
    width = getattr(text_config, "hidden_size", 0)
    train = request.config.train
    change = {"activation_checkpointing": "full", "activation_offload": True}
    is_usable = request.device == "cuda" and changed(request.config, change, request.device)
    if train.activation_offload or not (is_usable and layers and width):
        return ""
    tokens = planned.tokens // train.batch_size_training
    size = PRECISIONS[train.precision].compute.itemsize
    moved = size_text(layers * tokens * width * size)
    return (
        "\nNot tried: with micro-batches of one sample, --activation_checkpointing full --activation_offload moves "
        f"{layers} layers x {tokens:,} tokens x {width:,} x {size} bytes = {moved} per rank to host memory. "
        "Try it if less than that is missing."
    )


def find_fits(
    request: PlanRequest,
    recipe: Recipe,
    room: float,
    planned: Plan,
    quick: bool,
    report: Callable[[str], Any],
) -> list[Fit]:
    """Find changes with which a run fits: first those that do not change the training, else up to
    MAX_PROPOSALS others.

    Args:
        request: the run. This process must not have a process group.
        recipe: the functions that a plan runs.
        room: bytes of device memory per rank.
        planned: the plan of the unchanged run.
        quick: extrapolate every plan. Otherwise a change that fits by a quick plan is also planned
            in full.
        report: called with a text about every change that is planned.
    """
    changes = list[Change]()
    last = planned
    fits = list[Fit]()
    cheap, others = ladder(request, room)
    for change in [*cheap, *others] if not has_room(planned, room) else []:
        settings, _ = change
        if any(gives_up_more(settings, fit.change) for fit in fits):
            continue
        config, ranks, flags = apply_changes(request, [*changes, change])
        if config is None or not flags:  # the run would reject these settings
            continue
        candidate = dataclasses.replace(request, config=config, world_size=ranks)
        try:
            plan = predict(candidate, recipe, quick=True)
            if has_room(plan, room) and not quick:
                plan = predict(candidate, recipe)
        except UserError:
            continue
        report(f"Planned {' '.join(flags)}: {size_text(plan.device_bytes)} per rank")
        if has_room(plan, room):
            gives_up = "; ".join(reason for _, reason in [*changes, change])
            fits = [fit for fit in fits if not gives_up_more(fit.change, settings)]
            fits.append(Fit(config, flags, gives_up, plan, settings))
            if change in cheap or len(fits) == MAX_PROPOSALS:
                break
        # Gradients of more micro-batches may take the memory that smaller ones save.
        elif change in cheap and plan.device_bytes < last.device_bytes:
            changes = [*changes, change]
            last = plan
    return fits


def gives_up_more(change: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether a change does all that the other one does, and more of it: further settings,
    or more ranks."""
    if change == other or not change.keys() >= other.keys():
        return False
    return all(
        change[name] >= value if name in MORE else change[name] == value
        for name, value in other.items()
    )


def has_room(plan: Plan, room: float) -> bool:
    """Return whether a plan fits a device with `room` bytes."""
    return plan.device_bytes <= USABLE * room


def describe_fits(planned: Plan, fits: list[Fit], room: int, times: Sequence[str]) -> str:
    """Return the text about the result of `find_fits`. `times`: of the run if it fits, else of each
    fit."""
    if has_room(planned, room):
        return f"It fits {size_text(room)} as it is: {size_text(planned.device_bytes)} per rank.\n{times[0]}".rstrip()
    lines = [
        f"It does not fit {size_text(room)} as it is: {size_text(planned.device_bytes)} per rank.",
        "What fits:"
        if fits
        else "No tested change makes it fit. Use more GPUs or a smaller model.",
    ]
    # without fits there is one time all the same, that of the run
    pairs = list(zip(fits, times, strict=False))
    for number, (fit, time) in enumerate(pairs, start=1):
        size = f"{size_text(fit.plan.device_bytes)} per rank"
        if fit.plan.device == "cuda":
            size += f", and {size_text(fit.plan.host_bytes)} of host memory per rank"
        lines.append(f"{number}. {' '.join(fit.flags)}")
        lines.append(f"   {size}")
        lines.append(f"   gives up: {fit.gives_up}")
        if time:
            lines.append(f"   {time}")
    return "\n".join(lines)


def ladder(request: PlanRequest, room: float = math.inf) -> tuple[list[Change], list[Change]]:
    """Return the changes that do not change the training, and the others, cheapest first; below 24
    GiB QLoRA first."""
    config = request.config
    device = request.device
    train = config.train
    is_lora = config.peft.use_peft
    is_sharded = config.fsdp.enable_fsdp and config.fsdp.sharding_strategy == "FULL_SHARD"
    # so that the global batch stays the same
    steps = train.batch_size_training * train.gradient_accumulation_steps
    one = {"batch_size_training": 1, "gradient_accumulation_steps": steps, "val_batch_size": 1}
    can_round = not is_lora and train.optimizer == "AdamW" and train.precision != "fp16"
    lora = {"use_peft": True}
    four_bit = {"use_peft": True, "mode": "4bit"}
    is_four_bit = config.quantization.mode == "4bit"
    rounded = "the frozen weights are rounded to 4 bits"
    recomputed = {"activation_checkpointing": "full"}
    adapters = "adapters are trained instead of all weights, mostly with a higher --lr"
    four_bit_cost = rounded if is_lora else f"{adapters}; {rounded}"
    rounded_scales = "the scales of the 4-bit weights are rounded to 8 bits"
    scales = {} if is_four_bit else four_bit
    scales_cost = rounded_scales if is_four_bit else f"{four_bit_cost}; {rounded_scales}"
    model_config = models.load_model_config(request.folder, config.model.trust_remote_code)
    half = models.resolve_context_length(config.data.context_length, model_config) // 2
    cheap: list[Candidate] = [
        (request.world_size > 1 and not is_sharded, SHARDED, "ranks send each other their shards"),
        (train.activation_checkpointing != "full", recomputed, "decoder layers are computed twice"),
        (train.batch_size_training > 1, one, f"a step is {steps} micro-batches"),
        _tiling(config, 2 * half),
    ]
    # at least twice as many
    factors = [2]
    while factors[-1] * 2 * request.world_size <= MOST_RANKS:
        factors.append(factors[-1] * 2)
    others = _shared_sequences(request, 1, one)
    for factor in factors:
        ranks = factor * request.world_size
        cost = f"{ranks} ranks, and {factor} times the samples per step"
        others.append((True, SHARDED | {RANKS: ranks}, cost))
        others += _shared_sequences(request, factor, one)
    others += [
        (can_round, {"optimizer": "AdamW8bit"}, "AdamW's states are rounded to 8 bits"),
        (
            can_round and train.precision == "bf16_mixed",
            {"optimizer": "anyprecision", "precision": "bf16_pure"},
            "weights and AdamW's states are kept in bf16, weights rounded stochastically",
        ),
        (not is_lora, lora, adapters),
        (not is_four_bit, four_bit, four_bit_cost),
        (not config.quantization.double_quant, scales | {"double_quant": True}, scales_cost),
        (
            True,
            four_bit | {"context_length": half},
            f"QLoRA, and samples of at most {half:,} tokens",
        ),
        (
            device == "cuda",
            SHARDED | {"fsdp_cpu_offload": True},
            "weights come from the host at every use",
        ),
    ]
    if device == "cuda" and room <= SMALL_GPU:
        # a stable sort: the others keep their order
        others.sort(key=lambda candidate: candidate[1] != four_bit)
    return _usable(cheap), _usable(others)


def _shared_sequences(request: PlanRequest, factor: int, one: dict[str, Any]) -> list[Candidate]:
    """Return sequence parallelism over `factor` times the ranks, with the global batch as it is.
    `one`: micro-batches of one sample."""
    config = request.config
    is_packed = config.data.batching_strategy == "packing"
    now = config.fsdp.sequence_parallel_size
    ranks = factor * request.world_size
    more = {RANKS: ranks} if factor > 1 else {}
    candidates: list[Candidate] = []
    for size in range(now + 1, ranks + 1) if factor == 1 else [ranks]:
        steps = one["gradient_accumulation_steps"] * size // (now * factor)
        change = SHARDED | one | more | {SHARED_BY: size, "gradient_accumulation_steps": steps}
        cost = f"{size} ranks exchange tokens in every layer; micro-batches per step: {steps}"
        is_possible = is_packed and ranks % size == 0 and size % (now * factor) == 0
        candidates.append((is_possible, change, cost))
    return candidates


def _tiling(config: Config, context_length: int) -> Candidate:
    """Return the change to tiled MLPs."""
    is_long = context_length > UNTILED_TOKENS * config.fsdp.sequence_parallel_size
    can_help = is_long and isinstance(config.train.tiled_mlp, str)
    cost = "MLPs are computed in pieces, and again in the backward pass"
    return can_help, {"tiled_mlp": TILES[-1]}, cost


def _usable(candidates: list[Candidate]) -> list[Change]:
    """Return the changes whose condition, the first value, is true."""
    return [(settings, cost) for condition, settings, cost in candidates if condition]


def choose_checkpointing(
    request: PlanRequest, recipe: Recipe, free: float, quick: bool = True
) -> tuple[Config, str, Plan]:
    """Choose for `--activation_checkpointing auto`: the first of off, selective and full that fits
    `free` bytes (inf: unknown), else the one with the least memory. What fits by a quick plan is
    also planned in full unless `quick`. If memory is left, weights of one process may stay cast;
    see `_keep_cast_weights`. Returns the settings with it, a text with the choice and the reason,
    and the plan. Raises UserError like the run. This process must not have a process group."""
    planned = list[str]()
    for how in ("off", "selective", "full"):
        config = changed(request.config, {"activation_checkpointing": how}, request.device)
        if config is None:
            continue  # selective needs layers that are FSDP units
        try:
            candidate = dataclasses.replace(request, config=config)
            plan = predict(candidate, recipe, quick=True)
            # the last choice is planned in full whether it fits or not
            is_chosen = has_room(plan, free) or how == "full"
            if is_chosen and plan.is_quick and not quick:
                plan = predict(candidate, recipe)
        except UserError:
            if how == "off":
                raise
            continue  # this architecture does not support checkpointing
        planned.append(f"{how} {size_text(plan.device_bytes)}")
        choice = config, f"{how} (planned: {', '.join(planned)}; free: {free_text(free)})", plan
        if has_room(plan, free):
            break
    return _keep_cast_weights(request, recipe, free, quick, choice)


def choose_settings(
    request: PlanRequest, recipe: Recipe, free: float, quick: bool = True
) -> tuple[Config, list[str], Plan]:
    """Choose activation_checkpointing and then tiled_mlp, each if it is auto. Returns the settings, a
    text about each choice, and the plan. For the rest see `choose_checkpointing`."""
    config = request.config
    notes = []
    if config.train.activation_checkpointing == "auto":
        config, why, plan = choose_checkpointing(request, recipe, free, quick)
        notes.append(f"activation_checkpointing auto: {why}")
    else:
        plan = predict(request, recipe, quick)
    if config.train.tiled_mlp == "auto":
        chosen = dataclasses.replace(request, config=config)
        config, why, plan = _choose_tiling(chosen, recipe, free, quick, plan)
        notes.append(f"tiled_mlp auto: {why}")
    return config, notes, plan


def _choose_tiling(
    request: PlanRequest, recipe: Recipe, free: float, quick: bool, plan: Plan
) -> tuple[Config, str, Plan]:
    """Choose for `--tiled_mlp auto`: off if the plan without it fits `free` bytes, else the first size
    of pieces that fits, else the choice with the least memory."""
    planned = [f"off {size_text(plan.device_bytes)}"]
    choice: dict[str, Any] = {"tiled_mlp": "off"}
    for tokens in TILES:
        change = {"tiled_mlp": tokens}
        config = changed(request.config, change, request.device)
        if has_room(plan, free) or config is None:
            break
        try:
            candidate = dataclasses.replace(request, config=config)
            smaller = predict(candidate, recipe, quick)
        except UserError:
            break  # no MLP was found
        planned.append(f"{tokens} {size_text(smaller.device_bytes)}")
        if smaller.device_bytes < plan.device_bytes:
            choice = change
            plan = smaller
    config = changed(request.config, choice, request.device)
    assert config is not None
    why = f"{choice['tiled_mlp']} (planned: {', '.join(planned)}; free: {free_text(free)})"
    return config, why, plan


def _keep_cast_weights(
    request: PlanRequest,
    recipe: Recipe,
    free: float,
    quick: bool,
    choice: tuple[Config, str, Plan],
) -> tuple[Config, str, Plan]:
    """If one process casts fp32 weights to 16 bits for every forward and backward pass, return the
    choice with SHARD_GRAD_OP, which casts them once per step, if its plan fits. Each cast moves 6
    bytes per weight."""
    config, why, plan = choice
    precision = PRECISIONS[config.train.precision]
    is_cast = not config.peft.use_peft and precision.trained != precision.compute
    if request.world_size > 1 or config.fsdp.enable_fsdp or not is_cast or math.isinf(free):
        return choice
    new_config = changed(config, CAST_ONCE, request.device)
    if new_config is None or not has_room(plan, free):
        return choice
    candidate = dataclasses.replace(request, config=new_config)
    larger = predict(candidate, recipe, quick)
    if not has_room(larger, free):
        return choice
    size = size_text(larger.device_bytes)
    note = f"weights are cast once per step, sharding_strategy SHARD_GRAD_OP ({size})"
    return new_config, f"{why}; {note}", larger


def changed(config: Config, changes: dict[str, Any], device: str) -> Config | None:
    """Return changed settings, without settings that have no effect any more; None if they break a
    rule."""
    values = {**values_of(config), **changes}
    for fields, on, fits in CONDITIONS:
        if on in changes and not fits(values[on]):
            values |= {name: SETTINGS[name].default for name in fields}
    result, wrong = convert(values, {})
    if wrong or broken_rules({**values, "device": device}):
        return None
    return result


def apply_changes(
    request: PlanRequest, changes: list[Change]
) -> tuple[Config | None, int, list[str]]:
    """Return the changed settings (None: see `changed`), the number of ranks, and the changes as on
    a command line."""
    settings = {name: value for change, _ in changes for name, value in change.items()}
    ranks = settings.pop(RANKS, request.world_size)
    config = changed(request.config, settings, request.device)
    if config is None:
        return None, ranks, []
    before = values_of(request.config)
    words = dict[str, Any]()
    for name, value in settings.items():
        if value != before[name]:
            words[SETTINGS[name].flag] = value
    if ranks != request.world_size:
        words[RANKS] = ranks
    flags = list[str]()
    for flag, value in words.items():
        text = "" if value is True else f" {shlex.quote(format_value(value))}"
        flags.append(flag + text)
    return config, ranks, flags
