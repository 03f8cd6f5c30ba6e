"""All pictures: the name in docs/img, and what draws it."""

from collections.abc import Callable
from pathlib import Path

from . import concepts, memory, planned, recording

FOLDER = Path(__file__).resolve().parents[1] / "img"
PICTURES: dict[str, Callable[[], str]] = {
    "memory.svg": memory.draw,
    "planned.svg": planned.draw,
    "recording.svg": recording.draw,
    "packing.svg": concepts.draw_packing,
    "quantized_sharding.svg": concepts.draw_quantized_sharding,
}
