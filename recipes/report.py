"""Write the report of a run again, or compare runs: one HTML file that opens anywhere, without network.

RUN is a run's directory, also of one that is still running, was killed, or is of an earlier version. One RUN: its
report.html, as the run itself writes it when it ends. Several: one page with their curves over each other and the
settings in which they differ.
"""

import sys
from argparse import Namespace
from pathlib import Path

from llama_ft import report
from llama_ft.config import ScriptFlags, exit_with
from llama_ft.config.wording import nearest_file
from llama_ft.errors import UserError

COMPARISON = "comparison.html"


def main(options: Namespace) -> None:
    """From directories to a page."""
    try:
        runs = [report.read_run(Path(name).expanduser()) for name in options.runs]
        if damaged := [line for run in runs for line in run.damaged]:
            raise UserError(*(f"{line}\nWithout this file, the report has the rest." for line in damaged))
        page = report.report_page(runs[0]) if len(runs) == 1 else report.comparison_page(runs)
    except UserError:
        raise
    except Exception as error:  # a directory that another program has written, or a damaged file, may hold anything
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{', '.join(options.runs)}: no report can be made of this ({reason}).") from error
    path = Path(options.out).expanduser()
    try:
        report.write_page(path, page)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.\n--out FILE names another place.") from error
    for run in runs:
        if run.missing:
            print(f"{run.folder} has no {'; no '.join(run.missing)}")
    print(f"The report: {path}")


def read_flags(argv: list[str]) -> Namespace:
    """The directories in `runs`, and in `out` the file to write.

    Raises:
        UserError: with one message for every mistake.
    """
    flags = ScriptFlags(str(__doc__))
    flags.add_argument("runs", nargs="*", metavar="RUN", help="a run's directory (output/...)")
    flags.add_argument(
        "--out", metavar="FILE", help=f"the file to write; default: RUN/report.html, and of several {COMPARISON} here"
    )
    options = flags.read(argv)
    mistakes = [f"{name}: {complaint}" for name in options.runs if (complaint := _complaint(Path(name).expanduser()))]
    if not options.runs:
        mistakes.append("RUN is needed: report.py RUN [RUN...].")
    if options.out is None and options.runs:
        options.out = COMPARISON if len(options.runs) > 1 else str(Path(options.runs[0]) / report.REPORT_FILE)
    elif options.out is not None and Path(options.out).suffix not in (".html", ".htm"):
        mistakes.append(f"--out {options.out}: expected a file whose name ends in .html.")
    elif options.out is not None and not Path(options.out).expanduser().absolute().parent.is_dir():
        mistakes.append(f"--out {options.out}: there is no folder {Path(options.out).parent}.")
    if mistakes:
        raise UserError(*mistakes)
    return options


def _complaint(folder: Path) -> str:
    if not folder.exists():
        return f"no such folder.{nearest_file(folder)}"
    if not folder.is_dir():
        return "is a file. Expected a run's directory."
    if report.is_run(folder):
        return ""
    runs = sorted(entry.name for entry in folder.iterdir() if report.is_run(entry))
    held = f" It holds runs: {', '.join(runs[:5])}{', ...' if len(runs) > 5 else ''}." if runs else ""
    return f"is not a run's directory: it has neither status.json nor metrics.jsonl.{held}"


if __name__ == "__main__":
    try:
        main(read_flags(sys.argv[1:]))
    except UserError as error:
        exit_with(error)
