"""Takes the gradients of adapters of experts as the recipe does, and saves them, case by case."""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "recipes"))
import finetuning

from llama_ft import data, models, runtime, training
from llama_ft.config import CheckpointConfig, load
from llama_ft.export import export_adapter
from llama_ft.phases import NULL_MONITOR
from llama_ft.training.train_state import LossScale

FLAGS = [
    "--precision", "fp32", "--device", "cpu", "--enable_fsdp", "--dataset", "demo",
    "--batch_size_training", "1", "--min_num_params", "1000", "--use_peft",
]  # fmt: skip

if __name__ == "__main__":
    work = Path(sys.argv[1]).parent
    tokenizer = models.load_tokenizer(work / "tokenizer", False)
    samples = torch.load(work / "samples.pt", weights_only=True).tolist()
    for name, flags in json.loads((work / "cases.json").read_text()).items():
        config, _ = load(FLAGS + flags, finetuning.DEMO_CONFIG)
        with runtime.start("cpu", models.shard_degree(config.fsdp)) as ranks:
            folder = Path(config.model.model_name)
            model_config = models.load_model_config(folder, False)
            request = models.ModelRequest(config, folder, model_config)
            built = finetuning.build_model(request, ranks, NULL_MONITOR)
            own = samples[ranks.rank :: ranks.world_size]
            rows = Dataset.from_dict(
                {
                    "input_ids": own,
                    "labels": own,
                    "source": [name] * len(own),
                    "desirable": [None] * len(own),
                }
            )
            batches = [data.collate(rows, [number], 0, True) for number in range(len(own))]
            targets = sum(len(sample) - 1 for sample in samples)
            built.model.train()
            objective = training.SupervisedFineTuning()
            step = data.StepBatches(batches=batches, target_tokens=targets, samples=len(batches))
            loop = training.LoopState(config, LossScale(1.0), ranks.device)
            for batch in training.micro_batches(built, step, loop, ranks):
                (objective.loss(built, batch, ranks).loss / targets).backward()
            assert built.adapter is not None
            gradients = {}
            for parameter_name, key in built.adapter.keys.items():
                gradient = built.model.get_parameter(parameter_name).grad
                whole = getattr(gradient, "full_tensor", lambda gradient=gradient: gradient)
                gradients[key] = whole()
            result = work / "results" / str(ranks.world_size) / name
            export_adapter(built, result / "model", CheckpointConfig(), tokenizer, str, ranks)
            if ranks.is_main:
                torch.save(gradients, result / "gradients.pt")
