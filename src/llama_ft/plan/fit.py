"""The search for settings that fit: every answer has been planned as any recipe is.

Nothing of what is trained changes at first, only how: sharding, checkpointing, the division of the global batch into
micro-batches, offloading. For each change to the training itself (8-bit states, LoRA, quantized weights, shorter rows)
the same search finds its fastest layout. Layouts are tried from the fastest on (speed.py). One that does not fit rules
out all that surely need as much; one plan at a micro-batch of 1 for each way of checkpointing says which others cannot.
"""

import bisect
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import torch

from llama_ft import models
from llama_ft.config import Config
from llama_ft.config.gpus import ANY_CPU, ANY_GPU, Device
from llama_ft.config.plan_flags import RANKS_OF_A_NODE
from llama_ft.errors import UserError
from llama_ft.plan.changes import (
    DIVISION,
    Layout,
    changed,
    differing,
    flags_of,
    gives_up,
    kept,
    layout_of,
    layouts,
    qualities,
    settings_of,
    shorter,
    trains_the_same,
    wishes,
)
from llama_ft.plan.fit_answer import FitAnswer, Fitting
from llama_ft.plan.predict import MOST_MICRO_BATCHES, BuildModel, PlanRequest, predict
from llama_ft.plan.record import Change, Plan
from llama_ft.plan.speed import Ranks, Shape, seconds_a_token, shape_of
from llama_ft.processes import cores, end_with

USABLE = 0.97  # plans are measured to be right within 3 % (benchmarks/plan.py)
SURELY_TOO_MUCH = 1.05  # an estimate beyond this share of what may be used is not worth a plan
MOST_RANKS = 1024
MOST_PROCESSES = 4  # each holds about 0.5 GiB of its own
WORTH_A_CHANGE, WORTH_TELLING = 1.01, 1.05  # times as fast
SECONDS_TO_ADVISE = 30.0

Known = dict[str, Plan | None]


@dataclass
class Search:
    """The layouts of one kind of training.

    Attributes:
        request: what the user asks for.
        build_model: the recipe's.
        device: what it has to fit.
        shape: of the model.
        context_length: of the user's recipe, resolved.
        quality: changes to what is trained.
        wishes: fields that the user has set.
        keeps_wishes: whether those may not change.
        fewest_first: try those with the fewest changes first, not the fastest.
        known: plans made so far; None: what could not be planned.
    """

    request: PlanRequest
    build_model: BuildModel
    device: Device
    shape: Shape
    context_length: int
    quality: dict[str, Any]
    wishes: frozenset[str]
    keeps_wishes: bool
    fewest_first: bool = False
    known: Known = field(default_factory=dict)

    def run(self, most: int, deadline: float = float("inf")) -> list[Fitting]:
        """The first `most` that fit, one for each way of sharding, checkpointing and offloading.

        Args:
            most: of them.
            deadline: of time.monotonic, when it gives up.
        """
        configs = {layout: self._config(layout) for layout in layouts(self.request)}
        open_ones = {layout: config for layout, config in configs.items() if config is not None}
        if self.keeps_wishes:
            open_ones = {it: config for it, config in open_ones.items() if not self._overridden(config)}
        if not open_ones or (first := self._base(min(open_ones, key=lambda it: kept(it.checkpointing)))) is None:
            return []
        failed = [] if self.fits(first[1]) else [first[0]]
        found = list[Fitting]()
        seconds = {layout: self._seconds(layout, config, first[1]) for layout, config in open_ones.items()}
        for layout in sorted(open_ones, key=lambda it: self._cost(open_ones[it], seconds[it])):
            if len(found) == most or time.monotonic() > deadline:
                break
            if any(layout.holds_no_less_than(it) for it in failed) or _is_like_one(layout, found):
                continue
            if self._is_too_much(first, layout) or self._is_too_much(self._base(layout), layout):
                continue
            plan = self.plan(open_ones[layout])
            if plan is not None and self.fits(plan):
                found.append(self._fitting(layout, open_ones[layout], plan, seconds[layout]))
            elif plan is not None:
                failed.append(layout)
        return found

    def own_seconds(self) -> float:
        """A token's, of the recipe as it is."""
        layout = layout_of(self.request)
        base = self._base(layout)
        return self._seconds(layout, self.request.config, base[1]) if base is not None else 0.0

    def fits(self, plan: Plan) -> bool:
        """Whether the device has room for it."""
        return plan.device_bytes <= USABLE * self.device.bytes

    def plan(self, config: Config) -> Plan | None:
        """A quick plan; None where the run would refuse the recipe."""
        key = json.dumps(dataclasses.asdict(config))
        if key not in self.known:
            try:
                plan = predict(dataclasses.replace(self.request, config=config), self.build_model, quick=True)
                self.known[key] = dataclasses.replace(plan, timeline=[])
            except UserError:
                self.known[key] = None
        return self.known[key]

    def _config(self, layout: Layout) -> Config | None:
        settings = {**self.quality, **settings_of(layout, self.request)}
        return changed(self.request.config, settings, self.request.device)

    def _is_too_much(self, base: tuple[Layout, Plan] | None, layout: Layout) -> bool:
        usable = USABLE * self.device.bytes
        return base is not None and estimate(*base, layout, self._rows) > SURELY_TOO_MUCH * usable

    def _base(self, layout: Layout) -> tuple[Layout, Plan] | None:
        """The leanest layout with the same checkpointing, planned."""
        world = self.request.world_size
        strategy = "FULL_SHARD" if world > 1 else layout_of(self.request).strategy
        base = Layout(strategy, world, layout.checkpointing, 1, offload=False)
        config = self._config(base)
        plan = self.plan(config) if config is not None else None
        return (base, plan) if plan is not None else None

    def _overridden(self, config: Config) -> list[str]:
        return [name for name in differing(self.request.config, config) if name in self.wishes]

    def _cost(self, config: Config, seconds: float) -> tuple[float, ...]:
        changes = differing(self.request.config, config)
        count = len({"micro_batch" if name in DIVISION else name for name in changes})
        dear = seconds * WORTH_A_CHANGE**count
        overridden = len(self._overridden(config))
        return (overridden, count, seconds) if self.fewest_first else (overridden, dear)

    def _seconds(self, layout: Layout, config: Config, base: Plan) -> float:
        ranks = Ranks(self.request.world_size, self.request.local_world_size, self.device, self.request.device)
        context = self.quality.get("context_length", self.context_length)
        return seconds_a_token(config, layout, base, self._rows, context, self.shape, ranks)

    @property
    def _rows(self) -> int:
        """Of a rank in a step: as many micro-batches has a layout with one row each."""
        train = self.request.config.train
        return train.batch_size_training * train.gradient_accumulation_steps

    def _fitting(self, layout: Layout, config: Config, plan: Plan, seconds: float) -> Fitting:
        changes = differing(self.request.config, config)
        words = gives_up(changes, self.request.config, plan)
        same = trains_the_same(changes, self.request.config)
        return Fitting(config, layout, flags_of(changes), self._overridden(config), words, plan, seconds, same)


