"""`llama-ft watch`: a run in the terminal, from its files alone."""

import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated

import numpy
from pydantic import Field
from pydantic.dataclasses import dataclass
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from llama_ft.config.newest_run import NO_RUN, newest_run
from llama_ft.config.reading.tool_flags import check, read
from llama_ft.config.value_types import STRICT
from llama_ft.config.wording.messages import size_text, time_text
from llama_ft.errors import UserError, plural
from llama_ft.extensions.report.live import RECENT_STEPS, Progress, progress_of
from llama_ft.extensions.report.page import ENDINGS, Question, questions_of, report_page
from llama_ft.extensions.report.run import (
    Run,
    is_other_file,
    problems_of_runs,
    read_run,
    warnings_of,
)
from llama_ft.extensions.report.write import write_page
from llama_ft.masking import mask_secrets, printable

SECONDS_BETWEEN_LOOKS = 2.0
SECONDS_BETWEEN_REPORTS = 30
STYLES = {"good": "green", "bad": "red", "warn": "yellow", "info": "cyan"}
WIDTH = 120  # of what is printed into a file
BAR_WIDTH = 30
MOST_RANKS = 8  # further ones are in one line
MOST_QUESTIONS = 2
LONGEST_TEXT = 240  # characters of a question or an answer
BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(config=STRICT, kw_only=True)
class WatchFlags:
    """Flags of recipes/watch.py."""

    paths: list[str] = Field(default_factory=list)
    """[RUN]: the directory of a run; if not given, the newest run in output/."""

    price: Annotated[float, Field(gt=0)] | None = None
    """Price of one GPU for an hour, in any currency: show the cost so far and at the end."""

    html: bool = False
    """Also rewrite RUN/report.html every 30 s. A browser that shows it loads it again."""

    once: bool = False
    """Print once and stop, as if the output were no terminal."""


def read_watch_flags(argv: list[str], description: str) -> WatchFlags:
    """Return the flags, with one run in `paths`. Raises UserError with all errors."""
    options, _, errors = read(argv, WatchFlags, description)
    if not options.paths:
        newest = newest_run()
        options.paths = [str(newest)] if newest else []
        if newest is None:
            errors.append(f"RUN is needed, since {NO_RUN}")
    if len(options.paths) > 1:
        errors.append(f"{' and '.join(options.paths)}: name one run.")
    errors += problems_of_runs(options.paths)
    check(errors)
    if options.html and is_other_file(Path(options.paths[0], "report.html")):
        raise UserError(f"--html: {options.paths[0]}/report.html exists, and is not a report.")
    return options


def watch(folder: Path, options: WatchFlags) -> None:
    """Show the run until it ends. Ctrl-C ends the watch only."""
    width = None if sys.stdout.isatty() else WIDTH
    console = Console(highlight=False, markup=False, emoji=False, width=width)
    shows_live = console.is_terminal and not options.once
    if not (shows_live or options.html):
        console.print(picture(read_run(folder), time.time(), options.price, _has_blocks()))
        return
    last: RenderableType = ""
    with Live(console=console, screen=shows_live, auto_refresh=False) as live:
        for run in _versions(folder, options):
            last = picture(run, time.time(), options.price, _has_blocks())
            if shows_live:
                live.update(last, refresh=True)
    console.print(last)


def _versions(folder: Path, options: WatchFlags) -> Iterator[Run]:
    """Yield the run again and again until it has ended."""
    report_at = 0.0
    while True:
        started = time.monotonic()
        run = read_run(folder)
        is_running = run.status.get("state") == "running"
        yield run
        if options.html and (started >= report_at or not is_running):
            refresh = SECONDS_BETWEEN_REPORTS if is_running else None
            write_page(folder / "report.html", report_page(run, options.price, refresh))
            report_at = started + SECONDS_BETWEEN_REPORTS
        if not is_running:
            return
        # at most a tenth of a core, however long the log is
        time.sleep(max(SECONDS_BETWEEN_LOOKS, 10 * (time.monotonic() - started)))


def _has_blocks() -> bool:
    return "utf" in (sys.stdout.encoding or "").lower()


