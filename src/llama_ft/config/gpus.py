"""What a device has: memory as torch sees it, and the speeds that tell which of two settings is faster."""

import re
from dataclasses import dataclass

from llama_ft.config.rules import parse_size
from llama_ft.config.wording import nearest, size_text
from llama_ft.errors import UserError


@dataclass(frozen=True)
class Device:
    """A GPU, or a CPU's share for a rank.

    Attributes:
        name: for people.
        bytes: of its memory.
        teraflops: dense bf16 (fp16 where there is no bf16).
        memory_gbs: GB/s of its memory.
        link_gbs: GB/s that a rank sends to those of its node: NVLink, or PCIe.
        network_gbs: the same between nodes.
    """

    name: str
    bytes: int
    teraflops: float
    memory_gbs: float
    link_gbs: float
    network_gbs: float


# GiB: the low end of the totals that torch's out-of-memory messages show (22.03 on an L4, 23.64 on an RTX 4090, 79.15
# to 79.25 on an A100): ECC, firmware and driver take the rest of what is on the box. Speeds: the vendors' data sheets,
# without sparsity; links in one direction, PCIe 4 where there is no NVLink; network: a 400 Gb/s adapter for each of the
# newer GPUs, 100 Gb/s elsewhere.
#                  GiB  TFLOPS memory link network
TABLE: dict[str, tuple[float, float, float, float, float]] = {
    "t4": (14.5, 65, 320, 12, 3),
    "v100-16": (15.7, 125, 900, 150, 12),
    "v100-32": (31.7, 125, 900, 150, 12),
    "a10": (22.0, 125, 600, 25, 12),
    "a10g": (21.9, 70, 600, 25, 12),
    "l4": (21.9, 121, 300, 25, 12),
    "a40": (44.3, 150, 696, 25, 12),
    "a6000": (47.4, 155, 768, 25, 12),
    "l40s": (44.3, 362, 864, 25, 12),
    "rtx6000ada": (47.3, 364, 960, 25, 12),
    "rtx3090": (23.5, 71, 936, 25, 12),
    "rtx4090": (23.5, 165, 1008, 25, 12),
    "rtx5090": (31.3, 210, 1792, 50, 12),
    "a100-40": (39.3, 312, 1555, 300, 25),
    "a100": (79.1, 312, 2039, 300, 25),
    "h100": (79.1, 989, 3350, 450, 50),
    "h100-nvl": (93.0, 835, 3900, 300, 50),
    "h200": (139.7, 989, 4800, 450, 50),
    "b200": (178.3, 2250, 8000, 900, 50),
    "mi300x": (191.5, 1307, 5300, 64, 50),
}
OTHER_NAMES = {"a100-80": "a100", "h100-80": "h100", "v100": "v100-16", "3090": "rtx3090", "4090": "rtx4090"}
OTHER_NAMES |= {"5090": "rtx5090", "rtxa6000": "a6000", "6000ada": "rtx6000ada", "h100nvl": "h100-nvl"}
# What a size alone stands for, and a rank on a CPU: a few cores of a server, gloo over loopback and 10 Gb/s.
ANY_GPU, ANY_CPU = (312, 2039, 300, 25), (0.3, 20, 1.5, 1)


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
        return Device(size_text(size), size, *(ANY_GPU if kind == "cuda" else ANY_CPU))
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
    gibibytes, *speeds = TABLE[name]
    return Device(f"{name} ({gibibytes:g} GiB)", int(gibibytes * 2**30), *speeds)
