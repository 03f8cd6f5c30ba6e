"""What a plan may change so that a run takes less memory: one list for --fit, --longest, and settings
that are auto.

A further setting that saves memory is one entry of `SAVINGS`. The order is that of the price: first
what costs only speed, then what changes the training.
"""

import math
import shlex
from collections.abc import Callable
from typing import Any, NamedTuple

from llama_ft import models
from llama_ft.config import Config
from llama_ft.config.reading.load import convert
from llama_ft.config.rules import CONDITIONS, broken_rules
from llama_ft.config.settings.settings import SETTINGS, values_of
from llama_ft.config.wording.messages import format_value
from llama_ft.plan.types import UNTILED_TOKENS, PlanRequest

SMALL_GPU = 24 * 2**30  # bytes
MOST_RANKS = 8  # ranks are doubled up to here, the GPUs of most nodes
SHARDED: dict[str, Any] = {"enable_fsdp": True, "sharding_strategy": "FULL_SHARD"}
LORA: dict[str, Any] = {"use_peft": True}
FOUR_BIT: dict[str, Any] = {"use_peft": True, "mode": "4bit"}
# Matmuls of larger pieces are hardly faster, those of smaller ones slower.
TILES = (8192, 2048)
RANKS = "--nproc"  # a flag of recipes/plan.py; the only change that is not a setting
SHARED_BY = "sequence_parallel_size"
BATCH = ("batch_size_training", "gradient_accumulation_steps", "val_batch_size")

Change = tuple[dict[str, Any], str]  # settings by field name, and what they cost


class Saving(NamedTuple):
    """A way to take less memory.

    Attributes:
        find: returns the changes of this kind that a run can use, from the cheapest to the most
            expensive.
        keeps_training: it costs only speed. Such changes add up; of the others a run needs one.
        for_length: it makes activations smaller, so that --longest tries it.
        setting: name of the setting that can be auto.
        auto: what auto tries, in this order.
        without_plan: what auto means if nothing can be planned.
        is_worth: whether auto is worth planning; if not, it means the first of `auto`.
    """

    find: Callable[[PlanRequest], list[Change]]
    keeps_training: bool = True
    for_length: bool = False
    setting: str = ""
    auto: tuple[Any, ...] = ()
    without_plan: Any = None
    is_worth: Callable[[Config], bool] = lambda config: True


def _sharding(request: PlanRequest) -> list[Change]:
    fsdp = request.config.fsdp
    is_sharded = fsdp.enable_fsdp and fsdp.sharding_strategy == "FULL_SHARD"
    if request.world_size == 1 or is_sharded:
        return []
    return [(SHARDED, "ranks send each other their shards")]


def _checkpointing(request: PlanRequest) -> list[Change]:
    if request.config.train.activation_checkpointing == "full":
        return []
    return [({"activation_checkpointing": "full"}, "decoder layers are computed twice")]


def _one_sample(request: PlanRequest) -> list[Change]:
    if request.config.train.batch_size_training == 1:
        return []
    one = _one_of(request)
    return [(one, f"a step is {one['gradient_accumulation_steps']} micro-batches")]


def _one_of(request: PlanRequest) -> dict[str, Any]:
    """Return micro-batches of one sample, with the global batch as it is."""
    train = request.config.train
    steps = train.batch_size_training * train.gradient_accumulation_steps
    return {"batch_size_training": 1, "gradient_accumulation_steps": steps, "val_batch_size": 1}


def _tiling(request: PlanRequest) -> list[Change]:
    shared_by = request.config.fsdp.sequence_parallel_size
    is_long = _context_length(request) > UNTILED_TOKENS * shared_by
    if not is_long or not isinstance(request.config.train.tiled_mlp, str):
        return []
    cost = "MLPs are computed in pieces, and again in the backward pass"
    return [({"tiled_mlp": TILES[-1]}, cost)]


def _can_tile(config: Config) -> bool:
    """Return whether --tiled_mlp auto may need pieces."""
    # If it is not given, it is at most 4,096 tokens: see `resolve_context_length`.
    tokens = (config.data.context_length or 0) * config.train.batch_size_training
    is_long = tokens > UNTILED_TOKENS * config.fsdp.sequence_parallel_size
    return is_long and config.memory.plan_memory and not config.model.compile


def _offloading(request: PlanRequest) -> list[Change]:
    if request.device != "cuda" or request.config.train.activation_offload:
        return []
    change = {"activation_checkpointing": "full", "activation_offload": True}
    return [(change, "inputs of layers move to host memory and back")]


def _sharing(request: PlanRequest) -> list[Change]:
    return _shared_sequences(request, 1)


def _shared_sequences(request: PlanRequest, factor: int) -> list[Change]:
    """Return sequence parallelism over `factor` times the ranks, with the global batch as it is."""
    config = request.config
    if config.data.batching_strategy != "packing":
        return []
    now = config.fsdp.sequence_parallel_size
    ranks = factor * request.world_size
    more = {RANKS: ranks} if factor > 1 else {}
    one = _one_of(request)
    changes: list[Change] = []
    for size in range(now + 1, ranks + 1) if factor == 1 else [ranks]:
        if ranks % size or size % (now * factor):
            continue
        steps = one["gradient_accumulation_steps"] * size // (now * factor)
        change = SHARDED | one | more | {SHARED_BY: size, "gradient_accumulation_steps": steps}
        cost = f"{size} ranks exchange tokens in every layer; micro-batches per step: {steps}"
        changes.append((change, cost))
    return changes


