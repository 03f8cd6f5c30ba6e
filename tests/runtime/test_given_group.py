"""A process group that the caller has started, as Ray Train does."""

from pathlib import Path

from forked import forked

JOB = Path(__file__).with_name("given_group_job.py")


def test_runs_in_a_thread_take_the_callers_process_group_and_leave_it() -> None:
    finished = forked(JOB, ranks=2, timeout=120)
    assert finished.exit_code == 0, finished.output
    for number in range(2):
        assert finished.output.count(f"run {number}: 3, at most True\n") == 2
    assert finished.output.count("left\n") == 2


def test_a_thread_that_hangs_is_named() -> None:
    finished = forked(JOB, "hangs", ranks=2, timeout=120)
    lines = JOB.read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if text.endswith("# here"))
    assert finished.exit_code == 1, finished.output
    assert "error: rank 1 did not arrive" in finished.output
    assert f"is at {JOB}:{line} in runs\n" in finished.output
