"""Settings that change memory: which a search may try, how they are written, and what each gives up."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llama_ft.config import Config
from llama_ft.config.effect import CONDITIONS
from llama_ft.config.fields import SETTINGS, values_of
from llama_ft.config.load import convert
from llama_ft.config.rules import broken_rules
from llama_ft.config.wording import is_flag, show, size_text
from llama_ft.models import shard_degree
from llama_ft.plan.predict import PlanRequest
from llama_ft.plan.record import Plan

# Their product with the ranks is the global batch, which stays: how it is divided nobody asks for for its own sake.
DIVISION = ("batch_size_training", "gradient_accumulation_steps", "val_batch_size")
CHECKPOINTING = ("off", "selective", "full")  # what is kept, the most first
SHORTEST_CONTEXT = 256


@dataclass(frozen=True)
class Layout:
    """How the same training may be done; nothing but speed depends on it.

    Attributes:
        strategy: sharding_strategy.
        degree: ranks that share a copy of the model.
        checkpointing: activation_checkpointing.
        micro_batch: batch_size_training.
        offload: fsdp_cpu_offload.
    """

    strategy: str
    degree: int
    checkpointing: str
    micro_batch: int
    offload: bool

    def holds_no_less_than(self, other: "Layout") -> bool:
        """Whether it surely needs at least as much memory as `other`."""
        return (
            self.degree <= other.degree
            and (self.strategy == "SHARD_GRAD_OP") >= (other.strategy == "SHARD_GRAD_OP")
            and kept(self.checkpointing) >= kept(other.checkpointing)
            and self.micro_batch >= other.micro_batch
            and self.offload <= other.offload
        )


def kept(checkpointing: str) -> int:
    """Rank of a way of checkpointing by what it keeps; every_k lies between full and off, wherever k puts it."""
    return {"off": 2, "every_k": 1, "selective": 1, "full": 0}[checkpointing]


def layout_of(request: PlanRequest) -> Layout:
    """The layout that a recipe asks for."""
    config = request.config
    degree = {"world": request.world_size, "node": request.local_world_size}
    asked = shard_degree(config.fsdp)
    return Layout(
        config.fsdp.sharding_strategy if config.fsdp.enable_fsdp else "NO_SHARD",
        degree[asked] if isinstance(asked, str) else asked,
        config.train.activation_checkpointing,
        config.train.batch_size_training,
        config.fsdp.fsdp_cpu_offload,
    )


def layouts(request: PlanRequest) -> list[Layout]:
    """Every layout with the recipe's global batch."""
    world, node = request.world_size, request.local_world_size
    asked, train = layout_of(request), request.config.train
    shards = {(asked.strategy, asked.degree)}
    if world == 1 and request.device == "cuda":
        shards.add(("FULL_SHARD", 1))  # for offloading
    if world > 1:
        shards |= {("NO_SHARD", 1), ("FULL_SHARD", world), ("SHARD_GRAD_OP", world)}
        shards |= {("HYBRID_SHARD", node * nodes) for nodes in range(1, world // node) if (world // node) % nodes == 0}
    rows = train.batch_size_training * train.gradient_accumulation_steps
    return [
        Layout(strategy, degree, checkpointing, micro_batch, offload)
        for strategy, degree in sorted(shards)
        for checkpointing in {asked.checkpointing: None, **dict.fromkeys(CHECKPOINTING)}
        for micro_batch in range(1, rows + 1)
        if rows % micro_batch == 0
        for offload in ((False, True) if request.device == "cuda" else (False,))
        if strategy == "FULL_SHARD" or asked.offload or not offload
        if offload or world > 1 or strategy == asked.strategy
    ]


def settings_of(layout: Layout, request: PlanRequest) -> dict[str, Any]:
    """What a layout sets."""
    train = request.config.train
    asked = layout_of(request)
    settings: dict[str, Any] = {
        "activation_checkpointing": layout.checkpointing,
        "batch_size_training": layout.micro_batch,
        "gradient_accumulation_steps": train.batch_size_training
        * train.gradient_accumulation_steps
        // layout.micro_batch,
        "val_batch_size": min(train.val_batch_size, max(1, layout.micro_batch)),
        "fsdp_cpu_offload": layout.offload,
    }
    if (layout.strategy, layout.degree) != (asked.strategy, asked.degree):
        is_node = layout.degree == request.local_world_size
        settings["sharding_strategy"] = layout.strategy
        settings["sharding_group_size"] = layout.degree if layout.strategy == "HYBRID_SHARD" and not is_node else None
        settings["enable_fsdp"] = True
    elif layout.offload:
        settings["enable_fsdp"] = True
    return settings


def qualities(config: Config, context_length: int) -> list[dict[str, Any]]:
    """Changes to what is trained, each alone; the first is none."""
    train, is_lora, mode = config.train, config.peft.use_peft, config.quantization.mode
    lora: dict[str, Any] = {} if is_lora else {"use_peft": True}
    found: list[dict[str, Any]] = [{}]
    if not is_lora and train.optimizer == "AdamW" and train.precision != "fp16":
        found.append({"optimizer": "AdamW8bit"})
        if train.precision == "bf16_mixed":
            found.append({"optimizer": "anyprecision", "precision": "bf16_pure"})
    found += [lora] if lora else []
    found += [{**lora, "mode": bits} for bits in ("8bit", "4bit") if (bits, mode) in _FEWER]
    if context_length // 2 >= SHORTEST_CONTEXT:
        found.append({"context_length": context_length // 2})
    return found


_FEWER = {("8bit", "none"), ("4bit", "none"), ("4bit", "8bit")}


def shorter(config: Config, context_length: int) -> list[dict[str, Any]]:
    """Changes to what is trained when none alone is enough: the leanest ways with shorter and shorter rows."""
    alone = [change for change in qualities(config, context_length) if "context_length" not in change]
    leanest = [alone[0], *alone[-1:]] if len(alone) > 1 else alone
    lengths = [context_length // part for part in (2, 4, 8, 16) if context_length // part >= SHORTEST_CONTEXT]
    return [{**change, "context_length": length} for change in leanest for length in lengths]


def changed(config: Config, changes: Mapping[str, Any], device: str) -> Config | None:
    """A recipe with some settings changed, and those set back that have no effect any more; None: it breaks a rule."""
    values = {**values_of(config), **changes}
    for condition in CONDITIONS:
        if condition.on in changes and not condition.fits(values[condition.on]):
            values |= {name: SETTINGS[name].default for name in condition.fields}
    if broken_rules({**values, "device": device}):
        return None
    result, wrong = convert(values, {})
    return None if wrong else result


def differing(config: Config, other: Config) -> dict[str, Any]:
    """The settings of `other` that differ from `config`'s, by field name."""
    before = values_of(config)
    return {name: value for name, value in values_of(other).items() if value != before[name]}


def wishes(config: Config, places: Mapping[str, str]) -> frozenset[str]:
    """Fields that the user has set: a default that a file sets may only be a record (a run's config.yaml has them all).

    Args:
        config: the recipe.
        places: dotted name -> where it was set, as `config.load` returns them.
    """
    values = values_of(config)
    return frozenset(
        name
        for name, setting in SETTINGS.items()
        if name not in DIVISION
        and (is_flag(place := places.get(setting.dotted, "")) or (place and values[name] != setting.default))
    )


def flags_of(changes: Mapping[str, Any]) -> list[str]:
    """As on the command line of recipes/finetuning.py."""
    return [_flag(name, value) for name, value in changes.items()]


def _flag(name: str, value: Any) -> str:
    word = "quantization" if name == "mode" else name
    return f"--{word}" if value is True else f"--{word} {show(value)}"


def trains_the_same(changes: Mapping[str, Any], config: Config) -> bool:
    """Whether changes to a recipe cost nothing but speed."""
    return not any(_losses_of_training(changes, config))


def gives_up(changes: Mapping[str, Any], config: Config, plan: Plan) -> str:
    """What a recipe with these changes gives up, in words: of the training, and of its speed."""
    return "; ".join([*_losses_of_training(changes, config), *_losses_of_speed(changes, plan)]) or "nothing"


def _losses_of_training(changes: Mapping[str, Any], config: Config) -> Iterator[str]:
    if changes.get("use_peft"):
        yield f"adapters (r={config.peft.r}) are trained instead of all weights, mostly with a higher --lr"
    if "mode" in changes:
        yield f"the frozen weights are rounded to {changes['mode'].removesuffix('bit')} bits"
    if changes.get("optimizer") == "AdamW8bit":
        yield "AdamW's states are rounded to 8 bits"
    if changes.get("precision") == "bf16_pure":
        yield "weights and AdamW's states are kept in bf16, weights rounded stochastically"
    if "context_length" in changes:
        longer = {"drop": "left out", "split": "split"}.get(config.data.truncation, "cut")
        yield f"rows longer than {changes['context_length']:,} tokens are {longer}"


def _losses_of_speed(changes: Mapping[str, Any], plan: Plan) -> Iterator[str]:
    if changes.get("activation_checkpointing") == "full":
        yield "decoder layers are computed twice"
    elif changes.get("activation_checkpointing") in ("selective", "every_k"):
        yield "parts of the layers are computed twice"
    if changes.get("fsdp_cpu_offload"):
        yield f"weights come from the host at every use, which holds {size_text(plan.host_load_bytes)} a rank"
    if plan.world_size > 1 and ("enable_fsdp" in changes or changes.get("sharding_strategy") == "FULL_SHARD"):
        yield "ranks send each other their shards"
    if "gradient_accumulation_steps" in changes:
        yield f"a step is {changes['gradient_accumulation_steps']} micro-batches"
