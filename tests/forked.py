"""Processes that have torch imported when they begin: forks of a server that has imported it once.

Importing torch and transformers takes every process 5 to 8 s of a core. What is forked here is a
process of its own all the same, with a command line, an environment, an output and an exit code;
ranks meet over gloo as torchrun's do.
"""

import multiprocessing
import os
import re
import runpy
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
# One thread each: a plain 1, which torchrun sets by itself, means a share of the cores to
# llama_ft.runtime. The tests' tensors are tiny, and threads that wait for each other spin: on busy
# cores test_loss_scale took over 300 s, not 42.
ENVIRONMENT = {
    "PYTHONPATH": str(REPOSITORY / "src"),
    "OMP_NUM_THREADS": "01",
    "CUDA_VISIBLE_DEVICES": "",
}
# What a fork inherits of the variables that were there when the tests began. llama_ft looks for
# secrets in every variable, several hundred times per run; a CI has a hundred variables.
INHERITED = re.compile(
    r"(HOME|LANG|SHELL|TERM|TMPDIR|USER|VIRTUAL_ENV)$|PATH|LC_|LD_|PYTHON|TORCH|HF_|.*_PROXY$",
    re.IGNORECASE,
)
AT_THE_START = dict(os.environ)
SECONDS_TO_LEAVE = 30.0  # what torchrun gives the other ranks when one has failed
POLLING = threading.Lock()  # multiprocessing polls all of its processes whenever it starts one


@dataclass(frozen=True)
class Finished:
    """A process that has ended, or the ranks of a job."""

    exit_code: int
    output: str  # stdout and stderr as they came
    seconds: float


def start_server() -> None:
    """Start the server, unless it runs; it ends with this process."""
    own = {**ENVIRONMENT, "PYTHONPATH": f"{ENVIRONMENT['PYTHONPATH']}:{Path(__file__).parent}"}
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)  # threads are counted when torch is imported
    try:
        multiprocessing.get_context("forkserver").set_forkserver_preload(["preloaded"])
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def forked(
    script: Path | str,
    *arguments: str | Path,
    ranks: int = 0,
    nodes: int = 1,
    timeout: float = 240,
    **environment: str,
) -> Finished:
    """Run a script as `python script arguments`, or (ranks > 0) as so many ranks as torchrun starts
    them. In `arguments`, {node} is the number of the node.

    Variables that a library reads when it is imported have no effect in `environment`.

    Raises:
        subprocess.TimeoutExpired: with the output so far; nothing is left running.
    """
    started = time.monotonic()
    with tempfile.NamedTemporaryFile() as output:
        running = start_forked(
            script,
            *arguments,
            output=Path(output.name),
            ranks=ranks,
            nodes=nodes,
            **environment,
        )
        exit_code = running.wait(started + timeout - time.monotonic())
        text = Path(output.name).read_text(errors="replace")
    if exit_code is None:
        raise subprocess.TimeoutExpired(running.words, timeout, text)
    return Finished(exit_code, text, time.monotonic() - started)


@dataclass(frozen=True)
class Running:
    """The processes of a script, one per rank."""

    words: list[str]
    processes: list[ForkServerProcess]
    store: Any  # where the ranks meet; it must live as long as they do

    def is_alive(self) -> bool:
        return any(_exit_code(process) is None for process in self.processes)

    def send(self, number: int) -> None:
        """Send a signal to every rank, as a terminal or a launcher does."""
        for process in self.processes:
            if _exit_code(process) is None:
                assert process.pid is not None
                os.kill(process.pid, number)

    def wait(self, timeout: float) -> int | None:
        """Wait for all ranks, and kill them after `timeout` seconds. Return the exit code of the
        rank that failed first."""
        return _wait(self.processes, time.monotonic() + timeout)


def start_forked(
    script: Path | str,
    *arguments: str | Path,
    output: Path,
    ranks: int = 0,
    nodes: int = 1,
    **environment: str,
) -> Running:
    """Start what `forked` runs. stdout and stderr go to the file `output`."""
    start_server()
    store, place = _meeting(ranks, nodes) if ranks else (None, {})
    words = [str(script), *map(str, arguments)]
    output.touch()
    processes = []
    for rank in range(max(1, ranks)):
        node, local_rank = divmod(rank, max(1, ranks) // nodes)
        own = {}
        if ranks:
            own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "GROUP_RANK": str(node)}
        variables = {**_inherited(), **ENVIRONMENT, **place, **own, **environment}
        own_words = [word.replace("{node}", str(node)) for word in words]
        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=_run_script, args=(own_words, variables, str(output)))
        processes.append(process)
        with POLLING:
            process.start()
    return Running(words, processes, store)


def _inherited() -> dict[str, str]:
    """Variables that tests have set, and those of the start that matter."""
    return {
        name: value
        for name, value in os.environ.items()
        if AT_THE_START.get(name) != value or INHERITED.match(name)
    }


def _meeting(ranks: int, nodes: int) -> tuple[Any, dict[str, str]]:
    """A store where the ranks meet, and the variables by which torchrun's agent would announce it."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "GROUP_WORLD_SIZE": str(nodes),
    }
    variables |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks // nodes)}
    variables |= {"TORCHELASTIC_RUN_ID": "forked", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return store, {**variables, "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}


def _run_script(words: list[str], variables: dict[str, str], output: str) -> None:
    """What a forked process does: the script, as the interpreter would run it."""
    os.environ.clear()
    os.environ.update(variables)
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(file, standard)
    sys.argv = words
    sys.path[0] = str(Path(words[0]).parent)
    os.chdir(REPOSITORY)
    runpy.run_path(words[0], run_name="__main__")


def _wait(processes: list[ForkServerProcess], deadline: float) -> int | None:
    """Wait for all; the exit code of the one that failed first, or None after the deadline. As
    under torchrun, a failure ends the others."""
    failed = 0
    while running := [process for process in processes if _exit_code(process) is None]:
        if time.monotonic() > deadline:
            for process in running:
                process.kill()
            return failed or None
        connection.wait([process.sentinel for process in running], deadline - time.monotonic())
        codes = [code for process in processes if (code := _exit_code(process))]
        if codes and not failed:
            failed = codes[0]
            deadline = min(deadline, time.monotonic() + SECONDS_TO_LEAVE)
            for process in running:
                process.terminate()
    return failed or next((code for process in processes if (code := _exit_code(process))), 0)


def _exit_code(process: ForkServerProcess) -> int | None:
    with POLLING:
        return process.exitcode