def _more_ranks(request: PlanRequest) -> list[Change]:
    # at least twice as many
    factors = [2]
    while factors[-1] * 2 * request.world_size <= MOST_RANKS:
        factors.append(factors[-1] * 2)
    changes: list[Change] = []
    for factor in factors:
        ranks = factor * request.world_size
        cost = f"{ranks} ranks, and {factor} times the samples per step"
        changes.append((SHARDED | {RANKS: ranks}, cost))
        changes += _shared_sequences(request, factor)
    return changes


def _small_states(request: PlanRequest) -> list[Change]:
    config = request.config
    train = config.train
    if config.peft.use_peft or train.optimizer != "AdamW" or train.precision == "fp16":
        return []
    changes: list[Change] = [({"optimizer": "AdamW8bit"}, "AdamW's states are rounded to 8 bits")]
    if train.precision == "bf16_mixed":
        change = {"optimizer": "anyprecision", "precision": "bf16_pure"}
        cost = "weights and AdamW's states are kept in bf16, weights rounded stochastically"
        changes.append((change, cost))
    return changes


def _adapters(request: PlanRequest) -> list[Change]:
    config = request.config
    adapters = "adapters are trained instead of all weights, mostly with a higher --lr"
    rounded = "the frozen weights are rounded to 4 bits"
    rounded_scales = "the scales of the 4-bit weights are rounded to 8 bits"
    four_bit_cost = rounded if config.peft.use_peft else f"{adapters}; {rounded}"
    changes: list[Change] = []
    if not config.peft.use_peft:
        changes.append((LORA, adapters))
    is_four_bit = config.quantization.mode == "4bit"
    if not is_four_bit:
        changes.append((FOUR_BIT, four_bit_cost))
    if not config.quantization.double_quant:
        scales = {} if is_four_bit else FOUR_BIT
        cost = rounded_scales if is_four_bit else f"{four_bit_cost}; {rounded_scales}"
        changes.append((scales | {"double_quant": True}, cost))
    half = _context_length(request) // 2
    cost = f"QLoRA, and samples of at most {half:,} tokens"
    changes.append((FOUR_BIT | {"context_length": half}, cost))
    return changes


def _weights_on_host(request: PlanRequest) -> list[Change]:
    if request.device != "cuda":
        return []
    return [(SHARDED | {"fsdp_cpu_offload": True}, "weights come from the host at every use")]


def _context_length(request: PlanRequest) -> int:
    if request.pack_length is not None:
        return request.pack_length
    config = request.config
    model_config = models.load_model_config(request.folder, config.model.trust_remote_code)
    return models.resolve_context_length(config.data.context_length, model_config)


CHECKPOINTING = Saving(
    _checkpointing,
    for_length=True,
    setting="activation_checkpointing",
    auto=("off", "selective", "full"),
    without_plan="full",
)
SAVINGS = (
    Saving(_sharding, for_length=True),
    CHECKPOINTING,
    Saving(_one_sample),
    Saving(
        _tiling,
        for_length=True,
        setting="tiled_mlp",
        auto=("off", *TILES),
        without_plan="off",
        is_worth=_can_tile,
    ),
    Saving(_offloading, for_length=True),
    Saving(_sharing, keeps_training=False, for_length=True),
    Saving(_more_ranks, keeps_training=False),
    Saving(_small_states, keeps_training=False),
    Saving(_adapters, keeps_training=False),
    Saving(_weights_on_host, keeps_training=False),
)


def ladder(request: PlanRequest, room: float = math.inf) -> tuple[list[Change], list[Change]]:
    """Return the changes that do not change the training, and the others, cheapest first; below 24
    GiB QLoRA first."""
    cheap: list[Change] = []
    others: list[Change] = []
    for saving in SAVINGS:
        (cheap if saving.keeps_training else others).extend(saving.find(request))
    if request.device == "cuda" and room <= SMALL_GPU:
        # a stable sort: the others keep their order
        others.sort(key=lambda change: change[0] != FOUR_BIT)
    return cheap, others


def methods_of(request: PlanRequest) -> list[dict[str, Any]]:
    """Return the settings that --longest plans, by field name: none, and then each with those before it.
    Sizes of one kind replace each other."""
    methods: list[dict[str, Any]] = [{}]
    for saving in SAVINGS:
        before = methods[-1]
        if saving.for_length:
            for settings, _ in saving.find(request):
                # the global batch does not matter there
                own = {name: value for name, value in settings.items() if name not in BATCH}
                methods.append(before | own)
    return methods


def auto_settings(config: Config) -> list[Saving]:
    """Return the savings whose setting is auto."""
    values = values_of(config)
    return [saving for saving in SAVINGS if saving.setting and values[saving.setting] == "auto"]


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
