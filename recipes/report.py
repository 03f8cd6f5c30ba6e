"""Write the report of a run, or compare runs: one HTML file that needs no network.

RUN is the directory of a run, which may still be running, have been killed, or come from an earlier version. One RUN:
its report.html, which a run also writes when it ends. Several: one page with their curves in the same charts and the
settings that differ.
"""

import signal
import sys
from pathlib import Path

from llama_ft import report
from llama_ft.errors import UserError, exit_on_error
from llama_ft.processes import replace_text
from llama_ft.report.run import ReportFlags, read_report_flags


def main(options: ReportFlags) -> None:
    """From directories to a page."""
    try:
        runs = [report.read_run(Path(name).expanduser()) for name in options.places]
        page = report.report_page(runs[0]) if len(runs) == 1 else report.comparison_page(runs)
    except UserError:
        raise
    except Exception as error:  # a directory that another program has written, or a damaged file, may hold anything
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{', '.join(options.places)}: cannot make a report ({reason}).") from error
    path = Path(str(options.out)).expanduser()
    try:
        replace_text(path, page)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.\n--out FILE names another place.") from error
    print(f"The report: {path}")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
    with exit_on_error():
        main(read_report_flags(sys.argv[1:], str(__doc__)))
