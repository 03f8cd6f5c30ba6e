"""Ranks that are started again, and jobs on two nodes: two torchrun agents on this machine."""

import json
import re
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import agents
import pytest
from conftest import RECIPE, Finished, losses, run
from forked import forked

JOB = str(Path(__file__).with_name("elastic_job.py"))
RESTARTS = ("--max_restarts", "3")


def two_nodes(*arguments: str) -> list[Finished]:
    """A job on two agents that meet at a port; `arguments` are torchrun's from there on."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        meeting = f"localhost:{free.getsockname()[1]}"
    agent = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--rdzv_backend",
        "c10d",
    ]
    command = [*agent, "--rdzv_endpoint", meeting, "--rdzv_id", "two-nodes", *arguments]
    with ThreadPoolExecutor(2) as nodes:
        return list(nodes.map(lambda _: run(command), range(2)))


@pytest.mark.slow
def test_a_restarted_attempt_resumes_each_run_of_the_launch(
    tmp_path: Path,
) -> None:
    nodes = two_nodes("--nproc_per_node", "1", *RESTARTS, JOB, "killed once", str(tmp_path))
    assert [node.exit_code for node in nodes] == [0, 0], nodes[0].output + nodes[1].output
    first, second = sorted(folder.name for folder in tmp_path.iterdir())
    assert first.split("-by-")[1] == second.split("-by-")[1], "both begun by the first attempt"
    output = nodes[0].output + nodes[1].output
    for rank in (0, 1):
        printed = re.findall(rf"^rank {rank} (.*)$", output, re.M)
        assert printed == [
            f"begins in {first}",
            f"begins in {second}",
            f"resumes in {first}",
            f"resumes in {second}",
        ]
    for folder in (first, second):
        assert json.loads((tmp_path / folder / "status.json").read_text())["state"] == "finished"


@pytest.mark.slow
def test_a_user_error_is_printed_once_per_node_and_not_restarted() -> None:
    nodes = two_nodes("--nproc_per_node", "2", *RESTARTS, JOB, "early user error", ".")
    for node in nodes:
        assert node.exit_code == 1 and node.seconds < 40
        assert (
            node.output.count("error: mine.yaml:3: this is not right.\n       That would be.") == 1
        )


@pytest.mark.slow
def test_a_later_user_error_on_one_node_ends_both(tmp_path: Path) -> None:
    nodes = two_nodes("--nproc_per_node", "1", *RESTARTS, JOB, "late user error", str(tmp_path))
    output = nodes[0].output + nodes[1].output
    assert all(node.exit_code == 1 and node.seconds < 40 for node in nodes)
    assert output.count("error: mine.jsonl:7: this row is not right.") == 1
    assert (
        output.count("rank 0 begins") == 2
        and "resumes" not in output
        and "lost contact" not in output
    )
    failed = json.loads(next(tmp_path.glob("run1*/status.json")).read_text())
    assert (failed["state"], failed["exit_code"]) == ("failed", 2)


@pytest.mark.parametrize("is_command", [False, pytest.param(True, marks=pytest.mark.large)])
def test_two_nodes_have_the_losses_of_one_process(
    tmp_path: Path, tiny_model: Path, rows16: Path, is_command: bool
) -> None:
    how = f"--precision fp32 --optimizer SGD --lr 0.1 --num_epochs 3 --model_name {tiny_model} --dataset {rows16}"
    how += " --batching_strategy padding --context_length 200 --no_run_validation --save_model False --output_dir"
    alone = forked(RECIPE, *how.split(), tmp_path / "alone", "--batch_size_training", "16")
    assert alone.exit_code == 0, alone.output
    own = [*how.split(), str(tmp_path / "nodes"), "--batch_size_training", "8", "--enable_fsdp"]
    own += ["--no_plan", "--collective_timeout", "2m"]
    with agents.nodes(2, tmp_path, own, is_command) as started:
        both = [started.start(name) for name in ("first", "second")]
        assert [node.wait() for node in both] == [0, 0], started.output
    assert len(losses(tmp_path / "nodes")) == 3
    assert losses(tmp_path / "nodes") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
