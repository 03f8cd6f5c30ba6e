"""The report of a run that memory has ended: where, what held most, planned against available, and what would fit."""

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
from llama_ft.config.messages import size_text
from llama_ft.observe.memory import MemoryMonitor, memory_use, record_memory, write_snapshot
from llama_ft.phases import Phase
from llama_ft.plan.types import Plan, read_plan
from llama_ft.runtime import Runtime
from llama_ft.runtime.out_of_memory import KILLED, KILLED_BY, host_memory, shortage

SECONDS_TO_PLAN = 120.0
NEEDS_LESS = 0.9
MOST_CHANGES = 3
AMPLE_SHARE = 0.5  # of the host's memory: runs that had used less were hardly killed for want of it
STEP_PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer step")
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "PET_")


@contextmanager
def explain_errors(config: Config, job: Runtime, watch: MemoryMonitor, planner: Path) -> Iterator[None]:
    """Have this rank explain what ends the block, if that has to do with memory.

    Args:
        config: the run's settings.
        job: the ranks.
        watch: of the block's phases.
        planner: recipes/plan.py, which is asked what would fit.
    """
    job.explainer = report = MemoryReport(config, job, planner)
    if config.memory.memory_snapshot and job.device.type == "cuda":
        record_memory()
    try:
        yield
    except BaseException:
        report.phase = watch.phase  # before the watch closes
        raise


class MemoryReport:
    """Explains the ends of this rank that have to do with memory; see runtime.failures.Explainer.

    Attributes:
        phase: in which the run ended.
    """

    def __init__(self, config: Config, job: Runtime, planner: Path) -> None:
        self.phase: Phase | None = None
        self._config, self._job, self._planner = config, job, planner
        self._before = memory_use(job.device)  # Python and its libraries; no tensor yet

    def describe(self, error: BaseException) -> str:
        """Where memory ran out, what held most of it, and what was planned beside what is available."""
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        model, optimizer = _first_local(frames, nn.Module), _first_local(frames, torch.optim.Optimizer)
        where = f" in the {self.phase} phase" if self.phase else ""
        where += f" of step {self._job.status.step + 1}" if self._job.status and self.phase in STEP_PHASES else ""
        where += f", in {module}" if (module := module_at_work(frames, model)) else ""
        message = (str(error).strip() or type(error).__name__).splitlines()[0].rpartition("err == 0. ")[2].rstrip(".")
        is_host = shortage(error) == "host"
        lines = [f"ran out of {'host' if is_host else 'GPU'} memory{where}: {message}."]
        use, plan = memory_use(self._job.device), self._plan
        if is_host and self._job.device.type == "cuda":  # tensors are not what fills the host
            return "\n".join([*lines, self.describe_kill()])
        total = use.device if self._job.device.type == "cuda" else max(0, use.anonymous - self._before.anonymous)
        lines.append(f"Held most: {held_most(model, optimizer, self._job.device, total)}.")
        planned = "No plan" if plan is None else f"Planned: {size_text(plan.device_bytes)}, most in {plan.peak.phase}"
        lines.append(
            f"{planned}; available per rank: {size_text(self._available())}. {host_memory() if is_host else ''}"
        )
        if self._config.memory.memory_snapshot and self._run is not None:
            lines.append(f"Memory snapshot: {write_snapshot(self._run, self._job.rank, 'out-of-memory')}")
        return "\n".join(line.rstrip() for line in lines)

    def advise(self, error: BaseException) -> str:
        """What would fit, as plan.py answers in SECONDS_TO_PLAN."""
        if shortage(error) == "host" and self._job.device.type == "cuda":
            return "What would fit: see docs/exit-code-9.md."
        traceback.clear_frames(error.__traceback__)  # plan.py needs memory, too: activations and states go
        gc.collect()
        # If the plan did fit, it was wrong, and something has to become less all the same.
        limit = self._available()
        if self._plan is not None:
            limit = min(limit, int(NEEDS_LESS * self._plan.device_bytes))
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as settings:
            resolved = self._run / "config.yaml" if self._run is not None else None  # with what the machine decided
            settings.write(resolved.read_text() if resolved and resolved.exists() else to_yaml(self._config))
            settings.flush()
            ranks = f"--nproc {self._job.world_size} --nproc_per_node {self._job.local_world_size}"
            wanted = [*ranks.split(), "--device", self._job.device.type, "--fit", f"{limit}B", "--quick", "--json"]
            answer = ask_planner([sys.executable, str(self._planner), "--config", settings.name, *wanted])
        return f"What would fit in {size_text(limit)} per rank: {answer}"

    def last_end(self, run: Path) -> str:
        """How the run in a directory ended whose lock this process has: if all ranks were killed with -9, status.json
        still says that it runs. "" if the end is known, or there is no run."""
        try:
            status = json.loads((run / "status.json").read_text())
        except (OSError, ValueError):
            return ""
        if status.get("state") != "running" and KILLED not in str(status.get("message")):
            return ""
        return f"The run in {run} was {KILLED} or its machine lost power. {KILLED_BY}\n{self.describe_kill(run)}"

    def describe_kill(self, run: Path | None = None) -> str:
        """Planned and measured host memory of a run (None: this one), and settings that take less of it."""
        run, host, lines = run or self._run, host_memory(), list[str]()
        plan, peaks = read_plan(run) if run is not None else None, _last_peaks(run)
        if plan is not None:
            load, save = size_text(plan.host_load_bytes), size_text(plan.host_save_bytes)
            lines.append(f"Planned on the host per rank, besides Python: {load} while loading, {save} while saving.")
        if peaks:
            lines.append(f"The ranks' peaks at the last logged step: {', '.join(map(size_text, peaks))}.")
        if peaks and host is not None and sum(peaks) < AMPLE_SHARE * host.bytes:
            lines[-1] += f" That is far from {size_text(host.bytes)}: more likely it was somebody's kill -9."
            return "\n".join(lines)
        settings = self._config
        changes = {
            "no --fsdp_cpu_offload": settings.fsdp.fsdp_cpu_offload,
            "no --activation_offload": settings.train.activation_offload,
            "--save_async False": settings.checkpoint.save_async,
            "a smaller --shuffle_buffer": settings.data.streaming,
            "--tokenize_processes 1": not settings.data.streaming and settings.data.tokenize_processes != 1,
            "fewer ranks on this machine": True,
        }
        return "\n".join([*lines, f"Takes less: {', '.join(name for name, is_used in changes.items() if is_used)}."])

    @property
    def _run(self) -> Path | None:
        return self._job.status.path.parent if self._job.status is not None else None

    @property
    def _plan(self) -> Plan | None:
        return read_plan(self._run) if self._run is not None else None

    def _available(self) -> int:
        """What a plan may need at most: with CUDA's own memory and NCCL's, without other programs' and libraries'."""
        if self._job.device.type == "cpu":
            host = host_memory()
            return max(0, host.bytes // self._job.local_world_size - self._before.anonymous) if host is not None else 0
        free, total = torch.cuda.mem_get_info(self._job.device)
        outside = self._plan.outside_bytes if self._plan is not None else 0
        others = max(0, total - free - torch.cuda.memory_reserved(self._job.device) - outside)
        fraction = self._config.train.device_memory_fraction
        return min(total - others, total if fraction is None else int(fraction * total) + outside)


def module_at_work(frames: list[FrameType], model: nn.Module | None) -> str:
    """The innermost module that computes, or is recomputed; "" for none, as in most of a backward pass."""
    names = {id(module): name for name, module in model.named_modules()} if model is not None else {}
    return next((name for frame in reversed(frames) if (name := names.get(id(frame.f_locals.get("self"))))), "")


def held_most(
    model: nn.Module | None, optimizer: torch.optim.Optimizer | None, device: torch.device, total: int
) -> str:
    """What holds a rank's memory, the largest first.

    Args:
        model: as it is on this rank; None: not built yet.
        optimizer: None: not built yet.
        device: whose memory.
        total: bytes of all tensors.
    """
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]] if optimizer else []
    parameters = [*trained, *model.parameters()] if model is not None else trained
    states = optimizer.state.values() if optimizer is not None else []
    tensors: dict[str, list[Any]] = {
        "parameters": parameters,
        "gradients": [parameter.grad for parameter in parameters],
        "optimizer states": [value for state in states for value in state.values()],
    }
    seen, held = set[int](), dict[str, int]()
    for name, members in tensors.items():
        local = [getattr(tensor, "_local_tensor", tensor) for tensor in members if isinstance(tensor, torch.Tensor)]
        storages = {it.untyped_storage()._cdata: it.untyped_storage() for it in local if it.device.type == device.type}
        held[name] = sum(storage.nbytes() for key, storage in storages.items() if key not in seen)
        seen |= storages.keys()
    held["activations and the rest"] = max(0, total - sum(held.values()))
    return ", ".join(f"{name} {size_text(size)}" for name, size in sorted(held.items(), key=lambda it: -it[1]) if size)


