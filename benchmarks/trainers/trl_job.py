"""One run of a TRL trainer, in its own environment, started by torchrun for throughput.py and
preferences.py.

Ways to shard it: `accelerate` is accelerate's FSDP2, `transformers` is Transformers' own
(DistributedConfig), `ddp` keeps a whole model on every rank. On the CPU accelerate ignores its FSDP
plugin and runs DDP without a message. There, this script enables FSDP2 itself, as accelerate does
on a GPU.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `import benchmarks`

import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from peft import LoraConfig, PeftModel
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TrainerCallback
from transformers.distributed import DistributedConfig
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from benchmarks.shared.process_memory import anonymous_bytes
from benchmarks.shared.text_files import read_json_lines

TRAINERS: dict[str, tuple[Any, Any]] = {
    "sft": (SFTTrainer, SFTConfig),
    "dpo": (DPOTrainer, DPOConfig),
    "kto": (KTOTrainer, KTOConfig),
    "simpo": (CPOTrainer, CPOConfig),
    "orpo": (ORPOTrainer, ORPOConfig),
    "gkd": (GKDTrainer, GKDConfig),
}
LAYER_POLICY = "TRANSFORMER_BASED_WRAP"


def load_model(job: dict[str, Any]) -> Any:
    """fp32 where it is trained; else as the frozen weights of the other side: bf16, or
    quantized."""
    bf16 = job["precision"] != "fp32"
    quantized = job["method"] in ("8bit", "nf4")
    compute = torch.bfloat16 if bf16 else torch.float32
    settings: dict[str, Any] = {
        "dtype": torch.float32 if job["method"] == "full" or not bf16 else torch.bfloat16
    }
    if job["way"] == "transformers":
        size = int(os.environ["WORLD_SIZE"])
        settings["distributed_config"] = DistributedConfig(
            fsdp_size=size, fsdp_mixed_precision=bf16
        )
    if job["method"] == "nf4":
        # Stored as floats, the only kind of 4-bit weights that accelerate can shard.
        storage = compute if job["way"] == "accelerate" else torch.uint8
        settings["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=compute,
            bnb_4bit_quant_storage=storage,
        )
    elif job["method"] == "8bit":
        settings["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
    if quantized:
        device = f"cuda:{os.environ['LOCAL_RANK']}" if job["device"] == "cuda" else "cpu"
        settings["device_map"] = {"": device}
    return AutoModelForCausalLM.from_pretrained(
        job["model"], attn_implementation="sdpa", **settings
    )


def settings_of(job: dict[str, Any]) -> Any:
    on_cpu = job["device"] == "cpu"
    sharding: dict[str, Any] = {}
    if job["way"] == "accelerate" and not on_cpu:
        sharding = {"fsdp": True, "fsdp_config": {"version": 2, "auto_wrap_policy": LAYER_POLICY}}
    if job["trainer"] == "sft":
        sharding["packing"] = job["layout"] == "packing"
    settings = dict(
        output_dir=job["output"],
        use_cpu=on_cpu,
        # With transformers' own FSDP2 the model casts for itself; bf16 would add autocast, which is
        # slower.
        bf16=job["precision"] != "fp32" and job["way"] != "transformers",
        max_length=job["length"],
        train_sampling_strategy="sequential",
        per_device_train_batch_size=job["micro_batch"],
        gradient_accumulation_steps=job["accumulation"],
        max_steps=job["steps"],
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        weight_decay=0.0,
        optim="adamw_torch_fused",
        gradient_checkpointing=job["checkpointing"],
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_drop_last=True,
        ddp_find_unused_parameters=False,
        seed=0,
    )
    return TRAINERS[job["trainer"]][1](**{**settings, **sharding, **job["settings"]})


def shard_with_accelerate(trainer: Any, bf16: bool) -> None:
    """Have accelerate prepare the model with FSDP2 on the CPU."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy=LAYER_POLICY)
    state = trainer.accelerator.state
    if bf16:
        plugin.set_mixed_precision("bf16")
    state.fsdp_plugin = plugin
    state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    trainer.is_fsdp_enabled = True


def sharded(kind: Any, job: dict[str, Any]) -> Any:
    """Return a trainer class that accelerate shards with FSDP2, also on the CPU. It is sharded
    before the rest of the trainer is made, as on a GPU: its reference model is sharded, too."""
    if job["way"] != "accelerate" or job["device"] != "cpu":
        return kind

    class Sharded(kind):  # type: ignore[misc, valid-type]
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            shard_with_accelerate(self, job["precision"] != "fp32")

    return Sharded


