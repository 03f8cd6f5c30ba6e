"""Compute how long a run trains on a GPU, how fast and what that costs. Nothing is measured.

A step takes FLOPs / (MATMUL_SHARE x published peak) + bytes / (BANDWIDTH_SHARE x published bandwidth)
seconds, where the plan has counted both. With --objective grpo, the answers take `generation_seconds` in
addition.
"""

import re

import torch

from llama_ft.config import Config
from llama_ft.config.wording.messages import time_text
from llama_ft.observe.flops import peak_of
from llama_ft.plan.types import Plan
from llama_ft.runtime.devices import PRECISIONS

# Shares of the published rates. With them, the median of the runs in benchmarks/planner/published_speeds.yaml
# (torchtitan, KempnerForge, NeMo Automodel, Unsloth; A100 to H200, RTX 5090) is at least as fast as computed.
MATMUL_SHARE = 0.65
BANDWIDTH_SHARE = 0.75
# Each token of an answer reads all weights. Share of the published bandwidth: Transformers launches the
# kernels of each layer one by one, which takes longer than the reading on a fast GPU.
GENERATION_SHARE = 0.2
# GB/s of the memory, from the vendors' data sheets, by the names of --fit
BANDWIDTHS = {
    "t4": 320, "v100": 900, "v100-32": 900, "a10": 600, "a10g": 600, "a40": 696, "l4": 300, "l40": 864, "l40s": 864,
    "rtx3090": 936, "rtx4080": 717, "rtx4090": 1008, "rtx5080": 960, "rtx5090": 1792, "rtxa4000": 448,
    "rtxa5000": 768, "rtxa6000": 768, "rtx6000ada": 960, "a100-40": 1555, "a100": 1935, "h100": 3350, "h200": 4800,
    "b200": 8000,
}  # fmt: skip
# Name of a GPU -> measured speed / computed speed. `gpu_check.py --speed_factors` prints it for published
# results, of which there are none yet.
SPEED_FACTORS: dict[str, float] = {}


def step_seconds(plan: Plan, config: Config, gpu: str) -> float | None:
    """Return the seconds of an optimizer step, see above. `gpu` is a name of --fit. Return None without a
    GPU, without published rates of it, in fp32, and if weights are offloaded to the host."""
    if config.fsdp.fsdp_cpu_offload or not (plan.step_flops and plan.step_bytes):
        return None
    flops = plan.step_flops + plan.generation_flops
    compute_dtype = PRECISIONS[config.train.precision].compute
    seconds = computed_seconds(flops, plan.step_bytes, gpu, compute_dtype)
    if seconds is None:
        return None
    return seconds / SPEED_FACTORS.get(gpu, 1.0) + generation_seconds(plan, gpu)


def computed_seconds(
    flops: float, nbytes: float, gpu: str, dtype: torch.dtype = torch.bfloat16
) -> float | None:
    """Return the seconds for matmuls of so many FLOPs, and for kernels that move so many bytes. `gpu`
    is a name of --fit. None: its rates are not published."""
    peak = peak_of(peak_name(gpu), dtype)
    bandwidth = BANDWIDTHS.get(gpu, 0) * 1e9
    if not peak or not bandwidth:
        return None
    return flops / (MATMUL_SHARE * peak) + nbytes / (BANDWIDTH_SHARE * bandwidth)


def generation_seconds(plan: Plan, gpu: str) -> float:
    """Return the seconds in which a rank generates the answers of a step: bytes / (GENERATION_SHARE x
    published bandwidth); 0 without generation."""
    if not plan.generation_bytes:
        return 0.0
    return plan.generation_bytes / (GENERATION_SHARE * BANDWIDTHS[gpu] * 1e9)


def peak_name(gpu: str) -> str:
    """Return the name in the list of peaks of a GPU of --fit: `RTX 4090` of rtx4090."""
    return re.sub("^RTX", "RTX ", gpu.upper())


def step_tokens(plan: Plan) -> int:
    """Return the tokens of an optimizer step, all ranks together."""
    return plan.tokens * plan.micro_batches * plan.data_size


def tokens_per_second(plan: Plan, seconds: float) -> float:
    """Return the tokens per second and GPU, if a step takes so many seconds."""
    return step_tokens(plan) / seconds / plan.world_size


def describe_time(plan: Plan, config: Config, gpu: str, price: float | None) -> str:
    """Return a text on the time of a step and of the run, and its cost if a price per GPU hour is
    given. If the data determine the number of steps, it is the time of a million tokens instead. `gpu` is
    a name of --fit."""
    seconds = step_seconds(plan, config, gpu)
    if seconds is None:
        return "Time: not computed; published rates say nothing about --precision fp32 and --fsdp_cpu_offload."
    tokens = step_tokens(plan)
    speed = tokens_per_second(plan, seconds)
    steps = config.train.max_train_step
    if steps:
        duration = seconds * steps
        what = f"{steps:,} steps"
    else:
        duration = seconds * 1e6 / tokens
        what = "1 million tokens"
    text = (
        f"Time (computed, not measured): {time_text(seconds)} per step of {tokens:,} tokens, {speed:,.0f} tokens/s "
        f"per GPU, {time_text(duration)} for {what}."
    )
    if plan.generated_tokens:
        text += (
            f" A step includes the generation of at most {plan.generated_tokens:,} tokens, at an assumed "
            f"{GENERATION_SHARE:.0%} of the published memory bandwidth."
        )
    if price:
        text += f" Cost of these: {price * plan.world_size * duration / 3600:,.2f}."
    return f"{text}\n{_describe_step(plan, config, gpu)}"


def _describe_step(plan: Plan, config: Config, gpu: str) -> str:
    """Return the numbers of the formula above."""
    peak = peak_of(peak_name(gpu), PRECISIONS[config.train.precision].compute)
    computed = _number(plan.step_flops / 1e12)
    moved = _number(plan.step_bytes / 1e9)
    return (
        f"Per GPU and step: {computed} TFLOP at {MATMUL_SHARE:.0%} of {peak / 1e12:g} TFLOP/s, and "
        f"{moved} GB at {BANDWIDTH_SHARE:.0%} of {BANDWIDTHS[gpu]:,} GB/s."
    )


def _number(value: float) -> str:
    """Return three digits: 0.000123, 1.23, 1,230."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
