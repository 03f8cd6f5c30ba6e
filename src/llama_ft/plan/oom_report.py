"""Explain an out-of-memory error: where it happened, what holds the memory, the plan, and which
changes would fit."""

import gc
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from llama_ft.config import Config, to_yaml
from llama_ft.config.wording.messages import size_text
from llama_ft.observe.memory import (
    MemoryMonitor,
    held_tensors,
    memory_use,
    record_memory,
    write_snapshot,
)
from llama_ft.phases import Phase
from llama_ft.plan.free_memory import free_bytes, free_text
from llama_ft.plan.types import read_plan
from llama_ft.runtime import Ranks
from llama_ft.runtime.ends.out_of_memory import shortage

SECONDS_TO_PLAN = 120.0
FITTING_SHARE = 0.9
STEP_PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer step")
TORCHRUN_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "MASTER_",
    "LOCAL_",
    "GROUP_",
    "ROLE_",
    "TORCHELASTIC_",
    "PET_",
)
PAGE = "How to use less host memory: docs/troubleshooting/exit-code-9.md."


@contextmanager
def explain_errors(
    config: Config, ranks: Ranks, watch: MemoryMonitor, planner: Path
) -> Iterator[None]:
    """Make this rank explain errors about memory that end the block.

    Args:
        config: the run's settings.
        ranks: the ranks.
        watch: knows the current phase.
        planner: path of recipes/plan.py, which finds changes that would fit.
    """
    report = MemoryReport(config, ranks, planner)
    ranks.explain_errors_with(report)
    if config.memory.memory_snapshot and ranks.device.type == "cuda":
        record_memory()
    try:
        yield
    except BaseException:
        report.phase = watch.phase  # read it before the watch closes
        raise