def ask_planner(command: list[str], seconds: float = SECONDS_TO_PLAN) -> str:
    """Run plan.py, without a GPU and outside this job; the changes that fit by its answer, or why there is none."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(TORCHRUN_VARIABLES)}
    # The model is there already; asking the hub would only take time.
    environment |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    try:
        planner = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=seconds)
        answer = json.loads(planner.stdout.strip().rpartition("\n")[2])
    except subprocess.TimeoutExpired:
        return f"not found out within {seconds:g} s. Ask recipes/plan.py --fit."
    except ValueError:
        return f"not found out, {planner.stderr.strip().rpartition(chr(10))[2] or f'exit code {planner.returncode}'}"
    if answer.get("fits_as_it_is"):
        return "the run itself, by its plan; something else takes the memory."
    fits = [f"{' '.join(it['flags'])} ({size_text(it['peak_bytes'])})" for it in answer["fits"][:MOST_CHANGES]]
    ranks = [f"the same training on {answer['fits_on_ranks']} ranks"] if answer.get("fits_on_ranks") else []
    return " or ".join([*fits, *ranks]) or "none of the changes that were planned."


def _first_local(frames: list[FrameType], kind: type[Any]) -> Any:
    """The recipe's model or optimizer: the first local variable of that type, from the outermost frame on."""
    return next((value for frame in frames for value in frame.f_locals.values() if isinstance(value, kind)), None)


def _last_peaks(run: Path | None) -> list[int]:
    """Every rank's host peak as it was logged last."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines() if run is not None else []
        logged = [line for line in lines[:-1] if '"memory/host_peak_bytes"' in line]  # the last may be cut short
        return [int(peak) for peak in json.loads(logged[-1])["memory/host_peak_bytes"]] if logged else []
    except (OSError, ValueError):
        return []
