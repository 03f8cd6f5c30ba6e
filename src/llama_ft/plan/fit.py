"""What would fit: a fixed ladder of changes, from the cheapest to the dearest, each planned as any recipe is.

Changes that cost nothing but speed come first, and add up: sharding, activation checkpointing, micro-batches of one
sample. Each change to the training itself comes on top of them: optimizer states of fewer bits, LoRA, QLoRA, shorter
samples. CPU offload comes if nothing else fits.
"""

import dataclasses
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llama_ft import commands, models
from llama_ft.config import Config, to_yaml
from llama_ft.config.messages import is_flag, size_text
from llama_ft.config.settings import SETTINGS, values_of
from llama_ft.errors import UserError
from llama_ft.phases import MemoryCategory
from llama_ft.plan.changes import changed, differing, flags_of, gives_up
from llama_ft.plan.flags import RANKS_OF_A_NODE
from llama_ft.plan.gpus import Device
from llama_ft.plan.predict import BuildModel, PlanRequest, predict
from llama_ft.plan.types import Change, Plan

USABLE = 0.97  # plans are measured to be right within 3 % (benchmarks/plan.py)
MOST_RANKS = 1024
MOST_ANSWERS = 3
SHORTEST_CONTEXT = 256
STATES: tuple[MemoryCategory, ...] = ("sharded parameters", "quantized parts", "gradients", "optimizer state")

Settings = dict[str, Any]
Planned = tuple[Config, Plan]


