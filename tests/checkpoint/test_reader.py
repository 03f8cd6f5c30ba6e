"""Checkpoints are read by rows for any number of writing ranks, and corruption of any byte is
found."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from llama_ft.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    checkpoint_errors,
    complete_checkpoints,
    restore_weights,
)
from llama_ft.checkpoint.reader import file_digest, shard_file
from llama_ft.config import CheckpointConfig
from llama_ft.errors import UserError
from llama_ft.export import find_valid
from llama_ft.runtime import Ranks


def three_ranks(folder: Path, tensor: torch.Tensor, chunks: list[torch.Tensor]) -> Checkpoint:
    """A checkpoint as three ranks would write it, its files made with the safetensors library."""
    folder.mkdir()
    start = 0
    for rank, rows in enumerate(chunks):
        own = {f"rng.{rank}.cpu": torch.full((2,), rank, dtype=torch.uint8)}
        if rank == 0:
            own["optimizer.state.w.step"] = torch.tensor(5.0)
        if rows.numel():
            own["model.w"] = rows.contiguous()
        offsets = {name: {"saved_offsets": [0] * value.ndim} for name, value in own.items()}
        offsets |= {"model.w": {"saved_offsets": [start, 0]}}
        start += len(rows)
        save_file(own, folder / shard_file(rank), {"DCP_SHARDING_INFO": json.dumps(offsets)})
    (folder / "trainer.json").write_text(
        json.dumps({"format": 2, "step": 5, "world_size": len(chunks)})
    )
    return Checkpoint(folder)


def test_rows_are_assembled_from_the_files_of_all_ranks(tmp_path: Path) -> None:
    tensor = torch.arange(14.0).view(7, 2)
    checkpoint = three_ranks(tmp_path / "c", tensor, [tensor[:3], tensor[3:], tensor[:0]])
    assert checkpoint.tensors["model.w"].shape == (7, 2)
    for start in range(8):
        for stop in range(start, 8):
            assert torch.equal(checkpoint.read_rows("model.w", start, stop), tensor[start:stop])
    assert torch.equal(checkpoint.weights().read("w"), tensor)
    assert checkpoint.read("optimizer.state.w.step").item() == 5.0
    assert checkpoint.read("rng.2.cpu").tolist() == [2, 2]


@pytest.fixture
def written(tmp_path: Path, runtime: Ranks) -> Path:
    """A real checkpoint."""
    model = torch.nn.Linear(40, 30)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 40)).sum().backward()
    optimizer.step()
    with CheckpointWriter(
        tmp_path, CheckpointConfig(), {"config": {"train": {"lr": 1e-4}}}, runtime
    ) as writer:
        writer.save(1, model, optimizer, {})
    (folder,) = complete_checkpoints(tmp_path)
    assert checkpoint_errors(folder) == []
    return folder


def test_a_flipped_bit_anywhere_is_found_and_its_file_named(written: Path) -> None:
    places = random.Random(0)
    files = sorted(written.iterdir())
    for number in range(30):
        file = files[number % len(files)]
        sound = file.read_bytes()
        broken = bytearray(sound)
        broken[places.randrange(len(sound))] ^= 1 << places.randrange(8)
        file.write_bytes(broken)
        assert any(file.name in line for line in checkpoint_errors(written)), (file, number)
        file.write_bytes(sound)
    lines = (written / "checksums.txt").read_text()
    (written / "checksums.txt").write_text(lines.replace("  shard", "  ../shard"))
    assert checkpoint_errors(written) == ["checksums.txt: corrupted"]


@pytest.mark.parametrize("name", [shard_file(0), "trainer.json", "checksums.txt"])
def test_a_truncated_or_missing_file_is_found_and_named(written: Path, name: str) -> None:
    file = written / name
    content = file.read_bytes()
    for damaged in (content[:-1], content + b"\n", b""):
        file.write_bytes(damaged)
        assert any(name in line for line in checkpoint_errors(written))
    file.unlink()
    assert any(name in line for line in checkpoint_errors(written))
    file.mkdir()
    assert any(name in line for line in checkpoint_errors(written))


def test_only_directories_of_the_right_name_are_checkpoints(written: Path) -> None:
    run = written.parent.parent
    for name in (".writing-step-000009", "set-aside-1-step-000009", "step-9", "step-abcdef"):
        shutil.copytree(written, run / "checkpoints" / name)
    shutil.copytree(written, run / "checkpoints" / "step-1000000")
    (run / "checkpoints" / "step-000010").touch()
    assert [folder.name for folder in complete_checkpoints(run)] == ["step-1000000", "step-000001"]


def test_a_checkpoint_of_another_version_is_an_error(written: Path) -> None:
    trainer = written / "trainer.json"
    trainer.write_text(trainer.read_text().replace('"format": 2', '"format": 3'))
    with pytest.raises(UserError, match="another version of llama_ft"):
        Checkpoint(written)


def test_a_pickle_in_place_of_a_tensor_file_is_never_executed(
    written: Path, tmp_path: Path
) -> None:
    class Touch:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (eval, (f"open({str(tmp_path / 'touched')!r}, 'w')",))

    torch.save({"model.weight": Touch()}, written / shard_file(0))
    with pytest.raises(UserError, match="cannot be read as a checkpoint"):
        Checkpoint(written)
    assert not (tmp_path / "touched").exists()


def write_damaged(file: Path, damage: str) -> None:
    """Put something else in place of a file of a checkpoint."""
    content = file.read_bytes() if file.exists() else b"0" * 100
    file.unlink(missing_ok=True)
    if damage == "cut":
        file.write_bytes(content[:-40])
    elif damage == "empty":
        file.touch()
    elif damage == "longer":
        file.write_bytes(content + b"1")
    elif damage == "zeros":
        file.write_bytes(bytes(len(content)))
    elif damage == "directory":
        file.mkdir()
    elif damage == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to(file)


DAMAGES = ("cut", "empty", "longer", "zeros", "directory", "pipe", "link to itself")


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_beside_the_files_of_the_ranks_does_not_matter(written: Path, damage: str) -> None:
    sound = Checkpoint(written)
    for name in ("reference.safetensors", "teacher.safetensors", "my-notes.safetensors"):
        write_damaged(written / name, damage)
    assert checkpoint_errors(written) == []
    names = sorted(Checkpoint(written).tensors)
    assert names == sorted(sound.tensors)
    model = torch.nn.Linear(40, 30)
    restore_weights(Checkpoint(written), model)
    assert torch.equal(model.weight, sound.read("model.weight"))


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [shard_file(0), "trainer.json", "checksums.txt"])
def test_any_damage_of_a_file_makes_an_older_checkpoint_the_newest_valid_one(
    written: Path, name: str, damage: str
) -> None:
    newer = written.with_name("step-000002")
    shutil.copytree(written, newer)
    write_damaged(newer / name, damage)
    assert any(name in line for line in checkpoint_errors(newer))
    run = written.parent.parent
    assert find_valid(run).folder == written


def test_a_checkpoint_that_does_not_open_is_not_used(written: Path) -> None:
    newer = written.with_name("step-000002")
    shutil.copytree(written, newer)
    trainer = newer / "trainer.json"
    checksums = newer / "checksums.txt"
    before = file_digest(trainer)
    trainer.write_text(trainer.read_text().replace('"world_size": 1', '"world_size": 2'))
    checksums.write_text(checksums.read_text().replace(before, file_digest(trainer)))
    assert "cannot be read as a checkpoint" in str(checkpoint_errors(newer))
    assert find_valid(written.parent.parent).folder == written
