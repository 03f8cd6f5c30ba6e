"""Find settings that fit: the changes of plan/changes.py, from the cheapest to the most expensive,
each planned like any run.

Changes that cost only speed come first and are combined. Each of the others is added to them. A
change that only gives up more than another one that fits is not an answer.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from llama_ft.config import Config
from llama_ft.config.settings.settings import SETTINGS, values_of
from llama_ft.config.wording.messages import size_text
from llama_ft.errors import UserError
from llama_ft.plan.changes import (
    CHECKPOINTING,
    RANKS,
    SHARED_BY,
    Change,
    Saving,
    apply_changes,
    auto_settings,
    changed,
    ladder,
)
from llama_ft.plan.duration import describe_time, step_seconds, tokens_per_second
from llama_ft.plan.flags import PlanFlags
from llama_ft.plan.free_memory import free_text
from llama_ft.plan.predict import predict
from llama_ft.plan.spare_memory import SHARE_TO_KEEP
from llama_ft.plan.types import Plan, PlanRequest, Recipe
from llama_ft.runtime.devices import PRECISIONS

USABLE = 0.97  # plans are right within 3% (measured with benchmarks/planner/plan.py)
MAX_PROPOSALS = 3
CAST_ONCE: dict[str, Any] = {"enable_fsdp": True, "sharding_strategy": "SHARD_GRAD_OP"}
MORE = (RANKS, SHARED_BY, "gradient_accumulation_steps")  # a larger number gives up more


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
    original: Config,
) -> tuple[str, int, dict[str, object]]:
    """Return the answer to --fit: a text, the exit code (0: the run fits, 3: with changes, 4: not),
    and values for --json. `original`: with auto. For the other arguments see `find_fits`."""
    room, quick = options.fit_bytes, bool(options.quick)
    fits = find_fits(request, recipe, room, planned, quick, report)
    fits = [as_started(fit, original, request, recipe, room, quick) for fit in fits]
    is_fit = has_room(planned, room)
    runs = [(fit.plan, fit.config) for fit in fits]
    if not runs:
        runs = [(planned, request.config)]
    seconds = [step_seconds(*run, options.gpu) for run in runs]
    times = [describe_time(*run, options.gpu, options.price) if options.gpu else "" for run in runs]
    answers = [
        {
            "flags": fit.flags,
            "gives_up": fit.gives_up,
            "peak_bytes": fit.plan.device_bytes,
            "host_bytes": fit.plan.host_bytes,
            "step_seconds": s,
            "tokens_per_second": s and tokens_per_second(fit.plan, s),
        }
        for fit, s in zip(fits, seconds, strict=False)
    ]
    values: dict[str, object] = {
        "fits_as_it_is": is_fit,
        "step_seconds": seconds[0] if is_fit else None,
        "tokens_per_second": seconds[0] and tokens_per_second(planned, seconds[0])
        if is_fit
        else None,
        "fits": answers,
    }
    exit_code = 0
    if not is_fit:
        exit_code = 3 if fits else 4
    return describe_fits(planned, fits, room, times), exit_code, values


@dataclass(frozen=True)
class _Search:
    """What every plan of a search shares: see `find_fits`."""

    request: PlanRequest
    recipe: Recipe
    room: float
    quick: bool
    report: Callable[[str], Any]

    def plan_with(self, changes: list[Change]) -> Fit | None:
        """Plan the run with changes, the last of which is the one that counts. None: it would reject
        them."""
        config, ranks, flags = apply_changes(self.request, changes)
        if config is None or not flags:
            return None
        candidate = dataclasses.replace(self.request, config=config, world_size=ranks)
        try:
            plan = predict(candidate, self.recipe, quick=True)
            if has_room(plan, self.room) and not self.quick:
                plan = predict(candidate, self.recipe)
        except UserError:
            return None
        self.report(f"Planned {' '.join(flags)}: {size_text(plan.device_bytes)} per rank")
        last, _ = changes[-1]
        return Fit(config, flags, "; ".join(reason for _, reason in changes), plan, last)

    def without_needless(self, fit: Fit, before: list[Change], change: Change) -> Fit:
        """Leave out what stands before a change and is not needed with it, the most expensive first."""
        for number in reversed(range(len(before))):
            smaller = self.plan_with([*before[:number], change])
            if smaller is None or not has_room(smaller.plan, self.room):
                break
            fit = smaller
        return fit


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

    search = _Search(request, recipe, room, quick, report)
    changes = list[Change]()
    least = planned.device_bytes
    fits = list[Fit]()
    cheap, others = ladder(request, room)
    for change in [*cheap, *others] if not has_room(planned, room) else []:
        settings, _ = change
        if any(gives_up_more(settings, fit.change) for fit in fits):
            continue
        fit = search.plan_with([*changes, change])
        if fit is None:
            continue
        if has_room(fit.plan, room):
            if change in others:
                fit = search.without_needless(fit, changes, change)
            fits = [other for other in fits if not gives_up_more(other.change, settings)]
            fits.append(fit)
            if change in cheap or len(fits) == MAX_PROPOSALS:
                break
        # Gradients of more micro-batches may take the memory that smaller ones save.
        elif change in cheap and fit.plan.device_bytes < least:
            changes = [*changes, change]
            least = fit.plan.device_bytes
    return fits


def as_started(
    fit: Fit, original: Config, request: PlanRequest, recipe: Recipe, room: float, quick: bool
) -> Fit:
    """Return a fit as a run with its flags starts: it chooses again what is auto."""
    flags = {flag.split()[0] for flag in fit.flags}
    values = values_of(fit.config)
    again = {
        saving.setting: "auto"
        for saving in auto_settings(original)
        if SETTINGS[saving.setting].flag not in flags and values[saving.setting] != saving.auto[0]
    }
    config = changed(fit.config, again, request.device)
    if not again or config is None:
        return fit
    run = dataclasses.replace(request, config=config, world_size=fit.plan.world_size)
    chosen, _, plan = choose_settings(run, recipe, room, quick)
    return fit._replace(config=chosen, plan=plan) if has_room(plan, room) else fit


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
    spare = "" if planned.device_bytes > room else f", and {1 - USABLE:.0%} must stay free"
    lines = [
        f"It does not fit {size_text(room)} as it is: {size_text(planned.device_bytes)} per rank{spare}.",
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
        lines += [f"   {line}" for line in time.splitlines()]
    return "\n".join(lines)


def choose_settings(
    request: PlanRequest, recipe: Recipe, free: float, quick: bool = True
) -> tuple[Config, list[str], Plan]:
    """Choose each setting that is auto, one after the other. Returns the settings, a text about each
    choice, and the plan, with kept units if they fit. For the rest see `choose_checkpointing`."""
    plan: Plan | None = None
    notes = []
    for saving in auto_settings(request.config):
        if saving is CHECKPOINTING:
            config, why, plan = choose_checkpointing(request, recipe, free, quick)
        else:
            config, why, plan = _choose(saving, request, recipe, free, quick)
        notes.append(f"{saving.setting} auto: {why}")
        request = dataclasses.replace(request, config=config)
    return request.config, notes, _keep_units(plan or predict(request, recipe, quick), free)


def _keep_units(plan: Plan, free: float) -> Plan:
    """Return the plan with units that stay unsharded while answers are generated, if the run then needs no
    more than without them, or SHARE_TO_KEEP of `free` bytes (inf: unknown). The run does as planned."""
    if not plan.kept_peaks:
        return plan
    with_units = plan.with_kept_units()
    most = 0.0 if math.isinf(free) else SHARE_TO_KEEP * free
    return with_units if with_units.device_bytes <= max(plan.device_bytes, most) else plan


def choose_checkpointing(
    request: PlanRequest, recipe: Recipe, free: float, quick: bool = True
) -> tuple[Config, str, Plan]:
    """Choose activation checkpointing: see `_choose`. If memory is left, weights of one process may
    stay cast; see `_keep_cast_weights`. Raises UserError like the run. This process must not have a
    process group."""
    choice = _choose(CHECKPOINTING, request, recipe, free, quick)
    return _keep_cast_weights(request, recipe, free, quick, choice)


def _choose(
    saving: Saving, request: PlanRequest, recipe: Recipe, free: float, quick: bool
) -> tuple[Config, str, Plan]:
    """Choose the first value of `saving.auto` that fits `free` bytes (inf: unknown), else the one with
    the least memory. What fits by a quick plan is also planned in full unless `quick`. Returns the
    settings with it, a text with the choice and the reason, and the plan."""
    planned = list[str]()
    best: tuple[Any, Config, Plan] | None = None
    for value in saving.auto:
        config = changed(request.config, {saving.setting: value}, request.device)
        if config is None:
            continue  # selective needs layers that are FSDP units
        try:
            candidate = dataclasses.replace(request, config=config)
            plan = predict(candidate, recipe, quick=True)
            # the last choice is planned in full whether it fits or not
            is_chosen = has_room(plan, free) or value == saving.auto[-1]
            if is_chosen and plan.is_quick and not quick:
                plan = predict(candidate, recipe)
        except UserError:
            if best is None:
                raise
            continue  # this architecture does not support it
        planned.append(f"{value} {size_text(plan.device_bytes)}")
        if best is None or plan.device_bytes < best[2].device_bytes:
            best = value, config, plan
        if has_room(plan, free):
            break
    assert best is not None
    value, config, plan = best
    why = f"{value} (planned: {', '.join(planned)}; free: {free_text(free)})"
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
