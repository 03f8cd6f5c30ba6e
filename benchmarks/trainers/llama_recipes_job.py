"""One run of llama-recipes' (now llama-cookbook's) finetuning.py, started by torchrun for
benchmarks/trainers/throughput.py, in its own environment. It uses FSDP1 and keeps all weights and optimizer
states in bf16. It trains on GPUs only."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `import benchmarks`

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DistributedSampler

from benchmarks.shared.text_files import read_json_lines

ROWS = "THROUGHPUT_ROWS"


def rows(dataset_config: Any, tokenizer: Any, split: str) -> list[dict[str, Any]]:
    """What --custom_dataset.file names: tokenized rows."""
    found = read_json_lines(os.environ[ROWS])
    return [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in found]


class RowsInOrder(DistributedSampler[Any]):
    """The order of the file, for the same rows in each step as on the other side."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **{**named, "shuffle": False})


def flags_of(job: dict[str, Any]) -> dict[str, Any]:
    if job["precision"] == "fp32":
        raise ValueError("llama-recipes loads every model in bf16")
    flags = {
        "model_name": job["model"],
        "output_dir": job["output"],
        "dataset": "custom_dataset",
        "custom_dataset.file": f"{Path(__file__).resolve()}:rows",
        "enable_fsdp": int(os.environ["WORLD_SIZE"]) > 1,
        "fsdp_activation_checkpointing": job["checkpointing"],
        "use_fast_kernels": True,
        "batching_strategy": "packing",
        "context_length": job["length"],
        "batch_size_training": job["micro_batch"],
        "gradient_clipping": True,
        "lr": job["lr"],
        "num_epochs": 1,
        "max_train_step": job["steps"],
        "run_validation": False,
        "save_model": False,
    }
    if job["method"] == "lora":
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        flags |= {"use_peft": True, "lora_config.r": job["r"], "lora_config.lora_dropout": 0.0}
        flags["lora_config.target_modules"] = targets
    return flags


def main(job: dict[str, Any]) -> None:
    os.environ[ROWS] = job["rows"]
    torch.utils.data.DistributedSampler = RowsInOrder  # type: ignore[misc]
    from llama_cookbook.finetuning import main as finetune

    ends = list[float]()
    losses = list[float]()

    def step_done(*_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        ends.append(time.time())

    def seen(module: Any, given: Any, output: Any) -> None:
        if (
            module.training
            and getattr(output, "loss", None) is not None
            and hasattr(module, "lm_head")
        ):
            losses.append(float(output.loss.detach()))

    register_optimizer_step_post_hook(step_done)
    torch.nn.modules.module.register_module_forward_hook(seen)
    finetune(**flags_of(job))
    ranks = int(os.environ["WORLD_SIZE"])
    rank = int(os.environ["RANK"])
    mean = torch.tensor(losses[: len(ends)], device=job["device"])
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean /= ranks
    tokens = job["length"] * job["micro_batch"] * ranks
    found = {
        "is": "FSDP1, all in bf16" if ranks > 1 else "one process, all in bf16",
        "ends": ends,
        "losses": mean.tolist(),
        "tokens": [tokens * (step + 1) for step in range(len(ends))],
        "device_peak": torch.cuda.max_memory_allocated() if job["device"] == "cuda" else 0,
    }
    Path(job["output"], f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
