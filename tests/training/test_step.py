"""The end of a step: norm and clipping are torch's, and a loss that is read late is read
nevertheless."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import metrics
from forked import Finished, forked
from torch.nn.utils import clip_grad_norm_

from llama_ft.config import TrainConfig
from llama_ft.data import StepBatches
from llama_ft.models import BuiltModel
from llama_ft.runtime import Ranks
from llama_ft.training import (
    LossSum,
    StepOutcome,
    clip_grad_norm,
    local_gradients,
    reduce_losses_and_norm,
)
from llama_ft.training.train_state import LossScale

SCRIPT = Path(__file__).with_name("lagging_job.py")
TIMES = ("perf/", "memory/")


@pytest.mark.parametrize("clipping", [True, False])
@pytest.mark.parametrize("scale", [1.0, 64.0])
def test_gradient_norm_and_clipping_equal_torchs(
    runtime: Ranks, clipping: bool, scale: float
) -> None:
    torch.manual_seed(0)
    model, reference = (torch.nn.Linear(5, 3) for _ in range(2))
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        theirs.grad = torch.randn_like(theirs)
        ours.grad = theirs.grad * scale
    settings = TrainConfig(gradient_clipping=clipping, gradient_clipping_threshold=0.5)
    expected = clip_grad_norm_(reference.parameters(), 0.5 if clipping else float("inf"))
    losses = []
    for loss in (3.0, 4.0):
        value = torch.tensor(loss)
        losses.append(
            LossSum(value, 7, {"margin": 2 * value}, {"weight": 5 - value, "loss": value})
        )
    built: Any = BuiltModel(model)  # type: ignore[arg-type]  # any module has gradients
    gradients = local_gradients(built, LossScale(scale), runtime)
    sums = reduce_losses_and_norm(losses, gradients, runtime)
    clip_grad_norm(gradients, sums[1], settings)
    step = StepBatches(batches=[], target_tokens=14, samples=2)
    outcome = StepOutcome(step, losses, 14, sums)
    assert outcome.read() == (0.5, pytest.approx(expected.item()))
    assert outcome.logged() == {"train/margin": 1.0, "train/loss": 4.0, "train/weight": 2.0}
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.fixture
def launch(tmp_path: Path, tiny_model: Path, rows16: Path) -> Callable[..., Finished]:
    """Run cases of six steps each on two ranks, in one launch. A case is a directory for the run,
    whether losses are read late, the step that goes wrong (0: none), and flags."""

    def start(*cases: tuple[Path, bool, int, str]) -> Finished:
        runs = []
        for folder, lags, bad_step, flags in cases:
            common = f"--model_name {tiny_model} --dataset {rows16} --precision fp32 --enable_fsdp"
            common += " --context_length 64 --batch_size_training 1 --no_plan --lr 1e-2"
            common += f" --max_train_step 6 --num_epochs 6 --output_dir {folder} {flags}"
            sums = str(sums_of(folder))
            runs.append({"lags": lags, "bad_step": bad_step, "sums": sums, "flags": common.split()})
        (tmp_path / "cases.json").write_text(json.dumps(runs))
        return forked(SCRIPT, tmp_path / "cases.json", ranks=2)

    return start


def sums_of(folder: Path) -> Path:
    """The file for the weights' sum at the beginning of each step of a run."""
    return folder.with_suffix(".sums")


def logged(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl of a run without what depends on the machine."""
    lines = []
    for line in metrics(folder):
        lines.append({key: line[key] for key in line if not key.startswith(TIMES)})
    return lines


def test_a_loss_read_one_step_late_is_logged_for_its_own_step(
    launch: Callable[..., Finished], tmp_path: Path
) -> None:
    flags = "--validation 0.3 --eval_steps 3"
    finished = launch((tmp_path / "late", True, 0, flags), (tmp_path / "now", False, 0, flags))
    assert finished.exit_code == 0, finished.output
    late = logged(tmp_path / "late")
    assert [line["step"] for line in late] == [0, 1, 2, 3, 4, 5, 6]
    assert [line["train/rank"] for line in late[1:]] == [1] * 6  # the largest one
    for line, expected in zip(late, logged(tmp_path / "now"), strict=True):
        assert line == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("optimizer", ["AdamW", pytest.param("Adafactor", marks=pytest.mark.slow)])
def test_after_a_failed_step_no_weight_changes_even_if_its_loss_is_read_late(
    launch: Callable[..., Finished], tmp_path: Path, optimizer: str
) -> None:
    folder = tmp_path / "run"
    finished = launch((folder, True, 3, f"--optimizer {optimizer}"))
    assert finished.exit_code == 1
    assert "error: step 3: the loss is nan" in finished.output
    assert "rank 1, micro-batch 1 (loss nan)" in finished.output
    sums = sums_of(folder).read_text().splitlines()
    assert len(sums) == 4, "the fourth step was under way when the third was read"
    assert sums[0] != sums[1] != sums[2] == sums[3]
    assert [line["step"] for line in metrics(folder)] == [1, 2]