def picture(run: Run, now: float, price: float | None, has_blocks: bool = True) -> RenderableType:
    """Return what the terminal shows of a run.

    Args:
        run: its files.
        now: the moment, in seconds since 1970.
        price: of a GPU per hour.
        has_blocks: the terminal can print the characters of small curves.
    """
    progress = progress_of(run, now)
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column()
    rows.add_row("progress", _bar(progress, run))
    for name, text in [
        ("time", _times(progress)),
        ("cost", _costs(progress, price)),
        ("mean reward", _losses(run, "train/reward", has_blocks)),
        ("loss", _losses(run, "train/loss", has_blocks)),
        ("validation", _validation(run)),
        ("speed", _speed(run)),
        ("saved", _saved(progress, run, now, price)),
    ]:
        if text:
            rows.add_row(name, text)
    parts: list[RenderableType] = [_head(run), "", rows]
    memory = _memory(run)
    if memory is not None:
        parts += ["", memory]
    for text in warnings_of(run):
        parts.append(_safe(f"warning: {text}", "yellow"))
    message = run.status.get("message")
    if message:
        parts.append(_safe(str(message), STYLES[ENDINGS.get(run.status.get("state", ""), "info")]))
    for question in questions_of(run, "samples")[:MOST_QUESTIONS]:
        parts += ["", _answers(question)]
    if run.status.get("state") == "running":
        parts += ["", _safe(f"touch {run.folder}/save  saves a checkpoint after this step", "dim")]
    return Group(*parts)


def _safe(text: str, style: str = "") -> Text:
    whole = text.encode("utf-8", "replace").decode()  # an answer may hold half a surrogate pair
    return Text(printable(mask_secrets(whole)), style)


def _head(run: Run) -> Text:
    state = str(run.status.get("state") or "unknown")
    head = Text(f"{run.folder}  ", "bold")
    head.append(state, STYLES[ENDINGS.get(state, "info")])
    if run.model:
        head.append_text(_safe(f"  {run.model}, {run.method}"))
    return head


def _bar(progress: Progress, run: Run) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    total = progress.total_steps
    text = f"step {progress.step:,}"
    if total:
        text += f" of {total:,}, {progress.step / total:.0%}"
    if "epoch" in run.curves:
        text += f", epoch {run.curves['epoch'].values[-1]:.3g}"
    bar = ProgressBar(total=total or 1, completed=progress.step, width=BAR_WIDTH)
    grid.add_row(bar, text)
    return grid


def clock(moment: float, now: float) -> str:
    """Return a time of the local clock, with the date if it is another day."""
    then = datetime.fromtimestamp(moment).astimezone()
    is_today = then.date() == datetime.fromtimestamp(now).date()
    return f"{then:%H:%M}" if is_today else f"{then:%Y-%m-%d %H:%M}"


def _times(progress: Progress) -> str:
    parts = []
    now = progress.until
    if progress.started_at is not None:
        took = time_text(max(0.0, now - progress.started_at))
        parts.append(f"started {clock(progress.started_at, now)}, {took} of this launch")
    if progress.left_seconds is not None:
        end = clock(now + progress.left_seconds, now)
        parts.append(f"ends about {end}, in {time_text(progress.left_seconds)}")
    return "; ".join(parts)


def _costs(progress: Progress, price: float | None) -> str:
    so_far = progress.cost(progress.spent_seconds, price)
    if so_far is None or price is None:
        return ""
    text = f"{so_far:,.2f} so far"
    left = progress.cost(progress.left_seconds, price)
    if left is not None:
        text += f", about {so_far + left:,.2f} at the end"
    return f"{text}, at {price:g} per hour and GPU for {plural(progress.ranks, 'rank')}"


def _losses(run: Run, key: str, has_blocks: bool) -> str:
    curve = run.curves.get(key)
    if curve is None:
        return ""
    recent = curve.values[-RECENT_STEPS:]
    text = f"{curve.values[-1]:.4g}, mean of the last {len(recent)}: {recent.mean():.4g}"
    return f"{text}  {sparkline(curve.values)}" if has_blocks else text


def sparkline(values: numpy.ndarray) -> str:
    """Return a curve of at most BAR_WIDTH characters: each is the mean of some values."""
    parts = numpy.array_split(values, min(BAR_WIDTH, len(values)))
    means = numpy.array([part.mean() for part in parts])
    span = means.max() - means.min()
    heights = (means - means.min()) / span if span else numpy.zeros(len(means))
    return "".join(BLOCKS[round(height * (len(BLOCKS) - 1))] for height in heights.tolist())


