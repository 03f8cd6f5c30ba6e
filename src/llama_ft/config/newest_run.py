"""Find the newest run, for tools that are started without one."""

from collections.abc import Callable
from pathlib import Path

from llama_ft.config.paths import RUN_MARKER

RUNS = Path("output")  # where a run without --output_dir is, in the working directory
MOST_FOLDERS = 2  # output/run and output/experiment/run
NO_RUN = f"there is no run in {RUNS}/ of this directory."


def newest_run(is_usable: Callable[[Path], object] = lambda folder: True) -> Path | None:
    """Return the run in output/ that was active last, of those that `is_usable` accepts; None
    without one."""
    markers = list[Path]()
    for depth in range(1, MOST_FOLDERS + 1):
        markers += RUNS.glob("/".join(["*"] * depth) + f"/{RUN_MARKER}")
    for folder in sorted((marker.parent for marker in markers), key=_last_active, reverse=True):
        if is_usable(folder):
            return folder
    return None


def is_newest(folder: Path) -> bool:
    """Return whether the tools find this run, which has just ended, without its name."""
    newest = newest_run()
    return newest is not None and newest.resolve() == folder.resolve()


def _last_active(folder: Path) -> float:
    """Return when the run wrote its status. It does that at its start, while it trains and at its
    end."""
    for name in ("status.json", RUN_MARKER):
        file = folder / name
        if file.is_file():
            return file.stat().st_mtime
    return 0.0
