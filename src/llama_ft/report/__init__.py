"""report.html: the self-contained HTML report of a run, on results and cost. Nothing here imports
torch."""

import sys
from pathlib import Path

from llama_ft.processes import replace_text
from llama_ft.report.page import comparison_page, report_page
from llama_ft.report.run import Run, read_run


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
