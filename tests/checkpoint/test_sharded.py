"""Checkpoints are complete or absent; torch.distributed.checkpoint with a process group of one and real files."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from llama_ft.checkpoint import CheckpointWriter
from llama_ft.errors import RunFailure
from llama_ft.runtime import Runtime
from llama_ft.runtime.devices import DeviceNote


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    cpu = torch.device("cpu")
    yield Runtime(0, 1, 0, 1, cpu, cpu, DeviceNote("node1", "CPU", "1 thread"), mesh, None)
    dist.destroy_process_group()


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").iterdir()}


def test_only_the_best_and_those_asked_for_are_kept(tmp_path: Path, runtime: Runtime) -> None:
    writer = CheckpointWriter(tmp_path, runtime)
    model, optimizer = trained()
    writer.save_best(1, 3.0, model, optimizer, {})
    writer.save_best(2, 2.0, model, optimizer, {})
    writer.keep(2, model, optimizer, {})
    writer.save_best(3, 1.0, model, optimizer, {})
    assert names(tmp_path) == {"step-000002", "step-000003", "best.json"}
    best = json.loads((tmp_path / "checkpoints" / "best.json").read_text())
    assert best == {"checkpoint": "step-000003", "step": 3, "eval/loss": 1.0}


def test_a_save_that_fails_leaves_the_earlier_checkpoint_and_names_it(tmp_path: Path, runtime: Runtime) -> None:
    writer = CheckpointWriter(tmp_path, runtime)
    model, optimizer = trained()
    writer.keep(1, model, optimizer, {})
    before = {path: path.read_bytes() for path in (tmp_path / "checkpoints" / "step-000001").iterdir()}
    (tmp_path / "checkpoints" / "step-000002").write_text("a file where the directory has to go")
    with pytest.raises(RunFailure, match=r"step-000002: the checkpoint could not be written.*\n.*step-000001"):
        writer.keep(2, model, optimizer, {})
    os.remove(tmp_path / "checkpoints" / "step-000002")
    assert names(tmp_path) == {"step-000001"}
    assert {path: path.read_bytes() for path in (tmp_path / "checkpoints" / "step-000001").iterdir()} == before


def test_what_a_killed_save_left_is_no_checkpoint_and_is_replaced(tmp_path: Path, runtime: Runtime) -> None:
    left = tmp_path / "checkpoints" / ".writing-step-000001"
    left.mkdir(parents=True)
    (left / "half").write_text("half")
    writer = CheckpointWriter(tmp_path, runtime)
    assert not list((tmp_path / "checkpoints").glob("step-*"))
    writer.keep(1, *trained(), {})
    assert names(tmp_path) == {"step-000001"} and not (writer.path(1) / "half").exists()


def test_a_full_disk_is_called_that(tmp_path: Path) -> None:
    from llama_ft.checkpoint.sharded import _cause

    archive_error = OSError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    assert _cause(archive_error, free_bytes=4096) == "no space left on device: 0.0 MiB are free"
    assert "unexpected pos" in _cause(archive_error, free_bytes=2**30)
