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


END = """
import atexit, threading, time, sys
from llama_ft.processes import end_quickly

class Module:
    def __del__(self):
        print("destroyed", flush=True)

kept = Module()
sys.modules["kept"] = kept
atexit.register(print, "registered")
def work():
    time.sleep(0.2)
    print("thread")
threading.Thread(target=work).start()
sys.stdout.write("script ")
if len(sys.argv) > 1:
    end_quickly(int(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("arguments", "printed"), [((), ["destroyed"]), (("0",), []), (("3",), [])]
)
def test_a_process_that_ends_quickly_waits_for_threads_and_functions_at_exit(
    arguments: tuple[str, ...], printed: list[str]
) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", END, *arguments], capture_output=True, text=True, timeout=60
    )
    assert finished.returncode == int(arguments[0] if arguments else 0)
    assert finished.stdout.split() == ["script", "thread", "registered", *printed]
    assert not finished.stderr


def test_a_process_that_has_used_a_gpu_ends_as_always() -> None:
    used = "import torch; torch.cuda.is_initialized = lambda: True\n"
    finished = subprocess.run(
        [sys.executable, "-c", used + END, "0"], capture_output=True, text=True, timeout=60
    )
    assert finished.stdout.split() == ["script", "thread", "registered", "destroyed"]


def test_output_that_cannot_be_written_still_fails_a_process_that_ends_quickly() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    script = "from llama_ft.processes import end_quickly; print('lost'); end_quickly()"
    finished = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONUNBUFFERED": ""},  # otherwise `print` fails
        stdout=write_end,
        stderr=subprocess.PIPE,
        timeout=60,
    )
    os.close(write_end)
    assert finished.returncode == 120 and b"BrokenPipeError" in finished.stderr  # Python's own end


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "2>&-"])
def test_a_process_whose_output_is_closed_ends_quickly_without_a_message(closed: str) -> None:
    script = "from llama_ft.processes import end_quickly; print('line'); end_quickly()"
    finished = subprocess.run(
        ["bash", "-c", f'"$0" -c "$1" {closed}', sys.executable, script],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert finished.returncode == 0 and not finished.stderr
    assert finished.stdout == ("line\n" if closed == "2>&-" else "")


def test_functions_at_exit_that_were_registered_before_the_script_run_too() -> None:
    """Coverage and profilers register theirs, then run a script."""
    script = f"import atexit; atexit.register(print, 'earlier')\n{END}"
    finished = subprocess.run(
        [sys.executable, "-c", script, "0"], capture_output=True, text=True, timeout=60
    )
    assert finished.stdout.split()[:4] == ["script", "thread", "registered", "earlier"]


def test_a_program_that_has_run_a_script_has_its_own_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from llama_ft.processes import end_quickly\nend_quickly()\n")
    program = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__'); sys.exit(3)"
    finished = subprocess.run([sys.executable, "-c", program, str(script)], timeout=60)
    assert finished.returncode == 3


def test_files_that_a_script_has_not_closed_are_written(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from llama_ft.processes import end_quickly\n"
        "text = Path(sys.argv[1]).open('w'); text.write('line')\n"
        "binary = Path(sys.argv[2]).open('wb'); binary.write(b'bytes')\n"
        "closed = Path(sys.argv[1]).open(); closed.close()\n"
        "end_quickly()"
    )
    files = [tmp_path / "text", tmp_path / "binary"]
    finished = subprocess.run([sys.executable, "-c", script, *map(str, files)], timeout=60)
    assert finished.returncode == 0
    assert [file.read_text() for file in files] == ["line", "bytes"]
