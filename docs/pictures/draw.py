"""All pictures: the file in docs/img, what draws it, and what it shows in words."""

from collections.abc import Callable
from pathlib import Path

from . import comparison, concepts, curves, fits, memory, planned, recording, run_path

FOLDER = Path(__file__).resolve().parents[1] / "img"
PICTURES: dict[str, Callable[[], str]] = {
    "fits.svg": fits.draw,
    "memory.svg": memory.draw,
    "planned.svg": planned.draw,
    "recording.svg": recording.draw,
    "packing.svg": concepts.draw_packing,
    "quantized_sharding.svg": concepts.draw_quantized_sharding,
    "curves.svg": curves.draw,
    "run.svg": run_path.draw,
    "trl_comparison.svg": comparison.draw,
}
# The text that pages show in place of a picture.
WORDS: dict[str, Callable[[], str]] = {
    "fits.svg": fits.describe,
    "memory.svg": memory.describe,
    "planned.svg": planned.describe,
    "recording.svg": recording.describe,
    "packing.svg": lambda: concepts.PACKING,
    "quantized_sharding.svg": lambda: concepts.QUANTIZED_SHARDING,
    "curves.svg": curves.describe,
    "run.svg": lambda: run_path.DESCRIPTION,
    "trl_comparison.svg": lambda: comparison.DESCRIPTION,
}
