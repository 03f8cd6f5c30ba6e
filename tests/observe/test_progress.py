"""The bar on a terminal and the lines of a log file, as they are printed."""

import io
import re

from rich.console import Console

from llama_ft.observe.progress import ProgressBar

STEP = {
    "train/loss": 6.2134,
    "train/lr": 1.2e-3,
    "train/grad_norm": 1.3189,
    "perf/tokens_per_second": 8412.4,
    "perf/mfu": 0.384,
    "perf/matmul_utilization": 0.5,
    "perf/step_seconds": 1.312,
    "memory/host_peak_bytes": [1, 2],
}


def file_console() -> tuple[Console, io.StringIO]:
    printed = io.StringIO()
    return Console(file=printed, soft_wrap=True, highlight=False, markup=False, emoji=False), printed


def terminal_console(columns: int) -> tuple[Console, io.StringIO]:
    printed = io.StringIO()
    return Console(file=printed, force_terminal=True, width=columns, highlight=False, markup=False), printed


def visible_lines(printed: io.StringIO) -> list[str]:
    without_codes = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", printed.getvalue())
    return [line.strip() for line in re.split(r"[\r\n]+", without_codes) if line.strip()]


def test_a_log_file_gets_plain_lines() -> None:
    console, printed = file_console()
    with ProgressBar(100, console=console) as progress:
        progress.update(12, STEP)
    expected = "step 12/100  loss 6.213  lr 1.2e-03  grad_norm 1.32  8,412 tokens/s  MFU 38%  1.3 s/step\n"
    assert printed.getvalue() == expected


def test_a_run_that_ends_early_still_prints_its_last_step() -> None:
    console, printed = file_console()
    with ProgressBar(500, console=console, seconds_between_lines=3600) as progress:
        for step in range(1, 38):
            progress.update(step, STEP)
    assert [line.split("  ")[0] for line in visible_lines(printed)] == ["step 1/500", "step 37/500"]


def test_an_evaluation_is_a_line_of_its_own() -> None:
    console, printed = file_console()
    with ProgressBar(100, console=console) as progress:
        progress.note_evaluation(0, 9.0109, 8191.7)
    assert printed.getvalue() == "step 0/100  held-out loss 9.011  perplexity 8191.70\n"


def test_a_terminal_gets_a_bar_with_everything_beside_it() -> None:
    console, printed = terminal_console(columns=160)
    with ProgressBar(100, console=console) as progress:
        progress.note_evaluation(0, 9.0109, 8191.7)
        progress.update(12, STEP)
    bar = visible_lines(printed)[-1]
    assert re.match(r"step +12/100 ", bar)
    for part in ("loss 6.213", "held-out 9.011", "lr 1.2e-03", "8,412 tokens/s", "1.3 s/step", "left"):
        assert part in bar
    assert "━" in bar


def test_the_bar_fits_on_80_columns() -> None:
    console, printed = terminal_console(columns=80)
    with ProgressBar(20000, console=console) as progress:
        progress.note_evaluation(0, 9.0109, 8191.7)
        progress.update(12345, STEP | {"perf/tokens_per_second": 123456.0})
    bar = visible_lines(printed)[-1]
    assert len(bar) <= 80
    assert "…" not in bar
    assert "loss 6.213  val 9.011" in bar
    assert re.search(r"123,456 tok/s +left [-\d]+:", bar)


def test_the_time_left_of_a_resumed_run_is_by_its_own_speed() -> None:
    now = [1000.0]
    printed = io.StringIO()
    console = Console(file=printed, force_terminal=True, width=160, highlight=False, get_time=lambda: now[0])
    with ProgressBar(1000, steps_done=900, console=console) as progress:
        for step in range(901, 911):
            now[0] += 20.0
            progress.update(step, STEP)
    bar = visible_lines(printed)[-1]
    assert re.match(r"step +910/1000 ", bar)
    assert bar.endswith("0:03:20 left 0:30:00")  # 10 steps in 200 s, so 90 in 1800 s
