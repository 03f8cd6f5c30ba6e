"""The command line of recipes/check.py."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from llama_ft.config.data_names import is_url
from llama_ft.config.reading.tool_flags import check, read, with_extensions
from llama_ft.config.rules import SECRET
from llama_ft.config.value_types import STRICT, Duration
from llama_ft.masking import is_url_with_secret


@dataclass(config=STRICT, kw_only=True)
class CheckFlags:
    """Flags of recipes/check.py."""

    output_dir: str = "output"
    """The directory whose disk is tried. Nothing is left there."""

    save_to: str | None = None
    """URL of an object store, such as s3://bucket/run: each rank writes, reads and deletes one small
    object there. Credentials come from the environment."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to compute on; auto: CUDA if there is a GPU."""

    megabytes: Annotated[int, Field(ge=1, le=4096)] = 64
    """MiB that each rank sends, and writes to the disk."""

    collective_timeout: Duration = "2m"
    """Longest time a rank waits for the others; then the check ends and names the missing ranks."""


def read_check_flags(argv: list[str], description: str) -> CheckFlags:
    """Return the flags. Raises UserError with all errors."""
    flags, _, errors = read(argv, with_extensions("check", CheckFlags), description)
    if not errors and flags.save_to is not None:
        if not is_url(flags.save_to):
            errors.append(f"--save_to {flags.save_to}: expected a URL such as s3://bucket/run.")
        elif is_url_with_secret(flags.save_to):
            errors.append(f"--save_to {SECRET}")
    check(errors)
    return flags