def _validation(run: Run) -> str:
    curve = run.curves.get("eval/loss")
    if curve is None:
        return ""
    steps, values = curve
    text = f"{values[-1]:.4g} at step {steps[-1]:,.0f}"
    if steps[0] == 0 and len(values) > 1:
        text += f", {values[0]:.4g} before training"
    if values.min() < values[-1]:
        text += f", lowest {values.min():.4g} at step {steps[values.argmin()]:,.0f}"
    return text


def _speed(run: Run) -> str:
    parts = []
    for key, form, text in (
        ("perf/tokens_per_second", ",.0f", "{} tokens/s"),
        ("perf/mfu", ".0%", "MFU {}"),
        ("perf/step_seconds", ".3g", "{} s per step"),
    ):
        if key in run.curves:
            values = run.curves[key].values
            now = text.format(format(values[-1], form))
            parts.append(f"{now} (median {numpy.median(values):{form}})")
    return ", ".join(parts)


def _saved(progress: Progress, run: Run, now: float, price: float | None) -> str:
    saved = progress.checkpoint
    if saved is None:
        text = "no checkpoint yet"
    else:
        text = f"step {saved.step:,}, {time_text(max(0.0, now - saved.saved_at))} ago"
    if run.status.get("state") not in ("running", "died"):
        return text if saved else ""
    lost = plural(progress.unsaved_steps, "step")
    if progress.step_seconds is not None:
        seconds = progress.unsaved_steps * progress.step_seconds
        lost += f", {time_text(seconds)}"
        cost = progress.cost(seconds, price)
        lost += f", {cost:,.2f}" if cost is not None else ""
    if run.status.get("state") == "died":
        return f"{text}; lost: {lost}"
    stop = "Ctrl-C and SIGTERM save first" if progress.saves_on_stop else "nor does Ctrl-C save"
    return f"{text}; a kill now loses {lost}; {stop}"


def _memory(run: Run) -> RenderableType | None:
    """Return a bar per rank: its peak as a share of the planned one."""
    peaks = run.of_ranks.get("memory/device_peak_bytes")
    planned = max((peak["bytes"] for peak in run.plan.get("peaks", [])), default=0)
    if peaks is None:
        return _host_memory(run, planned)
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    highest = max(*peaks, planned)
    for rank, peak in enumerate(peaks[:MOST_RANKS]):
        text = size_text(peak)
        if planned:
            text += f" of {size_text(planned)} planned"
        bar = ProgressBar(
            total=highest, completed=peak, width=BAR_WIDTH, complete_style=_color(peak, planned)
        )
        grid.add_row(f"GPU memory, rank {rank}", bar, text)
    rest = peaks[MOST_RANKS:]
    if rest:
        grid.add_row("", "", f"{len(rest)} more ranks, at most {size_text(max(rest))}")
    return grid


def _color(peak: float, planned: float) -> str:
    return "red" if planned and peak > planned else "green"


def _host_memory(run: Run, planned: float) -> Text | None:
    peaks = run.of_ranks.get("memory/host_peak_bytes")
    if peaks is None:
        return None
    sizes = ", ".join(size_text(peak) for peak in peaks[:MOST_RANKS])
    rest = peaks[MOST_RANKS:]
    if rest:
        sizes += f", {len(rest)} more ranks at most {size_text(max(rest))}"
    text = Text("host memory (RSS) of each rank  ", "bold")
    text.append(sizes, "not bold")
    if planned:
        text.append(f"; tensors planned: {size_text(planned)}", "not bold")
    return text


def _answers(question: Question) -> Text:
    text = _safe(f"{_short(question.text)}\n", "bold")
    first, last = question.answers[0], question.answers[-1]
    for answer in [first] if first is last else [first, last]:
        text.append_text(_safe(f"{answer.get('when')}: ", "dim"))
        text.append_text(_safe(f"{_short(str(answer.get('answer', '')))}\n"))
    text.rstrip()
    return text


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_TEXT else f"{line[:LONGEST_TEXT]}..."
