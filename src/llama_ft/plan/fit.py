"""What would fit: a fixed ladder of changes, from the cheapest to the dearest, each planned as any recipe is.

Changes that cost nothing but speed come first, and add up: sharding, activation checkpointing, micro-batches of one
sample. Each of the others comes on top of them: twice the ranks, optimizer states of fewer bits, LoRA, QLoRA, with it
samples of half the length, and CPU offload.
"""

import dataclasses
import shlex
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from llama_ft import models
from llama_ft.config import Config, to_yaml
from llama_ft.config.load import convert
from llama_ft.config.messages import show, size_text
from llama_ft.config.rules import CONDITIONS, broken_rules
from llama_ft.config.settings import SETTINGS, values_of
from llama_ft.errors import UserError
from llama_ft.plan.gpus import free_text
from llama_ft.plan.predict import BuildModel, predict
from llama_ft.plan.types import Plan, PlanRequest

USABLE = 0.97  # plans are measured to be right within 3 % (benchmarks/plan.py)
MOST_ANSWERS = 3
SHARDED: dict[str, Any] = {"enable_fsdp": True, "sharding_strategy": "FULL_SHARD", "sharding_group_size": None}
FOUR_BIT: dict[str, Any] = {"mode": "4bit"}
RANKS = "--nproc"  # of recipes/plan.py: the one change that is no setting

Change = tuple[dict[str, Any], str]  # settings by field name, and what is given up for them


class Fit(NamedTuple):
    """Settings with which a run fits."""

    config: Config
    flags: list[str]  # what differs
    gives_up: str
    plan: Plan


def find_fits(
    request: PlanRequest, build_model: BuildModel, room: float, planned: Plan, quick: bool, tell: Callable[[str], Any]
) -> list[Fit]:
    """Find what fits `room` bytes if a recipe, whose plan is `planned`, does not: changes that leave the training as it
    is, else up to MOST_ANSWERS others. `tell` hears of every change that is planned. This process must not have a
    process group. What fits by a quick plan is planned in full too, unless `quick`."""
    free, last, fits = list[Change](), planned, list[Fit]()

    def plan(changes: list[Change]) -> Plan | None:
        """With these changes, noted if it fits; None: the run itself would stop at these settings."""
        settings = {name: value for change, _ in changes for name, value in change.items()}
        ranks = settings.pop(RANKS, request.world_size)
        config = changed(request.config, settings, request.device)
        flags = flags_of(request.config, config) if config else []
        flags += [f"{RANKS} {ranks}"] if ranks != request.world_size else []
        if config is None or not flags:
            return None
        asked = dataclasses.replace(request, config=config, world_size=ranks)
        with suppress(UserError):
            found = predict(asked, build_model, quick=True)
            if has_room(found, room) and not quick:
                found = predict(asked, build_model)
            tell(f"Planned {' '.join(flags)}: {size_text(found.device_bytes)} a rank")
            if has_room(found, room):
                fits.append(Fit(config, flags, "; ".join(gives_up for _, gives_up in changes), found))
            return found
        return None

    if has_room(planned, room):
        return []
    cheap, others = ladder(request)
    for change in cheap:
        found = plan([*free, change])
        if fits:
            return fits
        if found and found.device_bytes < last.device_bytes:  # gradients of more micro-batches may take what it saves
            free, last = [*free, change], found
    for change in others:
        if len(fits) < MOST_ANSWERS:
            plan([*free, change])
    return fits


def has_room(plan: Plan, room: float) -> bool:
    """Whether a plan fits a device of `room` bytes."""
    return plan.device_bytes <= USABLE * room


def describe_fits(planned: Plan, fits: list[Fit], room: int) -> str:
    """What `find_fits` has found, for people."""
    does = "fits" if has_room(planned, room) else "does not fit"
    lines = [f"It {does} {size_text(room)} as it is: {size_text(planned.device_bytes)} a rank."]
    if not has_room(planned, room):
        lines.append("What fits:" if fits else "None of the changes that were planned makes it fit.")
    for number, fit in enumerate(fits, 1):
        lines.append(f"{number}. {' '.join(fit.flags)}\n   {size_text(fit.plan.device_bytes)} a rank")
        lines.append(f"   gives up: {fit.gives_up}")
    return "\n".join(lines)