def _is_like_one(layout: Layout, found: Iterable[Fitting]) -> bool:
    return any(dataclasses.replace(layout, micro_batch=it.layout.micro_batch) == it.layout for it in found)


def estimate(base: Layout, plan: Plan, layout: Layout, micro_batches: int) -> float:
    """About what a layout needs on the device, by a plan of another one with the same checkpointing.

    Args:
        base: the other one.
        plan: its.
        layout: the one asked about.
        micro_batches: of a step, in `base`.
    """
    most = 0.0
    held: tuple[Any, ...] = ("sharded parameters", "quantized parts", "optimizer state", "gradients")
    gathers = 2 * min(micro_batches, MOST_MICRO_BATCHES)  # in forward and backward
    for peak in plan.peaks:
        states = sum(peak.holders[holder] for holder in held)
        by_token = peak.holders["activations"] + peak.holders["logits and loss"]
        kept_gathered = 0.0
        if layout.strategy == "SHARD_GRAD_OP" and peak.phase in ("forward", "backward"):
            kept_gathered = plan.sent_bytes.get("all-gather", 0) / gathers
        rest = peak.bytes - states - by_token
        sharded = 0.0 if layout.offload else states * base.degree / layout.degree
        most = max(most, sharded + by_token * layout.micro_batch / base.micro_batch + rest + kept_gathered)
    return most * (plan.device_bytes - plan.outside_bytes) / plan.peak.bytes + plan.outside_bytes


def find_fits(
    request: PlanRequest,
    build_model: BuildModel,
    device: Device,
    places: Mapping[str, str],
    planned: Plan,
    quick: bool,
    tell: Callable[[str], object],
    most: int = 3,
) -> FitAnswer:
    """Settings with which a recipe fits. This process must not have a process group.

    Args:
        request: what is asked for.
        build_model: the recipe's.
        device: what it has to fit.
        places: dotted name -> where it was set.
        planned: the plan of the recipe as it is.
        quick: look for the smallest changes, for SECONDS_TO_ADVISE at most, and plan none of them in full.
        tell: hears what is searched.
        most: answers.
    """
    start = _prepare(request, build_model, device, wishes(request.config, places))
    answer = FitAnswer(request, device, planned, start.fits(planned), [])
    if answer.fits_as_it_is:
        tell("Looking for faster settings that fit too ...")
        own = start.own_seconds()
        answer.fits = [it for it in start.run(most) if it.seconds * WORTH_TELLING < own and it.flags]
        return answer
    if quick:
        answer.fits = _smallest_changes(start, most)
        return answer
    alone, together = (which(request.config, start.context_length) for which in (qualities, shorter))
    for changes, keeps_wishes in ((alone, True), (together, True), (alone, False), (together, False)):
        searches = [dataclasses.replace(start, quality=it, keeps_wishes=keeps_wishes) for it in changes]
        whose = "" if keeps_wishes else ", whatever you have set"
        tell(f"Trying {len(searches)} kinds of training{whose}: a minute or more ...")
        answer.fits = _choose(_run_all(searches), most)
        _verify(answer.fits, start)
        if answer.fits:
            break
    if not any(it.keeps_training and not it.overridden for it in answer.fits):
        tell("Trying more ranks ...")
        answer.enough_ranks, answer.blocker = _more_ranks(start)
    return answer


