"""The check a run makes at its start: is what it will hold more than there is?

The plan is made in a process of its own while the run prepares its data and loads its weights. It is forked before
anything is started, since planning needs a process group that is not the run's; a new interpreter would first take 6 s
to import what it needs.
"""

import dataclasses
import math
import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

from llama_ft.config import Config
from llama_ft.config.messages import size_text
from llama_ft.data import TokenizedData, TrainingBatches
from llama_ft.errors import UserError
from llama_ft.models import NewTokens
from llama_ft.plan.auto_checkpointing import PYTHON_BYTES, Choice, choose_checkpointing, free_bytes, is_open, settled
from llama_ft.plan.fit import find_fits
from llama_ft.plan.gpus import Device
from llama_ft.plan.predict import CUDA_CONTEXT_BYTES, NCCL_BYTES, BuildModel, PlanRequest, predict
from llama_ft.plan.types import Change, Plan
from llama_ft.processes import end_with
from llama_ft.runtime import Runtime, log
from llama_ft.runtime.out_of_memory import host_memory

SECONDS_FOR_PLAN, SECONDS_FOR_ADVICE, SECONDS_FOR_CHOICE = 15.0, 60.0, 120.0
NICE = 10

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """What a rank may take.

    Attributes:
        device_bytes: of its GPU; None on the CPU.
        host_bytes: of its node's memory, its share; None where that cannot be known.
        device_name: for people.
    """

    device_bytes: int | None
    host_bytes: int | None
    device_name: str

    @property
    def bytes(self) -> int | None:
        """Where tensors lie: of the GPU, or on the CPU of the host."""
        return self.device_bytes if self.device_bytes is not None else self.host_bytes


class Preflight:
    """Plans a run while it starts. On ranks other than 0, and where planning is off, its methods do nothing.

    Args:
        build_model: the recipe's.
        off: whether not to plan.
    """

    def __init__(self, build_model: BuildModel, off: bool) -> None:
        self._pipe: Connection | None = None
        self._limits = Limits(None, None, "")
        if off or os.environ.get("RANK", "0") != "0" or not hasattr(os, "fork"):
            return
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        ends = theirs, self._pipe
        self._process = context.Process(target=_serve, args=(*ends, build_model, os.getpid()), daemon=True)
        self._process.start()
        theirs.close()

    def ask(
        self,
        config: Config,
        folder: Path,
        new_tokens: NewTokens | None,
        rows: TokenizedData,
        steps: TrainingBatches,
        job: Runtime,
    ) -> Config:
        """Begin to plan, and go on; with activation_checkpointing auto wait until that is chosen, on all ranks.

        Returns:
            The settings with what was chosen.
        """
        if self._pipe is None and not is_open(config):
            return config
        request = PlanRequest(
            config,
            folder,
            job.world_size,
            job.local_world_size,
            "cuda" if job.device.type == "cuda" else "cpu",
            rows.longest_row,
            new_tokens,
            rows.target_share,
            steps.size,
            rows.validation is not None,
        )
        self._limits = _limits(request, job)
        most_bytes = self._limits.bytes
        if is_open(config):
            limits = (most_bytes, free_bytes(job.device, job.local_world_size))
            mine = min(limit if limit is not None else math.inf for limit in limits)
            fewest = job.all_gather_floats(mine).min().item()
            most_bytes = None if math.isinf(fewest) else int(fewest)
        if self._pipe is not None:
            with suppress(OSError):
                self._pipe.send((request, most_bytes))
        if not is_open(config):
            return config
        choice = job.broadcast_from_rank0(partial(self._chosen, request))
        log.info(choice.why)
        return choice.config

    def _chosen(self, request: PlanRequest) -> Choice:
        answer = self._receive(SECONDS_FOR_CHOICE)
        if isinstance(answer, Choice):
            return dataclasses.replace(answer, plan=None)
        self._end()
        return settled(request.config, "full", request.device, f"not planned: {answer}")

    def tell(self, output_dir: Path) -> None:
        """Write plan.json, say what the run will hold, and warn where that is more than there is."""
        if self._pipe is None:
            return
        answer = self._receive(SECONDS_FOR_PLAN)
        if isinstance(answer, Plan):
            answer.save(output_dir)
            log.info(_summary(answer, self._limits))
            if excess := excess_line(answer, self._limits):
                changes = self._receive(SECONDS_FOR_ADVICE)
                log.warning("\n".join([excess, *_advice(changes)]))
        else:
            log.info(f"The run's memory was not planned: {answer}")
        self._end()

    def _end(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
            self._process.kill()  # it may still be planning, on a core that the run needs
            self._process.join()

    def _receive(self, seconds: float) -> Any:
        """What the planner sends, or in words why that is nothing."""
        if self._pipe is None:
            return "planning is off"
        try:
            if self._pipe.poll(seconds):
                return self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(1)
            code = self._process.exitcode or 0
            return f"the planner ended ({f'signal {-code}' if code < 0 else f'exit code {code}'})"
        return f"it took over {seconds:.0f} s. recipes/plan.py has no limit"


def _serve(pipe: Connection, parents: Connection, build_model: BuildModel, parent: int) -> None:
    """The process that plans: one request, its plan, and where that is too much, what would fit."""
    parents.close()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the run, which ends this
    os.nice(NICE)
    end_with(parent, oom_score=1000)
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):
        request, most_bytes = pipe.recv()
        plan: Plan | str | None = None
        if is_open(request.config):
            choice = _or_problem(partial(choose_checkpointing, request, build_model, most_bytes))
            pipe.send(choice)
            if not isinstance(choice, Choice):
                return
            request, plan = dataclasses.replace(request, config=choice.config), choice.plan
        plan = plan or _or_problem(partial(predict, request, build_model, quick=True))
        pipe.send(plan)
        if isinstance(plan, Plan) and most_bytes is not None and plan.device_bytes > most_bytes:
            device = Device("", most_bytes)
            pipe.send(_or_problem(lambda: find_fits(request, build_model, device, plan, True, log.debug).changes()))


