"""What people read while a run works."""

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
