"""Runs that the kernel ended for want of host memory: what their directories tell, and what would need less."""

import json
import shlex
import sys
import time
from pathlib import Path

from llama_ft import commands
from llama_ft.checkpoint.reader import complete_checkpoints
from llama_ft.config import Config
from llama_ft.config.wording import size_text
from llama_ft.plan.record import read_plan
from llama_ft.runtime import Runtime
from llama_ft.runtime.out_of_memory import KILLED, host_memory

BY_WHOM = ": by the kernel if host memory ran out, or by somebody's kill -9."
AMPLE = 0.5  # of the host's memory: runs that had used less were hardly killed for want of it


def last_end(run: Path) -> str:
    """How the run in a directory ended whose lock this process has: where all ranks were killed with -9, status.json
    still says that it runs. "" where the end is known, or there is no run."""
    try:
        status = json.loads((run / "status.json").read_text())
        written = (run / "status.json").stat().st_mtime
    except (OSError, ValueError):
        return ""
    if KILLED in str(status.get("message")):  # a rank that survived has said so
        how = f"when one of its ranks was {KILLED}{BY_WHOM}"
    elif status.get("state") != "running":
        return ""
    elif written < time.time() - time.clock_gettime(time.CLOCK_BOOTTIME):
        how = "without a word, and this machine was started anew since: it may have lost power."
    else:
        how = f"without a word, as when {KILLED}{BY_WHOM}"
    step = status.get("step")
    step = step if isinstance(step, int) else 0
    saved = [int(it.name.removeprefix("step-")) for it in complete_checkpoints(run)]
    after = f"{step}" if step >= max(saved, default=0) else f"{max(saved)} or later"  # status.json lags
    return f"The run in {run} ended after step {after} {how}"


def about_host(config: Config, run: Path, job: Runtime, library_bytes: int) -> str:
    """What the files of a run say of host memory, and what would take less of it.

    Args:
        config: the run's settings.
        run: its directory.
        job: the ranks.
        library_bytes: of its share of the host that a rank needs for other things than tensors.
    """
    lines = []
    if (plan := read_plan(run)) is not None:
        lines.append(
            f"Planned on the host, a rank: {size_text(plan.host_load_bytes)} while loading, "
            f"{size_text(plan.host_save_bytes)} while saving, beside Python and its libraries."
        )
    device, host = job.device.type, host_memory()
    if peaks := _last_peaks(run):
        lines.append(f"The ranks' peaks at the last logged step: {', '.join(map(size_text, peaks))}.")
        if host is not None and sum(peaks) < AMPLE * host.bytes:
            lines.append(
                f"That is far from the {size_text(host.bytes)} there are: more likely it was somebody's kill -9."
            )
            return "\n".join(lines)
    if device == "cpu" and host is not None:
        room = max(0, host.share(job.local_world_size) - library_bytes)
        lines.append(f"What would fit: {plan_command(run, job.world_size, device, room)}")
    return "\n".join([*lines, host_changes(config, device)])


def host_changes(config: Config, device: str) -> str:
    """Settings of this recipe that cost host memory, each with its way out; what tensors cost is plan.py's to say."""
    changes = []
    if device == "cuda" and config.fsdp.fsdp_cpu_offload:
        changes.append("without --fsdp_cpu_offload, parameters and optimizer states are on the GPUs")
    if device == "cuda" and config.train.activation_offload:
        changes.append("without --activation_offload, inputs of recomputed layers are on the GPUs")
    if config.checkpoint.save_async:
        changes.append("--save_async False keeps the copy of a checkpoint only while training waits")
    if config.data.streaming:
        changes.append(f"a --shuffle_buffer of fewer than {config.data.shuffle_buffer} rows")
    elif config.data.tokenize_processes != 1:
        changes.append("--tokenize_processes 1, if it happened while rows were tokenized")
    changes.append("fewer ranks on this machine")
    return "\n  ".join(["What takes less host memory:", *changes])


def plan_command(run: Path | None, ranks: int, device: str, capacity_bytes: int) -> str:
    """The command that says what fits; without a run directory for the flags of this process."""
    recipe = shlex.join(["--config", f"{run}/config.yaml"] if run is not None else sys.argv[1:])
    fit = f"{capacity_bytes / 2**30:.4g}GiB"
    words = f"{commands.shown('plan')} {recipe}".strip()
    return f"{words} --nproc {ranks} --device {device} --fit {fit}"


def _last_peaks(run: Path) -> list[int]:
    """Every rank's host peak as it was logged last."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return []
    for line in reversed(lines):
        if '"memory/host_peak_bytes"' in line:
            try:
                return [int(peak) for peak in json.loads(line)["memory/host_peak_bytes"]]
            except (ValueError, TypeError):  # cut short by the end
                continue
    return []