def _or_problem(make: Callable[[], T]) -> T | str:
    try:
        return make()
    except UserError as error:
        return str(error)
    except Exception as error:  # what is wrong with the run, the run will say
        return f"{type(error).__name__}: {error}".partition("\n")[0]


def _limits(request: PlanRequest, job: Runtime) -> Limits:
    host = host_memory()
    share = None if host is None else host.bytes // job.local_world_size - PYTHON_BYTES
    if job.device.type != "cuda":
        return Limits(None, share, "this machine's memory")
    _, total = torch.cuda.mem_get_info(job.device)
    fraction = request.config.train.device_memory_fraction
    # What CUDA and NCCL take is in a plan, and no part of the fraction.
    most = total if fraction is None else min(total, int(total * fraction) + CUDA_CONTEXT_BYTES + NCCL_BYTES)
    return Limits(most, share, torch.cuda.get_device_name(job.device))


def _summary(plan: Plan, limits: Limits) -> str:
    most = plan.peak
    have = "" if limits.bytes is None else f" of {size_text(limits.bytes)}"
    where = f"{most.phase}, {most.module}" if most.module else most.phase
    return f"Planned: {size_text(plan.device_bytes)}{have} a rank at most ({where}); plan.json says what holds it"


def excess_line(plan: Plan, limits: Limits) -> str:
    """What a run will lack; "" if nothing."""
    if limits.bytes is not None and plan.device_bytes > limits.bytes:
        largest = max(plan.peak.holders.items(), key=lambda it: it[1])
        return (
            f"This run will most likely not fit: each rank needs {size_text(plan.device_bytes)}, and has "
            f"{size_text(limits.bytes)} ({limits.device_name}). Most of it, in {plan.peak.phase}, are {largest[0]}: "
            f"{size_text(largest[1])}."
        )
    host = max(plan.host_load_bytes, plan.host_save_bytes)
    if plan.device == "cuda" and limits.host_bytes is not None and host > limits.host_bytes:
        when = "saving" if host == plan.host_save_bytes else "loading"
        return (
            f"This run will most likely need more host memory than there is: {size_text(host)} a rank while {when}, of "
            f"{size_text(limits.host_bytes)} that are its share of this node's."
        )
    return ""


def _advice(changes: list[Change] | str) -> list[str]:
    if isinstance(changes, str):
        return [f"  What would fit is not known: {changes}"]
    return [f"  {' '.join(it.flags)} would need {size_text(it.peak_bytes)} ({it.gives_up})" for it in changes]
