"""A run on torchrun --nnodes 1:3 that loses a node and gets it back is the run that nothing
happens to. Each agent is a node; they meet on this machine."""

import json
import os
import re
import shutil
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

import pytest
from conftest import RECIPE, metrics, reproducible_metrics
from forked import ENVIRONMENT, REPOSITORY, forked

SLOWED = REPOSITORY / "tests" / "slowed_recipe.py"
STEPS = 120
DEADLINE_SECONDS = 150.0
# Without LoRA's dropout, whose random numbers depend on the rank.
SETTINGS = (
    "--precision fp32 --enable_fsdp --batch_size_training 2 --gradient_accumulation_steps 2 --num_epochs 99 "
    f"--max_train_step {STEPS} --lr 1e-3 --lr_scheduler linear --save_steps 5 --no_run_validation --no_plan"
)
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


def last_step(run: Path) -> int:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    steps = [json.loads(line)["step"] for line in lines if line.endswith("\n")]
    return max(steps, default=0)


def words_of(model: Path, rows: Path, output_dir: Path | str, *more: str) -> list[str]:
    inputs = ["--model_name", str(model), "--dataset", str(rows)]
    return [*SETTINGS.split(), *inputs, "--output_dir", str(output_dir), *more]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, rows70: Path) -> Path:
    """The run on 2 ranks that nothing happens to."""
    output_dir = tmp_path_factory.mktemp("elastic") / "whole"
    finished = forked(RECIPE, *words_of(tiny_model, rows70, output_dir), ranks=2)
    assert finished.exit_code == 0, finished.output
    return output_dir


def assert_equal_run(run: Path, whole: Path) -> None:
    """Compare what every step has seen bit for bit, and its loss within 1e-5."""
    lines = metrics(run)
    expected = metrics(whole)
    for key in ("step", "tokens", "epoch", "train/lr"):
        assert [line[key] for line in lines] == [line[key] for line in expected]
    losses = [line["train/loss"] for line in lines]
    assert losses == pytest.approx([line["train/loss"] for line in expected], rel=1e-5)


@pytest.mark.slow
def test_a_lost_node_that_returns_changes_no_step(
    whole: Path, tmp_path: Path, tiny_model: Path, rows70: Path
) -> None:
    run = tmp_path / "run"
    port = free_port()
    # no --resume: torchrun's next attempt must find the run by itself
    words = words_of(tiny_model, rows70, run)
    first = Node(tmp_path / "first", port, words, is_host=True)
    second = Node(tmp_path / "second", port, words)
    nodes = [first, second]
    with ended_at_last(nodes):
        wait_until(lambda: last_step(run) >= 12, first, second)
        second.lose()
        lost_after = last_step(run)
        alone = "The global batch stays 8, as in the resumed run"
        wait_until(lambda: alone in first.output and last_step(run) > lost_after + 10, first)
        nodes.append(Node(tmp_path / "second", port, words))
        exit_codes = [node.wait() for node in (first, nodes[-1])]
    assert exit_codes == [0, 0], first.output + nodes[-1].output
    output = first.output + nodes[-1].output
    resumed_from = [int(step) for step in re.findall(r"Resuming from .*/step-(\d+)", output)]
    assert len(resumed_from) == 2, output
    assert lost_after - 10 < resumed_from[0] <= lost_after < resumed_from[1]
    assert "stopped by SIGTERM" in first.output  # to let the node in
    assert_equal_run(run, whole)
    lines = reproducible_metrics(run)
    assert lines[: resumed_from[0]] == reproducible_metrics(whole)[: resumed_from[0]]

    # On 2 ranks again it is the run of 2 ranks from that checkpoint, bit for bit.
    copied = tmp_path / "copied"
    name = f"checkpoints/step-{resumed_from[1]:06d}"
    shutil.copytree(run / name, copied / name)
    again = words_of(tiny_model, rows70, tmp_path / "again", "--resume", str(copied / name))
    finished = forked(RECIPE, *again, ranks=2)
    assert finished.exit_code == 0, finished.output
    assert reproducible_metrics(tmp_path / "again") == lines[resumed_from[1] :]


@pytest.mark.slow
def test_a_node_lost_before_the_first_checkpoint_leaves_the_global_batch(
    whole: Path, tmp_path: Path, tiny_model: Path, rows70: Path
) -> None:
    run = tmp_path / "run"
    port = free_port()
    words = words_of(tiny_model, rows70, run, "--save_steps", "0", "--save_every_epoch", "False")
    first = Node(tmp_path / "first", port, words, is_host=True)
    second = Node(tmp_path / "second", port, words)
    with ended_at_last([first, second]):
        wait_until(lambda: last_step(run) >= 5, first, second)
        second.lose()
        assert first.wait() == 0, first.output
    assert "The global batch stays 8" in first.output and "Resuming from" not in first.output
    assert_equal_run(run, whole)
