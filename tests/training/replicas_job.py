"""LoRA with data parallelism: steps on batches shared out over the ranks, through a checkpoint in
the middle. Arguments: a directory for the results and the checkpoints."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from tiny_llama import tiny_llama

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))
import finetuning

from llama_ft import checkpoint, runtime, training
from llama_ft.config import CheckpointConfig, Config, FSDPConfig, PeftConfig, TrainConfig
from llama_ft.data import IGNORED, Batch, StepBatches
from llama_ft.models import BuiltModel, apply_fsdp, set_storage_dtypes
from llama_ft.models.adapters.lora_linear import use_fused_lora
from llama_ft.training.objectives.sft import SupervisedFineTuning
from llama_ft.training.train_state import LossScale

STEPS = 4  # the checkpoint is after half of them
MICRO_BATCHES = 8  # of all ranks in a step
LENGTH = 12

CASES = ("fp32", "bf16_mixed", "bf16_pure")


def settings(precision: str) -> TrainConfig:
    return TrainConfig(
        precision=precision,
        lr=1e-2,
        weight_decay=0.1,
        adam_epsilon=1e-2,  # else a gradient that is almost 0 moves a weight as far as any other
        gradient_clipping=True,
        gradient_clipping_threshold=0.05,
    )


def build(precision: str, ranks: runtime.Ranks) -> tuple[BuiltModel, torch.optim.Optimizer]:
    """Always the same model with an adapter, as the recipe makes it, and its optimizer."""
    model = tiny_llama(num_hidden_layers=3, vocab_size=50)
    inject_adapter_in_model(
        LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False), model
    )
    use_fused_lora(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    dtypes = runtime.PRECISIONS[precision]
    set_storage_dtypes(model, dtypes)
    built = BuiltModel(model)
    fsdp = FSDPConfig(enable_fsdp=True, sharding_strategy="NO_SHARD")

    built.sharding = apply_fsdp(built, ranks.mesh, fsdp, dtypes)
    return built, training.build_optimizer(model, settings(precision))


def batches(step: int, ranks: runtime.Ranks) -> list[Batch]:
    """This rank's micro-batches of a step, with different numbers of loss tokens."""
    found = []
    for number in range(ranks.rank, MICRO_BATCHES, ranks.world_size):
        generator = torch.Generator().manual_seed(step * MICRO_BATCHES + number)
        ids = torch.randint(0, 50, (2, LENGTH), generator=generator)
        labels = ids.clone()
        labels[:, : number % 4 + 1] = IGNORED
        found.append(Batch(ids, labels, [LENGTH] * 2, False, [""] * 2, [True] * 2))
    return found


def train(
    built: BuiltModel,
    optimizer: torch.optim.Optimizer,
    precision: str,
    steps: range,
    ranks: runtime.Ranks,
    reduce_last_only: bool = True,
) -> list[tuple[float, float]]:
    """Train for `steps`. Return the loss and the gradient norm of each."""
    config = Config(train=settings(precision), peft=PeftConfig(use_peft=reduce_last_only))
    loop = training.LoopState(config, LossScale(1.0), ranks.device)
    objective = SupervisedFineTuning()
    built.model.train()
    results = []
    for step in steps:
        mine = batches(step, ranks)
        count = round(ranks.all_gather_floats(sum(b.target_tokens for b in mine)).sum().item())
        batches_of_step = StepBatches(batches=mine, target_tokens=count, samples=len(mine))
        outcome = finetuning.train_step(built, objective, optimizer, batches_of_step, loop, ranks)
        results.append(outcome.read())
    return results


def adapters(built: BuiltModel) -> dict[str, torch.Tensor]:
    return {
        name: parameter.detach().clone()
        for name, parameter in built.model.named_parameters()
        if parameter.requires_grad
    }


def run(precision: str, folder: Path, ranks: runtime.Ranks) -> dict[str, object]:
    """Train a case, save it in the middle, and train its second half again from there."""
    folder.mkdir(exist_ok=True)
    built, optimizer = build(precision, ranks)
    numbers = train(built, optimizer, precision, range(STEPS // 2), ranks)
    about = {"config": {}}
    with checkpoint.CheckpointWriter(folder, CheckpointConfig(), about, ranks) as writer:
        writer.save(STEPS // 2, built.model, optimizer, {})
    numbers += train(built, optimizer, precision, range(STEPS // 2, STEPS), ranks)
    return {"numbers": numbers, "end": adapters(built), "again": resume(precision, folder, ranks)}


def resume(precision: str, folder: Path, ranks: runtime.Ranks) -> dict[str, torch.Tensor]:
    """Train the second half from a checkpoint of `run`, by any number of ranks."""
    built, optimizer = build(precision, ranks)
    saved = checkpoint.Checkpoint(folder / "checkpoints" / f"step-{STEPS // 2:06d}")
    checkpoint.restore(saved, built.model, optimizer, ranks)
    train(built, optimizer, precision, range(STEPS // 2, STEPS), ranks)
    return adapters(built)


if __name__ == "__main__":
    out = Path(sys.argv[1])
    with runtime.start("cpu", 1) as ranks:
        for precision in CASES:
            result = run(precision, out / precision, ranks)
            everyone: list[object] = [None] * ranks.world_size
            dist.all_gather_object(everyone, result["end"])
            if ranks.is_main:
                torch.save({**result, "copies": everyone}, out / f"{precision}.pt")
