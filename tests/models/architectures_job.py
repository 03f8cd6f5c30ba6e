"""Loads models as the recipe does, takes a training step and exports the result; saves what was
seen, case by case."""

import json
import sys
import time
from functools import partial
from pathlib import Path

import torch
from datasets import Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))
import finetuning

from llama_ft import data, models, runtime, training
from llama_ft.config import CheckpointConfig, load
from llama_ft.export import export_adapter, export_model, write_model_card
from llama_ft.models.sharding.fsdp import free_unsharded
from llama_ft.phases import NULL_MONITOR
from llama_ft.training.train_state import LossScale

LENGTHS = [[24, 16], [20, 12]]  # samples per rank: one packed sequence, or a padded batch

if __name__ == "__main__":
    work = Path(sys.argv[1]).parent
    tokenizer = models.load_tokenizer(work / "tokenizer", False)
    tokens = torch.load(work / "tokens.pt", weights_only=True)  # [ranks, positions]
    targets = sum(length - 1 for lengths in LENGTHS for length in lengths)
    for name, flags in json.loads((work / "cases.json").read_text()).items():
        started = time.monotonic()
        settings = [
            "--batch_size_training",
            "1",
            "--precision",
            "fp32",
            "--device",
            "cpu",
            "--enable_fsdp",
        ]
        settings += [
            "--dataset",
            "demo",
            *([] if "--min_num_params" in flags else ["--min_num_params", "1000"]),
        ]
        config, _ = load(settings + flags, finetuning.DEMO_CONFIG)
        with runtime.start("cpu", models.shard_degree(config.fsdp)) as ranks:
            folder = Path(config.model.model_name)
            result = work / "results" / name
            model_config = models.load_model_config(folder, False)
            request = models.ModelRequest(config, folder, model_config)
            built = finetuning.build_model(request, ranks, NULL_MONITOR)
            model = built.model
            lengths = LENGTHS[ranks.rank]
            parts = [part.tolist() for part in tokens[ranks.rank][: sum(lengths)].split(lengths)]
            own = Dataset.from_dict(
                {"input_ids": parts, "labels": parts, "source": [name] * 2, "desirable": [None] * 2}
            )
            is_packed = config.data.batching_strategy == "packing"
            batch = data.collate(own, range(len(lengths)), 0, is_packed)
            # each architecture once
            if is_packed and not config.peft.use_peft and config.fsdp.low_cpu_fsdp:
                built.has_chunked_loss = training.check_packing(
                    built, own, 256, torch.float32, ranks
                )
            optimizer = training.build_optimizer(model, config.train)
            model.train()
            objective = training.SupervisedFineTuning()
            step = data.StepBatches(batches=[batch], target_tokens=targets, samples=len(lengths))
            loop = training.LoopState(config, LossScale(1.0), ranks.device)
            training.set_learning_rate(optimizer, 1e-2)
            outcome = finetuning.train_step(built, objective, optimizer, step, loop, ranks)
            loss, norm = outcome.read()
            logged = outcome.logged()
            model.eval()
            with torch.no_grad():
                logits = model(input_ids=tokens, use_cache=False).logits
            free_unsharded(model)
            card = partial(write_model_card, base_model=config.model.model_name)
            is_whole = built.adapter is None
            export = export_model if is_whole else export_adapter
            sizes = CheckpointConfig(max_shard_size="60KB")
            export(built, result / "model", sizes, tokenizer, card, ranks)
            if ranks.is_main:
                torch.save(
                    {"loss": loss, "norm": norm, "logged": logged, "logits": logits},
                    result / "seen.pt",
                )
                print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)
