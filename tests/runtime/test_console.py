"""What people read while a run works."""

import io
import os
from pathlib import Path

import pytest
from forked import start_forked

from llama_ft.errors import UserError
from llama_ft.runtime import configure_console, console, log

HOSTILE = "a\x1b[2Jb\x1b]0;title\x07c\x9b31m\rd\x7f\r\nf"
HARMLESS = "a\ufffd[2Jb\ufffd]0;title\ufffdc\ufffd31m\ufffdd\ufffd"

# More than the 64 KiB that a pipe holds.
TALKATIVE = """
import sys
from pathlib import Path
from llama_ft.runtime.console import configure_console, console, log
configure_console(rank=0)
for number in range(9_000):
    log.info(f"line {number}")
print("a line past the console", flush=True)
Path(sys.argv[1]).write_text(str(console.quiet))
"""


def test_control_characters_of_files_do_not_reach_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(console, "file", io.StringIO())
    configure_console(rank=0)
    log.warning(HOSTILE)
    console.print(HOSTILE)
    assert console.file.getvalue().count(f"{HARMLESS}\n") == 2
    message = str(UserError(f"configs/mine.yaml:3: train.{HOSTILE} is not a setting."))
    assert HARMLESS in message and "\x1b" not in message and "\x9b" not in message


@pytest.mark.parametrize("reader", ["a pipe", None])
def test_a_run_continues_when_its_output_is_closed_or_the_disk_is_full(
    reader: str | None, tmp_path: Path
) -> None:
    reading, writing = os.pipe()
    output = Path(f"/proc/{os.getpid()}/fd/{writing}" if reader else "/dev/full")
    script = tmp_path / "talkative.py"
    script.write_text(TALKATIVE)
    talking = start_forked(script, tmp_path / "end", output=output)
    assert reader is None or os.read(reading, 6) == b"line 0"
    os.close(writing)
    os.close(reading)
    assert talking.wait(timeout=100) == 0
    assert (tmp_path / "end").read_text() == "True"
