"""A rank that is slower than the others is named while training."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import SLOWED
from forked import forked
from transformers import AutoModelForCausalLM

from llama_ft.observe import OwnWork
from llama_ft.run.parts.slow_ranks import slow_ranks, who
from llama_ft.runtime import Ranks


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


def test_of_ranks_that_are_measured_together_all_are_named() -> None:
    assert who(5, together=1, per_node=4) == "rank 5 on node 1"
    expected = "one of ranks 4 to 7 on node 1, which share sequences,"
    assert who(5, together=4, per_node=4) == expected


@pytest.mark.parametrize(
    ("late", "steps"),
    # The first step does not count, then they are compared after 20 and 40.
    [
        pytest.param("data", 45, marks=pytest.mark.slow),
        pytest.param("computing", 25, marks=pytest.mark.slow),
        pytest.param("", 25, marks=pytest.mark.slow),
    ],
)
def test_a_slow_rank_is_named_once_and_an_even_run_names_nobody(
    tmp_path: Path, tiny_model: Path, rows70: Path, late: str, steps: int
) -> None:
    flags = (
        f"--precision fp32 --enable_fsdp --batch_size_training 2 --num_epochs 99 --max_train_step {steps} "
        f"--no_run_validation --no_plan --save_model False --model_name {tiny_model} --dataset {rows70} "
        f"--lr 1e-3 --output_dir {tmp_path}/run"
    )
    slow = {"SLOW_RANK": "1", "LATE": late} if late else {}
    finished = forked(SLOWED, *flags.split(), ranks=3, **slow)
    assert finished.exit_code == 0, finished.output
    named = re.findall(r"warning: rank (\d+) on node 0 is slow.*", finished.output)
    assert named == (["1"] if late else []), finished.output
    if late == "data":
        found = re.search(r"\((\S+) s per step, (\S+) s of it\s+for data", finished.output)
        assert found is not None
        assert 0.3 < float(found[2]) / float(found[1]) < 0.9


def test_on_a_gpu_the_forward_passes_of_a_layer_are_counted_for_all(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With events that stand for CUDA's: two of them are a millisecond apart."""
    recorded = list[float]()

    class Event:
        def __init__(self, **_: bool) -> None: ...

        def record(self) -> None:
            recorded.append(float(len(recorded)))
            self.at = recorded[-1]

        def query(self) -> bool:
            return self.at < 5  # the third pass is still queued

        def elapsed_time(self, end: "Event") -> float:
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)  # of 2 layers
    cuda = torch.device("cuda")
    mesh: Any = None
    ranks = Ranks(0, 2, 0, 2, cuda, cuda, "GPU", mesh, None)
    work = OwnWork(ranks)
    work.watch(model)
    tokens = torch.tensor([[1, 2, 3]])
    model.eval()(tokens)
    assert recorded == []
    model.train()
    for _ in range(3):
        model(tokens)
    work.begin_step(0.5)
    assert work.seconds() == pytest.approx(0.5 + 2 * 0.001 * 2 * 3)
