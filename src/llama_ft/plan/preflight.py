"""Predict the memory of a run at its start, and warn if it is more than is available.

The plan is made in another process while the run prepares data and loads weights. The process is
forked before anything else starts, because planning needs its own process group, and a new
interpreter would import for 6 s. Only that process imports the planner's private parts of torch: if
one is missing, the run continues without a plan.
"""

import dataclasses
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from llama_ft.config import Config
from llama_ft.config.wording.messages import size_text
from llama_ft.data import TokenizedData, TrainingBatches
from llama_ft.errors import reason
from llama_ft.models import NewTokens
from llama_ft.plan.changes import auto_settings
from llama_ft.plan.free_memory import free_bytes, free_text
from llama_ft.plan.types import Plan, PlannedMedia, PlanRequest, Recipe
from llama_ft.processes import end_with
from llama_ft.runtime import Ranks, log

SECONDS_FOR_PLAN = 15.0
SECONDS_FOR_ADVICE = 60.0
SECONDS_FOR_CHOICE = 120.0


class PlannedMemory(NamedTuple):
    """What a run must know of its plan: the share of the free memory that it takes, and whether FSDP units
    stay unsharded while answers are generated."""

    share: float
    keeps_units: bool


class Preflight:
    """Plans a run while it starts. On ranks other than 0, and if planning is off, its methods do
    nothing.

    Args:
        recipe: the functions that a plan runs.
        off: do not plan.
    """

    def __init__(self, recipe: Recipe, off: bool) -> None:
        self._pipe: Connection | None = None
        if off or os.environ.get("RANK", "0") != "0":
            return
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, recipe, os.getpid()), daemon=True
        )
        self._process.start()
        theirs.close()

    def start(
        self,
        config: Config,
        folder: Path,
        new_tokens: NewTokens | None,
        dataset: TokenizedData,
        steps: TrainingBatches,
        ranks: Ranks,
    ) -> Config:
        """Start to plan and return. If a setting is auto, wait for the choice, on all ranks.

        Args:
            config: the run's settings.
            folder: the model's directory.
            new_tokens: tokens that are added to the model's vocabulary.
            dataset: the tokenized data. Its longest samples are planned.
            steps: the batches, which define the micro-batches.
            ranks: the ranks.

        Returns:
            The settings, with the choice.
        """
        free = free_bytes(ranks.device, ranks.local_world_size, config.train.device_memory_fraction)
        self._free = ranks.all_gather_floats(free).min().item()
        self._free_on_host = free_bytes(torch.device("cpu"), ranks.local_world_size)
        if self._pipe is not None:
            train = dataset.report.train
            longest_example = dataset.longest_example
            target_share = dataset.target_share
            size = steps.size
            if generated := config.preference.entry.generated_steps(config):
                longest_example = (longest_example or 0) + generated.added_tokens
                target_share = 1.0
                size = None
            request = PlanRequest(
                config,
                folder,
                world_size=ranks.world_size,
                local_world_size=ranks.local_world_size,
                device=ranks.target.device,
                longest_example=longest_example,
                new_tokens=new_tokens,
                target_share=target_share,
                size=size,
                has_validation=bool(dataset.validations),
                samples=(train.samples, train.target_tokens),
                media=planned_media(config, dataset),
            )
            with suppress(OSError):
                self._pipe.send((request, self._free))
        if not auto_settings(config):
            return config
        chosen, notes = ranks.broadcast_from_rank0(partial(self._choice, config))
        for note in notes:
            log.info(note)
        return chosen

    def _choice(self, config: Config) -> tuple[Config, list[str]]:
        answer = self._receive(SECONDS_FOR_CHOICE)
        if isinstance(answer, tuple):
            return answer
        self._end()
        chosen = {saving.setting: saving.without_plan for saving in auto_settings(config)}
        notes = [f"{name} auto: {value} (not planned: {answer})" for name, value in chosen.items()]
        return dataclasses.replace(config, train=dataclasses.replace(config.train, **chosen)), notes

    def report(self, output_dir: Path, ranks: Ranks) -> PlannedMemory | None:
        """Write plan.json, log the predicted memory, and warn if it is more than is available.
        Return what was planned, on all ranks; None if there is no plan. All ranks call it together."""
        return ranks.broadcast_from_rank0(partial(self._report, output_dir))

    def _report(self, output_dir: Path) -> PlannedMemory | None:
        planned = None
        if self._pipe is None:
            return planned
        plan = self._receive(SECONDS_FOR_PLAN)
        if isinstance(plan, Plan):
            plan.save(output_dir)
            needs = f"{size_text(plan.device_bytes)} of {free_text(self._free)} per rank"
            log.info(f"Planned peak: {needs}, in phase {plan.peak.phase} (details: plan.json)")
            planned = PlannedMemory(plan.device_bytes / max(1.0, self._free), plan.keeps_units)
            if plan.device_bytes > self._free:
                fits = self._receive(SECONDS_FOR_ADVICE)
                log.warning(
                    f"This run will probably run out of memory: it needs {needs}. What would fit:\n  {fits}"
                )
            host = max(plan.host_load_bytes, plan.host_save_bytes)
            if plan.device == "cuda" and host > self._free_on_host:
                needs = f"{size_text(host)} of {free_text(self._free_on_host)} per rank"
                log.warning(f"This run will probably run out of host memory: it needs {needs}.")
        else:
            log.info(f"No memory plan: {plan}")
        self._end()
        return planned

    def _end(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
            self._process.kill()  # it may still be planning, and the run needs its core
            self._process.join()

    def _receive(self, seconds: float) -> Any:
        """Return the planner's next answer, or a text that says why there is none."""
        if self._pipe is None:
            return "planning is off"
        try:
            if self._pipe.poll(seconds):
                return self._pipe.recv()
        except (EOFError, OSError):
            return "the planner has ended"
        return f"it took over {seconds:.0f} s. recipes/plan.py has no limit"


def planned_media(config: Config, dataset: TokenizedData) -> PlannedMedia | None:
    """Return what to plan in addition to text."""
    if dataset.media is None:
        return None
    is_packed = config.data.batching_strategy == "packing"
    planned: PlannedMedia = dataset.media.planned(dataset.report.train, is_packed)
    return planned


def _serve(pipe: Connection, recipe: Recipe, parent: int) -> None:
    """Run as the forked process: answer one request."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the run, which ends this process
    os.nice(10)
    end_with(parent, oom_score=1000)
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):
        for answer in _answers(pipe, recipe):
            pipe.send(answer)


def _answers(pipe: Connection, recipe: Recipe) -> Iterator[Any]:
    """Receive a request. Yield the settings with what was chosen for auto and texts about it, if
    something is auto; the plan; and if it does not fit, a text with changes that would fit. After an
    error, yield a text that describes it instead."""
    try:
        from llama_ft.plan.fit import choose_settings, find_fits  # while the run reads its data

        request: PlanRequest
        free: float
        request, free = pipe.recv()
        config, notes, plan = choose_settings(request, recipe, free)
        if notes:
            yield config, notes
        request = dataclasses.replace(request, config=config)
        yield plan
        if plan.device_bytes > free:
            fits = find_fits(request, recipe, free, plan, True, log.debug)
            lines = list[str]()
            for fit in fits:
                size = size_text(fit.plan.device_bytes)
                lines.append(f"{' '.join(fit.flags)} would need {size} ({fit.gives_up})")
            yield "\n  ".join(lines) or "none of the planned changes"
    except Exception as error:  # the run itself will report what is wrong
        yield reason(error)


def resolve_checkpointing(config: Config, device: str) -> Config:
    """Return the settings with activation_checkpointing replaced by the default of the device
    (cuda, cpu) if unset, and each setting that is auto if that is not worth planning."""
    train = config.train
    if train.activation_checkpointing is None:
        how: Any = "auto" if device == "cuda" and config.memory.plan_memory else "off"
        train = dataclasses.replace(train, activation_checkpointing=how)
    config = dataclasses.replace(config, train=train)
    simple = {
        each.setting: each.auto[0] for each in auto_settings(config) if not each.is_worth(config)
    }
    return dataclasses.replace(config, train=dataclasses.replace(train, **simple))
