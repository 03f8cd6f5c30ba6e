"""The gradients of one optimizer step of the recipe, whose ranks share packed sequences. Arguments: a
directory with cases.json and for the results, how many ranks share a sequence, and perhaps how many
share one copy of the model."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
from forked import REPOSITORY
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoTokenizer

from llama_ft import models, runtime, training
from llama_ft.config.reading.load import load
from llama_ft.data import IGNORED, Batch, StepBatches
from llama_ft.phases import NULL_MONITOR
from llama_ft.training.objectives.reference import StoredReference
from llama_ft.training.train_state import LossScale

VOCABULARY = 301
OFFLOAD = "--fsdp_cpu_offload"  # the settings allow it on GPUs only
# Each list is a micro-batch. Filled up to a multiple of 2 or 4, every cut is inside a sample.
LENGTHS = ([37, 20, 2, 41, 30, 25], [90, 66], [53, 31, 44, 70], [129, 8])
LABELED = (
    300,
    60,
    300,
    140,
)  # no token after these is in the loss: some ranks have none of the second


def make_batches() -> list[Batch]:
    """The micro-batches of a step. If samples are pairs, neighbors are chosen and rejected."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for lengths, labeled in zip(LENGTHS, LABELED, strict=True):
        ids = torch.randint(3, VOCABULARY, (1, sum(lengths)), generator=generator)
        labels = ids.clone()
        labels[:, labeled:] = IGNORED
        for start in torch.tensor([0, *lengths[:-1]]).cumsum(0).tolist():
            labels[:, start : start + 1 + start % 5] = IGNORED
        count = len(lengths)
        desirable: list[bool | None] = [None] * count
        desirable[::2] = [number % 4 == 0 for number in range(0, count, 2)]
        batches.append(
            Batch(ids, labels, lengths, True, [f"row {n}" for n in range(count)], desirable)
        )
    return batches


class Recorded(torch.optim.SGD):
    """Keeps whole gradients where an optimizer would use them."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.0)
        self.gradients: dict[str, torch.Tensor] = {}
        self._model = model

    def step(self, closure: Any = None) -> None:
        for name, parameter in self._model.named_parameters():
            gradient = parameter.grad
            if gradient is not None:
                whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                self.gradients[name] = whole.cpu().clone()


def load_recipe() -> Any:
    """Return recipes/finetuning.py as a module."""
    file = REPOSITORY / "recipes" / "finetuning.py"
    spec = importlib.util.spec_from_file_location("finetuning", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compute(finetuning: Any, flags: list[str], ranks: runtime.Ranks) -> dict[str, Any]:
    """The loss, the logged numbers and all gradients of a step."""
    config, _ = load([flag for flag in flags if flag != OFFLOAD])
    config.fsdp.fsdp_cpu_offload = OFFLOAD in flags
    folder = Path(config.model.model_name)
    model_config = AutoConfig.from_pretrained(folder)
    objective = training.build_objective(config)
    models.choose_head(model_config, config.preference.entry.has_score)
    objective.prepare_model(model_config, AutoTokenizer.from_pretrained(folder), VOCABULARY)
    torch.manual_seed(0)
    request = models.ModelRequest(config, folder, model_config)
    built = finetuning.build_model(request, ranks, NULL_MONITOR)
    with torch.no_grad():  # an adapter whose B is 0 has no gradient in A
        for name, parameter in built.model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.02)
    batches = make_batches()
    reference = getattr(objective, "reference", None)
    own = batches[ranks.data.rank :: ranks.data.size]
    if isinstance(reference, StoredReference):
        reference.compute(built, own, ranks)
        reference._sums = reference._sums - 1  # of a policy that has changed
    first_pass = objective.first_pass(config)
    if config.preference.objective == "distill":
        assert first_pass is not None
        first_pass.fill_for_plan()
    built.model.train()
    targets = sum(batch.target_tokens for batch in batches)
    samples = sum(len(batch.locations) for batch in batches) // objective.examples_per_sample
    step = StepBatches(batches=own, target_tokens=targets, samples=samples)
    optimizer = Recorded(built.model)
    loop = training.LoopState(config, LossScale(1.0), ranks.device)
    outcome = finetuning.train_step(built, objective, optimizer, step, loop, ranks)
    loss, norm = outcome.read()
    return {
        "loss": loss,
        "norm": norm,
        "logged": outcome.logged(),
        "gradients": optimizer.gradients,
    }


if __name__ == "__main__":
    out = Path(sys.argv[1])
    size = int(sys.argv[2])
    degree: Any = int(sys.argv[3]) if len(sys.argv) > 3 else "world"
    launch = " ".join(sys.argv[2:])
    finetuning = load_recipe()
    with runtime.start("cpu", degree, sequence_size=size) as ranks:
        for name, flags in json.loads((out / "cases.json").read_text()).items():
            result = compute(finetuning, flags, ranks)
            if ranks.is_main:
                torch.save(result, out / f"{name}, {ranks.world_size} ranks, {launch}.pt")
