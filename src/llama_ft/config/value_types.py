"""Types of settings that several modules of settings share: counts, sizes such as `5GB` and durations
such as `3h50m`."""

import re
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field

STRICT = ConfigDict(
    extra="forbid",
    use_attribute_docstrings=True,
    allow_inf_nan=False,
    coerce_numbers_to_str=True,
    validate_default=True,
)
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B", re.IGNORECASE)
SIZE_BYTES = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}
DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the bytes that `5GB`, `200MB` or `1.5 TB` stand for, decimal units as the Hub counts
    them, or `80GiB`.

    Raises:
        ValueError: the text is not such a size, or is zero.
    """
    size_bytes = 0
    match = SIZE.fullmatch(text.strip())
    if match:
        number = float(match[1])
        unit = match[2] or ""
        size_bytes = int(number * SIZE_BYTES[unit.upper()])
    if size_bytes == 0:
        raise ValueError("expected a size such as 5GB or 200MB")
    return size_bytes


def parse_duration(text: str) -> int:
    """Return the seconds that `3h50m`, `90s` or `1d` stand for.

    Raises:
        ValueError: the text is not such a time, is zero, or longer than a year.
    """
    total = 0
    match = DURATION.fullmatch(text.replace(" ", ""))
    if match:
        days, hours, minutes, seconds = (int(number or 0) for number in match.groups())
        total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not 0 < total <= 366 * 24 * 3600:  # libraries overflow at some length
        raise ValueError("expected a time of up to a year, such as 3h50m, 45m or 90s")
    return total


def _check_size(text: str) -> str:
    parse_size(text)
    return text


def _check_duration(text: str) -> str:
    parse_duration(text)
    return text


# Both stay texts, so that config.yaml shows them as the user wrote them.
Size = Annotated[str, AfterValidator(_check_size)]
Duration = Annotated[str, AfterValidator(_check_duration)]
