"""One run of torchtune's distributed recipe, in its own environment, started by torchrun for
benchmarks/trainers/throughput.py.

torchtune keeps all weights and optimizer states in one dtype: with bf16_mixed it runs everything in
bf16.
"""

import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `import benchmarks`

import torch
import torch.distributed as dist
import torchtune
from omegaconf import OmegaConf
from torch.distributed.fsdp import FSDPModule
from torchtune import training

from benchmarks.shared.text_files import read_json_lines


class StepLog:
    """Takes the time when the recipe logs. (What it logs as the loss is with LoRA that of rank 0's
    rows.)"""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def log_config(self, config: Any) -> None:
        pass

    def log_dict(self, payload: dict[str, Any], step: int) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.time())

    def close(self) -> None:
        pass


class Rows(torch.utils.data.Dataset[Any]):
    """Tokenized rows of a file, under torchtune's names."""

    def __init__(self, tokenizer: Any, file: str) -> None:
        self.rows = read_json_lines(file)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        row = self.rows[number]
        return {"tokens": row["input_ids"], "labels": row["labels"]}


class Tokenizer:
    """What the recipe asks of one: nothing is tokenized."""

    def __init__(self, pad: int) -> None:
        self.pad_id = pad


def configuration(job: dict[str, Any]) -> Any:
    shapes = json.loads(Path(job["model"], "config.json").read_text())
    rope = shapes.get("rope_parameters") or shapes
    model = {
        "_component_": "torchtune.models.llama3.llama3",
        "vocab_size": shapes["vocab_size"],
        "num_layers": shapes["num_hidden_layers"],
        "num_heads": shapes["num_attention_heads"],
        "num_kv_heads": shapes["num_key_value_heads"],
        "embed_dim": shapes["hidden_size"],
        "intermediate_dim": shapes["intermediate_size"],
        "max_seq_len": job["length"],
        "norm_eps": shapes["rms_norm_eps"],
        "rope_base": rope["rope_theta"],
    }
    if job["method"] == "lora":
        model |= {
            "_component_": "torchtune.models.llama3.lora_llama3",
            "lora_rank": job["r"],
            "lora_alpha": 32,
        }
        model |= {
            "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
            "apply_lora_to_mlp": True,
        }
    files = sorted(path.name for path in Path(job["model"]).glob("*.safetensors"))
    checkpointer = {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": job["model"],
        "checkpoint_files": files,
        "output_dir": job["output"],
        "model_type": "LLAMA3",
    }
    return OmegaConf.create(
        {
            "output_dir": job["output"],
            "tokenizer": {
                "_component_": "__main__.Tokenizer",
                "pad": shapes.get("pad_token_id") or 0,
            },
            "model": model,
            "checkpointer": checkpointer,
            "resume_from_checkpoint": False,
            "save_adapter_weights_only": True,
            "dataset": {"_component_": "__main__.Rows", "file": job["rows"]},
            "seed": 0,
            "shuffle": False,
            "batch_size": job["micro_batch"],
            "optimizer": {
                "_component_": "torch.optim.AdamW",
                "fused": True,
                "weight_decay": 0.0,
                "lr": job["lr"],
            },
            "lr_scheduler": {
                "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
                "num_warmup_steps": 0,
                "num_cycles": 0.0,  # a constant
            },
            "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
            "epochs": 1,
            "max_steps_per_epoch": job["steps"],
            "gradient_accumulation_steps": 1,
            "clip_grad_norm": 1.0,
            "compile": False,
            "metric_logger": {"_component_": "__main__.StepLog"},
            "log_every_n_steps": 1,
            "device": job["device"],
            "dtype": "fp32" if job["precision"] == "fp32" else "bf16",
            "enable_activation_checkpointing": job["checkpointing"],
        }
    )


def main(job: dict[str, Any]) -> None:
    config = configuration(job)
    full = job["method"] == "full"
    if job["device"] == "cpu":  # it refuses to read a GPU's memory there, and reads it all the same
        training.get_memory_stats = lambda device: {}
        training.log_memory_stats = lambda *_, **__: None
        training.cleanup_before_training = lambda: None
    # The recipes are scripts next to the package and cannot be imported from it.
    script = (
        Path(torchtune.__file__).parent.parent
        / "recipes"
        / f"{job['method']}_finetune_distributed.py"
    )
    name = "FullFinetuneRecipeDistributed" if full else "LoRAFinetuneRecipeDistributed"
    # the other one does so itself; without it, this one has every rank train on the same rows
    if not full:
        dist.init_process_group(training.get_distributed_backend(job["device"]))
    recipe = runpy.run_path(str(script))[name](config)
    recipe.setup(config)
    if full:
        recipe._checkpoint_client.save_checkpoint = lambda **_: None
    else:
        recipe.save_checkpoint = lambda *_, **__: None
    losses = list[torch.Tensor]()
    recipe._loss_fn.register_forward_hook(lambda _, __, loss: losses.append(loss.detach().float()))
    recipe.train()
    ranks = dist.get_world_size()
    rank = dist.get_rank()
    log = recipe._metric_logger if rank == 0 else StepLog()
    tokens = job["length"] * job["micro_batch"] * ranks
    mean = torch.stack(losses)
    dist.all_reduce(mean)  # rows are of one length: every rank's mean counts the same
    units = sum(isinstance(module, FSDPModule) for module in recipe._model.modules())
    found = {
        "is": f"FSDP2, {units} units, all in {config.dtype}",
        "ends": log.ends,
        "losses": (mean / ranks).tolist(),
        "tokens": [tokens * (step + 1) for step in range(len(log.ends))],
        "device_peak": torch.cuda.max_memory_allocated() if job["device"] == "cuda" else 0,
    }
    Path(job["output"], f"rank-{rank}.json").write_text(json.dumps(found))
    recipe.cleanup()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
