"""What would fit: a fixed ladder of changes, from the cheapest to the dearest, each planned as any recipe is.

Changes that cost nothing but speed come first, and add up: sharding, activation checkpointing, micro-batches of one
sample. Each change to the training itself comes on top of them: optimizer states of fewer bits, LoRA, QLoRA. Shorter
samples and CPU offload come if nothing else fits.
"""

import dataclasses
import shlex
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llama_ft import commands, models
from llama_ft.config import Config, to_yaml
from llama_ft.config.load import convert
from llama_ft.config.messages import show, size_text
from llama_ft.config.rules import CONDITIONS, broken_rules
from llama_ft.config.settings import SETTINGS, values_of
from llama_ft.errors import UserError
from llama_ft.phases import MemoryCategory
from llama_ft.plan.flags import RANKS_OF_A_NODE
from llama_ft.plan.gpus import free_text
from llama_ft.plan.predict import BuildModel, predict
from llama_ft.plan.types import Plan, PlanRequest

USABLE = 0.97  # plans are measured to be right within 3 % (benchmarks/plan.py)
MOST_RANKS = 1024
MOST_ANSWERS = 3
SHORTEST_CONTEXT = 256
STATES: tuple[MemoryCategory, ...] = ("sharded parameters", "quantized parts", "gradients", "optimizer state")
SHARDED: dict[str, Any] = {"enable_fsdp": True, "sharding_strategy": "FULL_SHARD", "sharding_group_size": None}


@dataclass(frozen=True)
class Rung:
    """A change: the settings by field name, and what it gives up."""

    settings: dict[str, Any]
    gives_up: str


@dataclass(frozen=True)
class Fit:
    """Settings with which a run fits: all, what differs as flags, what is given up for them, and the plan."""

    config: Config
    flags: list[str]
    gives_up: str
    plan: Plan


@dataclass
class Ladder:
    """Plans a recipe with one change after another. This process must not have a process group.

    Attributes:
        request: the recipe.
        build_model: the recipe's.
        device_bytes: what it has to fit.
        planned: the plan of the recipe as it is.
        quick: whether quick plans will do for the answers; else what fits by a quick plan is planned in full, too.
        tell: hears what is being planned.
        fits: what `climb` finds: up to MOST_ANSWERS, or one that leaves the training as it is.
        enough_ranks: on how many ranks the same training would fit; None: that is not known.
    """

    request: PlanRequest
    build_model: BuildModel
    device_bytes: int
    planned: Plan
    quick: bool
    tell: Callable[[str], object]
    fits: list[Fit] = field(default_factory=list)
    enough_ranks: int | None = None

    def climb(self) -> None:
        """Find what fits, if the recipe does not fit as it is."""
        free, last = list[Rung](), self.planned
        if self._has_room(last):
            return
        for rung in cheap_changes(self.request):
            if rung.settings != SHARDED and _states(last) >= USABLE * self.device_bytes:
                free.append(rung)  # states alone are too much: smaller activations need no plan
                continue
            plan = self._plan([*free, rung]) or last
            if self.fits:
                return
            if plan.device_bytes < last.device_bytes:  # gradients of more micro-batches may take what one row saves
                free, last = [*free, rung], plan
        for rung in training_changes(self.request.config):
            if len(self.fits) < MOST_ANSWERS:
                self._plan([*free, rung])
        for rung in last_resorts(self.request):
            if not self.fits:
                self._plan([*free, rung])
        self.enough_ranks = self._find_ranks(free)

    def _has_room(self, plan: Plan) -> bool:
        return plan.device_bytes <= USABLE * self.device_bytes

    def _plan(self, rungs: list[Rung]) -> Plan | None:
        """The plan with these changes, noted if it fits; None: the run itself would stop at these settings."""
        before, settings = self.request.config, _settings(rungs)
        config = changed(before, settings, self.request.device)
        if config is None or not (flags := flags_of(before, config)):
            return None
        self.tell(f"Planning with {' '.join(flags)} ...")
        request = dataclasses.replace(self.request, config=config)
        with suppress(UserError):
            plan = predict(request, self.build_model, quick=True)
            if self._has_room(plan) and not self.quick:
                plan = predict(request, self.build_model)
            if self._has_room(plan):
                self.fits.append(Fit(config, flags, "; ".join(rung.gives_up for rung in rungs), plan))
            return plan
        return None

    def _find_ranks(self, free: list[Rung]) -> int | None:
        """The fewest ranks, doubled until there are enough: states are divided by the ranks, activations are not."""
        request, settings = self.request, _settings(free) | SHARDED
        config, ranks = changed(request.config, settings, request.device), request.world_size
        while config is not None and (ranks := 2 * ranks) <= MOST_RANKS:
            self.tell(f"Planning {ranks} ranks ...")
            node = max(request.local_world_size, min(ranks, RANKS_OF_A_NODE))
            more = dataclasses.replace(request, config=config, world_size=ranks, local_world_size=node)
            try:
                plan = predict(more, self.build_model, quick=True)
            except UserError:
                return None
            if self._has_room(plan):
                return ranks
            if plan.device_bytes - _states(plan) > USABLE * self.device_bytes:
                return None
        return None

    def to_json(self) -> dict[str, Any]:
        """What was found, as plain values."""
        fits = [{"flags": it.flags, "gives_up": it.gives_up, "peak_bytes": it.plan.device_bytes} for it in self.fits]
        as_it_is = self._has_room(self.planned)
        return {"fits_as_it_is": as_it_is, "fits": fits, "fits_on_ranks": self.enough_ranks}

    def describe(self) -> str:
        """What was found, for people."""
        does = "fits" if self._has_room(self.planned) else "does not fit"
        lines = [f"It {does} {size_text(self.device_bytes)} as it is: {size_text(self.planned.device_bytes)} a rank."]
        if self.enough_ranks:
            how = "sharded, with activation checkpointing and micro-batches of 1"
            lines.append(f"The same training fits on {self.enough_ranks} ranks, {how}.")
        if not self._has_room(self.planned):
            lines.append("What fits:" if self.fits else "None of the changes that were planned makes it fit.")
        for number, fit in enumerate(self.fits, 1):
            lines.append(f"{number}. {' '.join(fit.flags)}\n   {size_text(fit.plan.device_bytes)} a rank")
            lines.append(f"   gives up: {fit.gives_up}")
        return "\n".join(lines)

    def write(self, folder: Path) -> None:
        """Write each answer as a recipe, with the command that runs it in its head.

        Raises:
            UserError: the folder cannot be written.
        """
        ranks, of_a_node = self.request.world_size, self.request.local_world_size
        several = f"--nnodes {ranks // of_a_node} " if ranks > of_a_node else ""
        script = commands.shown("finetuning", f"torchrun {several}--nproc_per_node {of_a_node}" if ranks > 1 else "")
        for number, fit in enumerate(self.fits, 1):
            file, size = folder / f"fit-{number}.yaml", size_text(fit.plan.device_bytes)
            head = f"{' '.join(fit.flags)}\n{size} a rank, for {size_text(self.device_bytes)}\ngives up: {fit.gives_up}"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                file.write_text(to_yaml(fit.config, f"{head}\n  {script} --config {shlex.quote(str(file))}"))
            except OSError as error:
                raise UserError(f"--fit_out {folder}: cannot be written: {error.strerror}.") from None


