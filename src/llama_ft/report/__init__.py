"""report.html: what a run did and what it cost, in one file that opens anywhere. Nothing here imports torch."""

import sys
from pathlib import Path

from llama_ft.processes import replace_text
from llama_ft.report.page import comparison_page, report_page
from llama_ft.report.run import Run, read_run

__all__ = ["Run", "comparison_page", "read_run", "report_page", "write_or_warn"]


def write_or_warn(output_dir: Path) -> None:
    """Write a run's report.html when it has ended; whatever goes wrong with that is a warning and changes nothing."""
    try:
        replace_text(output_dir / "report.html", report_page(read_run(output_dir)))
    except BaseException as error:  # a signal, too: the run's end is settled, and this process is about to leave
        reason = f"{type(error).__name__}: {error}"
        print(f"warning: {output_dir}/report.html was not written: {reason}", file=sys.stderr, flush=True)
