"""Compare LoRA on stacked experts in parts (models/adapters/lora_experts.py) with PEFT's own sum of weights.

    python benchmarks/speed/experts.py

A small random Qwen3-MoE with adapters of its attention and its experts takes training steps in two
forms, which differ in nothing else, alternately in one process on the CPU. Printed are, for each
form, the CPU seconds of a step (of all threads, median over the turns), its seconds, and the peak of
the tensors that a step adds to weights, adapters and optimizer states. (This needs a C++ compiler;
see plan_job.py.)
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / folder) for folder in ("src", ".")]

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.planner.plan_job import HostBytes, compile_counter
from llama_ft.models.adapters.lora_experts import use_split_experts
from llama_ft.models.adapters.lora_linear import use_fused_lora

MIB = 2**20
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
}
FORMS = ("PEFT", "in parts")


class Form:
    """A model with adapters, and its optimizer."""

    def __init__(self, name: str, asked: argparse.Namespace) -> None:
        torch.manual_seed(0)
        dtype = torch.bfloat16 if asked.precision == "bf16" else torch.float32
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE)).to(dtype)
        if asked.activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        settings = LoraConfig(
            r=asked.rank,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        )
        get_peft_model(model, settings, autocast_adapter_dtype=False)
        use_fused_lora(model)
        if name == "in parts":
            use_split_experts(model)
        self.model: Any = model.train()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
        self.losses: list[float] = []
        self.cpu_seconds: list[float] = []
        self.seconds: list[float] = []
        self.step_bytes = 0

    def step(self, ids: torch.Tensor) -> None:
        """Take one training step."""
        loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def turn(self, ids: torch.Tensor, steps: int, counter: HostBytes) -> None:
        """Take and measure some steps."""
        gc.collect()
        counter.reset()
        before = counter.now()
        started = time.perf_counter()
        cpu_started = time.process_time()
        for _ in range(steps):
            self.step(ids)
        self.cpu_seconds.append((time.process_time() - cpu_started) / steps)
        self.seconds.append((time.perf_counter() - started) / steps)
        self.step_bytes = counter.peak() - before


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--tokens", type=int, default=512, help="of a step, in samples of 256")
    parser.add_argument("--turns", type=int, default=5, help="of each form")
    parser.add_argument("--steps", type=int, default=2, help="of each turn")
    parser.add_argument("--activation_checkpointing", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counter = HostBytes(compile_counter(Path(folder)))
    forms = {name: Form(name, asked) for name in FORMS}
    ids = torch.randint(SHAPE["vocab_size"], (asked.tokens // 256, 256))
    for form in forms.values():
        form.step(ids)  # the first creates the optimizer's states
    for _ in range(asked.turns):
        for form in forms.values():
            form.turn(ids, asked.steps, counter)
    for name, form in forms.items():
        cpu_seconds = statistics.median(form.cpu_seconds)
        seconds = statistics.median(form.seconds)
        figures = f"{cpu_seconds:.2f} CPU s, {seconds:.2f} s, {form.step_bytes / MIB:,.0f} MiB"
        print(f"{name:8}  {figures} a step; losses {form.losses[0]:.4f} to {form.losses[-1]:.4f}")
    theirs, ours = forms.values()
    pairs = zip(ours.cpu_seconds, theirs.cpu_seconds, strict=True)
    ratio = statistics.median(own / other for own, other in pairs)
    print(
        f"CPU time {ratio:.2f} times PEFT's; memory {ours.step_bytes / theirs.step_bytes:.2f} times"
    )


if __name__ == "__main__":
    main()
