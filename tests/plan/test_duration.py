"""Time, speed and cost of a plan, compared with those computed by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_shapes import write_llama

from llama_ft.config import load
from llama_ft.config.wording.messages import time_text
from llama_ft.plan.duration import (
    BANDWIDTHS,
    SPEED_FACTORS,
    computed_seconds,
    describe_time,
    step_seconds,
)
from llama_ft.plan.flags import GPUS, WITHOUT_BF16

Plan = Callable[..., Any]
LAYERS = 7
HIDDEN = 64
INNER = 160
VOCABULARY = 1000
LENGTH = 128
TOKENS = 256
FLAGS = (
    "--enable_fsdp",
    "--context_length",
    str(LENGTH),
    "--batch_size_training",
    str(TOKENS // LENGTH),
)
# weights of matmuls; half the heads for KV
LAYER = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 2 + 3 * HIDDEN * INNER
# forward, of a layer and token, which sees half of the others
ATTENTION = 4 * HIDDEN * (LENGTH + 1) / 2
RECOMPUTED = LAYERS * (2 * LAYER + ATTENTION)
FULL = 6 * LAYERS * LAYER + 6 * VOCABULARY * HIDDEN + 3 * LAYERS * ATTENTION


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """config.json of a small Llama, and no weights."""
    shape = {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "vocab_size": VOCABULARY,
        "num_hidden_layers": LAYERS,
    }
    return write_llama(tmp_path / "model", **shape)


@pytest.mark.parametrize(
    ("quick", "flags", "per_token"),
    [
        (False, "", FULL),
        pytest.param(
            True,
            "--activation_checkpointing full",
            FULL + RECOMPUTED,
            marks=pytest.mark.slow,
        ),
        pytest.param(  # LoRA of rank 4 on q_proj: 2 forward and 2 backward for frozen weights
            True,
            "--use_peft --peft.r 4 --target_modules q_proj --activation_checkpointing full",
            FULL
            - 2 * (LAYERS * LAYER + VOCABULARY * HIDDEN)
            + RECOMPUTED
            + (6 + 2) * LAYERS * 4 * 2 * HIDDEN,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_time_and_cost_equal_those_computed_by_hand(
    plan: Plan, model: Path, flags: str, per_token: float, quick: bool
) -> None:
    line = [*FLAGS, "--gradient_accumulation_steps", "3", *flags.split()]
    planned = plan(model, 2, *line, device="cuda", quick=quick)
    config, _ = load(
        ["--model_name", "m", "--dataset", "demo", *line, "--max_train_step", "10000000"],
        paths=False,
    )
    flops = 3 * TOKENS * per_token
    assert planned.is_quick == quick
    assert planned.step_flops == pytest.approx(flops, rel=1e-6)
    seconds = flops / (0.65 * 989e12) + planned.step_bytes / (0.75 * 3350e9)  # an H100
    assert step_seconds(planned, config, "h100") == pytest.approx(seconds, rel=1e-6)
    said, numbers = describe_time(planned, config, "h100", 2.5).splitlines()
    assert "computed, not measured" in said
    assert f"per step of {2 * 3 * TOKENS:,} tokens, " in said
    assert f" {3 * TOKENS / seconds:,.0f} tokens/s per GPU, " in said
    assert f"{time_text(1e7 * seconds)} for 10,000,000 steps." in said
    assert said.endswith(f"Cost of these: {2.5 * 2 * 1e7 * seconds / 3600:.2f}.")
    assert " TFLOP at 65% of 989 TFLOP/s, and " in numbers
    assert numbers.endswith(" GB at 75% of 3,350 GB/s.")


def test_rates_are_those_of_the_named_gpu(plan: Plan, model: Path) -> None:
    planned = plan(model, 1, *FLAGS, quick=True)
    for gpu, flags, rates in (
        ("rtx4090", "", (165e12, 1008e9)),
        ("a100-40", "", (312e12, 1555e9)),
        ("t4", "--precision fp16", (65e12, 320e9)),
        ("mi300x", "", None),  # --fit does not know it
        ("", "", None),
        ("h100", "--precision fp32", None),
        ("h100", "--enable_fsdp --fsdp_cpu_offload", None),
    ):
        config, _ = load(["--model_name", "m", "--dataset", "demo", *flags.split()], paths=False)
        seconds = step_seconds(planned, config, gpu)
        if rates is None:
            assert seconds is None, gpu
            assert "not computed" in describe_time(planned, config, gpu, None)
        else:
            peak, bandwidth = rates
            computing = planned.step_flops / (0.65 * peak)
            assert seconds == pytest.approx(computing + planned.step_bytes / (0.75 * bandwidth)), (
                gpu
            )


def test_the_rates_of_every_gpu_of_fit_are_published() -> None:
    assert BANDWIDTHS.keys() == GPUS.keys()
    for gpu in GPUS:
        dtype = torch.float16 if gpu in WITHOUT_BF16 else torch.bfloat16
        assert computed_seconds(1e12, 1e9, gpu, dtype) is not None, gpu


def test_a_measured_factor_of_a_gpu_changes_its_time(
    plan: Plan, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = plan(model, 1, *FLAGS, quick=True)
    config, _ = load(["--model_name", "m", "--dataset", "demo"], paths=False)
    before = step_seconds(planned, config, "h100")
    others = step_seconds(planned, config, "a100")
    monkeypatch.setitem(SPEED_FACTORS, "h100", 0.8)
    assert before is not None
    assert step_seconds(planned, config, "h100") == pytest.approx(before / 0.8)
    assert step_seconds(planned, config, "a100") == others


def test_times_are_printed_with_readable_units() -> None:
    assert [time_text(seconds) for seconds in (0.0627, 5.23, 75, 840, 12600)] == [
        "63 ms",
        "5.2 s",
        "75 s",
        "14 min",
        "3.5 h",
    ]