def advise(request: PlanRequest, build_model: BuildModel, capacity_bytes: int, most: int = 3) -> list[Change]:
    """The few smallest changes with which a recipe fits, one for each kind of training; in this process, quickly.

    Args:
        request: what does not fit.
        build_model: the recipe's.
        capacity_bytes: of the device.
        most: changes.
    """
    device = Device("", capacity_bytes, *(ANY_GPU if request.device == "cuda" else ANY_CPU))
    found = _smallest_changes(_prepare(request, build_model, device, frozenset()), most)
    return [it.change(max(other.speed for other in found)) for it in found]


def _smallest_changes(start: Search, most: int) -> list[Fitting]:
    deadline = time.monotonic() + SECONDS_TO_ADVISE
    request, found = start.request, list[Fitting]()
    for quality in (*qualities(request.config, start.context_length), *shorter(request.config, start.context_length)):
        if len(found) >= most or time.monotonic() > deadline:
            break
        search = dataclasses.replace(start, quality=quality, keeps_wishes=False, fewest_first=True)
        found += search.run(most - 1 if not quality else 1, deadline)
    return found


def _prepare(request: PlanRequest, build_model: BuildModel, device: Device, set_by_user: frozenset[str]) -> Search:
    config = request.config
    model_config = models.load_model_config(request.folder, config.model.trust_remote_code)
    context_length = models.resolve_context_length(config.data.context_length, model_config)
    shape = shape_of(models.build_skeleton(model_config, config.model))
    return Search(request, build_model, device, shape, context_length, {}, set_by_user, keeps_wishes=True)


def _run_all(searches: list[Search]) -> list[list[Fitting]]:
    """Each in a process of its own, as many at a time as there are cores."""
    processes = min(len(searches), MOST_PROCESSES, cores())
    context = get_context("fork")  # what is imported need not be imported again, which takes 10 s
    with ProcessPoolExecutor(processes, context, initializer=_begin_process, initargs=(os.getpid(),)) as pool:
        return list(pool.map(_run, searches))


def _run(search: Search) -> list[Fitting]:
    return search.run(2 if not search.quality else 1)


def _begin_process(parent: int) -> None:
    torch.set_num_threads(1)  # a forked process has none of OpenMP's threads, and would wait for them
    end_with(parent)


def _choose(found: list[list[Fitting]], most: int) -> list[Fitting]:
    """Those that train the same, then the fastest of the others; only those with the fewest of the user's settings
    overridden, where there is no other way."""
    every = [fitting for each in found for fitting in each]
    fewest = min((len(it.overridden) for it in every), default=0)
    every = [it for it in every if len(it.overridden) == fewest]
    return sorted(every, key=lambda it: (not it.keeps_training, it.seconds))[:most]


def _verify(fits: list[Fitting], search: Search) -> None:
    """Plan the first answer in full; drop it where it does not fit after all."""
    while fits and fits[0].plan.is_quick:
        request = dataclasses.replace(search.request, config=fits[0].config)
        fits[0] = dataclasses.replace(fits[0], plan=predict(request, search.build_model))
        if not search.fits(fits[0].plan):
            fits.pop(0)


def _more_ranks(search: Search) -> tuple[int | None, str]:
    """The fewest ranks, doubled until there are enough, on which the same training fits; else what is in the way."""
    plans = dict[int, Plan]()

    def is_enough(world: int) -> bool:
        node = max(search.request.local_world_size, min(world, RANKS_OF_A_NODE))
        request = dataclasses.replace(search.request, world_size=world, local_world_size=node)
        layout = Layout("FULL_SHARD", world, "full", 1, offload=False)
        config = changed(request.config, settings_of(layout, request), request.device)
        plan = dataclasses.replace(search, request=request).plan(config) if config is not None else None
        if plan is not None:
            plans[world] = plan
        return plan is not None and search.fits(plan)

    worlds = [search.request.world_size * 2**power for power in range(1, 11)]
    worlds = [world for world in worlds if world <= MOST_RANKS]
    if not worlds or not is_enough(worlds[-1]):
        last = plans.get(worlds[-1]) if worlds else None
        return None, max(last.peak.holders.items(), key=lambda it: it[1])[0] if last is not None else ""
    return worlds[bisect.bisect_left(worlds, True, hi=len(worlds) - 1, key=is_enough)], ""
