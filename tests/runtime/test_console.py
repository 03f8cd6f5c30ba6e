"""What people read while a run works."""

import os
import subprocess
import sys
from pathlib import Path

from conftest import ENVIRONMENT, REPOSITORY

TALKATIVE = """
import sys
from pathlib import Path
from llama_ft.runtime.console import configure_console, console, log
configure_console(rank=0)
for number in range(20_000):
    log.info(f"line {number}")
print("a line past the console", flush=True)
Path(sys.argv[1]).write_text(str(console.quiet))
"""


def test_a_run_goes_on_when_nobody_reads_it_any_more(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TALKATIVE, str(tmp_path / "end")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**ENVIRONMENT}, cwd=REPOSITORY) as talking:
        assert talking.stdout is not None and talking.stdout.readline() == b"line 0\n"
        talking.stdout.close()
        assert talking.wait(timeout=100) == 0
    assert (tmp_path / "end").read_text() == "True"


def test_a_run_goes_on_when_the_disk_is_full_that_its_output_goes_to(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TALKATIVE, str(tmp_path / "end")]
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, stdout=full, env={**ENVIRONMENT}, cwd=REPOSITORY, timeout=100).returncode == 0
    assert (tmp_path / "end").read_text() == "True"


def test_a_run_goes_on_when_its_terminal_is_gone(tmp_path: Path) -> None:
    """Left with disown, which keeps SIGHUP from it."""
    reader, terminal = os.openpty()
    command = [sys.executable, "-c", TALKATIVE, str(tmp_path / "end")]
    with subprocess.Popen(command, stdout=terminal, env={**ENVIRONMENT}, cwd=REPOSITORY) as talking:
        os.close(terminal)
        assert os.read(reader, 6) == b"line 0"
        os.close(reader)
        assert talking.wait(timeout=100) == 0
    assert (tmp_path / "end").read_text() == "True"
