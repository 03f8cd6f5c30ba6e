"""Write the report of a run, or compare runs: one HTML file that needs no network.

RUN is the directory of a run. The run may still work, may have been killed, or may come from an
earlier version. For one RUN, this writes its report.html, as a run does at its end. For several, it
writes one page with their curves in shared charts and the settings that differ.
"""

import signal
import sys

from llama_ft.config.home import expanded
from llama_ft.errors import exit_on_error
from llama_ft.extensions.report.page import comparison_page, named_runs, report_page
from llama_ft.extensions.report.run import (
    ReportFlags,
    corrupted_files_explained,
    read_report_flags,
    read_run,
)
from llama_ft.extensions.report.write import write_page


def main(options: ReportFlags) -> None:
    """Read the runs and write the page."""
    with corrupted_files_explained(options.paths):
        runs = [read_run(expanded(name)) for name in options.paths]
        if len(runs) == 1:
            page = report_page(runs[0], price=options.price)
        else:
            page = comparison_page(named_runs(runs, options.names), options.price)
    path = expanded(str(options.output))
    write_page(path, page)
    print(f"The report: {path}")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C prints no traceback
    with exit_on_error():
        main(read_report_flags(sys.argv[1:], str(__doc__)))