@dataclass
class Ladder:
    """Plans a recipe with one change after another.

    Attributes:
        request: the recipe, which does not fit.
        build_model: the recipe's.
        room_bytes: what a plan may need.
        quick: whether quick plans will do; else what fits by a quick plan is planned in full, too.
        tell: hears what is being planned.
    """

    request: PlanRequest
    build_model: BuildModel
    room_bytes: float
    quick: bool
    tell: Callable[[str], object]

    def climb(self, planned: Plan) -> tuple[list[Planned], int | None, str]:
        """Find up to MOST_ANSWERS changes, or one that leaves the training as it is.

        Args:
            planned: the plan of the recipe as it is.

        Returns:
            What fits; without an answer that leaves the training as it is, also on how many ranks that fits, or what
            keeps more ranks from helping.
        """
        free, last = Settings(), planned
        for change, shrinks_states in free_changes(self.request):
            if not shrinks_states and _states(last) >= self.room_bytes:
                free |= change  # states alone are too much: smaller activations need no plan
                continue
            plan, fits = self._plan(free | change, last)
            if fits is not None:
                return [fits], None, ""
            if plan.device_bytes < last.device_bytes:  # gradients of more micro-batches may take what one row saves
                free, last = free | change, plan
        found = list[Planned]()
        leanest = Settings()
        for change in other_training(self.request.config):
            if len(found) < MOST_ANSWERS:
                last, fits = self._plan(free | change, last)
                found += [fits] if fits is not None else []
                leanest = change
        for context_length in self._shorter():
            if not found and _states(last) < self.room_bytes:
                last, fits = self._plan(free | leanest | {"context_length": context_length}, last)
                found += [fits] if fits is not None else []
        if not found and self.request.device == "cuda":
            _, fits = self._plan({**free, **SHARDED, "fsdp_cpu_offload": True}, last)
            found += [fits] if fits is not None else []
        return found, *self._more_ranks(free)

    def _plan(self, settings: Settings, last: Plan) -> tuple[Plan, Planned | None]:
        """The plan with these settings (`last` if there is none), and the recipe with it if that fits."""
        request = self.request
        config = changed(request.config, settings, request.device)
        if config is None or not (flags := flags_of(differing(request.config, config))):
            return last, None
        self.tell(f"Planning with {' '.join(flags)} ...")
        request = dataclasses.replace(request, config=config)
        try:
            plan = predict(request, self.build_model, quick=True)
            fits = plan.device_bytes <= self.room_bytes
            if fits and not self.quick:
                plan = predict(request, self.build_model)
                fits = plan.device_bytes <= self.room_bytes
        except UserError:  # the run itself would stop at these settings
            return last, None
        return plan, (config, plan) if fits else None

    def _shorter(self) -> list[int]:
        config = self.request.config
        model_config = models.load_model_config(self.request.folder, config.model.trust_remote_code)
        longest = models.resolve_context_length(config.data.context_length, model_config)
        return [length for length in (longest // 2, longest // 4) if length >= SHORTEST_CONTEXT]

    def _more_ranks(self, free: Settings) -> tuple[int | None, str]:
        """The fewest ranks, doubled until there are enough, on which the same training fits; else what is in the way.
        States are divided by the ranks, activations are not."""
        ranks = 2 * self.request.world_size
        while ranks <= MOST_RANKS:
            node = max(self.request.local_world_size, min(ranks, RANKS_OF_A_NODE))
            request = dataclasses.replace(self.request, world_size=ranks, local_world_size=node)
            config = changed(request.config, {**free, **SHARDED}, request.device)
            if config is None:
                return None, ""
            self.tell(f"Planning {ranks} ranks ...")
            try:
                plan = predict(dataclasses.replace(request, config=config), self.build_model, quick=True)
            except UserError:
                return None, ""
            if plan.device_bytes <= self.room_bytes:
                return ranks, ""
            if plan.device_bytes - _states(plan) > self.room_bytes:
                return None, max(plan.peak.holders.items(), key=lambda it: it[1])[0]
            ranks *= 2
            while ranks <= MOST_RANKS and _states(plan) * 2 * request.world_size / ranks > self.room_bytes:
                ranks *= 2
        return None, ""


SHARDED: Settings = {"enable_fsdp": True, "sharding_strategy": "FULL_SHARD", "sharding_group_size": None}


def free_changes(request: PlanRequest) -> Iterator[tuple[Settings, bool]]:
    """Changes that leave the training as it is, the cheapest first, and whether each shrinks parameters and states."""
    fsdp, train = request.config.fsdp, request.config.train
    if request.world_size > 1 and not (fsdp.enable_fsdp and fsdp.sharding_strategy == "FULL_SHARD"):
        yield SHARDED, True
    if train.activation_checkpointing != "full":
        yield {"activation_checkpointing": "full"}, False
    if train.batch_size_training > 1:
        steps = train.batch_size_training * train.gradient_accumulation_steps  # the global batch stays
        one = {"batch_size_training": 1, "gradient_accumulation_steps": steps}
        yield one | ({"val_batch_size": 1} if train.val_batch_size > 1 else {}), False


def other_training(config: Config) -> Iterator[Settings]:
    """Changes to what is trained, each alone; the last is the leanest."""
    is_lora, mode = config.peft.use_peft, config.quantization.mode
    if not is_lora and config.train.optimizer == "AdamW" and config.train.precision != "fp16":
        yield {"optimizer": "AdamW8bit"}
        if config.train.precision == "bf16_mixed":
            yield {"optimizer": "anyprecision", "precision": "bf16_pure"}
    if not is_lora:
        yield {"use_peft": True}
    if mode != "4bit":
        yield {"mode": "4bit"} if is_lora else {"use_peft": True, "mode": "4bit"}


def _states(plan: Plan) -> int:
    """What no smaller micro-batch makes less, with what CUDA and NCCL take."""
    held = next(peak for peak in plan.peaks if peak.phase == "optimizer step").holders
    return sum(held[holder] for holder in STATES) + plan.outside_bytes


def find_fits(
    request: PlanRequest,
    build_model: BuildModel,
    device: Device,
    planned: Plan,
    quick: bool,
    tell: Callable[[str], object],
) -> "FitAnswer":
    """Settings with which a recipe fits. This process must not have a process group.

    Args:
        request: what is asked for.
        build_model: the recipe's.
        device: what it has to fit.
        planned: the plan of the recipe as it is.
        quick: whether quick plans will do for the answers.
        tell: hears what is being planned.
    """
    room = USABLE * device.bytes
    answer = FitAnswer(request, device, planned, planned.device_bytes <= room, [])
    if not answer.fits_as_it_is:
        ladder = Ladder(request, build_model, room, quick, tell)
        answer.fits, answer.enough_ranks, answer.blocker = ladder.climb(planned)
    return answer


@dataclass
class FitAnswer:
    """What fits.

    Attributes:
        request: what was asked for.
        device: what it had to fit.
        plan: of the recipe as it is.
        fits_as_it_is: whether that fits.
        fits: recipes that do otherwise, each with its plan.
        enough_ranks: on how many ranks the same training would fit.
        blocker: what keeps more ranks from helping; "" where that was not asked.
    """

    request: PlanRequest
    device: Device
    plan: Plan
    fits_as_it_is: bool
    fits: list[Planned]
    enough_ranks: int | None = None
    blocker: str = ""

    def changes(self) -> list[Change]:
        """What each of `fits` changes, for messages."""
        before, found = self.request.config, list[Change]()
        for config, plan in self.fits:
            changes = differing(before, config)
            found.append(Change(flags_of(changes), gives_up(changes, before, plan), plan.device_bytes))
        return found

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "fits_as_it_is": self.fits_as_it_is,
            "fits": [asdict(change) for change in self.changes()],
            "fits_on_ranks": self.enough_ranks,
        }

    def describe(self, commands: list[str]) -> str:
        """For people.

        Args:
            commands: one for each of `fits`, which runs it.
        """
        needs, has = size_text(self.plan.device_bytes), self.device.name
        if self.fits_as_it_is:
            return f"It fits {has} as it is: {needs} a rank."
        lines = [f"It does not fit {has} as it is: {needs} a rank."]
        if self.enough_ranks:
            how = "sharded, with activation checkpointing and micro-batches of 1"
            lines.append(f"The same training fits on {self.enough_ranks} ranks, {how}.")
        if self.blocker:
            lines.append(f"More ranks do not help: what is in the way is the same on every rank ({self.blocker}).")
        lines.append("What fits:" if self.fits else "None of the changes that were planned makes it fit.")
        for number, (change, command) in enumerate(zip(self.changes(), commands, strict=True), 1):
            lines.append(f"{number}. {' '.join(change.flags)}")
            lines.append(f"   {size_text(change.peak_bytes)} a rank")
            lines.append(f"   gives up: {change.gives_up}")
            lines.append(f"   {command}")
        return "\n".join(lines)

    def write(self, folder: Path) -> list[str]:
        """Write each answer as a recipe; returns the commands that run them.

        Raises:
            UserError: the folder cannot be written.
        """
        commands = []
        for number, ((config, _), change) in enumerate(zip(self.fits, self.changes(), strict=True), 1):
            file = folder / f"fit-{number}.yaml"
            command = f"{_launcher(self.request)} --config {shlex.quote(str(file))}"
            head = f"{' '.join(change.flags)}\n{size_text(change.peak_bytes)} a rank, for {self.device.name}"
            head += f"\ngives up: {change.gives_up}\n  {command}"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                file.write_text(to_yaml(config, head))
            except OSError as error:
                raise UserError(f"--fit_out {folder}: cannot be written: {error.strerror}.") from None
            commands.append(command)
        return commands

    def commands(self, places: Mapping[str, str], recipe: str | None) -> list[str]:
        """What runs each answer without a recipe of its own.

        Args:
            places: dotted name -> where the user set it.
            recipe: the file that --config named.
        """
        return [self._command(config, places, recipe) for config, _ in self.fits]

    def _command(self, config: Config, places: Mapping[str, str], recipe: str | None) -> str:
        values = values_of(config)
        typed = {name for name, setting in SETTINGS.items() if is_flag(places.get(setting.dotted, ""))}
        different = differing(self.request.config, config)
        shown = {name: values[name] for name in values if name in typed or name in different}
        words = [f"--config {shlex.quote(recipe)}"] if recipe else []
        return " ".join([_launcher(self.request), *words, *flags_of(shown)])


def _launcher(request: PlanRequest) -> str:
    nodes = request.world_size // request.local_world_size
    if request.world_size == 1:
        return commands.shown("finetuning")
    several = f"--nnodes {nodes} " if nodes > 1 else ""
    return commands.shown("finetuning", f"torchrun {several}--nproc_per_node {request.local_world_size}")
