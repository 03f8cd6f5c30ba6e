"""The first process of a node takes as long as it needs."""

from pathlib import Path

from forked import forked

JOB = Path(__file__).with_name("turns_job.py")


def test_others_wait_for_the_first_process_of_a_node_longer_than_the_time_out(tmp_path: Path) -> None:
    finished = forked(JOB, tmp_path / "done", ranks=2)
    assert finished.exit_code == 0, finished.output
    lines = [f"rank {rank} is first or finds it done: True" for rank in (0, 1)]
    assert finished.output.splitlines() == lines
