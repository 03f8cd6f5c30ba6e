"""The bar on a terminal and the lines of a log file, as they are printed."""

import io
import re

import pytest
from rich.console import Console

from llama_ft.observe.progress import ProgressBar

STEP = {
    "train/loss": 6.2134, "train/lr": 1.2e-3, "train/grad_norm": 1.3189, "perf/tokens_per_second": 8412.4,
    "perf/mfu": 0.384, "perf/matmul_utilization": 0.5, "perf/step_seconds": 1.312, "memory/host_peak_bytes": [1, 2],
}  # fmt: skip
EVALUATION = {"eval/loss": 9.0109, "eval/perplexity": 8191.7}


def last_line(printed: io.StringIO) -> str:
    without_codes = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", printed.getvalue())
    return [line.strip() for line in re.split(r"[\r\n]+", without_codes) if line.strip()][-1]


@pytest.mark.parametrize("is_quiet", [False, True])
def test_a_log_file_gets_the_first_ten_steps_then_fewer_and_all_evaluations(
    is_quiet: bool,
) -> None:
    now = [1000.0]
    printed = io.StringIO()
    console = Console(
        file=printed, soft_wrap=True, highlight=False, markup=False, get_time=lambda: now[0]
    )
    with ProgressBar(2000, steps_done=12, console=console, is_quiet=is_quiet) as progress:
        for step in range(13, 2001):  # a step takes a second
            now[0] += 1.0
            progress.update(step, STEP if step < 2000 else {**STEP, "train/rewards/margins": 0.25})
            if step == 30:
                progress.update(step, EVALUATION)
    lines = printed.getvalue().splitlines()
    assert (
        lines.pop(0 if is_quiet else 10)
        == "step 30/2000  validation loss 9.011  perplexity 8191.70"
    )
    assert bool(lines) is not is_quiet
    if lines:
        numbers = "loss 6.213  lr 1.2e-03  grad_norm 1.32  8,412 tokens/s  MFU 38%  50% of the matmul rate  1.31 s/step"
        assert (
            lines[0] == f"step 13/2000  {numbers}"
            and " loss 6.213  margin 0.25  lr 1.2e-03 " in lines[-1]
        )
        steps = [int(line.split("/")[0].removeprefix("step ")) for line in lines]
        gaps = [later - earlier for earlier, later in zip(steps, steps[1:], strict=False)]
        assert (
            gaps[:9] == [1] * 9
            and gaps[9:68] == [10] * 59
            and gaps[68:-1] == [60] * 23
            and steps[-1] == 2000
        )


@pytest.mark.parametrize("columns", [160, 80])
def test_a_terminal_gets_a_bar_with_as_many_numbers_as_fit(columns: int) -> None:
    printed = io.StringIO()
    console = Console(
        file=printed, force_terminal=True, width=columns, highlight=False, markup=False
    )
    with ProgressBar(20000, console=console) as progress:
        progress.update(0, EVALUATION)
        progress.update(12345, STEP)
    bar = last_line(printed)
    assert len(bar) <= columns and re.match(r"step 12345/20000 ━", bar)
    assert "loss 6.213  val 9.011  lr 1." in bar and re.search(r"left [-\d]+:", bar)
    if columns == 160:
        assert "8,412 tokens/s" in bar and "1.31 s/step" in bar


def test_the_time_left_of_a_resumed_run_is_estimated_from_its_own_speed() -> None:
    now = [1000.0]
    printed = io.StringIO()
    console = Console(
        file=printed, force_terminal=True, width=160, highlight=False, get_time=lambda: now[0]
    )
    with ProgressBar(1000, steps_done=900, console=console) as progress:
        for step in range(901, 911):
            now[0] += 20.0
            progress.update(step, STEP)
    # 10 steps in 200 s, so 90 in 1800 s
    assert re.match(r"step +910/1000 .* left 0:30:00$", last_line(printed))


def test_an_evaluation_by_rewards_shows_the_reward() -> None:
    """Its loss is minus the reward."""
    printed = io.StringIO()
    with ProgressBar(8, console=Console(file=printed, soft_wrap=True)) as progress:
        progress.update(8, {"eval/loss": -0.59, "eval/reward": 0.59})
    assert last_line(printed) == "step 8/8  validation loss -0.59  mean reward 0.59"
