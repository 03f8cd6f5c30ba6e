"""What a device has: memory as torch sees it."""

import re
from dataclasses import dataclass

from llama_ft.config.messages import nearest, size_text
from llama_ft.config.run_settings import parse_size
from llama_ft.errors import UserError


@dataclass(frozen=True)
class Device:
    """A GPU, or a CPU's share for a rank.

    Attributes:
        name: for people.
        bytes: of its memory.
    """

    name: str
    bytes: int


# GiB: the low end of the totals that torch's out-of-memory messages show (22.03 on an L4, 23.64 on an RTX 4090, 79.15
# to 79.25 on an A100): ECC, firmware and driver take the rest of what is on the box.
TABLE: dict[str, float] = {
    "t4": 14.5,
    "v100-16": 15.7,
    "v100-32": 31.7,
    "a10": 22.0,
    "a10g": 21.9,
    "l4": 21.9,
    "a40": 44.3,
    "a6000": 47.4,
    "l40s": 44.3,
    "rtx6000ada": 47.3,
    "rtx3090": 23.5,
    "rtx4090": 23.5,
    "rtx5090": 31.3,
    "a100-40": 39.3,
    "a100": 79.1,
    "h100": 79.1,
    "h100-nvl": 93.0,
    "h200": 139.7,
    "b200": 178.3,
    "mi300x": 191.5,
}
OTHER_NAMES = {"a100-80": "a100", "h100-80": "h100", "v100": "v100-16", "3090": "rtx3090", "4090": "rtx4090"}
OTHER_NAMES |= {"5090": "rtx5090", "rtxa6000": "a6000", "6000ada": "rtx6000ada", "h100nvl": "h100-nvl"}


def device_for(text: str, kind: str) -> Device:
    """What `--fit` names: `h100`, `H100 80GB`, `80GiB`, `24000MB`.

    Args:
        text: the name of a GPU, or the memory of a rank.
        kind: cuda or cpu.

    Raises:
        UserError: it is neither.
    """
    try:
        size = parse_size(text)
    except ValueError:
        pass
    else:
        return Device(size_text(size), size)
    name = re.sub(r"[\s_]|nvidia|geforce|tesla|amd|-?(sxm\d?|pcie)", "", text.lower())
    name = re.sub(r"(\d\d)g(i?b)?$", r"\1", name)  # h100 80GB
    name = re.sub(r"^([ahv]100)-?(\d\d)$", r"\1-\2", name)
    name = OTHER_NAMES.get(name, name)
    if name not in TABLE or kind == "cpu":
        hint = "." if kind == "cpu" else f", or one of {', '.join(TABLE)}."
        meant = nearest(name, TABLE) if kind == "cuda" else None
        raise UserError(
            f"--fit {text}: expected the memory of a rank, such as 80GiB{hint}"
            + (f" Did you mean {meant}?" if meant else "")
        )
    return Device(f"{name} ({TABLE[name]:g} GiB)", int(TABLE[name] * 2**30))
