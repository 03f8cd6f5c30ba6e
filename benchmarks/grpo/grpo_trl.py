"""One run of TRL's GRPOTrainer for benchmarks/grpo/grpo_comparison.py, in TRL's environment.

Its answers, their log-probabilities and rewards are those of the rounds in the job, which TRL gets as
from a sampler of the user's. Advantages, importance weights, ratios and losses are TRL's own. It
writes the loss and the gradients of each step into result.safetensors.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Recorder(TrainerCallback):
    """Keeps the gradients of each step."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any, **_: Any
    ) -> None:
        found = {}
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[name.replace(".default", "")] = parameter.grad.clone()
        self.gradients.append(found)


class NoServer:
    """In place of vLLM: the weights need not be copied anywhere."""

    def sync_weights(self) -> None: ...


def main(job: dict[str, Any]) -> None:
    rounds = iter(job["rounds"])

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        found: dict[str, Any] = next(rounds)
        return found

    def reward(prompts: list[Any], completions: list[Any], **given: Any) -> list[float]:
        totals: list[float] = given["total"]
        return totals

    losses: list[float] = []

    class Recording(GRPOTrainer):  # type: ignore[misc]
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            loss = super()._compute_loss(model, inputs)
            losses.append(loss.item())
            return loss

    settings = dict(
        output_dir=job["output"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=job["micro_batch"],
        gradient_accumulation_steps=job["accumulation"],
        num_generations=job["num_generations"],
        max_completion_length=job["longest"],
        max_steps=job["steps"],
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        optim="sgd",
        weight_decay=0.0,
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    recorder = Recorder()
    adapter = LoraConfig.from_pretrained(job["adapter"])
    adapter.inference_mode = False
    # The prompts are not used, but TRL wants as many as a round has for each step.
    count = job["micro_batch"] * job["accumulation"] // job["num_generations"]
    trainer = Recording(
        AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        reward_funcs=reward,
        args=GRPOConfig(**settings, **job["settings"]),
        train_dataset=Dataset.from_list([{"prompt": "?"}] * (count * job["steps"])),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        peft_config=adapter,
        rollout_func=rollout,
        callbacks=[recorder],
    )
    start = load_file(Path(job["adapter"]) / "adapter_model.safetensors")
    set_peft_model_state_dict(trainer.model, start)
    trainer.use_vllm = True  # for the importance weights, which only its answers get
    trainer.vllm_generation = NoServer()
    trainer._last_loaded_step = 0
    trainer.train()
    found = {}
    for step, gradients in enumerate(recorder.gradients, 1):
        found |= {f"{step} {name}": gradient for name, gradient in gradients.items()}
    sums = torch.tensor(losses, dtype=torch.float64).view(job["steps"], -1).sum(1)
    found["losses"] = sums
    save_file(found, Path(job["output"], "result.safetensors"))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
