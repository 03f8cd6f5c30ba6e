"""Checkpoints are complete or absent, and no more are kept than asked for; a process group of one
and real files."""

import errno
import gc
import json
import os
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load

from llama_ft.checkpoint import Checkpoint, CheckpointWriter, checkpoint_errors, restore_weights
from llama_ft.checkpoint.reader import shard_file
from llama_ft.checkpoint.safetensors_file import SafetensorsFile
from llama_ft.checkpoint.writer import RESERVED_BYTES
from llama_ft.config import CheckpointConfig, TrainConfig
from llama_ft.errors import RunFailure
from llama_ft.observe.memory import memory_use, reset_peaks
from llama_ft.runtime import Ranks
from llama_ft.training import build_optimizer

STATE = {"progress": {}}


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def new_writer(runtime: Ranks, tmp_path: Path) -> Callable[..., CheckpointWriter]:
    return lambda **settings: CheckpointWriter(tmp_path, CheckpointConfig(**settings), {}, runtime)


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").iterdir()}


def test_only_the_best_and_requested_checkpoints_are_kept_even_after_a_restart(
    new_writer: Callable[..., CheckpointWriter], tmp_path: Path
) -> None:
    model, optimizer = trained()
    best = tmp_path / "checkpoints" / "best.json"
    with new_writer(keep_last=2) as writer:
        writer.save(1, model, optimizer, STATE, is_requested=False, best_value=3.0)
        writer.save(2, model, optimizer, STATE, best_value=2.0)
        writer.finish()
        assert names(tmp_path) == {"step-000002", "best.json"}
        before = best.read_text()
        writer.save(3, model, optimizer, STATE, is_requested=False, best_value=1.0)
    best.write_text(before)  # as if the run had been killed before it was written
    left = tmp_path / "checkpoints" / ".writing-step-000004"  # by a save that was killed
    left.mkdir()
    with new_writer(keep_last=2) as writer:
        assert not left.exists()
        assert json.loads(best.read_text()) == {
            "checkpoint": "step-000003",
            "step": 3,
            "eval/loss": 1.0,
        }
        for step in (4, 5):
            writer.save(step, model, optimizer, STATE)
    assert names(tmp_path) == {"step-000003", "step-000004", "step-000005", "best.json"}


def test_checkpoints_left_by_a_killed_run_are_deleted_at_the_next_start(
    new_writer: Callable[..., CheckpointWriter], tmp_path: Path
) -> None:
    model, optimizer = trained()
    with new_writer(keep_last=0) as writer:
        for step in range(1, 6):
            writer.save(step, model, optimizer, STATE)
    with new_writer(keep_last=2):
        assert names(tmp_path) == {"step-000004", "step-000005"}


def test_a_checkpoint_that_training_waits_for_is_written_without_copies(
    new_writer: Callable[..., CheckpointWriter], tmp_path: Path
) -> None:
    model = torch.nn.Linear(3072, 3072)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3072)).sum().backward()
    optimizer.step()
    state_bytes = 3 * 4 * 3072 * 3073
    cpu = torch.device("cpu")

    def save(step: int, is_final: bool, **settings: bool) -> float:
        """Return by how much of the state's bytes memory grows."""
        with new_writer(**settings) as writer:
            gc.collect()  # the block of the writer before this one
            reset_peaks(cpu)
            before = memory_use(cpu).resident_peak
            writer.save(step, model, optimizer, STATE, is_final=is_final)
        return (memory_use(cpu).resident_peak - before) / state_bytes

    save(1, is_final=False)  # what torch allocates once
    assert save(2, is_final=False) > 0.9
    assert save(3, is_final=True) < 0.2
    assert save(4, is_final=False, save_async=False) < 0.2
    folders = [tmp_path / "checkpoints" / f"step-00000{step}" for step in (2, 3, 4)]
    copied, final, waited = ((folder / shard_file(0)).read_bytes() for folder in folders)
    assert copied == final == waited


def test_a_failed_save_is_reported_at_the_next_step_and_keeps_the_old_checkpoint(
    new_writer: Callable[..., CheckpointWriter], tmp_path: Path
) -> None:
    model, optimizer = trained()
    new_writer(keep_last=1, save_async=False).save(1, model, optimizer, STATE)
    assert checkpoint_errors(tmp_path / "checkpoints" / "step-000001") == []
    (tmp_path / "checkpoints" / "step-000002").write_text("a file where the directory has to go")
    writer = new_writer(keep_last=1)
    writer.save(2, model, optimizer, STATE)
    while not writer.has_failed:
        threading.Event().wait(0.01)
    with pytest.raises(
        RunFailure, match=r"step-000002: the checkpoint could not be written.*\n.*step-000001"
    ):
        writer.finish()
    assert checkpoint_errors(tmp_path / "checkpoints" / "step-000001") == []
    assert not any(name.startswith(".writing") for name in names(tmp_path))


