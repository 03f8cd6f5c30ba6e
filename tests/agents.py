"""Agents of torchrun on this machine, each of them a node that can be lost and can return.

Their ranks are forks of the agent, which has torch imported, so that a restart takes a second. With
`is_command`, the agent is the command `torchrun`, and a rank is an interpreter of its own.
"""

import json
import os
import pickle
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from forked import ENVIRONMENT, REPOSITORY, Fork

SLOWED = REPOSITORY / "tests" / "slowed_recipe.py"
DEADLINE_SECONDS = 200.0
# How long the nodes that are there wait for more, at the start and after a loss.
START_SECONDS = 60
RESTART_SECONDS = 5


class Nodes:
    """Nodes that meet at a store of this process, so that any of them can be lost. The first one waits
    for the others at the start: lose that one.

    Args:
        most: they wait for so many nodes at the start, and go on with fewer after a loss.
        folder: each node has a working directory here.
        words: what follows `torchrun` in its command line, with the script's flags.
    """

    def __init__(
        self,
        most: int,
        folder: Path,
        words: list[str],
        is_command: bool = False,
        **environment: str,
    ) -> None:
        from torch.distributed import TCPStore
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
            C10dRendezvousBackend,
        )

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._rendezvous = C10dRendezvousBackend(self._store, str(self._store.port))
        self._most = most
        self._folder = folder
        self._words = words
        self._is_command = is_command
        self._brake = folder / "brake"
        self.take_per_step(0.1)
        needed = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "BRAKE": str(self._brake)}
        self._variables = {**os.environ, **ENVIRONMENT, **needed, **environment}
        self._started = list[Node]()

    def start(self, name: str) -> "Node":
        """Start a node. The one that comes first to a round says how long it waits for more."""
        is_first = not self._started
        port = self._store.port
        flags = f"--nnodes 1:{self._most} --nproc_per_node 1 --max_restarts 10 --rdzv_id {port}"
        flags += f" --rdzv_backend c10d --rdzv_endpoint localhost:{port}"
        # torch's own 15 s, or more than a loaded machine takes to give a sign of life; see `lose`
        flags += f" --rdzv_conf is_host=0,keep_alive_max_attempt={3 if self._is_command else 24}"
        flags += f",last_call_timeout={START_SECONDS if is_first else RESTART_SECONDS}"
        words = [*flags.split(), str(SLOWED), *self._words]
        node = Node(self._folder / name, words, self._variables, self._is_command)
        self._started.append(node)
        if is_first:
            wait_until(lambda: self._rendezvous.get_state() is not None, node)
        return node

    def lose(self, node: "Node") -> None:
        """Kill a node. Others notice it at once, unless torchrun is a command."""
        node.lose()
        is_written = self._is_command
        while not is_written:
            found = self._rendezvous.get_state()
            assert found is not None
            state = pickle.loads(found[0])
            for member in state.last_heartbeats:
                if member.pid == node.pid:
                    state.last_heartbeats[member] -= timedelta(days=1)
            result = self._rendezvous.set_state(pickle.dumps(state), found[1])
            is_written = result is not None and result[2]

    def take_per_step(self, seconds: float) -> None:
        """From now on, a step takes so many seconds longer than its work."""
        self._brake.write_text(str(seconds))

    @property
    def output(self) -> str:
        return "".join(node.output for node in self._started)

    def end(self) -> None:
        for node in self._started:
            node.lose()


class Node:
    """An agent with one rank, in a directory of its own."""

    def __init__(
        self, folder: Path, words: list[str], variables: dict[str, str], is_command: bool
    ) -> None:
        folder.mkdir(exist_ok=True)
        self._log = folder / f"{time.monotonic_ns()}.log"
        self._log.touch()
        request = {"words": words, "folder": str(folder), "is_command": is_command}
        self._agent = Fork([__file__, json.dumps(request)], variables, self._log)

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def pid(self) -> int:
        return self._agent.pid

    @property
    def exit_code(self) -> int | None:
        return self._agent.exit_code

    def lose(self) -> None:
        """Kill the agent and its ranks, whose parent it is until then."""
        if self.exit_code is not None:
            return
        os.kill(self.pid, signal.SIGSTOP)
        ranks = _children(self.pid)
        for process in (self.pid, *ranks):
            os.kill(process, signal.SIGKILL)
        self.wait()

    def wait(self) -> int | None:
        return self._agent.wait(DEADLINE_SECONDS)


def _run_agent(words: list[str], folder: str, is_command: bool) -> None:
    """Be torchrun, as the command line starts it."""
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    os.chdir(folder)
    if is_command:
        os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *words])
    arguments = parse_args(words)
    config, *_ = config_from_args(arguments)
    config.start_method = "fork"
    elastic_launch(config, _run_rank)(arguments.training_script, *arguments.training_script_args)


def _run_rank(script: str, *words: str) -> None:
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")


def _children(parent: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            if f"PPid:\t{parent}\n" in status.read_text():
                found.append(int(status.parent.name))
        except OSError:
            continue  # it has ended
    return found


@contextmanager
def nodes(*arguments: Any, **settings: Any) -> Iterator[Nodes]:
    """Nodes that end with the block."""
    started = Nodes(*arguments, **settings)
    try:
        yield started
    finally:
        started.end()


def wait_until(happened: Callable[[], Any], *nodes: Node) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not happened():
        for node in nodes:
            assert node.exit_code is None, node.output
        assert time.monotonic() < deadline, nodes[0].output
        threading.Event().wait(0.02)


if __name__ == "__main__":
    _run_agent(**json.loads(sys.argv[1]))
