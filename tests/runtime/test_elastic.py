"""Ranks that are started again, and jobs on two nodes: two torchrun agents on this machine."""

import json
import re
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import RECIPE, Finished, losses, run

JOB = str(Path(__file__).with_name("elastic_job.py"))
RESTARTS = ("--max_restarts", "3")


def two_nodes(*arguments: str) -> list[Finished]:
    """A job on two agents that meet at a port; `arguments` are torchrun's from there on."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        meeting = f"localhost:{free.getsockname()[1]}"
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--rdzv_backend", "c10d"]
    command = [*agent, "--rdzv_endpoint", meeting, "--rdzv_id", "two-nodes", *arguments]
    with ThreadPoolExecutor(2) as nodes:
        return list(nodes.map(lambda _: run(command), range(2)))


@pytest.mark.slow
def test_a_new_attempt_finds_the_directory_of_the_one_before_for_each_run_of_the_launch(tmp_path: Path) -> None:
    nodes = two_nodes("--nproc_per_node", "1", *RESTARTS, JOB, "killed once", str(tmp_path))
    assert [node.exit_code for node in nodes] == [0, 0], nodes[0].output + nodes[1].output
    first, second = sorted(folder.name for folder in tmp_path.iterdir())
    assert first.split("-by-")[1] == second.split("-by-")[1], "both begun by the first attempt"
    output = nodes[0].output + nodes[1].output
    for rank in (0, 1):
        told = re.findall(rf"^rank {rank} (.*)$", output, re.M)
        assert told == [f"begins in {first}", f"begins in {second}", f"goes on in {first}", f"goes on in {second}"]
    for folder in (first, second):
        assert json.loads((tmp_path / folder / "status.json").read_text())["state"] == "finished"


def test_a_mistake_in_the_settings_is_told_once_and_not_tried_again() -> None:
    nodes = two_nodes("--nproc_per_node", "2", *RESTARTS, JOB, "early mistake", ".")
    output = nodes[0].output + nodes[1].output
    assert all(node.exit_code == 1 and node.seconds < 30 for node in nodes)
    assert output.count("error: mine.yaml:3: this is not right.\n       That would be.") == 1


@pytest.mark.slow
def test_a_mistake_found_later_by_a_rank_of_one_node_ends_both(tmp_path: Path) -> None:
    nodes = two_nodes("--nproc_per_node", "1", *RESTARTS, JOB, "late mistake", str(tmp_path))
    output = nodes[0].output + nodes[1].output
    assert all(node.exit_code == 1 and node.seconds < 30 for node in nodes)
    assert output.count("error: mine.jsonl:7: this row is not right.") == 1
    assert output.count("rank 0 begins") == 2 and "goes on" not in output and "lost contact" not in output
    failed = json.loads(next(tmp_path.glob("run1*/status.json")).read_text())
    assert (failed["state"], failed["exit_code"]) == ("failed", 2)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """16 tokenized rows of at most 35 tokens: one step sees them all."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 301, (5 + 2 * n,), generator=generator).tolist() for n in range(16)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"input_ids": row, "labels": row}) + "\n" for row in ids))
    return file


def test_two_nodes_train_as_a_plain_loop_does(tmp_path: Path, tiny_model: Path, rows: Path) -> None:
    output_dir = tmp_path / "run"
    what = ["--model_name", str(tiny_model), "--dataset", str(rows), "--output_dir", str(output_dir)]
    how = ["--precision", "fp32", "--optimizer", "SGD", "--momentum", "0", "--weight_decay", "0", "--lr", "0.1"]
    steps = ["--lr_scheduler", "constant", "--batch_size_training", "8", "--num_epochs", "3", "--enable_fsdp"]
    steps += ["--context_length", "36"]  # 9 packs, some on each node
    nodes = two_nodes("--nproc_per_node", "1", str(RECIPE), *what, *how, *steps, "--collective_timeout", "2m")
    assert [node.exit_code for node in nodes] == [0, 0], nodes[0].output + nodes[1].output
    assert losses(output_dir) == pytest.approx(plain_losses(tiny_model, rows), rel=1e-5)


def plain_losses(folder: Path, rows: Path) -> list[float]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    examples = [torch.tensor(json.loads(line)["input_ids"]) for line in rows.read_text().splitlines()]
    targets = sum(len(ids) - 1 for ids in examples)
    result = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = torch.zeros(())
        for ids in examples:
            logits = model(input_ids=ids[None]).logits[0, :-1]
            loss = loss + torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum") / targets
        loss.backward()
        optimizer.step()
        result.append(loss.item())
    return result
