"""Trains a sharded model for three steps and saves its logits, a checkpoint and the exported
result, case by case."""

import json
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))
import finetuning

from llama_ft import checkpoint, models, runtime, training
from llama_ft.config import (
    CheckpointConfig,
    Config,
    FSDPConfig,
    ModelConfig,
    PeftConfig,
    TrainConfig,
)
from llama_ft.data import Batch, StepBatches
from llama_ft.export import export_adapter, export_model, write_model_card
from llama_ft.models.base.shards import local_shard
from llama_ft.models.sharding.fsdp import free_unsharded
from llama_ft.training.train_state import LossScale


def write_card(result: Path, aside: Path) -> None:
    assert not result.exists(), "it would stand there without its card"
    write_model_card(aside, "meta-llama/Llama-3.1-8B")


if __name__ == "__main__":
    cases = json.loads(Path(sys.argv[1]).read_text())
    out = Path(sys.argv[1]).parent
    ids = torch.arange(60).view(2, 30) * 5
    batch = Batch(ids, ids, [30, 30], False, ["a", "b"])
    for name, case in cases.items():
        with runtime.start("cpu", case.get("shards", "world")) as ranks:
            folder = Path(case["model"])
            precision = runtime.PRECISIONS[case.get("precision", "fp32")]
            tokenizer = models.load_tokenizer(folder, False)
            model_config = models.load_model_config(folder, False)
            settings = ModelConfig(model_name=str(folder))
            built = models.build_on_meta(model_config, settings, folder=folder)
            model = built.model
            peft = PeftConfig(**case["peft"])
            if peft.use_peft:
                built.adapter = models.inject_lora(built, peft, str(folder))
            models.freeze_first_layers(model, case.get("frozen_layers", 0))
            models.set_storage_dtypes(model, precision)
            models.apply_fsdp(
                built, ranks.mesh, FSDPConfig(enable_fsdp=True, min_num_params=1000), precision
            )
            how = models.LoadSettings(peft, 0, precision.frozen, scatter=True)
            built.stored = models.load_weights(built, ranks, how)
            optimizer = training.build_optimizer(model, TrainConfig(lr=1e-2))
            objective = training.SupervisedFineTuning()
            loop = training.LoopState(Config(), LossScale(1.0), ranks.device)
            targets = 58 * ranks.world_size
            step = StepBatches(batches=[batch], target_tokens=targets, samples=2)
            model.train()
            for _ in range(3):
                finetuning.train_step(built, objective, optimizer, step, loop, ranks)

            target = out / name
            target.mkdir(exist_ok=True)
            writer = checkpoint.CheckpointWriter(target, CheckpointConfig(), {}, ranks)
            writer.save(3, model, optimizer, {"epoch": 0.5})
            model.eval()
            with torch.no_grad():
                logits = model(input_ids=ids, use_cache=False).logits
            free_unsharded(model)
            saving = CheckpointConfig(save_dtype=case["dtype"] or "auto", max_shard_size="60KB")
            card = partial(write_card, target / "model")
            is_whole = built.adapter is None
            export = export_model if is_whole else export_adapter
            export(built, target / "model", saving, tokenizer, card, ranks)

            # Spoil the trained weights, then take them back from the checkpoint.
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        local_shard(parameter).fill_(0.123)
            writer.finish()
            checkpoint.restore_weights(checkpoint.Checkpoint(writer.last), model)
            with torch.no_grad():
                again = model(input_ids=ids, use_cache=False).logits
            if ranks.is_main:
                torch.save(
                    {"ids": ids, "logits": logits, "from checkpoint": again}, target / "logits.pt"
                )
