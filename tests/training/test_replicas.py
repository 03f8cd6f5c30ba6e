"""LoRA with data parallelism equals LoRA in one process: adapters are outside of fully_shard, and
one all-reduce per step sums their gradients. On shards, units are all-gathered as seldom as the
strategy allows."""

from pathlib import Path
from typing import Any

import pytest
import torch
from forked import forked
from torch.distributed.tensor import DTensor
from training import gathers_job, replicas_job

from llama_ft.runtime import Ranks

# of the first step: fp32 sums in another order, bf16 also rounds each rank's sum
TOLERANCE = {"fp32": 1e-6, "bf16_mixed": 1e-2, "bf16_pure": 1e-2}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def launch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replicas")
    finished = forked(Path(replicas_job.__file__), folder, ranks=request.param)
    assert finished.exit_code == 0, finished.output
    return folder


@pytest.mark.parametrize("precision", replicas_job.CASES)
def test_losses_norms_and_clipped_steps_equal_one_process(
    precision: str, launch: Path, runtime: Ranks, tmp_path: Path
) -> None:
    found = torch.load(launch / f"{precision}.pt")
    alone = replicas_job.run(precision, tmp_path, runtime)
    numbers: Any = alone["numbers"]
    assert all(norm > 0.05 for _, norm in numbers), "every step is clipped"
    assert found["numbers"][0] == pytest.approx(numbers[0], rel=TOLERANCE[precision])
    if precision != "fp32":
        return  # rounding to 16 bits grows
    losses = [loss for loss, _ in found["numbers"]]
    assert losses == pytest.approx([loss for loss, _ in numbers], rel=1e-6)
    # Rounding grows in the norms: by 4e-4 in one process with another order of micro-batches.
    norms = [norm for _, norm in found["numbers"]]
    assert norms == pytest.approx([norm for _, norm in numbers], rel=1e-2)
    end: Any = alone["end"]
    for name, expected in end.items():
        torch.testing.assert_close(found["end"][name], expected, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("precision", replicas_job.CASES)
def test_adapters_are_equal_on_all_ranks_and_after_a_resume(precision: str, launch: Path) -> None:
    found = torch.load(launch / f"{precision}.pt")
    for copy in found["copies"]:
        assert copy.keys() == found["end"].keys()
        for name, expected in found["end"].items():
            assert not isinstance(copy[name], DTensor)
            assert torch.equal(copy[name], expected)
            assert torch.equal(found["again"][name], expected)


def test_one_process_resumes_a_checkpoint_of_several_ranks(launch: Path, runtime: Ranks) -> None:
    found = torch.load(launch / "fp32.pt")
    again = replicas_job.resume("fp32", launch / "fp32", runtime)
    for name, expected in found["end"].items():
        torch.testing.assert_close(again[name], expected, rtol=1e-4, atol=1e-6)


def test_units_are_all_gathered_as_seldom_as_the_strategy_allows(tmp_path: Path) -> None:
    finished = forked(Path(gathers_job.__file__), tmp_path / "found.pt", ranks=2)
    assert finished.exit_code == 0, finished.output
    found = torch.load(tmp_path / "found.pt")
    expected, *others = found.values()
    for other in others:
        assert other["numbers"] == expected["numbers"]
        for name, weight in other["weights"].items():
            assert torch.equal(weight, expected["weights"][name])
    layers = gathers_job.LAYERS
    for (strategy, _), run in found.items():
        root = 1
        # all layers but the last for the forward and again for the backward pass
        per_micro_batch = 2 * (layers - 1) + 1
        gathers = run["micro_batches"] * per_micro_batch + root
        if strategy == "SHARD_GRAD_OP":
            gathers = layers + root
        assert run["units"] == layers + root
        assert run["gathers"] == gathers
