"""How long a run will train on a GPU, and what that costs: an estimate, since nothing is timed."""

import re

from llama_ft.config import Config
from llama_ft.observe.flops import peak_of
from llama_ft.plan.types import Plan
from llama_ft.runtime.devices import PRECISIONS

# Full training of Llama 3 405B reached 38 to 43%. Source: Llama Team 2024, arXiv:2407.21783, section 3.3.2.
ASSUMED_UTILIZATION = 0.4


def step_seconds(plan: Plan, config: Config, gpu: str) -> float | None:
    """Seconds of an optimizer step: FLOPs of a rank / (assumed utilization x published peak) of a GPU, by its name in
    --fit. None where no peak is known or decides: without a GPU, in fp32, and if weights come from the host."""
    peak = peak_of(re.sub("^RTX", "RTX ", gpu.upper()), PRECISIONS[config.train.precision].compute)
    is_known = peak and plan.step_flops and not config.fsdp.fsdp_cpu_offload
    return plan.step_flops / (ASSUMED_UTILIZATION * peak) if is_known else None


def describe_time(plan: Plan, config: Config, seconds: float | None, price: float | None) -> str:
    """The time of a step and of --max_train_step steps, or of a million tokens where the data decide how many steps
    there are; and what that costs at a price per GPU hour (None: not given)."""
    if seconds is None:
        return "Time: not estimated; published peaks say nothing about --precision fp32 and --fsdp_cpu_offload."
    tokens = plan.tokens * config.train.gradient_accumulation_steps * plan.world_size
    steps = config.train.max_train_step
    whole, what = (seconds * steps, f"{steps:,} steps") if steps else (seconds * 1e6 / tokens, "1 million tokens")
    cost = f" Cost of these: {(price or 0) * plan.world_size * whole / 3600:,.2f}."
    return (
        f"Time at an assumed {ASSUMED_UTILIZATION:.0%} of the published peak, not measured: {time_text(seconds)} per "
        f"step of {tokens:,} tokens, {time_text(whole)} for {what}.{cost if price else ''}"
    )


def time_text(seconds: float) -> str:
    """Show a time as people say it: `63 ms`, `5.2 s`, `14 min`, `3.5 h`."""
    for size, name, least in ((3600, "h", 5400), (60, "min", 90), (1, "s", 1)):
        if seconds >= least:
            return f"{seconds / size:,.{0 if seconds >= 10 * size else 1}f} {name}"
    return f"{seconds * 1000:.0f} ms"
