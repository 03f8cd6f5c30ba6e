"""Agents of torchrun on this machine, each of them a node that can be lost and can return."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forked import ENVIRONMENT, REPOSITORY

SLOWED = REPOSITORY / "tests" / "slowed_recipe.py"
DEADLINE_SECONDS = 150.0
# a lost node is noticed after 3 s, and a round begins 10 s after its first node
MEETING = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=10"


class Node:
    """An agent of torchrun with one rank, in a directory of its own. The others meet at the host's
    port."""

    def __init__(
        self, folder: Path, port: int, words: list[str], is_host: bool = False, **environment: str
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.log = folder / f"{time.monotonic_ns()}.log"
        agent = f"-m torch.distributed.run --nnodes 1:3 --nproc_per_node 1 --max_restarts 10 --rdzv_id {port}"
        agent += f" --rdzv_backend c10d --rdzv_endpoint localhost:{port}"
        agent += f" --rdzv_conf {MEETING},is_host={int(is_host)}"
        needed = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "STEP_SECONDS": "0.05"}
        with open(self.log, "w") as log:
            self.agent = subprocess.Popen(
                [sys.executable, *agent.split(), str(SLOWED), *words],
                stdout=log,
                stderr=log,
                cwd=folder,
                env={**os.environ, **ENVIRONMENT, **needed, **environment},
            )

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def lose(self) -> None:
        """Kill the agent, and its ranks, whose parent it is until then."""
        self.agent.send_signal(signal.SIGSTOP)
        ranks = children(self.agent.pid)
        self.agent.kill()
        for rank in ranks:
            os.kill(rank, signal.SIGKILL)
        self.agent.wait()

    def wait(self) -> int:
        return self.agent.wait(DEADLINE_SECONDS)


def children(parent: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            if f"PPid:\t{parent}\n" in status.read_text():
                found.append(int(status.parent.name))
        except OSError:
            continue  # it has ended
    return found


@contextmanager
def ended_at_last(nodes: list[Node]) -> Iterator[None]:
    try:
        yield
    finally:
        for node in nodes:
            if node.agent.poll() is None:
                node.lose()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


def wait_until(happened: Callable[[], Any], *nodes: Node) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not happened():
        for node in nodes:
            assert node.agent.poll() is None, node.output
        assert time.monotonic() < deadline, nodes[0].output
        threading.Event().wait(0.02)