class MemoryReport:
    """Explains errors about memory on this rank; see runtime.exit.Explainer.

    Attributes:
        phase: the phase in which the run ended.
    """

    def __init__(self, config: Config, ranks: Ranks, planner: Path) -> None:
        self.phase: Phase | None = None
        self._config = config
        self._ranks = ranks
        self._planner = planner
        self._before = memory_use(
            ranks.device
        )  # memory of Python and its libraries, without tensors
        self._free = free_bytes(
            ranks.device, ranks.local_world_size, config.train.device_memory_fraction
        )

    def describe(self, error: BaseException) -> str:
        """Return where memory ran out, the largest categories, and planned compared with available
        memory."""
        ranks = self._ranks
        kind = shortage(error)
        is_cuda = self._ranks.device.type == "cuda"
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        model = _first_local(frames, nn.Module)
        optimizer = _first_local(frames, torch.optim.Optimizer)
        where = f" in the {self.phase} phase" if self.phase else ""
        where += (
            f" of step {ranks.status.step + 1}"
            if ranks.status and self.phase in STEP_PHASES
            else ""
        )
        where += f", in {module}" if (module := module_at_work(frames, model)) else ""
        message = (
            (str(error).strip() or type(error).__name__)
            .splitlines()[0]
            .rpartition("err == 0. ")[2]
            .rstrip(".")
        )
        ended = f"ran out of {'host' if kind == 'host' else 'GPU'} memory{where}: {message}."
        if kind == "host" and is_cuda:  # tensors are on the GPU, so they did not fill the host
            return f"{ended}\n{self.describe_kill()}"
        use = memory_use(ranks.device)
        run = self._run
        total = use.device if is_cuda else max(0, use.anonymous - self._before.anonymous)
        plan = read_plan(run) if run else None
        planned = (
            f"Planned: {size_text(plan.device_bytes)}, peak in {plan.peak.phase}"
            if plan
            else "No plan"
        )
        lines = [ended, f"Largest categories: {held_most(model, optimizer, total)}."]
        lines.append(f"{planned}; available per rank: {free_text(self._free)}.")
        if self._config.memory.memory_snapshot and run:
            lines.append(f"Memory snapshot: {write_snapshot(run, ranks.rank, 'out-of-memory')}")
        return "\n".join(lines)

    def advise(self, error: BaseException) -> str:
        """Return which changes would fit. plan.py runs without a GPU, outside this job, at most
        SECONDS_TO_PLAN."""
        ranks = self._ranks
        run = self._run
        limit = self._free
        if shortage(error) == "host" and ranks.device.type == "cuda":
            return PAGE
        # frees activations and states, because plan.py needs memory, too
        traceback.clear_frames(error.__traceback__)
        gc.collect()
        # if the plan did fit, it was too low: look for less memory than planned
        if run and (plan := read_plan(run)):
            limit = min(limit, FITTING_SHARE * plan.device_bytes)
        # The model is already in the cache, so requests to the Hub would only take time.
        variables = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(TORCHRUN_VARIABLES)
        }
        environment = {**variables, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as settings:
            # includes values that the run has resolved, such as auto
            resolved = run / "config.yaml" if run else Path()
            settings.write(resolved.read_text() if resolved.is_file() else to_yaml(self._config))
            settings.flush()
            flags = [
                "--nproc",
                ranks.world_size,
                "--nproc_per_node",
                ranks.local_world_size,
                "--device",
                ranks.device.type,
            ]
            words = [
                self._planner,
                "--config",
                settings.name,
                *flags,
                "--fit",
                f"{limit:.0f}B",
                "--quick",
                "--json",
            ]
            command = [sys.executable, *map(str, words)]
            time = SECONDS_TO_PLAN
            try:
                planner = subprocess.run(
                    command, capture_output=True, text=True, env=environment, timeout=time
                )
                last_line = planner.stdout.strip().rpartition("\n")[2]
                fits = json.loads(last_line)["fits"]
                texts = [
                    f"{' '.join(fit['flags'])} ({size_text(fit['peak_bytes'])})" for fit in fits
                ]
                answer = " or ".join(texts) or "none of the planned changes."
            except subprocess.TimeoutExpired:
                answer = f"unknown, planning takes over {SECONDS_TO_PLAN:g} s. Run recipes/plan.py --fit."
            except ValueError:
                answer = f"unknown, {planner.stderr.strip().rpartition(chr(10))[2]}"
        return f"What would fit in {free_text(limit)} per rank: {answer}"

    def describe_kill(self) -> str:
        """Return the planned host memory of a run that was killed with -9, and a page about
        reducing it."""
        if self._run is None or (plan := read_plan(self._run)) is None:
            return PAGE
        load = size_text(plan.host_load_bytes)
        save = size_text(plan.host_save_bytes)
        return f"Planned host memory per rank, without Python: {load} while loading, {save} while saving.\n{PAGE}"

    @property
    def _run(self) -> Path | None:
        return self._ranks.status.path.parent if self._ranks.status is not None else None


def module_at_work(frames: list[FrameType], model: nn.Module | None) -> str:
    """Return the name of the innermost module whose forward is running; "" if none, as in most of a
    backward pass."""
    names = dict[int, str]()
    if model is not None:
        names = {id(module): name for name, module in model.named_modules()}
    for frame in reversed(frames):
        # A method's local variable self is its object.
        name = names.get(id(frame.f_locals.get("self")))
        if name:
            return name
    return ""


def held_most(model: nn.Module | None, optimizer: torch.optim.Optimizer | None, total: int) -> str:
    """Return the categories of a rank's `total` bytes of tensors, largest first. The model may not
    exist yet."""
    # A model's parameters are whole while their FSDP unit is unsharded. The optimizer always has
    # the shards.
    parameters = nn.ParameterList()
    if optimizer is not None:
        for param_group in optimizer.param_groups:
            parameters.extend(param_group["params"])
    if model is not None:
        parameters.extend(model.parameters())
    held = held_tensors(parameters, optimizer, {}).holders
    held["activations and the rest"] = max(0, total - sum(held.values()))
    largest_first = sorted(held.items(), key=lambda category: -category[1])
    return ", ".join(f"{name} {size_text(size)}" for name, size in largest_first)


def _first_local(frames: list[FrameType], kind: type[Any]) -> Any:
    """Return the first local variable of that type (the recipe's model or optimizer), from the
    outermost frame."""
    for frame in frames:
        for value in frame.f_locals.values():
            if isinstance(value, kind):
                return value
    return None
