"""Estimate how long a run trains on a GPU and what that costs. Nothing is measured."""

import re

from llama_ft.config import Config
from llama_ft.config.wording.messages import time_text
from llama_ft.observe.flops import peak_of
from llama_ft.plan.types import Plan
from llama_ft.runtime.devices import PRECISIONS

# MFU. The training of Llama 3 405B reached 38 to 43%. Source: Llama Team 2024, arXiv:2407.21783,
# section 3.3.2.
ASSUMED_UTILIZATION = 0.4
# Each token of an answer reads all weights. Share of the published bandwidth: Transformers launches the
# kernels of each layer one by one, which takes longer than the reading on a fast GPU.
ASSUMED_BANDWIDTH = 0.2
# GB/s of the memory, from the vendors' data sheets, by the names of --fit
BANDWIDTHS = {
    "t4": 320, "v100": 900, "v100-32": 900, "a10": 600, "a10g": 600, "a40": 696, "l4": 300, "l40": 864, "l40s": 864,
    "rtx3090": 936, "rtx4080": 717, "rtx4090": 1008, "rtx5080": 960, "rtx5090": 1792, "rtxa4000": 448,
    "rtxa5000": 768, "rtxa6000": 768, "rtx6000ada": 960, "a100-40": 1555, "a100": 1935, "h100": 3350, "h200": 4800,
    "b200": 8000,
}  # fmt: skip


def step_seconds(plan: Plan, config: Config, gpu: str) -> float | None:
    """Return the seconds of an optimizer step: FLOPs of a rank / (assumed MFU x published peak), and
    `generation_seconds`. `gpu` is a name of --fit. Return None without a GPU, without a known peak,
    in fp32, and if weights are offloaded to the host."""
    peak = peak_of(peak_name(gpu), PRECISIONS[config.train.precision].compute)
    if not peak or not plan.step_flops or config.fsdp.fsdp_cpu_offload:
        return None
    flops = plan.step_flops + plan.generation_flops
    return flops / (ASSUMED_UTILIZATION * peak) + generation_seconds(plan, gpu)


def generation_seconds(plan: Plan, gpu: str) -> float:
    """Return the seconds in which a rank generates the answers of a step: bytes / (assumed share x
    published bandwidth); 0 without generation."""
    if not plan.generation_bytes:
        return 0.0
    return plan.generation_bytes / (ASSUMED_BANDWIDTH * BANDWIDTHS[gpu] * 1e9)


def peak_name(gpu: str) -> str:
    """Return the name in the list of peaks of a GPU of --fit: `RTX 4090` of rtx4090."""
    return re.sub("^RTX", "RTX ", gpu.upper())


def describe_time(plan: Plan, config: Config, seconds: float | None, price: float | None) -> str:
    """Return a text on the time of a step and of the run, and its cost if a price per GPU hour is
    given. If the data determine the number of steps, it is the time of a million tokens instead."""
    if seconds is None:
        return "Time: not estimated; published peaks say nothing about --precision fp32 and --fsdp_cpu_offload."
    tokens = plan.tokens * plan.micro_batches * plan.data_size
    steps = config.train.max_train_step
    if steps:
        duration = seconds * steps
        what = f"{steps:,} steps"
    else:
        duration = seconds * 1e6 / tokens
        what = "1 million tokens"
    text = (
        f"Time at an assumed {ASSUMED_UTILIZATION:.0%} of the published peak, not measured: {time_text(seconds)} per "
        f"step of {tokens:,} tokens, {time_text(duration)} for {what}."
    )
    if plan.generated_tokens:
        text += (
            f" A step includes the generation of at most {plan.generated_tokens:,} tokens, at an assumed "
            f"{ASSUMED_BANDWIDTH:.0%} of the published memory bandwidth."
        )
    if price:
        text += f" Cost of these: {price * plan.world_size * duration / 3600:,.2f}."
    return text
