"""Processes that have torch imported when they begin: forks of a server that has imported it once.

Importing torch and transformers takes every process 5 to 8 s of a core. What is forked here is a
process of its own all the same, with a command line, an environment, an output and an exit code;
ranks meet over gloo as torchrun's do. All workers of pytest-xdist share one server.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
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


@dataclass(frozen=True)
class Finished:
    """A process that has ended, or the ranks of a job."""

    exit_code: int
    output: str  # stdout and stderr as they came
    seconds: float


class Server:
    """fork_server.py: this process's own, which ends with it, or that of another process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._address = ""
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None  # it reads until this process ends

    def share(self, address: str) -> None:
        """Use the server of another process."""
        self._address = address

    @property
    def address(self) -> str:
        """Where it listens. The first call starts it."""
        with self._lock:
            if not self._address:
                self._start()
            return self._address

    def connect(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX)
        client.connect(self.address)
        return client

    def _start(self) -> None:
        tests = Path(__file__).parent
        # threads are counted when torch is imported
        variables = {**os.environ, **ENVIRONMENT}
        variables["PYTHONPATH"] = f"{ENVIRONMENT['PYTHONPATH']}:{tests}"
        self._folder = tempfile.TemporaryDirectory(prefix="fork-server-")
        address = f"{self._folder.name}/socket"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(128)
            number = listener.fileno()
            self._process = subprocess.Popen(
                [sys.executable, str(tests / "fork_server.py"), str(number)],
                pass_fds=[number],
                stdin=subprocess.PIPE,
                cwd=REPOSITORY,
                env=variables,
            )
        self._address = address


SERVER = Server()


class Fork:
    """A process that runs a script, with `variables` as its environment."""

    def __init__(self, words: list[str], variables: dict[str, str], output: Path) -> None:
        request = {"words": words, "variables": variables, "output": str(output)}
        self._lock = threading.Lock()
        self._exit_code: int | None = None
        self.cpu_seconds = 0.0  # with those of its own processes, once it has ended
        self._connection = SERVER.connect()
        self._connection.sendall(json.dumps(request).encode() + b"\n")
        self._answers = self._connection.makefile()
        self.pid = int(self._answer())

    def fileno(self) -> int:
        """Readable when the process has ended."""
        return self._connection.fileno()

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        with self._lock:
            if self._exit_code is None and connection.wait([self._connection], 0):
                exit_code, seconds = self._answer().split()
                self._exit_code = int(exit_code)
                self.cpu_seconds = float(seconds)
            return self._exit_code

    def wait(self, timeout: float) -> int | None:
        """Wait for its end and return its exit code, or None after `timeout` seconds."""
        connection.wait([self._connection], timeout)
        return self.exit_code

    def _answer(self) -> str:
        answer = self._answers.readline()
        if not answer:
            raise RuntimeError("The fork server has ended. `import preloaded` in tests/ says why.")
        return answer

    def send(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.exit_code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def terminate(self) -> None:
        self.send(signal.SIGTERM)


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
    processes: list[Fork]
    store: Any  # where the ranks meet; it must live as long as they do

    def is_alive(self) -> bool:
        return any(process.exit_code is None for process in self.processes)

    def send(self, number: int) -> None:
        """Send a signal to every rank, as a terminal or a launcher does."""
        for process in self.processes:
            process.send(number)

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
        processes.append(Fork(own_words, variables, output))
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


def _wait(processes: list[Fork], deadline: float) -> int | None:
    """Wait for all; the exit code of the one that failed first, or None after the deadline. As
    under torchrun, a failure ends the others."""
    failed = 0
    while running := [process for process in processes if process.exit_code is None]:
        if time.monotonic() > deadline:
            for process in running:
                process.kill()
            return failed or None
        connection.wait(running, deadline - time.monotonic())
        codes = [code for process in processes if (code := process.exit_code)]
        if codes and not failed:
            failed = codes[0]
            deadline = min(deadline, time.monotonic() + SECONDS_TO_LEAVE)
            for process in running:
                process.terminate()
    return failed or next((code for process in processes if (code := process.exit_code)), 0)
