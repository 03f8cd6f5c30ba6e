"""The command line of recipes/report.py."""

from pathlib import Path

from pydantic import Field
from pydantic.dataclasses import dataclass

from llama_ft.config.paths import folder_problem
from llama_ft.config.run_settings import STRICT
from llama_ft.config.tool_flags import check, read
from llama_ft.report import REPORT_FILE
from llama_ft.report.run import is_run

COMPARISON = "comparison.html"


@dataclass(config=STRICT, kw_only=True)
class ReportFlags:
    """Flags of recipes/report.py."""

    places: list[str] = Field(default_factory=list)
    """RUN: directories of runs (output/...), which stand alone."""

    out: str | None = None
    """The file to write; if not given RUN/report.html, or comparison.html here for several runs."""


def read_report_flags(argv: list[str], description: str) -> ReportFlags:
    """Return the flags: the directories in `places`, and in `out` the file to write.

    Raises:
        UserError: with one message for every error.
    """
    options, _, errors = read(argv, ReportFlags, description)
    errors += [f"{name}: {error}" for name in options.places if (error := _problem(Path(name).expanduser()))]
    if not options.places:
        errors.append("RUN is needed: report.py RUN [RUN...].")
    elif options.out is None:
        options.out = COMPARISON if len(options.places) > 1 else str(Path(options.places[0]) / REPORT_FILE)
    elif Path(options.out).suffix not in (".html", ".htm"):  # anything else would be somebody's file
        errors.append(f"--out {options.out}: expected a file whose name ends in .html.")
    elif not Path(options.out).expanduser().absolute().parent.is_dir():
        errors.append(f"--out {options.out}: there is no folder {Path(options.out).parent}.")
    check(errors)
    return options


def _problem(folder: Path) -> str:
    is_foreign = folder.is_dir() and not is_run(folder)
    told = "is not a run's directory: it has neither status.json nor metrics.jsonl."
    return told if is_foreign else folder_problem(folder, "a run's directory") or ""
