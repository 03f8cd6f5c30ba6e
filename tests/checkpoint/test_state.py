"""What is put back: only what fits, without a step of the optimizer, and no file is kept."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from llama_ft.checkpoint import Checkpoint, CheckpointWriter, complete_checkpoints, restore
from llama_ft.config import CheckpointConfig, TrainConfig
from llama_ft.errors import UserError
from llama_ft.models import BuiltModel
from llama_ft.models.computing.activation_checkpointing import checkpoint_activations
from llama_ft.models.computing.compiled import compile_layers
from llama_ft.runtime import Ranks
from llama_ft.training import build_optimizer

OPTIMIZERS = {
    "AdamW": TrainConfig(optimizer="AdamW"),
    "AdamW8bit": TrainConfig(optimizer="AdamW8bit"),
    "anyprecision": TrainConfig(optimizer="anyprecision"),
    "Adafactor": TrainConfig(optimizer="Adafactor"),
    "momentum": TrainConfig(optimizer="SGD", momentum=0.9),
}
Save = Callable[[torch.nn.Module, torch.optim.Optimizer, TrainConfig], Checkpoint]


@pytest.fixture
def save(runtime: Ranks, tmp_path: Path) -> Save:
    """Write a checkpoint of a model and its optimizer, and open it."""

    def save(
        model: torch.nn.Module, optimizer: torch.optim.Optimizer, train: TrainConfig
    ) -> Checkpoint:
        about = {"config": {"train": dataclasses.asdict(train)}, "versions": {}}
        with CheckpointWriter(tmp_path, CheckpointConfig(), about, runtime) as writer:
            writer.save(1, model, optimizer, {})
        return Checkpoint(complete_checkpoints(tmp_path)[0])

    return save


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 96)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_neither_saving_nor_restoring_makes_a_step(
    save: Save, runtime: Ranks, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """torch's utilities make one where an optimizer has no states."""
    train = OPTIMIZERS[name]
    model = torch.nn.Linear(96, 64)
    optimizer = build_optimizer(model, train)
    monkeypatch.setattr(type(optimizer), "step", lambda *_, **__: pytest.fail("a hidden step"))
    checkpoint = save(model, optimizer, train)
    fresh = build_optimizer(model, train)
    restore(checkpoint, model, fresh, runtime)
    monkeypatch.undo()
    assert all(parameter.grad is None for parameter in model.parameters())
    counters = [state["step"].item() for state in fresh.state.values() if "step" in state]
    assert counters == ([] if train.optimizer == "SGD" else [0, 0])


def test_restored_optimizers_have_the_settings_of_the_new_run(save: Save, runtime: Ranks) -> None:
    train = TrainConfig(lr=1e-3, weight_decay=0.5)
    model = torch.nn.Linear(96, 64)
    optimizer = build_optimizer(model, train)
    step(model, optimizer)
    checkpoint = save(model, optimizer, train)
    fresh = build_optimizer(model, TrainConfig(lr=2e-5, weight_decay=0.25))
    restore(checkpoint, model, fresh, runtime)
    assert [(group["lr"], group["weight_decay"]) for group in fresh.param_groups] == [
        (2e-5, 0.25),
        (2e-5, 0.0),
    ]
    assert torch.equal(
        fresh.state[model.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"]
    )


def test_compiled_and_checkpointed_layers_are_saved_under_their_usual_names(
    save: Save, runtime: Ranks, tied_model: Path
) -> None:
    from transformers import AutoModelForCausalLM

    train = TrainConfig(activation_checkpointing="full")
    model = AutoModelForCausalLM.from_pretrained(tied_model)
    names = [name for name, _ in model.named_parameters()]
    checkpoint_activations(BuiltModel(model), train)
    compile_layers(BuiltModel(model), backend="eager")
    optimizer = build_optimizer(model, train)
    ids = torch.arange(12).view(1, 12)
    model.train()(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    checkpoint = save(model, optimizer, train)
    assert set(checkpoint.weights().tensors) == set(names)
    trained = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    fresh = build_optimizer(model, train)
    restore(checkpoint, model, fresh, runtime)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, trained[name])
        assert torch.equal(fresh.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])


STATE = "optimizer.state.weight.exp_avg"
UNFIT: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "codes": (
        lambda tensors: tensors.update({STATE: tensors[STATE].byte()}),
        r"\(64, 96\) torch.uint8 saved, \(64, 96\) needed",
    ),
    "weight": (lambda tensors: tensors.pop("model.bias"), r"bias: absent saved, \(64,\) needed"),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_tensors_that_do_not_fit_are_an_error_before_anything_is_read(
    save: Save, runtime: Ranks, kind: str
) -> None:
    train = TrainConfig()
    model = torch.nn.Linear(96, 64)
    change, message = UNFIT[kind]
    checkpoint = save(model, build_optimizer(model, train), train)
    (file,) = checkpoint.folder.glob("*.safetensors")
    metadata = safe_open(file, "pt").metadata()
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata)
    torch.nn.init.zeros_(model.weight)
    with pytest.raises(UserError, match=message):
        restore(Checkpoint(checkpoint.folder), model, build_optimizer(model, train), runtime)
    assert not model.weight.any()


def test_deleting_a_restored_checkpoint_frees_its_disk_space(
    save: Save, runtime: Ranks, tmp_path: Path
) -> None:
    train = TrainConfig()
    model = torch.nn.Linear(96, 64)
    checkpoint = save(model, build_optimizer(model, train), train)
    restore(checkpoint, model, build_optimizer(model, train), runtime)
    assert checkpoint.weights().read("weight").shape == (64, 96)
    mapped = Path("/proc/self/maps").read_text()
    opened = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [line for line in [*mapped.splitlines(), *opened] if str(checkpoint.folder) in line]
