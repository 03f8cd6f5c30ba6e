"""The command line of recipes/report.py."""

from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from llama_ft.config.paths import folder_problem
from llama_ft.config.run_settings import STRICT
from llama_ft.config.tool_flags import check, read
from llama_ft.report import REPORT_FILE
from llama_ft.report.run import is_run


@dataclass(config=STRICT, kw_only=True)
class ReportFlags:
    """Flags of recipes/report.py."""

    places: list[str] = Field(default_factory=list)
    """RUN: directories of runs (output/...), which stand alone."""

    out: Annotated[str, Field(pattern=r"\.html?$")] | None = None
    """The .html file to write; if not given RUN/report.html, or comparison.html here for several runs."""


def read_report_flags(argv: list[str], description: str) -> ReportFlags:
    """Return the flags: the directories in `places`, and in `out` the file to write.

    Raises:
        UserError: with one message for every error.
    """
    options, _, errors = read(argv, ReportFlags, description)
    errors += [] if options.places else ["RUN is needed: report.py RUN [RUN...]."]
    for name in options.places:
        folder, nothing = (
            Path(name).expanduser(),
            "has neither status.json nor metrics.jsonl: no run's directory.",
        )
        if error := folder_problem(folder, "a run's directory") or (None if is_run(folder) else nothing):
            errors.append(f"{name}: {error}")
    check(errors)
    options.out = options.out or ("comparison.html" if options.places[1:] else f"{options.places[0]}/{REPORT_FILE}")
    return options
