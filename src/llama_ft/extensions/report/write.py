"""Write report.html: when a tool asks for it, and at the end of a run."""

import sys
from pathlib import Path

from llama_ft.errors import UserError
from llama_ft.extensions.report.page import report_page
from llama_ft.extensions.report.run import read_run
from llama_ft.processes import replace_text


def write_page(path: Path, page: str) -> None:
    """Write a page into a file. Raises UserError if it cannot be written."""
    try:
        replace_text(path, page)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror}.\n"
            "llama-ft report --output FILE names another place."
        ) from error


def write_or_warn(output_dir: Path) -> None:
    """Write report.html of a run that has ended. Any error becomes a warning and does not change
    the run's result."""
    try:
        replace_text(output_dir / "report.html", report_page(read_run(output_dir)))
    # also a signal: the run is complete, and this process is about to exit
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        print(
            f"warning: {output_dir}/report.html was not written: {reason}",
            file=sys.stderr,
            flush=True,
        )
