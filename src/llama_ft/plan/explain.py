"""What to say when memory runs out: where it happened, the plan beside what is held, and what would make it fit."""

import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from llama_ft.config import Config, to_yaml
from llama_ft.config.wording import size_text
from llama_ft.observe.memory import memory_use
from llama_ft.observe.snapshot import record_memory, write_snapshot
from llama_ft.phases import Holder, Phase
from llama_ft.plan.killed import about_host, host_changes, last_end, plan_command
from llama_ft.plan.record import Plan, read_plan
from llama_ft.plan.where import first_local, frames_of, held_now, module_at_work
from llama_ft.runtime import Runtime
from llama_ft.runtime.out_of_memory import asked_bytes, host_memory, shortage
from llama_ft.runtime.watchdog import place

MOST_CHANGES = 3
SECONDS_TO_PLAN = 120.0
NEEDS_LESS = 0.9
LARGE_SHARE_IN_PIECES = 0.05  # of the device
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "PET_")
STEP_PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer step")
IN_PHASE: dict[Phase | None, str] = {
    None: "between phases",
    "load": "while the model was loaded",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer step": "in the optimizer step",
    "evaluation": "in an evaluation",
    "save": "while a checkpoint or the result was saved",
}


class KnowsPhase(Protocol):
    """Who measures the run."""

    @property
    def phase(self) -> Phase | None:
        """The present one."""


@contextmanager
def explaining(config: Config, job: Runtime, watch: KnowsPhase, planner: Path) -> Iterator[None]:
    """Have this rank explain what ends the block, if that has to do with memory.

    Args:
        config: the run's settings.
        job: the ranks.
        watch: of the block's phases.
        planner: recipes/plan.py, which is asked what would fit.
    """
    job.explainer = explainer = MemoryExplainer(config, job, planner)
    if config.memory.memory_snapshot and job.device.type == "cuda":
        record_memory()
    try:
        yield
    except BaseException:
        explainer.phase = watch.phase  # before the watch closes
        raise


