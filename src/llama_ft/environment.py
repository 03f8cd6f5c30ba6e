"""Check what a run takes from the environment: the variables of a launcher, and a home directory.

A shell or a container may have leftovers of another launcher, and a container with a random user id
has no home directory.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Self

from llama_ft.errors import UserError

WITHOUT_TORCHRUN = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
MEETING_POINT = ("MASTER_ADDR", "MASTER_PORT")
OF_TORCHRUN = "TORCHELASTIC_RUN_ID"  # set by torchrun, for any number of ranks
LARGEST_PORT = 65_535


class Launch(NamedTuple):
    """The place of this process among all ranks, as torchrun sets it in the environment."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def from_environment(cls, variables: Mapping[str, str], has_group: bool = False) -> Self:
        """Read the variables. Without torchrun, return the place of a single process.

        Args:
            variables: os.environ.
            has_group: the caller has started the process group, so no meeting point is needed.

        Raises:
            UserError: the variables do not fit together. The message names them.
        """
        place = cls(*(_number(variables, name) for name in WITHOUT_TORCHRUN))
        is_launched = bool(variables.get(OF_TORCHRUN))
        wrong = ""
        if place.rank >= place.world_size:
            wrong = "RANK must be below WORLD_SIZE"
        elif place.world_size > 1 and not variables.get("RANK"):
            wrong = "RANK is missing"
        elif place.world_size > 1 and place.local_rank >= place.local_world_size:
            wrong = "LOCAL_RANK must be below LOCAL_WORLD_SIZE"
        if not wrong and (place.world_size > 1 or is_launched) and not has_group:
            missing = [name for name in MEETING_POINT if not variables.get(name)]
            port = variables.get("MASTER_PORT", "")
            if missing:
                wrong = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
            elif not port.isascii() or not port.isdecimal() or not 0 < int(port) <= LARGEST_PORT:
                wrong = f"MASTER_PORT must be a number from 1 to {LARGEST_PORT}"
        if wrong:
            raise _misfit(variables, wrong)
        return place


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name) or str(WITHOUT_TORCHRUN[name])
    least = 1 if name.endswith("WORLD_SIZE") else 0
    is_whole = text.isascii() and text.isdecimal() and len(text) < 10
    if not is_whole or int(text) < least:
        raise _misfit(variables, f"{name} must be a whole number of at least {least}")
    return int(text)


def _misfit(variables: Mapping[str, str], wrong: str) -> UserError:
    """Return the error about the variables of a launcher."""
    names = [*WITHOUT_TORCHRUN, *MEETING_POINT, OF_TORCHRUN]
    present = [name for name in names if name in variables]
    shown = " ".join(f"{name}={variables[name]}" for name in present)
    return UserError(
        f"environment {shown}: {wrong}.\n"
        f"For one process, remove what a launcher has left: unset {' '.join(present)}\n"
        "For several, start with torchrun, which sets all of them."
    )


def ensure_home() -> None:
    """Set HOME for a user id that has no home directory, as in a container with a random one, so that
    all libraries find a directory for their caches: LLAMA_FT_CACHE, or XDG_CACHE_HOME.

    Raises:
        UserError: neither is set. Libraries would write into a directory called `~`.
    """
    try:
        Path.home()
    except RuntimeError:
        place = os.environ.get("LLAMA_FT_CACHE") or os.environ.get("XDG_CACHE_HOME")
        if not place:
            raise UserError(
                f"environment: HOME is not set, and user id {os.getuid()} has no home directory. Set HOME, or "
                "LLAMA_FT_CACHE, to a directory for caches that can be written."
            ) from None
        os.environ["HOME"] = os.path.abspath(place)