def cheap_changes(request: PlanRequest) -> Iterator[Rung]:
    """Changes that leave the training as it is, the cheapest first."""
    fsdp, train = request.config.fsdp, request.config.train
    if request.world_size > 1 and not (fsdp.enable_fsdp and fsdp.sharding_strategy == "FULL_SHARD"):
        yield Rung(SHARDED, "ranks send each other their shards")
    if train.activation_checkpointing != "full":
        yield Rung({"activation_checkpointing": "full"}, "decoder layers are computed twice")
    if train.batch_size_training > 1:
        steps = train.batch_size_training * train.gradient_accumulation_steps  # the global batch stays
        one = {"batch_size_training": 1, "gradient_accumulation_steps": steps}
        validation = {"val_batch_size": 1} if train.val_batch_size > 1 else {}
        yield Rung(one | validation, f"a step is {steps} micro-batches")


def training_changes(config: Config) -> Iterator[Rung]:
    """Changes to what is trained, each alone; the last is the leanest."""
    is_lora, precision = config.peft.use_peft, config.train.precision
    if not is_lora and config.train.optimizer == "AdamW" and precision != "fp16":
        yield Rung({"optimizer": "AdamW8bit"}, "AdamW's states are rounded to 8 bits")
        if precision == "bf16_mixed":
            bf16 = {"optimizer": "anyprecision", "precision": "bf16_pure"}
            yield Rung(bf16, "weights and AdamW's states are kept in bf16, weights rounded stochastically")
    lora = f"adapters (r={config.peft.r}) are trained instead of all weights, mostly with a higher --lr"
    if not is_lora:
        yield Rung({"use_peft": True}, lora)
    if config.quantization.mode != "4bit":
        rounded = "the frozen weights are rounded to 4 bits"
        yield Rung({"use_peft": True, "mode": "4bit"}, rounded if is_lora else f"{lora}; {rounded}")


def last_resorts(request: PlanRequest) -> Iterator[Rung]:
    """A half and a quarter of the context length, with the leanest training; CPU offload."""
    config = request.config
    leanest = [Rung({}, ""), *training_changes(config)][-1]
    model_config = models.load_model_config(request.folder, config.model.trust_remote_code)
    longest = models.resolve_context_length(config.data.context_length, model_config)
    for length in (longest // 2, longest // 4):
        if length >= SHORTEST_CONTEXT:
            shorter = f"{leanest.gives_up}; samples have at most {length:,} tokens".removeprefix("; ")
            yield Rung(leanest.settings | {"context_length": length}, shorter)
    if request.device == "cuda":
        yield Rung(SHARDED | {"fsdp_cpu_offload": True}, "weights come from the host at every use")


def _settings(rungs: list[Rung]) -> dict[str, Any]:
    return {name: value for rung in rungs for name, value in rung.settings.items()}


def _states(plan: Plan) -> int:
    """What no smaller micro-batch makes less, with what CUDA and NCCL take."""
    held = next(peak for peak in plan.peaks if peak.phase == "optimizer step").holders
    return sum(held[holder] for holder in STATES) + plan.outside_bytes


def choose_checkpointing(request: PlanRequest, build_model: BuildModel, free: float) -> tuple[Config, str, Plan]:
    """What `--activation_checkpointing auto` comes to be: the first of off, selective and full with which a recipe fits
    by its quick plan, else the one that holds least. This process must not have a process group.

    Args:
        request: whose config says auto.
        build_model: the recipe's.
        free: bytes that a rank may hold on its device; inf: that is not known.

    Returns:
        The recipe with it, what it is and why, and its plan.

    Raises:
        UserError: as the run itself would.
    """
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
        if plan.device_bytes <= USABLE * free:
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
