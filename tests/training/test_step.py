"""The end of a step: norm and clipping are torch's, and a loss that is read late is read
nevertheless."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import metrics
from forked import Finished, forked
from torch.nn.utils import clip_grad_norm_

from llama_ft.config import TrainConfig
from llama_ft.models import BuiltModel
from llama_ft.runtime import Ranks
from llama_ft.training import LossSum, clip_and_reduce_norm

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
    losses = [
        LossSum(torch.tensor(loss), 7, {"margin": torch.tensor(2 * loss)}) for loss in (3.0, 4.0)
    ]
    built: Any = BuiltModel(model)  # type: ignore[arg-type]  # any module has gradients
    result = clip_and_reduce_norm(built, losses, 14, settings, scale, runtime)
    assert result.read() == (0.5, pytest.approx(expected.item()))
    assert result.logged() == {"train/margin": 1.0}
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.fixture
def job(
    tmp_path: Path, tiny_model: Path, rows16: Path
) -> Callable[..., tuple[Finished, list[str], Path]]:
    """Six steps on two ranks; returns the process, the weights' sums and the run's directory."""

    def run(name: str, lags: bool, bad_step: int, *flags: str) -> tuple[Finished, list[str], Path]:
        settings = [
            "--model_name",
            tiny_model,
            "--dataset",
            rows16,
            "--precision",
            "fp32",
            "--enable_fsdp",
        ]
        settings += [
            "--context_length",
            "64",
            "--batch_size_training",
            "1",
            "--no_plan",
            "--lr",
            "1e-2",
        ]
        settings += [
            "--max_train_step",
            "6",
            "--num_epochs",
            "6",
            "--output_dir",
            tmp_path / name,
            *flags,
        ]
        finished = forked(
            SCRIPT, str(lags), str(bad_step), tmp_path / f"{name}.txt", *map(str, settings), ranks=2
        )
        return finished, (tmp_path / f"{name}.txt").read_text().splitlines(), tmp_path / name

    return run


def test_a_loss_read_one_step_late_is_logged_for_its_own_step(job: Callable[..., Any]) -> None:
    runs = [
        job(f"lags-{lags}", lags, 0, "--validation", "0.3", "--eval_steps", "3")
        for lags in (True, False)
    ]
    assert all(finished.exit_code == 0 for finished, _, _ in runs), runs[0][0].output
    late, at_once = (
        [
            {key: value for key, value in line.items() if not key.startswith(TIMES)}
            for line in metrics(folder)
        ]
        for _, _, folder in runs
    )
    assert [line["step"] for line in late] == [0, 1, 2, 3, 4, 5, 6]
    assert late == at_once


@pytest.mark.parametrize("optimizer", ["AdamW", "Adafactor"])
def test_after_a_failed_step_no_weight_changes_even_if_its_loss_is_read_late(
    job: Callable[..., Any], optimizer: str
) -> None:
    finished, sums, folder = job(optimizer, True, 3, "--optimizer", optimizer)
    assert finished.exit_code == 1
    assert (
        "error: step 3: the loss is nan" in finished.output
        and "rank 1, micro-batch 1 (loss nan)" in finished.output
    )
    assert len(sums) == 4, "the fourth step was under way when the third was read"
    assert sums[0] != sums[1] != sums[2] == sums[3]
    assert [line["step"] for line in metrics(folder)] == [1, 2]
