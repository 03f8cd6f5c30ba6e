"""The end of restarts by torchrun, whose agent is the parent of the ranks."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY

# The script takes in orphans, as the first process of a container does. Its child is the agent, and
# that one's child a rank. Both tell it by signals and files what they see.
SCRIPT = """
import ctypes, os, signal, sys, time
from llama_ft.processes import end_restarts

PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
received = []
signal.signal(signal.SIGTERM, lambda *_: received.append("first process"))
agent = os.fork()
if agent == 0:
    def stopped(*_):
        os.write(1, b"agent ")
        os._exit(0)
    signal.signal(signal.SIGTERM, stopped)
    rank = os.fork()
    if rank == 0:
        if sys.argv[1] == "killed":
            agent = os.getppid()
            os.kill(agent, signal.SIGKILL)
            while os.getppid() == agent:
                time.sleep(0.01)
        end_restarts()
        os._exit(0)
    while True:
        time.sleep(1)
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
print(*received)
"""


@pytest.mark.parametrize(("agent", "ended"), [("alive", "agent"), ("killed", "")])
def test_a_rank_ends_its_own_agent_and_no_other_process(agent: str, ended: str) -> None:
    variables = {"PYTHONPATH": str(REPOSITORY / "src"), "TORCHELASTIC_MAX_RESTARTS": "3"}
    finished = subprocess.run(
        [sys.executable, "-c", SCRIPT, agent],
        env=variables,
        cwd=Path("/"),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert finished.stdout.strip() == ended
