"""Checkpoints are complete or absent, and no more are kept than asked for; a process group of one and real files."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file

from llama_ft.checkpoint import Checkpoint, CheckpointWriter, checkpoint_errors, restore_weights
from llama_ft.checkpoint import writer as writer_module
from llama_ft.checkpoint.reader import shard_file
from llama_ft.config import CheckpointConfig, TrainConfig
from llama_ft.errors import RunFailure
from llama_ft.observe.memory import memory_use, reset_peaks
from llama_ft.runtime import Runtime
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
def new_writer(runtime: Runtime, tmp_path: Path) -> Callable[..., CheckpointWriter]:
    return lambda **settings: CheckpointWriter(tmp_path, CheckpointConfig(**settings), {}, runtime)


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").iterdir()}


def test_a_checkpoint_holds_what_was_there_when_it_was_begun(
    new_writer: Callable[..., CheckpointWriter], tmp_path: Path
) -> None:
    model, optimizer = trained()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    moments = {name: optimizer.state[p]["exp_avg"].clone() for name, p in model.named_parameters()}
    with new_writer() as writer:
        writer.save(7, model, optimizer, STATE)
        torch.nn.init.zeros_(model.weight)  # training goes on
        optimizer.state[model.weight]["exp_avg"].zero_()
    file = load_file(tmp_path / "checkpoints" / "step-000007" / shard_file(0))
    for name, weight in weights.items():
        assert torch.equal(file[f"model.{name}"], weight)
        assert torch.equal(file[f"optimizer.state.{name}.exp_avg"], moments[name])
    assert json.loads((tmp_path / "checkpoints" / "step-000007" / "trainer.json").read_text())["step"] == 7


def test_frozen_parameters_are_not_written(new_writer: Callable[..., CheckpointWriter], tmp_path: Path) -> None:
    model, optimizer = trained()
    model.weight.requires_grad_(False)
    with new_writer() as writer:
        writer.save(1, model, optimizer, STATE)
    assert Checkpoint(tmp_path / "checkpoints" / "step-000001").weights().tensors.keys() == {"bias"}


def test_training_goes_on_while_a_checkpoint_is_written(
    new_writer: Callable[..., CheckpointWriter], tmp_path: Path
) -> None:
    """A pipe in the place of trainer.json blocks the writing until somebody reads."""
    model, optimizer = trained()
    aside = tmp_path / "checkpoints" / ".writing-step-000001"
    writer = new_writer()
    aside.mkdir(parents=True)
    os.mkfifo(aside / "trainer.json")
    writer.save(1, model, optimizer, STATE)  # returns
    assert names(tmp_path) == {".writing-step-000001"}
    reader = threading.Thread(target=lambda: (aside / "trainer.json").read_bytes(), daemon=True)
    reader.start()
    with pytest.raises(RunFailure, match="step-000001: the checkpoint could not be written"):
        writer.finish()  # a pipe cannot be synced to disk


def test_only_the_best_and_those_asked_for_are_kept(
    new_writer: Callable[..., CheckpointWriter], tmp_path: Path
) -> None:
    model, optimizer = trained()
    with new_writer() as writer:
        writer.save(1, model, optimizer, STATE, asked=False, best_loss=3.0)
        writer.save(2, model, optimizer, STATE, asked=True, best_loss=2.0)
        writer.save(3, model, optimizer, STATE, asked=False, best_loss=1.0)
    assert names(tmp_path) == {"step-000002", "step-000003", "best.json"}
    best = json.loads((tmp_path / "checkpoints" / "best.json").read_text())
    assert best == {"checkpoint": "step-000003", "step": 3, "eval/loss": 1.0}


def test_keep_last_spares_the_best_also_after_a_new_start(
    new_writer: Callable[..., CheckpointWriter], tmp_path: Path
) -> None:
    model, optimizer = trained()
    with new_writer(keep_last=2) as writer:
        writer.save(1, model, optimizer, STATE, best_loss=1.0)
        for step in (2, 3):
            writer.save(step, model, optimizer, STATE)
    with new_writer(keep_last=2) as writer:
        writer.save(4, model, optimizer, STATE)
    assert names(tmp_path) == {"step-000001", "step-000003", "step-000004", "best.json"}


def test_a_kill_before_best_json_was_written_is_made_good_when_the_run_goes_on(
    new_writer: Callable[..., CheckpointWriter], tmp_path: Path
) -> None:
    model, optimizer = trained()
    best = tmp_path / "checkpoints" / "best.json"
    with new_writer(keep_last=1) as writer:
        writer.save(1, model, optimizer, STATE, best_loss=2.0)
        writer.finish()
        before = best.read_text()
        writer.save(2, model, optimizer, STATE, best_loss=1.0)
    best.write_text(before)
    with new_writer(keep_last=1) as writer:
        assert json.loads(best.read_text()) == {"checkpoint": "step-000002", "step": 2, "eval/loss": 1.0}
        writer.save(3, model, optimizer, STATE)
    assert names(tmp_path) == {"step-000002", "step-000003", "best.json"}


def test_the_old_one_goes_only_when_the_new_one_is_complete(
    new_writer: Callable[..., CheckpointWriter], tmp_path: Path
) -> None:
    model, optimizer = trained()
    with new_writer(keep_last=1) as writer:
        writer.save(1, model, optimizer, STATE)
    (tmp_path / "checkpoints" / "step-000002").write_text("a file where the directory has to go")
    writer = new_writer(keep_last=1)
    writer.save(2, model, optimizer, STATE)
    with pytest.raises(RunFailure, match=r"step-000002: the checkpoint could not be written.*\n.*step-000001"):
        writer.finish()
    assert checkpoint_errors(tmp_path / "checkpoints" / "step-000001") == []
    assert not any(name.startswith(".writing") for name in names(tmp_path))


def test_a_failed_save_is_told_at_the_next_step(new_writer: Callable[..., CheckpointWriter], tmp_path: Path) -> None:
    model, optimizer = trained()
    writer = new_writer()
    (tmp_path / "checkpoints").write_text("a file where the directory has to go")
    writer.save(1, model, optimizer, STATE)
    while not writer.has_failed:
        threading.Event().wait(0.01)
    with pytest.raises(RunFailure, match="There is no earlier one"):
        writer.finish()


def test_too_little_room_is_told_before_anything_is_written(
    new_writer: Callable[..., CheckpointWriter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "SPACE_FOR_THE_REST", 2**60)  # more than any disk has
    model, optimizer = trained()
    with pytest.raises(RunFailure, match=r"needs 1,073,741,824.00 GiB, and [\d,.]+ .iB are free"):
        new_writer().save(1, model, optimizer, STATE)
    assert not (tmp_path / "checkpoints").exists()


def test_what_a_killed_save_left_is_no_checkpoint_and_goes(
    new_writer: Callable[..., CheckpointWriter], tmp_path: Path
) -> None:
    left = tmp_path / "checkpoints" / ".writing-step-000001"
    left.mkdir(parents=True)
    (left / shard_file(0)).write_bytes(b"half")
    writer = new_writer()
    assert writer.last is None and not left.exists()


def test_without_save_async_it_is_there_when_save_returns(
    new_writer: Callable[..., CheckpointWriter], tmp_path: Path
) -> None:
    model, optimizer = trained()
    new_writer(save_async=False).save(1, model, optimizer, STATE)
    assert checkpoint_errors(tmp_path / "checkpoints" / "step-000001") == []


@pytest.mark.parametrize(
    ("settings", "due"),
    [
        ({}, {"epoch", "run"}),
        ({"save_every_epoch": False}, {"run"}),
        ({"save_steps": 3}, {"epoch", "run", "third step"}),
        ({"save_model": False}, set()),
        ({"save_model": False, "save_steps": 3}, {"run", "third step"}),
    ],
)
def test_when_a_checkpoint_is_due(
    new_writer: Callable[..., CheckpointWriter], settings: dict[str, object], due: set[str]
) -> None:
    writer = new_writer(**settings)
    asked = {
        "epoch": writer.is_due(4, ends_epoch=True, ends_run=False),
        "run": writer.is_due(4, ends_epoch=False, ends_run=True),
        "third step": writer.is_due(3, ends_epoch=False, ends_run=False),
    }
    assert {name for name, is_due in asked.items() if is_due} == due
    assert not writer.is_due(4, ends_epoch=False, ends_run=False)


def test_what_is_written_late_are_the_values_of_the_moment_of_the_save(
    new_writer: Callable[..., CheckpointWriter], tmp_path: Path
) -> None:
    """A pipe in the place of the file holds the write until somebody reads."""
    model, optimizer = trained()
    before = {f"model.{name}": p.detach().clone() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        before[f"optimizer.state.{name}.exp_avg"] = optimizer.state[parameter]["exp_avg"].clone()
    writer, aside = new_writer(), tmp_path / "checkpoints" / ".writing-step-000001"
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
        self.first, self.second = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
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
    assert torch.equal(model.second.weight, saved) and model.counts.tolist() == [7, 7, 7]


def test_writing_takes_no_memory_beside_the_copies(new_writer: Callable[..., CheckpointWriter]) -> None:
    model = torch.nn.Linear(4096, 8192, bias=False)
    nbytes = model.weight.nbytes  # 128 MiB; SGD without momentum has no states
    optimizer = build_optimizer(model, TrainConfig(optimizer="SGD"))
    writer = new_writer()
    reset_peaks(torch.device("cpu"))
    before = memory_use(torch.device("cpu")).resident_peak
    writer.save(1, model, optimizer, STATE)
    writer.finish()
    assert memory_use(torch.device("cpu")).resident_peak - before < nbytes + 2**26
