"""Time and cost of a plan, compared with those computed by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_shapes import write_llama

from llama_ft.config import load
from llama_ft.config.wording.messages import time_text
from llama_ft.plan.duration import describe_time, step_seconds

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
    seconds = 3 * TOKENS * per_token / (0.4 * 989e12)  # an H100
    assert planned.is_quick == quick and step_seconds(planned, config, "h100") == pytest.approx(
        seconds, rel=1e-6
    )
    said = describe_time(planned, config, seconds, 2.5)
    assert (
        f"per step of {2 * 3 * TOKENS:,} tokens, {time_text(1e7 * seconds)} for 10,000,000 steps."
        in said
    )
    assert (
        said.endswith(f"Cost of these: {2.5 * 2 * 1e7 * seconds / 3600:.2f}.")
        and "not measured" in said
    )


def test_the_flops_peak_is_that_of_the_named_gpu(plan: Plan, model: Path) -> None:
    planned = plan(model, 1, *FLAGS, quick=True)
    for gpu, flags, teraflops in (
        ("rtx4090", "", 165),
        ("a100-40", "", 312),
        ("t4", "--precision fp16", 65),
        ("mi300x", "", 1307),
        ("", "", 0),
        ("h100", "--precision fp32", 0),
        ("h100", "--enable_fsdp --fsdp_cpu_offload", 0),
    ):
        config, _ = load(["--model_name", "m", "--dataset", "demo", *flags.split()], paths=False)
        seconds = step_seconds(planned, config, gpu)
        assert seconds == (
            pytest.approx(planned.step_flops / (teraflops * 4e11)) if teraflops else None
        ), gpu


def test_times_are_printed_with_readable_units() -> None:
    assert [time_text(seconds) for seconds in (0.0627, 5.23, 75, 840, 12600)] == [
        "63 ms",
        "5.2 s",
        "75 s",
        "14 min",
        "3.5 h",
    ]
