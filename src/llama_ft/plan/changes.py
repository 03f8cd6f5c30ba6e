"""Settings that change memory: how a recipe with other ones is made and written, and what each gives up."""

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from llama_ft.config import Config
from llama_ft.config.load import convert
from llama_ft.config.messages import show, size_text
from llama_ft.config.rules import CONDITIONS, broken_rules
from llama_ft.config.settings import SETTINGS, values_of
from llama_ft.plan.types import Plan


def changed(config: Config, changes: Mapping[str, Any], device: str) -> Config | None:
    """A recipe with some settings changed, and those set back that have no effect any more; None: it breaks a rule."""
    values = {**values_of(config), **changes}
    for fields, on, fits in CONDITIONS:
        if on in changes and not fits(values[on]):
            values |= {name: SETTINGS[name].default for name in fields}
    if broken_rules({**values, "device": device}):
        return None
    result, wrong = convert(values, {})
    return None if wrong else result


def differing(config: Config, other: Config) -> dict[str, Any]:
    """The settings of `other` that differ from `config`'s, by field name."""
    before = values_of(config)
    return {name: value for name, value in values_of(other).items() if value != before[name]}


def flags_of(changes: Mapping[str, Any]) -> list[str]:
    """As on the command line of recipes/finetuning.py."""
    flags = {name: SETTINGS[name].flag for name in changes}
    return [flags[name] if it is True else f"{flags[name]} {shlex.quote(show(it))}" for name, it in changes.items()]


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
    if changes.get("fsdp_cpu_offload"):
        yield f"weights come from the host at every use, which holds {size_text(plan.host_load_bytes)} a rank"
    if plan.world_size > 1 and ("enable_fsdp" in changes or changes.get("sharding_strategy") == "FULL_SHARD"):
        yield "ranks send each other their shards"
    if "gradient_accumulation_steps" in changes:
        yield f"a step is {changes['gradient_accumulation_steps']} micro-batches"
