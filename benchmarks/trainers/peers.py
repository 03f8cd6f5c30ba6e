"""Other trainers for benchmarks/trainers/throughput.py: their environments, and launches that are watched
from outside."""

import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.shared.process_memory import anonymous_bytes
from benchmarks.shared.torchrun_command import torchrun_command

FOLDER = Path(__file__).resolve().parent
SAMPLE_SECONDS = 0.05
SECONDS_TO_END = 20
ERROR = re.compile(
    r"^(?:\[rank\d+\]: ?)?((?:\w+\.)*\w*(?:Error|Exception)\b.*|error: .*)$", re.MULTILINE
)


@dataclass(frozen=True)
class Peer:
    """A trainer to compare with.

    Attributes:
        title: as the table names it.
        requirements: what pip installs, pinned.
        ways: of distributing the model; the fastest on the spot is measured.
        can: cases, by method and layout, that it has.
    """

    title: str
    requirements: tuple[str, ...]
    ways: tuple[str, ...]
    can: frozenset[tuple[str, str]]

    @property
    def job(self) -> Path:
        return FOLDER / f"{self.title.replace('-', '_')}_job.py"


TORCH = "torch==" + torch.__version__.split("+")[0]
ADAPTED = frozenset((method, "dense") for method in ("lora", "nf4", "8bit"))
PEERS = {
    "trl": Peer(
        "trl",
        (
            TORCH,
            "trl==1.16.0",
            "transformers==5.23.0",
            "accelerate==1.15.0",
            "peft==0.21.2",
            "bitsandbytes==0.50.2",
        ),
        ("accelerate", "transformers", "ddp", "precomputed"),
        ADAPTED
        | {
            (method, layout)
            for method in ("full", "lora")
            for layout in ("dense", "padding", "packing")
        },
    ),
    "torchtune": Peer(
        "torchtune",
        # nf4tensor, which torchtune imports, left torchao later
        (TORCH, "torchtune==0.6.1", "torchao==0.11.0"),
        ("fsdp2",),
        frozenset({("full", "dense"), ("lora", "dense")}),
    ),
    "llama-recipes": Peer(
        "llama-recipes",
        # is_ccl_available, which it imports, left accelerate later
        (TORCH, "llama-cookbook==0.0.5.post1", "transformers<5", "accelerate<1.8", "datasets<4"),
        ("fsdp",),
        frozenset({("full", "dense"), ("lora", "dense")}),
    ),
}


def make_environment(peer: Peer, cache: Path) -> Path:
    """The interpreter of the peer's own virtual environment, made now unless it is there with these
    requirements.

    Raises:
        OSError: pip or venv failed; the message is its last line.
    """
    name = hashlib.sha256(" ".join(peer.requirements).encode()).hexdigest()[:8]
    folder = cache / "benchmarks" / f"{peer.title}-{name}"
    python = folder / "bin" / "python"
    finished = folder / "finished"
    if not finished.exists():
        print(f"{peer.title}: making its environment in {folder}", file=sys.stderr)
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(folder)],
            [str(python), "-m", "pip", "install", "--quiet", *peer.requirements],
        ):
            ended = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            if ended.returncode:
                raise OSError((ended.stdout.strip().splitlines() or ["no message"])[-1])
        finished.touch()
    return python


class RunFailed(Exception):
    """A run did not end as it should; the message is the first error it printed."""


@dataclass
class Watched:
    """What was seen of a run from outside: the wall clock at its start, each rank's most anonymous
    memory, and now and then the CPU seconds of all ranks."""

    started: float = 0.0
    peaks: dict[int, int] = field(default_factory=dict)  # process id -> bytes
    # wall clock, CPU seconds so far
    clocks: list[tuple[float, float]] = field(default_factory=list)


def launch(
    python: Path,
    script: Path,
    arguments: list[str],
    ranks: int,
    log: Path,
    seconds: float,
    environment: dict[str, str],
    look: Callable[[], None] = lambda: None,
) -> Watched:
    """Run a script on `ranks` processes under torchrun.

    Args:
        python: interpreter.
        script: run on every rank.
        arguments: of the script.
        ranks: processes.
        log: gets all they print.
        seconds: after which the run is ended.
        environment: variables added to this process's own.
        look: is called every 10 ms until the run has ended.

    Raises:
        RunFailed: it failed, or took too long.
    """
    command = torchrun_command(ranks, python)
    watched = Watched(time.time())
    ended = threading.Event()
    with open(log, "w") as output:
        process = subprocess.Popen(
            [*command, str(script), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, **environment},
        )
    sampler = threading.Thread(target=sample_memory, args=(process.pid, watched, ended))
    sampler.start()
    try:
        while process.poll() is None:
            if time.time() - watched.started > seconds:
                raise RunFailed(f"it took longer than {seconds:.0f} s")
            look()
            time.sleep(0.01)
        look()
    finally:
        ended.set()
        sampler.join()
        end(process, list(watched.peaks))
    if process.returncode:
        raise RunFailed(first_error(log.read_text(errors="replace")))
    return watched


def end(process: subprocess.Popen[bytes], ranks: list[int]) -> None:
    """torchrun has its ranks in sessions of their own, and leaves them when it is killed."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for rank in ranks:
        if Path(f"/proc/{rank}").exists():
            os.kill(rank, signal.SIGKILL)


def sample_memory(launcher: int, watched: Watched, ended: threading.Event) -> None:
    """The most anonymous memory of each rank, a direct child of torchrun, and their CPU time; 1 ms
    every 50."""
    while not ended.wait(SAMPLE_SECONDS):
        try:
            children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
            ticks = 0
            for child in map(int, children):
                times = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                ticks += int(times[11]) + int(times[12])
                held = anonymous_bytes(child, ranks=len(children))
                watched.peaks[child] = max(watched.peaks.get(child, 0), held)
            watched.clocks.append((time.time(), ticks / os.sysconf("SC_CLK_TCK")))
        except OSError:
            continue  # one has just ended


def first_error(log: str) -> str:
    """The line that says what was wrong: the first error that is not torchrun's own report of
    it."""
    found = [line for line in ERROR.findall(log) if "ChildFailedError" not in line]
    return (
        found[0][:300] if found else (log.strip().splitlines() or ["it printed nothing"])[-1][:300]
    )
