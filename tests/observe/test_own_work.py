"""A rank that is slower than the others is named while training."""

import re
from pathlib import Path

import pytest
import torch
from forked import REPOSITORY, forked

from llama_ft.observe.own_work import slow_ranks

SLOWED = REPOSITORY / "tests" / "slowed_recipe.py"
STEPS = 45  # the first does not count, then twice 20


@pytest.mark.parametrize(
    ("work", "flops", "expected"),
    [
        ([1.0, 1.0, 1.0, 1.3], [1, 1, 1, 1], [3]),
        ([1.3, 1.0], [1, 1], [0]),
        ([1.0, 1.0, 1.1, 1.19], [1, 1, 1, 1], []),
        ([0.001, 0.001, 0.002], [1, 1, 1], []),  # noise of the machine
        ([1.0, 1.0, 2.0], [1, 1, 2], []),  # it had twice the tokens
        ([1.0, 1.0, 1.0], [1, 1, 0.1], []),  # it had few tokens
    ],
)
def test_a_rank_is_slow_at_1_2_times_the_median(
    work: list[float], flops: list[float], expected: list[int]
) -> None:
    per_step = torch.tensor([work, [0.0] * len(work), flops], dtype=torch.float64).T
    assert slow_ranks(per_step * 20, steps=20) == expected


@pytest.mark.parametrize("late", ["data", "computing", ""])
def test_a_slow_rank_is_named_once_and_an_even_run_names_nobody(
    tmp_path: Path, tiny_model: Path, rows70: Path, late: str
) -> None:
    flags = (
        f"--precision fp32 --enable_fsdp --batch_size_training 2 --num_epochs 99 --max_train_step {STEPS} "
        f"--no_run_validation --no_plan --save_model False --model_name {tiny_model} --dataset {rows70} "
        f"--lr 1e-3 --output_dir {tmp_path}/run"
    )
    slow = {"SLOW_RANK": "1", "SLOW_SECONDS": "0.08", "LATE": late}
    finished = forked(SLOWED, *flags.split(), ranks=3, **slow)
    assert finished.exit_code == 0, finished.output
    named = re.findall(r"warning: rank (\d+) on node 0 is slow.*", finished.output)
    assert named == (["1"] if late else []), finished.output
    if late == "data":
        found = re.search(r"\((\S+) s per step, (\S+) s of it\s+for data", finished.output)
        assert found is not None
        assert float(found[2]) > 0.8 * float(found[1])