class MemoryExplainer:
    """Explains the ends of this rank that have to do with memory; see runtime.failures.Explainer.

    Attributes:
        phase: in which the run ended.
    """

    def __init__(self, config: Config, job: Runtime, planner: Path) -> None:
        self.phase: Phase | None = None
        self._config, self._job, self._planner = config, job, planner
        self._before = memory_use(job.device)  # Python and its libraries; no tensor yet
        self._capacity = 0

    def describe(self, error: BaseException) -> str:
        """See Explainer."""
        frames = frames_of(error.__traceback__)
        model, optimizer = first_local(frames, nn.Module), first_local(frames, torch.optim.Optimizer)
        module, job, run = module_at_work(frames, model), self._job, self._run
        is_host = shortage(error) == "host"
        when = IN_PHASE[self.phase] if model is not None else "before there was a model"
        if job.status is not None and self.phase in STEP_PHASES:
            when += f" of step {job.status.step + 1}"
        lines = [
            f"ran out of {'host' if is_host else 'GPU'} memory {when}{f', in {module}' if module else ''}.",
            f"At {place(frames[-1] if frames else None)}.",
            self._host(error) if is_host else self._device(error),
        ]
        if not is_host or job.device.type == "cpu":  # else the model is not what fills the host
            use = memory_use(job.device)
            total = use.device if job.device.type == "cuda" else max(0, use.anonymous - self._before.anonymous)
            held = held_now(model, optimizer, job.device) if model is not None else {}
            lines += compare(read_plan(run) if run is not None else None, self.phase, held, total, job.rank)
        if self._config.memory.memory_snapshot and run is not None:
            lines.append(f"Memory snapshot: {write_snapshot(run, job.rank, 'out-of-memory')}")
        return "\n".join(lines)

    def advise(self, error: BaseException, told_to_end: threading.Event) -> str:
        """See Explainer. plan.py is given SECONDS_TO_PLAN."""
        job, run = self._job, self._run
        if not self._capacity:
            return host_changes(self._config, job.device.type)
        traceback.clear_frames(error.__traceback__)  # plan.py needs memory, too: activations and states go
        gc.collect()
        fits = self._ask(told_to_end)
        return f"{fits}\nMore: {plan_command(run, job.world_size, job.device.type, self._capacity)}"

    def _ask(self, told_to_end: threading.Event) -> str:
        """plan.py's answer, for people; what it finds to fit although it did not is asked for less."""
        job, run, note, deadline = self._job, self._run, "", time.monotonic() + SECONDS_TO_PLAN
        ranks = ["--nproc", str(job.world_size), "--nproc_per_node", str(job.local_world_size)]
        wanted = [*ranks, "--device", job.device.type, "--quick", "--json", "--fit"]
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as recipe:
            resolved = run / "config.yaml" if run is not None else None  # with what the machine decided
            written = resolved is not None and resolved.exists()
            recipe.write(resolved.read_text() if resolved is not None and written else to_yaml(self._config))
            recipe.flush()
            while True:
                command = [sys.executable, str(self._planner), "--config", recipe.name, *wanted, f"{self._capacity}B"]
                answer, problem = ask_planner(command, told_to_end, deadline - time.monotonic())
                if answer is None or not answer.get("fits_as_it_is"):
                    return note + describe_fits(answer, problem, self._capacity)
                planned = Plan.from_json(answer["plan"]).device_bytes
                note = f"By its plan it fits, with {size_text(planned)} a rank: something else takes the memory here.\n"
                self._capacity = min(self._capacity - 1, int(NEEDS_LESS * planned))

    def describe_kill(self) -> str:
        """See Explainer."""
        return self._about_host(self._run) if self._run is not None else ""

    def last_end(self, run: Path) -> str:
        """See Explainer."""
        end = last_end(run)
        return f"{end}\n{self._about_host(run)}" if end else ""

    def _about_host(self, run: Path) -> str:
        return about_host(self._config, run, self._job, self._before.anonymous)

    @property
    def _run(self) -> Path | None:
        return self._job.status.path.parent if self._job.status is not None else None

    def _host(self, error: BaseException) -> str:
        host = host_memory()
        if host is not None and self._job.device.type == "cpu":
            # What a plan counts are tensors, which come on top of Python and its libraries.
            room = host.share(self._job.local_world_size) - self._before.anonymous
            if host.is_per_process:  # a limit of addresses, of which libraries take far more than of memory
                room = (host.available_bytes or 0) + host.own_bytes - self._before.anonymous
            self._capacity = self._less_than_planned(room)
        return f"{_wanted(error)}{host or ''}"

    def _less_than_planned(self, room: int) -> int:
        """What to look for: where the plan did fit, it was wrong, and something has to become less all the same."""
        plan = read_plan(self._run) if self._run is not None else None
        return max(0, room if plan is None else min(room, int(NEEDS_LESS * plan.device_bytes)))

    def _device(self, error: BaseException) -> str:
        device, fraction = self._job.device, self._config.train.device_memory_fraction
        free, total = torch.cuda.mem_get_info(device)
        told = torch.cuda.memory_stats(device)
        allocated, reserved = told.get("allocated_bytes.all.current", 0), told.get("reserved_bytes.all.current", 0)
        limit = total if fraction is None else int(fraction * total)
        plan = read_plan(self._run) if self._run is not None else None
        outside = plan.outside_bytes if plan is not None else 0
        self._capacity = self._less_than_planned(capacity(limit, total, free, reserved, outside))
        return _wanted(error) + describe_device(limit, total, free, allocated, reserved, asked_bytes(error) or 0)


def _wanted(error: BaseException) -> str:
    asked = asked_bytes(error)
    if asked is not None:
        return f"{size_text(asked)} more were asked for. "
    return f"{str(error).strip().partition(chr(10))[0] or type(error).__name__}\n"


def describe_device(limit: int, total: int, free: int, allocated: int, reserved: int, asked: int) -> str:
    """Who holds a GPU's memory, and whether it is only in pieces.

    Args:
        limit: of `total`, what this process may allocate.
        total: bytes of the device.
        free: that nobody holds.
        allocated: of this process's tensors.
        reserved: what torch's allocator holds for them.
        asked: for what there was no room.
    """
    pieces, others = reserved - allocated, total - free - reserved
    lines = [
        f"Of {size_text(total)}{f' (this process may take {size_text(limit)})' if limit < total else ''}, tensors hold "
        f"{size_text(allocated)}, torch keeps {size_text(pieces)} beside them,",
        f"others (CUDA itself, NCCL, other programs) hold {size_text(others)}, and {size_text(free)} are free.",
    ]
    if pieces > max(asked, LARGE_SHARE_IN_PIECES * total):
        lines.append(
            f"The {size_text(pieces)} that torch keeps are free, but in pieces: the environment variable\n"
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True may be all that is needed."
        )
    return "\n".join(lines)


