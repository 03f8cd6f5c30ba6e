"""One run of TRL's GRPOTrainer for grpo_curves.py and grpo_kill.py, in TRL's environment.

It saves its adapter, and writes the rewards, the tokens of answers and the seconds of its steps into
result.json.
"""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def read_prompts(file: str) -> Dataset:
    """Return chats without their last message, and each whole sample with each."""
    samples = [json.loads(line) for line in Path(file).read_text().splitlines()]
    rows = [{"prompt": one["messages"][:-1], "sample": json.dumps(one)} for one in samples]
    return Dataset.from_list(rows)


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(job["threads"])
    spec = importlib.util.spec_from_file_location("rewards", job["reward"])
    assert spec is not None and spec.loader is not None
    rewards = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rewards)

    def reward(prompts: Any, completions: Any, sample: list[str], **_: Any) -> list[float]:
        totals = []
        for answer, text in zip(completions, sample, strict=True):
            totals.append(sum(rewards.reward("", answer[0]["content"], json.loads(text)).values()))
        return totals

    settings = GRPOConfig(
        output_dir=job["output"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=job["micro_batch"],
        gradient_accumulation_steps=job["answers"] // job["micro_batch"],
        num_generations=job["num_generations"],
        max_completion_length=job["longest"],
        max_steps=job["steps"],
        learning_rate=job["lr"],
        lr_scheduler_type="cosine",
        weight_decay=0.0,
        max_grad_norm=0.0,
        seed=job["seed"],
        logging_steps=1,
        save_strategy="steps" if job["save_steps"] else "no",
        save_steps=job["save_steps"] or 1,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        reward_funcs=reward,
        args=settings,
        train_dataset=read_prompts(job["prompts"]),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        peft_config=LoraConfig(
            r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )
    ended = trainer.train(resume_from_checkpoint=job["resume"])
    trainer.save_model(str(Path(job["output"], "model")))
    steps = [line for line in trainer.state.log_history if "reward" in line]
    result = {
        "rewards": [line["reward"] for line in steps],
        "tokens": sum(line["completions/mean_length"] * job["answers"] for line in steps),
        "seconds": ended.metrics["train_runtime"],
    }
    Path(job["output"], "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
