"""The end of restarts by torchrun, whose agent is the parent of the ranks; the command as it was typed;
and the end of a process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY

from llama_ft import processes

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


def test_the_command_is_as_it_was_typed_with_its_launcher(tmp_path: Path) -> None:
    """A recipe changes its own sys.argv, and torchrun's words are in another process."""
    script = tmp_path / "finetuning.py"
    source = Path(processes.__file__).parents[1]
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(source)!r})\nfrom llama_ft.processes import typed_command\n"
        "sys.argv[1:] = ['--lr=0.1']\nprint(typed_command())\n"
    )
    words = [str(script), "--lr", "1e-1", "--name", "a b"]
    plain = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
    python = Path(sys.executable).name
    assert plain.stdout == f"{python} {script} --lr 1e-1 --name 'a b'\n"
    launcher = tmp_path / "torchrun"  # stands for torchrun: it starts Python with its variable
    launcher.write_text(
        "import os, subprocess, sys\n"
        "subprocess.run([sys.executable, *sys.argv[3:]], env=os.environ | {'TORCHELASTIC_RUN_ID': '1'}, check=True)\n"
    )
    command = [sys.executable, str(launcher), "--nproc_per_node", "2", *words]
    launched = subprocess.run(command, capture_output=True, text=True, check=True)
    assert launched.stdout == f"torchrun --nproc_per_node 2 {script} --lr 1e-1 --name 'a b'\n"


# What a script of recipes/ imports and does; its objects are frozen, so Triton would report leaks.
END = """
import atexit, sys, threading, time
from llama_ft.errors import before_imports
with before_imports():
    pass
import transformers.modeling_utils
from llama_ft.runtime import configure_console
assert "triton" in sys.modules
configure_console(0)

def work():
    time.sleep(0.2)
    print("thread")

def at_exit():
    print("registered")
    print("to stderr", file=sys.stderr)

threading.Thread(target=work).start()
atexit.register(at_exit)
if len(sys.argv) > 1:
    left_open = open(sys.argv[1], "w")
    left_open.write("line")
print("script")
"""


def test_a_process_ends_without_reports_of_leaks_and_loses_nothing(tmp_path: Path) -> None:
    file = tmp_path / "file"
    finished = subprocess.run(
        [sys.executable, "-c", END, str(file)], capture_output=True, text=True, timeout=120
    )
    assert finished.returncode == 0
    assert finished.stdout.split() == ["script", "thread", "registered"]
    assert finished.stderr == "to stderr\n"
    assert file.read_text() == "line"


def test_output_that_cannot_be_written_fails_a_process_at_its_end() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    finished = subprocess.run(
        [sys.executable, "-c", END],
        env={**os.environ, "PYTHONUNBUFFERED": ""},  # otherwise `print` fails
        stdout=write_end,
        stderr=subprocess.PIPE,
        timeout=120,
    )
    os.close(write_end)
    assert finished.returncode == 120 and b"BrokenPipeError" in finished.stderr


def test_a_process_with_a_closed_stdout_ends_without_reports_of_leaks() -> None:
    command = ["bash", "-c", '"$0" -c "$1" >&-', sys.executable, END]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0 and finished.stderr == "to stderr\n"