def write_fits(fits: list[Fit], folder: Path) -> None:
    """Write each as a config, fit-1.yaml and so on; UserError if the folder cannot be written."""
    for number, fit in enumerate(fits, 1):
        head = f"{' '.join(fit.flags)}\n{size_text(fit.plan.device_bytes)} a rank\ngives up: {fit.gives_up}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"fit-{number}.yaml").write_text(to_yaml(fit.config, head))
        except OSError as error:
            raise UserError(f"--fit_out {folder}: cannot be written: {error.strerror}.") from None


def ladder(request: PlanRequest) -> tuple[list[Change], list[Change]]:
    """Changes that leave the training as it is, and others, the cheapest first."""
    fsdp, train, is_lora = request.config.fsdp, request.config.train, request.config.peft.use_peft
    cheap, ranks = list[Change](), 2 * request.world_size
    if request.world_size > 1 and not (fsdp.enable_fsdp and fsdp.sharding_strategy == "FULL_SHARD"):
        cheap.append((SHARDED, "ranks send each other their shards"))
    if train.activation_checkpointing != "full":
        cheap.append(({"activation_checkpointing": "full"}, "decoder layers are computed twice"))
    if train.batch_size_training > 1:
        steps = train.batch_size_training * train.gradient_accumulation_steps  # the global batch stays
        one = {"batch_size_training": 1, "gradient_accumulation_steps": steps, "val_batch_size": 1}
        cheap.append((one, f"a step is {steps} micro-batches"))
    others: list[Change] = [(SHARDED | {RANKS: ranks}, f"{ranks} ranks, and twice the samples a step")]
    if not is_lora and train.optimizer == "AdamW" and train.precision != "fp16":
        others.append(({"optimizer": "AdamW8bit"}, "AdamW's states are rounded to 8 bits"))
        if train.precision == "bf16_mixed":
            pure = {"optimizer": "anyprecision", "precision": "bf16_pure"}
            others.append((pure, "weights and AdamW's states are kept in bf16, weights rounded stochastically"))
    lora, gives_up = {"use_peft": True}, "adapters are trained instead of all weights, mostly with a higher --lr"
    if not is_lora:
        others.append((lora, gives_up))
    if request.config.quantization.mode != "4bit":
        rounded = "the frozen weights are rounded to 4 bits"
        others.append((lora | FOUR_BIT, rounded if is_lora else f"{gives_up}; {rounded}"))
    model_config = models.load_model_config(request.folder, request.config.model.trust_remote_code)
    half = models.resolve_context_length(request.config.data.context_length, model_config) // 2
    others.append((lora | FOUR_BIT | {"context_length": half}, f"QLoRA, and samples of at most {half:,} tokens"))
    if request.device == "cuda":
        others.append((SHARDED | {"fsdp_cpu_offload": True}, "weights come from the host at every use"))
    return cheap, others


def choose_checkpointing(request: PlanRequest, build_model: BuildModel, free: float) -> tuple[Config, str, Plan]:
    """What `--activation_checkpointing auto` comes to be: the first of off, selective and full with which a recipe fits
    `free` bytes (inf: unknown) by its quick plan, else the one that holds least. Returns the recipe with it, what it is
    and why, and its plan. Raises UserError as the run itself would. This process must not have a process group."""
    planned = list[str]()
    for how in ("off", "selective", "full"):
        config = changed(request.config, {"activation_checkpointing": how}, request.device)
        if config is None:
            continue  # selective, where layers are no units
        try:
            plan = predict(dataclasses.replace(request, config=config), build_model, quick=True)
        except UserError:
            if how == "off":
                raise
            continue  # this architecture cannot be checkpointed
        planned.append(f"{how} {size_text(plan.device_bytes)}")
        choice = config, f"{how} (planned: {', '.join(planned)}; free: {free_text(free)})", plan
        if has_room(plan, free):
            break
    return choice


def changed(config: Config, changes: dict[str, Any], device: str) -> Config | None:
    """A recipe with some settings changed, and those set back that have no effect any more; None: it breaks a rule."""
    values = {**values_of(config), **changes}
    for fields, on, fits in CONDITIONS:
        if on in changes and not fits(values[on]):
            values |= {name: SETTINGS[name].default for name in fields}
    if broken_rules({**values, "device": device}):
        return None
    result, wrong = convert(values, {})
    return None if wrong else result


def flags_of(config: Config, other: Config) -> list[str]:
    """What of `other` differs from `config`, as on the command line of recipes/finetuning.py."""
    before, after = values_of(config), values_of(other)
    words = {SETTINGS[name].flag: it for name, it in after.items() if it != before[name]}
    return [flag if it is True else f"{flag} {shlex.quote(show(it))}" for flag, it in words.items()]
