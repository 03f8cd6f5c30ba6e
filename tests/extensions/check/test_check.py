"""recipes/check.py measures real ranks, and names what is odd."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import REPOSITORY
from forked import forked

from llama_ft.extensions.check.disk import DiskTrial
from llama_ft.extensions.check.machine import RankFacts
from llama_ft.extensions.check.network import Link
from llama_ft.extensions.check.result import CheckResult

CHECK = REPOSITORY / "recipes" / "check.py"
NETWORK_JOB = Path(__file__).with_name("network_job.py")


@pytest.mark.parametrize("ranks", [0, 2])
def test_ranks_are_listed_and_nothing_is_left(tmp_path: Path, ranks: int) -> None:
    folder = tmp_path / "new" / "runs"
    finished = forked(CHECK, "--output_dir", folder, "--megabytes", "2", ranks=ranks)
    lines = finished.output.splitlines()
    rows = [line for line in lines if line[:2].strip().isdigit() and "CPU" in line]
    assert [row.split()[0] for row in rows] == [str(rank) for rank in range(max(ranks, 1))]
    assert all("MB/s" in row and "GFLOP/s" in row for row in rows)
    assert any("torch 2." in line for line in lines)
    assert ("all-reduce, all ranks: " in finished.output) == (ranks == 2)
    assert finished.exit_code == 0, finished.output
    assert "No problem was found." in lines
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    finished = forked(CHECK, "--output_dir", file / "runs", "--megabytes", "1", ranks=2)
    assert finished.exit_code == 1
    assert (
        f"error: --output_dir {file}/runs: cannot be written (Not a directory): rank 0, 1 on"
        in (finished.output)
    )
    assert "Traceback" not in finished.output


def test_the_links_between_and_within_nodes_are_measured() -> None:
    finished = forked(NETWORK_JOB, "a", "a", "b", "b", ranks=4)
    assert finished.exit_code == 0, finished.output
    links = json.loads(finished.output.splitlines()[-1])
    assert [f"{what}, {where}" for what, where, _ in links] == [
        "all-reduce, all ranks",
        "all-gather, all ranks",
        "all-reduce, within a",
        "all-gather, within a",
        "all-reduce, within b",
        "all-gather, within b",
        "send, a -> b",
        "send, b -> a",
    ]
    assert all(rate > 1e6 for _, _, rate in links)


def result(**changes: object) -> CheckResult:
    """Four healthy ranks on two nodes."""
    facts = [
        RankFacts(
            rank=rank,
            node=f"node {rank // 2}",
            device="NVIDIA H100",
            versions={"torch": "2.13.0", "driver": "580.1"},
            free_bytes=79 * 2**30,
            total_bytes=80 * 2**30,
            host_bytes=2**40,
            flops_per_second=7e14 + rank,
            clock=1000.0 + rank / 10,
        )
        for rank in range(4)
    ]
    disks = [DiskTrial("", free_bytes=2**40, bytes_per_second=1e9)] * 4
    links = [
        Link("all-reduce", "all ranks", 1e9),  # over the network: slower than within a node
        Link("all-reduce", "within node 0", 3e11),
        Link("all-reduce", "within node 1", 3e11),
        Link("send", "node 0 -> node 1", 4e10),
        Link("send", "node 1 -> node 0", 4e10),
    ]
    healthy = CheckResult("output", facts, disks, links)
    return replace(healthy, **changes)  # type: ignore[arg-type]


def test_healthy_machines_have_no_problem() -> None:
    assert result().problems() == []
    assert "2     node 1  NVIDIA H100  79.00 GiB" in result().table()
    assert result().table().endswith("\ndriver 580.1, torch 2.13.0")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"flops_per_second": 4e14}, "rank 3 on node 1: a matmul has 57% of the median rate"),
        ({"free_bytes": 2**33}, "rank 3 on node 1: only 10% of its GPU's memory is free"),
        ({"clock": 1030.0}, "node 1: its clock differs by 30 seconds."),
        (
            {"versions": {"torch": "2.11.0", "driver": "580.1"}},
            "torch is 2.11.0: rank 3 on node 1. The others have 2.13.0.",
        ),
    ],
)
def test_an_odd_rank_is_named(change: dict[str, object], problem: str) -> None:
    facts = list(result().facts)
    facts[3] = replace(facts[3], **change)  # type: ignore[arg-type]
    [found] = result(facts=facts).problems()
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("trial", "problem"),
    [
        (
            DiskTrial("is not the same directory as on rank 0"),
            "--output_dir output: is not the same directory as on rank 0: rank 2, 3 on node 1.",
        ),
        (
            DiskTrial("", is_locked_for_others=False),
            "--output_dir output: has no locks (flock): rank 2, 3 on node 1.\n",
        ),
    ],
)
def test_a_node_with_an_unusable_disk_is_named(trial: DiskTrial, problem: str) -> None:
    [found] = result(disks=[*result().disks[:2], trial, trial]).problems()
    assert found.startswith(problem)


def test_a_slow_link_is_named() -> None:
    links = [
        Link("send", f"node {node} -> node {(node + 1) % 3}", 4e10 if node else 1e10)
        for node in range(3)
    ]
    [found] = result(links=links).problems()
    assert found == "send, node 0 -> node 1: 25% of the median bandwidth."
