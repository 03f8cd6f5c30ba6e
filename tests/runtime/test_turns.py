"""The first process of a node takes as long as it needs, and the others know when it is gone."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY

JOB = Path(__file__).with_name("turns_job.py")


@pytest.mark.slow
def test_others_wait_longer_than_the_time_out_for_a_leader_that_lives_but_not_for_one_that_is_stopped(
    tmp_path: Path,
) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(
        [*launcher, str(JOB), str(tmp_path / "done")],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
    )  # fmt: skip
    assert job.stdout is not None
    lines, pids = [], {}
    for line in job.stdout:
        lines.append(line)
        if told := re.match(r"rank (\d) has pid (\d+) and is first or finds it done: True$", line):
            pids[int(told[1])] = int(told[2])
        if line.startswith("error: "):  # torchrun would do it 30 s later
            os.kill(pids[0], signal.SIGKILL)
    assert job.wait() == 1
    assert list(pids) == [0, 1], "".join(lines)
    assert "for 4 s\n       (--collective_timeout) it has given no sign of life" in "".join(lines)
