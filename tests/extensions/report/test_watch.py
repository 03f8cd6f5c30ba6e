"""`llama-ft watch`: numbers from the files of a run, and what the terminal shows."""

import fcntl
import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
from conftest import REPOSITORY, run
from report_run import MARKUP, SECRET, write_run
from rich.console import Console

from llama_ft.config.paths import RUN_MARKER
from llama_ft.errors import UserError
from llama_ft.extensions.report.live import progress_of
from llama_ft.extensions.report.page import report_page
from llama_ft.extensions.report.run import read_run
from llama_ft.extensions.report.watch import picture, read_watch_flags, sparkline

SCRIPT = REPOSITORY / "recipes" / "watch.py"
WITHOUT_TORCH = "import runpy, sys; sys.argv = sys.argv[1:]; sys.modules |= dict.fromkeys(['torch', 'transformers']); "
WITHOUT_TORCH += "runpy.run_path(sys.argv[0], run_name='__main__')"
COMMAND = [sys.executable, "-c", WITHOUT_TORCH, str(SCRIPT)]
START = 1_700_000_000.0  # 2023-11-14T22:13:20+00:00
ROWS = {"LINES": "50", "COLUMNS": "120"}


def add_facts(folder: Path, **facts: object) -> None:
    path = folder / "facts.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


@pytest.fixture
def running(tmp_path: Path) -> Path:
    """A run at step 60 of 120: loaded for 100 s, then 60 steps in 600 s on two ranks."""
    folder = write_run(tmp_path / "running", state="running")
    attempt = {"step": 0, "time": "2023-11-14T22:13:20+00:00", "ranks": 2, "changed": {}}
    began = {"step": 0, "time": "2023-11-14T22:15:00+00:00"}
    add_facts(folder, attempts=[attempt], training_began=began, total_steps=120)
    (folder / "checkpoints" / "step-000050").mkdir(parents=True)
    (folder / "checkpoints" / ".writing-step-000060").mkdir()
    os.utime(folder / "checkpoints" / "step-000050", (START + 600, START + 600))
    os.utime(folder / "metrics.jsonl", (START + 700, START + 700))
    return folder


def shown(folder: Path, seconds: float, price: float | None = None) -> str:
    """What the terminal shows so many seconds after the start."""
    console = Console(width=120, record=True, file=open(os.devnull, "w"))
    with console.capture() as captured:
        console.print(picture(read_run(folder), START + seconds, price))
    return captured.get()


def test_the_terminal_shows_the_rewards_of_reinforcement_learning(running: Path) -> None:
    file = running / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    rewarded = [line | {"train/reward": line["step"] / 100} for line in lines]
    file.write_text("".join(json.dumps(line) + "\n" for line in rewarded))
    [text] = [line for line in shown(running, 705).splitlines() if line.startswith("mean reward")]
    assert "0.6, mean of the last 20: 0.505" in text


def test_the_end_follows_from_the_time_of_the_steps_so_far(running: Path) -> None:
    progress = progress_of(read_run(running), START + 705)
    assert progress.step_seconds == 10.0
    assert progress.left_seconds == 60 * 10 - 5
    assert progress.spent_seconds == 705
    assert progress.cost(3600, 2.0) == 2 * 2.0
    assert progress.unsaved_steps == 10


def test_a_resumed_run_adds_the_time_of_its_earlier_steps(running: Path) -> None:
    first = {"step": 0, "time": None, "ranks": 2, "changed": {}}
    second = {**first, "step": 40, "time": "2023-11-14T22:13:20+00:00"}
    began = {"step": 40, "time": "2023-11-14T22:15:00+00:00"}
    add_facts(running, attempts=[first, second], training_began=began)
    progress = progress_of(read_run(running), START + 700)
    assert progress.step_seconds == 600 / 20
    # the log has 0.5 and 1.5 s in turn
    assert progress.spent_seconds == pytest.approx(700 + 40 * 1.0)


def test_an_ended_run_has_the_time_that_it_wrote(running: Path) -> None:
    (running / "status.json").write_text('{"state": "finished", "step": 60}')
    add_facts(running, ended="2023-11-14T22:30:00+00:00")
    progress = progress_of(read_run(running), START + 99_999)
    assert (progress.spent_seconds, progress.left_seconds) == (1000, None)


def test_the_terminal_shows_progress_cost_memory_and_what_a_kill_would_lose(running: Path) -> None:
    text = shown(running, 705, price=2.0)
    for expected in (
        "step 60 of 120, 50%, epoch 1",
        "12 min of this launch; ends about",
        ", in 9.9 min",
        "0.78 so far, about 1.44 at the end, at 2 per hour and GPU for 2 ranks",
        "1.6, mean of the last 20: 2.03",
        "1.5 at step 60, 3 before training",
        "960 tokens/s (median 930), MFU 46% (median 43%)",
        "step 50, 1.8 min ago; a kill now loses 10 steps, 1.7 min, 0.11; Ctrl-C and SIGTERM save first",
        "GPU memory, rank 0",
        "235.0 MiB of 230.0 MiB planned",
        "236.0 MiB of 230.0 MiB planned",
        f"touch {running}/save",
    ):
        assert expected in " ".join(text.split()), expected
    assert "cost" not in shown(running, 705)


def test_answers_and_warnings_are_printed_as_text_and_without_secrets(running: Path) -> None:
    add_facts(running, slow_ranks=["rank 1 on node 0 is slow\x1b[2J"])
    text = " ".join(shown(running, 705).split())
    assert f"warning: {MARKUP}" in text and "warning: rank 1 on node 0 is slow" in text
    assert "before fine-tuning: " in text and "after fine-tuning: That." in text
    assert SECRET not in text and "\x1b[2J" not in text