def capacity(limit: int, total: int, free: int, reserved: int, outside: int) -> int:
    """What a plan may need at most: it counts CUDA's own memory and NCCL's, `outside`, but not other programs'."""
    other_programs = max(0, total - free - reserved - outside)
    return min(total - other_programs, limit + outside)


def compare(plan: Plan | None, phase: Phase | None, held: dict[Holder, int], total: int, rank: int) -> list[str]:
    """A table of what was planned for a phase and what is held now, by holder.

    Args:
        plan: None: only what is held.
        phase: the one the run is in; without a peak of it the largest is shown.
        held: bytes of those holders whose tensors can be told.
        total: of all tensors; what is not in `held` is shown in one line.
        rank: whose.
    """
    peak = next((peak for peak in plan.peaks if peak.phase == phase), plan.peak) if plan is not None else None
    planned = dict(peak.holders) if peak is not None else {}
    rows: list[tuple[str, int, int]] = [(name, planned.pop(name, 0), size) for name, size in held.items()]
    rest = total - sum(held.values())
    rows.append(("activations and the rest" if held else "all tensors", sum(planned.values()), rest))
    if held:
        rows.append(("together", peak.bytes if peak is not None else 0, total))
    texts = [("", "planned", "held now")]
    texts += [(name, size_text(due), size_text(max(0, now))) for name, due, now in rows if due or now > 0]
    if peak is None:
        texts = [(name, "", now) for name, _, now in texts]
    widths = [max(len(text[column]) for text in texts) for column in range(3)]
    title = f"Rank {rank}'s memory and the plan for the peak of its {peak.phase} phase" if peak is not None else ""
    return [
        f"{title or f'Rank {rank} has this memory; there is no plan to compare it with'}:",
        *(f"  {name:<{widths[0]}}  {due:>{widths[1]}}  {now:>{widths[2]}}" for name, due, now in texts),
    ]


def ask_planner(
    command: list[str], told_to_end: threading.Event, seconds: float = SECONDS_TO_PLAN
) -> tuple[dict[str, Any] | None, str]:
    """Run plan.py, without a GPU and outside this job; its answer, or why there is none."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(TORCHRUN_VARIABLES)}
    # The model is there already; asking the hub would only take time.
    environment |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as complaints:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=complaints, env=environment)
        os.setpriority(os.PRIO_PROCESS, process.pid, 10)
        deadline = time.monotonic() + seconds
        while process.poll() is None:
            if told_to_end.wait(0.1) or time.monotonic() > deadline:
                process.kill()
                process.wait()
                return None, "this process was told to end" if told_to_end.is_set() else f"it took over {seconds:.3g} s"
        output.seek(0)
        complaints.seek(0)
        try:
            answer = json.loads(output.read().strip().rpartition("\n")[2])
        except ValueError:
            last = complaints.read().strip().rpartition("\n")[2]
            return None, f"recipes/plan.py ended with exit code {process.returncode}{f' ({last})' if last else ''}"
    return (answer, "") if isinstance(answer, dict) else (None, "recipes/plan.py did not answer")


def describe_fits(answer: dict[str, Any] | None, problem: str, capacity_bytes: int) -> str:
    """The few changes that would make it fit, each with its predicted peak.

    Args:
        answer: plan.py's (see FitAnswer.to_json); None: there was none.
        problem: why not.
        capacity_bytes: what they fit in.
    """
    if answer is None:
        return f"What would fit was not found out: {problem}."
    room, fits = size_text(capacity_bytes), answer.get("fits", [])[:MOST_CHANGES]
    ranks = answer.get("fits_on_ranks")
    if not fits:
        more = f"; on {ranks} ranks the same training does" if ranks else ""
        return f"None of the changes that were planned fits in {room} a rank{more}."
    rows = [(" ".join(it["flags"]), size_text(it["peak_bytes"])) for it in fits]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"What would fit in {room} a rank; predicted peak:"]
    for (flags, peak), fit in zip(rows, fits, strict=True):
        lines.append(f"  {flags:<{widths[0]}}  {peak:>{widths[1]}}")
        lines.append(f"    gives up: {fit['gives_up']}")
    return "\n".join(lines)