def test_a_file_system_that_cannot_flush_a_directory_is_a_warning(
    new_writer: Callable[..., CheckpointWriter],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flush = os.fsync
    flushed = list[str]()

    def refuse_directories(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_directories)
    warnings = list[str]()
    monkeypatch.setattr("llama_ft.runtime.log.warning", warnings.append)
    monkeypatch.setattr("llama_ft.checkpoint.writer._first_warning", threading.Lock())
    model, optimizer = trained()
    with new_writer() as writer:
        writer.save(1, model, optimizer, STATE)
        writer.save(2, model, optimizer, STATE)
    assert names(tmp_path) == {"step-000001", "step-000002"}
    assert sum("cannot flush a directory" in line for line in warnings) == 1
    assert len(flushed) == 6  # three files of each checkpoint


def test_too_little_disk_space_is_an_error_before_anything_is_written(
    new_writer: Callable[..., CheckpointWriter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained()
    writer = new_writer()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=RESERVED_BYTES))
    with pytest.raises(RunFailure, match=r"it needs 1\.0 MiB, but only 1\.0 MiB are free"):
        writer.save(1, model, optimizer, STATE)
    assert not (tmp_path / "checkpoints").exists()


def test_checkpoints_are_due_at_epochs_intervals_and_the_end(
    new_writer: Callable[..., CheckpointWriter],
) -> None:
    def due(**settings: object) -> list[bool]:
        writer = new_writer(**settings)
        steps = [(4, True, False), (4, False, True), (3, False, False), (4, False, False)]
        # the end of an epoch, of the run, the third step, none
        return [writer.is_due(*step) for step in steps]

    assert due() == [True, True, False, False]
    assert due(save_every_epoch=False, save_steps=3) == [False, True, True, False]
    assert due(save_model=False) == [False] * 4
    assert due(save_model=False, save_steps=3) == [False, True, True, False]


def test_an_asynchronous_save_writes_the_values_at_the_time_of_the_save(
    new_writer: Callable[..., CheckpointWriter], tmp_path: Path
) -> None:
    """A pipe in place of the file holds the write until somebody reads."""
    model, optimizer = trained()
    before = {f"model.{name}": p.detach().clone() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        before[f"optimizer.state.{name}.exp_avg"] = optimizer.state[parameter]["exp_avg"].clone()
    writer = new_writer()
    aside = tmp_path / "checkpoints" / ".writing-step-000001"
    aside.mkdir(parents=True)
    os.mkfifo(aside / shard_file(0))
    writer.save(1, model, optimizer, STATE)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
        optimizer.state[parameter]["exp_avg"].zero_()
    written = load((aside / shard_file(0)).read_bytes())
    with pytest.raises(RunFailure):
        writer.finish()  # a pipe cannot be synced to disk
    assert all(torch.equal(written[name], value) for name, value in before.items())


class Tied(torch.nn.Module):
    """A weight under two names, and a buffer that a state dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4, bias=False)
        self.second = torch.nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("counts", torch.zeros(3))


def test_a_tied_parameter_is_written_once_and_a_buffer_is_not(
    new_writer: Callable[..., CheckpointWriter], tmp_path: Path
) -> None:
    model = Tied()
    optimizer = build_optimizer(model, TrainConfig())
    with new_writer() as writer:
        writer.save(1, model, optimizer, STATE)
    checkpoint = Checkpoint(tmp_path / "checkpoints" / "step-000001")
    states = {f"optimizer.state.first.weight.{key}" for key in ("step", "exp_avg", "exp_avg_sq")}
    assert checkpoint.tensors.keys() == {"model.first.weight", "rng.0.cpu", *states}
    saved = model.first.weight.detach().clone()
    torch.nn.init.zeros_(model.first.weight)
    model.counts.fill_(7)
    restore_weights(checkpoint, model)
    assert torch.equal(model.second.weight, saved)
    assert model.counts.tolist() == [7, 7, 7]


def test_a_file_holds_the_appended_rows_and_missing_rows_are_an_error(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(5, 3),
        "b": torch.randn(4, 2).bfloat16(),
        "empty": torch.zeros(0, 3),
    }
    with SafetensorsFile(tmp_path / "whole", tensors) as file:
        for rows in (rows for tensor in tensors.values() for rows in tensor.split(2)):
            file.append(rows)
    loaded = load((tmp_path / "whole").read_bytes())
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    with (
        pytest.raises(ValueError, match="bytes written"),
        SafetensorsFile(tmp_path / "short", tensors) as file,
    ):
        file.append(tensors["a"])