def test_a_killed_run_tells_what_is_lost(running: Path) -> None:
    (running / RUN_MARKER).touch()
    text = " ".join(shown(running, 705).split())
    assert "died" in text and "lost: 10 steps, 1.7 min" in text
    assert "--resume auto continues from it." in text


@pytest.mark.parametrize("files", [["metrics.jsonl"], ["status.json"]])
def test_a_run_that_has_just_begun_is_shown(
    running: Path, tmp_path: Path, files: list[str]
) -> None:
    early = tmp_path / "early"
    early.mkdir()
    for name in files:
        (early / name).write_bytes((running / name).read_bytes())
    assert "step 60" in shown(early, 705)


def test_a_small_curve_rises_and_falls_with_the_values() -> None:
    assert sparkline(numpy.array([1.0, 8.0])) == "▁█"
    assert sparkline(numpy.full(100, 2.0)) == "▁" * 30
    falling = sparkline(numpy.linspace(5, 1, 3000))
    assert len(falling) == 30 and sorted(falling, reverse=True) == list(falling)


def test_a_file_gets_the_run_once_and_no_control_sequences(running: Path) -> None:
    with open(running / RUN_MARKER, "w") as marker:
        fcntl.flock(marker, fcntl.LOCK_EX)
        finished = run([*COMMAND, str(running), "--price", "2"])
    assert finished.exit_code == 0, finished.output
    assert "step 60 of 120" in finished.output and "\x1b" not in finished.output


def test_a_terminal_follows_the_run_to_its_end_and_rewrites_the_report(running: Path) -> None:
    ours, theirs = pty.openpty()
    with open(running / RUN_MARKER, "w") as marker:
        fcntl.flock(marker, fcntl.LOCK_EX)
        environment = os.environ | ROWS | {"TERM": "xterm"}
        process = subprocess.Popen(
            [*COMMAND, str(running), "--html"], stdout=theirs, stderr=theirs, env=environment
        )
        os.close(theirs)
        text = ""
        while "step 60 of 120" not in text:
            text += os.read(ours, 65536).decode(errors="replace")
        while not (running / "report.html").exists():
            time.sleep(0.05)
        assert '<meta http-equiv="refresh" content="30">' in (running / "report.html").read_text()
        (running / "status.json").write_text(
            '{"state": "finished", "step": 120, "exit_code": 0, "message": ""}'
        )
        text = ""
        while True:
            try:
                text += os.read(ours, 65536).decode(errors="replace")
            except OSError:  # the process has closed its terminal
                break
    assert process.wait() == 0, text
    assert "finished" in text and "step 120 of 120" in text
    assert (running / "report.html").read_text().count("http-equiv") == 1
    assert "finished" in (running / "report.html").read_text()


def test_without_a_run_the_newest_one_in_output_is_watched(
    running: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="RUN is needed, since there is no run in output/ of this"):
        read_watch_flags([], "")
    for name, moment in (("old", 1), ("series/new", 3), ("middle", 2)):
        folder = tmp_path / "output" / name
        folder.mkdir(parents=True)
        (folder / RUN_MARKER).touch()
        (folder / "status.json").touch()
        os.utime(folder / "status.json", (moment, moment))
    assert read_watch_flags([], "").paths == ["output/series/new"]


def test_a_report_without_a_watch_is_not_loaded_again(running: Path) -> None:
    assert "refresh" not in report_page(read_run(running)).partition("<style>")[0]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("status.json", '{"state": 7, "message": ["a"], "step": "x"}'),
        ("plan.json", '{"peaks": 3}'),
        ("config.yaml", "null"),
        ("metrics.jsonl", '{"step": "x", "train/loss": "high"}\n'),
    ],
)
def test_files_of_another_program_end_in_one_message(running: Path, file: str, text: str) -> None:
    (running / file).write_text(text)
    finished = run([*COMMAND, str(running)])
    assert finished.exit_code == 2
    assert finished.output.startswith(f"error: {running}") and "Traceback" not in finished.output
    assert "corrupted (" in finished.output


def test_a_name_that_is_too_long_ends_in_one_message() -> None:
    finished = run([*COMMAND, "a" * 5000])
    assert finished.exit_code == 2
    expected = f"error: {'a' * 60}...: this name is too long for the file system.\n"
    assert finished.output == expected


def test_a_report_that_cannot_be_written_ends_the_watch_with_one_message(running: Path) -> None:
    (running / "report.html").mkdir()
    finished = run([*COMMAND, str(running), "--html"])
    assert finished.exit_code == 2
    assert f"error: {running}/report.html cannot be written: Is a directory." in finished.output
    assert "Traceback" not in finished.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["goof"], "goof: there is no run or model here."),
        (["run/model"], "run/model: is a part of a run. Name run."),
        ([".", "."], ". and .: name one run."),
        (["--prise", "2"], "--prise is not a flag. Did you mean --price?"),
        (["run", "--html"], "--html: run/report.html exists, and is not a report."),
    ],
)
def test_invalid_flags_end_in_one_message(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write_run(tmp_path / "here"))
    (tmp_path / "here" / "run" / "model").mkdir(parents=True)
    (tmp_path / "here" / "run" / "status.json").write_text("{}")
    (tmp_path / "here" / "run" / "report.html").write_text("mine")
    with pytest.raises(UserError) as refusal:
        read_watch_flags([*words, *(["."] if "--prise" in words else [])], "")
    assert refusal.value.messages == (message,)