def new_adapter(job: dict[str, Any]) -> LoraConfig | None:
    """Return the settings of a new adapter; None for full fine-tuning."""
    if job["method"] == "full":
        return None
    return LoraConfig(
        r=job["r"],
        lora_alpha=32,
        lora_dropout=0.0,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )


def write_and_exit(job: dict[str, Any], name: str, result: dict[str, Any]) -> NoReturn:
    """Write this rank's result and end the process."""
    Path(job["output"], f"{name}-{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # Python's own exit was seen to wait for gloo's threads forever


class Clock(TrainerCallback):
    """Notes when each step ends, its loss and its tokens."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.ends: list[float] = []
        self.losses: list[float] = []
        self.tokens: list[float] = []  # so far, of all ranks, without padding
        self.logs: list[dict[str, float]] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.ends.append(time.time())

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "loss" in logs:
            self.losses.append(float(logs["loss"]))
            self.tokens.append(float(logs.get("num_tokens", 0)))
            self.logs.append({name: float(value) for name, value in logs.items()})


def untuned_loss(trainer: Any, file: Path) -> float:
    """The mean loss over all target tokens of a file's rows, through this run's own preparation and
    batches; on every rank the same rows."""
    args = trainer.args
    rows = trainer._prepare_dataset(
        read(file), trainer.processing_class, args, args.packing, None, "check"
    )
    return mean_loss(trainer, rows)


def mean_loss(trainer: Any, rows: Any) -> float:
    """The same of rows that are tokenized. The model is in eval mode afterwards."""
    size = trainer.args.per_device_train_batch_size
    sums = torch.zeros(2, dtype=torch.float64)
    trainer.model.eval()
    with torch.no_grad():
        for first in range(0, len(rows), size):
            numbers = range(first, min(first + size, len(rows)))
            batch = trainer.data_collator([rows[number] for number in numbers])
            outputs = trainer.model(
                **trainer._prepare_inputs(batch), use_cache=False, fused_lm_head=True
            )
            sums -= torch.tensor(
                [float(outputs.log_probs.float().sum()), -float(outputs.label_mask.sum())]
            )
    return float(sums[0] / sums[1])


def read(file: Path) -> Dataset:
    rows = read_json_lines(file)
    # What all ranks read from a file has its cache there; TRL's precomputed reference needs one
    # that they share.
    return Dataset.from_json(str(file)) if "chosen" in rows[0] else Dataset.from_list(rows)


def what_it_is(model: Any) -> str:
    """How the model that is trained is really distributed."""
    if isinstance(model, DistributedDataParallel):
        return "DDP"
    units = sum(isinstance(module, FSDPModule) for module in model.modules())
    if units:
        return f"FSDP2, {units} units"
    return "one process" if dist.get_world_size() == 1 else "not distributed"


def main(job: dict[str, Any]) -> None:
    peft = None if job["adapter"] else new_adapter(job)
    before = anonymous_bytes()
    model = load_model(job)
    if job["adapter"]:
        model = PeftModel.from_pretrained(model, job["adapter"], is_trainable=True)
    clock = Clock(job["device"])
    kind, _ = TRAINERS[job["trainer"]]
    more: dict[str, Any] = {}
    if job["trainer"] == "gkd":
        more["teacher_model"] = AutoModelForCausalLM.from_pretrained(
            job["teacher"], dtype=torch.float32
        )
    trainer = sharded(kind, job)(
        model,
        args=settings_of(job),
        train_dataset=read(Path(job["rows"])),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        peft_config=peft,
        callbacks=[clock],
        **more,
    )
    if job["trainer"] == "kto":  # its KL divergence is estimated by the same completions as ours
        found = trainer.train_dataset
        answers = found["completion_ids"]
        trainer.train_dataset = found.map(lambda row: {"KL_completion_ids": answers[row["other"]]})
    untuned = untuned_loss(trainer, Path(job["check"])) if job["check"] else None
    trainer.train()
    found = {
        "untuned_loss": untuned,
        "is": what_it_is(trainer.model_wrapped),
        "ends": clock.ends,
        "losses": clock.losses,
        "tokens": clock.tokens,
        "logs": clock.logs,
        "before": {"pid": os.getpid(), "bytes": before},
        "device_peak": torch.cuda.max_memory_allocated() if job["device"] == "cuda" else 0,
    }
    write_and_exit(job, "rank", found)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
