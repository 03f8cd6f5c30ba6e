"""fp16 with loss scaling against fp32 (whose parity with a plain loop is in
tests/recipes/test_parity.py), and the scale's own rules against GradScaler's."""

from pathlib import Path

import pytest
import torch
from conftest import losses, metrics, run_cases, write_jsonl

from llama_ft.training.train_state import INITIAL_FACTOR, STEPS_TO_GROWTH, LossScale

STEPS = 6
SAMPLES = 8
LEARNING_RATE = 3e-3
JOB = Path(__file__).with_name("train_in_fp16.py")
TOO_MUCH = 2.0**22
OVERFLOWS = 2
INFINITE = float("inf")
NAN = float("nan")


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One global batch of tokenized samples, so that every step sees the same."""
    generator = torch.Generator().manual_seed(1)
    ids = [
        torch.randint(0, 301, (6 + 3 * number,), generator=generator).tolist()
        for number in range(SAMPLES)
    ]
    file = tmp_path_factory.mktemp("fp16") / "samples.jsonl"
    return write_jsonl(file, [{"input_ids": sample, "labels": sample} for sample in ids])


@pytest.fixture(scope="module")
def runs(
    tiny_model: Path, samples: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Output directories of the runs in fp16, all in one launch of 2 ranks."""
    folder = tmp_path_factory.mktemp("fp16_runs")
    text = f"--model_name {tiny_model} --dataset {samples} --precision fp16 --lr {LEARNING_RATE}"
    text += f" --lr_scheduler constant --num_epochs {STEPS} --batch_size_training 2 --enable_fsdp"
    # the longest sample: a step has all packed sequences, and both ranks have some
    text += f" --context_length 27 --gradient_accumulation_steps {SAMPLES // 4}"
    text += " --no_plan --no_save_model --gradient_clipping --gradient_clipping_threshold 0.5"
    flags = text.split()
    scales = {"usual": INITIAL_FACTOR, "overflowing": TOO_MUCH, "fp32": 1.0}
    cases = [
        (scale, [*flags, "--output_dir", str(folder / name)]) for name, scale in scales.items()
    ]
    cases[-1][1].append("--precision=fp32")
    launched = run_cases(folder, cases, ranks=2, script=JOB)
    assert launched.output.count("was skipped: its gradients overflowed fp16") >= OVERFLOWS
    return {name: folder / name for name in scales}


def test_fp16_trains_as_fp32_does_within_a_percent(runs: dict[str, Path]) -> None:
    found = losses(runs["usual"])
    assert found == pytest.approx(losses(runs["fp32"]), rel=1e-2)
    assert found[-1] < 0.9 * found[0]
    assert [line["train/loss_scale"] for line in metrics(runs["usual"])] == [INITIAL_FACTOR] * STEPS


def test_gradients_that_overflow_skip_the_step_and_halve_the_scale_until_they_fit(
    runs: dict[str, Path],
) -> None:
    lines = metrics(runs["overflowing"])
    skipped = [line for line in lines if line["train/grad_norm"] is None]
    assert len(skipped) >= OVERFLOWS and skipped == lines[: len(skipped)]
    scales = [line["train/loss_scale"] for line in lines]
    assert scales[: len(skipped)] == [TOO_MUCH / 2 ** (n + 1) for n in range(len(skipped))]
    assert set(scales[len(skipped) :]) == {scales[len(skipped) - 1]}
    assert lines[-1]["train/skipped_steps"] == len(skipped)
    waiting = losses(runs["overflowing"])[: len(skipped)]
    going = losses(runs["overflowing"])[len(skipped) :]
    assert waiting == pytest.approx([going[0]] * len(skipped), rel=1e-6), (
        "a skipped step changes no weight"
    )
    assert going == pytest.approx(losses(runs["fp32"])[: len(going)], rel=1e-2)


def test_the_factor_moves_as_torchs_grad_scaler_moves_it() -> None:
    theirs = torch.amp.GradScaler("cpu")
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    ours = LossScale(INITIAL_FACTOR)
    for step in range(STEPS_TO_GROWTH + 5):
        norm = INFINITE if step in (1, 2) else 1.0
        theirs.scale(weight.sum())
        weight.grad = torch.tensor([norm])
        theirs.step(optimizer)
        theirs.update()
        assert ours.update(step, 2.0, norm) == (step in (1, 2))
        assert ours.factor == theirs.get_scale(), step
    assert ours.factor == INITIAL_FACTOR / 2, "fell twice, and has grown once"


def test_a_loss_of_nan_or_a_minimal_scale_ends_the_run_instead_of_skipping() -> None:
    scale = LossScale(INITIAL_FACTOR)
    assert not scale.update(1, NAN, NAN)
    assert not scale.update(1, INFINITE, INFINITE)
    assert scale.factor == INITIAL_FACTOR and scale.skipped_steps == 0
    skips = [scale.update(step, 2.0, NAN) for step in range(17)]
    assert skips == [True] * 15 + [False] * 2 and scale.factor == 2.0
