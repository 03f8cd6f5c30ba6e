"""The parts of benchmarks/throughput.py that decide what is compared, and whether."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import throughput  # noqa: E402

from llama_ft.data.batches import BatchSampler  # noqa: E402


def run(losses: list[float], untuned: float | None = None, step_seconds: tuple[float, ...] = ()) -> throughput.Run:
    return throughput.Run(
        ends=[10.0, 12.0, 14.0, 16.0],
        tokens=[100.0, 100.0, 300.0, 100.0],
        losses=losses,
        step_seconds=list(step_seconds),
        started=3.0,
        peak_bytes=0,
        untuned_loss=untuned,
    )


def test_losses_that_do_not_agree_are_named_with_their_step() -> None:
    ours, theirs = run([9.0, 8.5]), run([9.0, 8.6])
    assert throughput.disagreement(ours, theirs, 1e-4, natural=False) == "step 2: 8.50000 and 8.60000"
    assert throughput.disagreement(ours, run([9.00001, 8.50001]), 1e-4, natural=False) == ""
    assert throughput.disagreement(ours, run([float("nan"), 8.5]), 1e-4, natural=False).startswith("step 1")


def test_rows_laid_out_otherwise_are_compared_by_the_untuned_model() -> None:
    assert throughput.disagreement(run([9.0, 8.5], 7.0), run([3.0, 2.0], 7.0), 1e-4, natural=True) == ""
    wrong = throughput.disagreement(run([9.0, 8.5], 7.0), run([9.0, 8.5], 7.1), 1e-4, natural=True)
    assert wrong == "the untuned model: 7.00000 and 7.10000"
    assert "missing" in throughput.disagreement(run([9.0, 8.5]), run([9.0, 8.5], 7.0), 1e-4, natural=True)


def test_tokens_a_second_leave_the_warm_up_out_and_take_the_slower_clock() -> None:
    assert run([9.0]).tokens_per_second(warmup=2) == 400 / 4
    assert run([9.0], step_seconds=(1.0, 1.0, 5.0, 3.0)).tokens_per_second(warmup=2) == 400 / 8
    assert run([9.0]).first_step_seconds == 7.0


def test_a_peer_sees_in_each_step_the_rows_that_two_of_our_ranks_see() -> None:
    rows = throughput.dense_rows(50, 8, 24)
    order = throughput.our_order(rows, length=8, batch=4)
    for step in range(6):
        seen = set[int]()
        for rank in range(2):
            plan = BatchSampler(
                [8] * 24,
                [7] * 24,
                pack_length=8,
                global_batch=4,
                world_size=2,
                rank=rank,
                micro_batch=2,
                seed=throughput.SEED,
            )
            seen |= {row for share in plan.step(0, step).micro_batches for row in share}
        assert set(order[step * 4 : step * 4 + 4]) == seen
    assert sorted(order) == list(range(24))
