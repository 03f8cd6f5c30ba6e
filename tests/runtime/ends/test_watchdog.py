"""Ranks that hang are found and named."""

import json
import os
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from forked import forked

from llama_ft.runtime.ends.watchdog import Report, describe_hang

JOB = Path(__file__).with_name("hanging_job.py")


def line_of(text: str) -> int:
    return next(
        number for number, line in enumerate(JOB.read_text().splitlines(), 1) if text in line
    )


def state_of(folder: Path) -> object:
    file = folder / "status.json"
    return json.loads(file.read_text())["state"] if file.exists() else None


@pytest.mark.parametrize(
    ("waiting_in", "line"),
    [
        ("gloo", "all_gather_floats(3.0)"),
        pytest.param("gloo, weights", "GlooAllGather()(", marks=pytest.mark.slow),
        pytest.param("shared memory", "memory.wait(1)", marks=pytest.mark.slow),
    ],
)
def test_a_stopped_rank_and_one_in_a_loop_are_named_and_the_job_ends(
    waiting_in: str, line: str, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(forked, JOB, tmp_path, waiting_in, ranks=3, timeout=120)
        while not job.done() and state_of(tmp_path) != "failed":
            time.sleep(0.02)
        pids = {rank: int((tmp_path / f"process-{rank}").read_text()) for rank in range(3)}
        os.kill(pids[1], signal.SIGKILL)  # a launcher would do it 30 s later
        finished = job.result()
    # rank 0's, or of the one killed: who ends first
    assert finished.exit_code in (1, -signal.SIGKILL), finished.output
    here = socket.gethostname()
    message = (
        "error: rank 1, 2 did not arrive; the others have waited for 6 s (--collective_timeout).\n"
        f"       rank 0 waits at {JOB}:{line_of(line)} in <module>\n"
        f"       rank 1 ({here}, pid {pids[1]}) does not respond: it is suspended or has ended\n"
    )
    assert finished.output.count("error: ") == 1 and message in finished.output
    loop = line_of("# here")
    assert re.search(
        rf"rank 2 \({here}, pid {pids[2]}\) is at {JOB}:({loop}|{loop + 1}) in <module>\n",
        finished.output,
    )
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["state"] == "failed" and status["message"].startswith(
        "error: rank 1, 2 did not arrive"
    )
    for pid in pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    ("collectives", "message"),
    [
        ((9, 8, 9), ["rank 1 did not", "rank 2 waits at 2.py:7 in f", "rank 1 (gpu1, pid 41) is"]),
        (
            (9, 9, 9),
            [
                "all ranks wait",
                "rank 2 waits",
                "rank 0 (gpu0, pid 40) is at",
                "rank 1 (gpu1, pid 41) is at",
            ],
        ),
    ],
)
def test_if_all_ranks_wait_those_with_fewer_collectives_are_named(
    collectives: tuple[int, ...], message: list[str]
) -> None:
    """On CUDA a rank that sleeps looks like one that waits."""
    reports = [
        Report(0, f"gpu{n}", 40 + n, True, made, f"{n}.py:7 in f")
        for n, made in enumerate(collectives)
    ]
    lines = describe_hang(reports, 2, 1800.0).splitlines()
    assert "1800 s (--collective_timeout)" in lines[0]
    assert len(lines) == len(message) and all(
        line.startswith(expected) for line, expected in zip(lines, message, strict=True)
    )
