"""A failing rank ends the job soon, says why once, and leaves no process behind."""

import json
import os
import re
import resource
import signal
import time
from pathlib import Path

import pytest
from conftest import Finished, torchrun
from forked import forked

# After that torchrun kills the ranks that are left.
SOON_SECONDS = 30.0
JOB = str(Path(__file__).with_name("failing_job.py"))
USER_ERROR = "error: mine.yaml:3: this is not right.\n       That would be.\n"


def status_of(folder: Path) -> dict[str, object]:
    return json.loads((folder / "status.json").read_text())


def seconds_since_failure(folder: Path) -> float:
    return time.time() - float((folder / "failed-at").read_text())


def assert_nothing_is_left(finished: Finished) -> None:
    for pid in re.findall(r"^pid (\d+)$", finished.output, re.M):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_an_exception_on_one_rank_is_printed_once_with_its_traceback(tmp_path: Path) -> None:
    finished = forked(JOB, "one rank raises", tmp_path, ranks=2)
    assert finished.exit_code == 1
    assert seconds_since_failure(tmp_path) < SOON_SECONDS
    assert (
        finished.output.count("ValueError: the flux capacitor is empty\nerror: rank 1 failed") == 1
    )
    assert "rank 0" not in finished.output.split("error: rank 1 failed")[0]
    assert "lost contact" not in finished.output
    assert status_of(tmp_path)["state"] == "failed" and status_of(tmp_path)["step"] == 3
    assert "flux capacitor" in str(status_of(tmp_path)["message"])
    assert_nothing_is_left(finished)


def test_rank_0_does_not_write_that_a_run_runs_after_another_rank_has_failed(
    tmp_path: Path,
) -> None:
    finished = forked(JOB, "one rank raises before the first status", tmp_path, ranks=2)
    assert finished.exit_code == 1
    assert status_of(tmp_path)["state"] == "failed"
    assert "flux capacitor" in str(status_of(tmp_path)["message"])


def test_an_error_without_a_text_and_a_limit_of_open_files_have_a_message(tmp_path: Path) -> None:
    finished = forked(JOB, "an error has no text", tmp_path)
    assert finished.exit_code == 1
    message = "error: rank 0 failed: Unprintable: (its message raises ValueError)"
    assert finished.output.count(message) == 1
    assert "During handling" not in finished.output
    finished = forked(JOB, "too many files are open", tmp_path)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    expected = rf"error: rank 0 has too many open files; the limit is {limit}: .*\n +Raise the limit: ulimit"
    assert finished.exit_code == 1 and re.search(expected, finished.output), finished.output
    assert "lost contact" not in finished.output


@pytest.mark.parametrize(
    ("way", "ranks"),
    [
        ("every rank has the same user error", 2),
        ("one rank has a user error", 2),
        ("every rank has the same user error", 0),
    ],
)
def test_a_user_error_is_printed_once_without_a_traceback(
    way: str, ranks: int, tmp_path: Path
) -> None:
    finished = forked(JOB, way, tmp_path, ranks=ranks)
    assert finished.exit_code == 2 and status_of(tmp_path)["exit_code"] == 2
    assert finished.output.count(USER_ERROR) == finished.output.count("error: ") == 1
    assert "Traceback" not in finished.output and "lost contact" not in finished.output
    assert_nothing_is_left(finished)


@pytest.mark.parametrize("with_agent", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_killed_rank_ends_the_job_within_30_seconds(tmp_path: Path, with_agent: bool) -> None:
    (tmp_path / "checkpoints" / "step-000003").mkdir(parents=True)
    if with_agent:
        finished = torchrun(2, JOB, "one rank is killed", str(tmp_path))
        assert finished.exit_code == 1
        assert "exitcode  : -9" in finished.output
    else:
        finished = forked(JOB, "one rank is killed", tmp_path, ranks=2)
        assert finished.exit_code == -signal.SIGKILL
    assert seconds_since_failure(tmp_path) < SOON_SECONDS
    assert (
        f"To resume from the last complete checkpoint, add --output_dir {tmp_path} --resume auto to the command.\n"
        in finished.output
    )
    lost = (
        r"^error: lost contact with another rank: rank 1 \(process \d+\) has ended, "
        r"most likely killed \(exit code -9\)"
    )
    assert (
        len(re.findall(lost, finished.output, re.MULTILINE))
        == finished.output.count("error: ")
        == 1
    )
    assert "Host memory: " in finished.output
    assert status_of(tmp_path)["state"] == "failed"
    assert_nothing_is_left(finished)


def test_a_rank_that_waits_in_new_group_ends_when_another_is_killed(tmp_path: Path) -> None:
    way = "one rank is killed while the other opens the run"
    finished = forked(JOB, way, tmp_path, ranks=2)
    assert seconds_since_failure(tmp_path) < SOON_SECONDS
    assert finished.exit_code == -signal.SIGKILL
    lost = r"^error: lost contact with another rank: rank 1 \(process \d+\) has ended"
    assert len(re.findall(lost, finished.output, re.MULTILINE)) == 1, finished.output
    assert status_of(tmp_path)["state"] == "failed"


@pytest.mark.parametrize(
    ("way", "message"),
    [
        (
            "the disk is full while the other rank opens the run",
            "rank 1 could not write config.yaml: No space left on device",
        ),
        pytest.param(
            "one rank never opens the run",
            "rank 1 did not arrive; the others have waited for 8 s",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_rank_that_waits_in_new_group_ends_when_another_fails_or_hangs(
    way: str, message: str, tmp_path: Path
) -> None:
    finished = forked(JOB, way, tmp_path, ranks=2)
    assert seconds_since_failure(tmp_path) < SOON_SECONDS
    assert finished.exit_code == 1, finished.output
    assert finished.output.count(f"error: {message}") == finished.output.count("error: ") == 1
    assert message in str(status_of(tmp_path)["message"])
    assert_nothing_is_left(finished)


def test_other_ranks_wait_for_the_first_process_of_a_node_longer_than_the_timeout(
    tmp_path: Path,
) -> None:
    finished = forked(JOB, "rank 0 goes first", tmp_path, ranks=2)
    assert finished.exit_code == 0, finished.output
    assert re.findall("^rank.*", finished.output, re.M) == [
        f"rank {r} is first or finds it done: True" for r in (0, 1)
    ]
