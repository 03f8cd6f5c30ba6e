"""The command line of recipes/check.py."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from llama_ft.config.tool_flags import check, read
from llama_ft.config.value_types import STRICT, Duration


@dataclass(config=STRICT, kw_only=True)
class CheckFlags:
    """Flags of recipes/check.py."""

    output_dir: str = "output"
    """The directory whose disk is tried. Nothing is left there."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to compute on; auto: CUDA if there is a GPU."""

    megabytes: Annotated[int, Field(ge=1, le=4096)] = 64
    """MiB that each rank sends, and writes to the disk."""

    collective_timeout: Duration = "2m"
    """Longest time a rank waits for the others; then the check ends and names the missing ranks."""


def read_check_flags(argv: list[str], description: str) -> CheckFlags:
    """Return the flags. Raises UserError with all errors."""
    flags, _, errors = read(argv, CheckFlags, description)
    check(errors)
    return flags
