"""Types of settings that are lists of mappings or mappings: groups of parameters, and further options of
PEFT."""

import re
from typing import Annotated, NotRequired

from pydantic import AfterValidator, ConfigDict, Field, with_config

# typing's own is not enough for pydantic before Python 3.12
from typing_extensions import TypedDict

STRICT_KEYS = ConfigDict(extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True)
FACTOR = re.compile(r"(.+)x")  # 0.1x


def rate_of(text: str, lr: float) -> float:
    """Return the learning rate that `0.1x`, a multiple of `lr`, or a number stands for.

    Raises:
        ValueError: the text is neither, or not above 0.
    """
    match = FACTOR.fullmatch(text.strip())
    try:
        rate = lr * float(match[1]) if match else float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise ValueError("expected a multiple of lr such as 0.1x, or a learning rate above 0")
    return rate


def _check_rate(text: str) -> str:
    rate_of(text, lr=1.0)
    return text


def _check_pattern(text: str) -> str:
    try:
        re.compile(text)
    except (re.error, RecursionError) as error:
        raise ValueError(f"not a regular expression ({error})") from error
    return text


Pattern = Annotated[str, Field(min_length=1), AfterValidator(_check_pattern)]


@with_config(STRICT_KEYS)
class ParameterGroup(TypedDict):
    """Settings for the parameters whose name contains a match of a regular expression."""

    match: Pattern
    lr: NotRequired[Annotated[str, AfterValidator(_check_rate)]]
    weight_decay: NotRequired[Annotated[float, Field(ge=0)]]
    freeze: NotRequired[bool]


def _check_group(group: ParameterGroup) -> ParameterGroup:
    others = {"lr", "weight_decay"} & group.keys()
    if group.get("freeze") and others:
        raise ValueError("freeze excludes lr and weight_decay")
    if not group.get("freeze") and not others:
        raise ValueError("expected lr, weight_decay or freeze: true with match")
    return group


CheckedGroup = Annotated[ParameterGroup, AfterValidator(_check_group)]


@with_config(STRICT_KEYS)
class PeftOptions(TypedDict, total=False):
    """Fields of PEFT's LoraConfig and LoHaConfig that are passed to it unchanged."""

    rank_pattern: dict[Pattern, Annotated[int, Field(ge=1)]]
    alpha_pattern: dict[Pattern, Annotated[float, Field(gt=0)]]
    exclude_modules: list[str] | Pattern
    layers_to_transform: list[Annotated[int, Field(ge=0)]] | Annotated[int, Field(ge=0)]
    layers_pattern: list[str] | str
