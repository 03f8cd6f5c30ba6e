"""fits.svg: what fits on one GPU of 24 GB, on one of 80 GB and on eight, in bars whose frames end where
the memory of the GPU ends. The numbers are those in the heads of configs/*.yaml, which tests compare
with the planner."""

import re
from pathlib import Path
from typing import NamedTuple

from llama_ft.plan.flags import GPUS

from . import memory, svg

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
PLANNED = re.compile(r"^#   ([\d.]+) GiB per rank on the GPU", re.MULTILINE)
# Name of a card -> usable GiB of each of its GPUs.
CARDS = {"1 x 24 GB": GPUS["rtx4090"], "1 x 80 GB": GPUS["h100"], "8 x 80 GB": GPUS["h100"]}
FULL = "Full fine-tuning"  # of Llama 3.1 8B, in memory.svg
# Card, label, and the config, or the name of a bar of memory.svg.
BARS = (
    ("1 x 24 GB", "Qwen3.5 9B, QLoRA", "qwen3.5_9b_4bit_24gb"),
    ("1 x 24 GB", "Gemma 4 E4B, LoRA", "gemma4_e4b_lora_24gb"),
    ("1 x 24 GB", "gpt-oss 20B, LoRA, as stored", "gpt_oss_20b_stored_24gb"),
    ("1 x 24 GB", "Devstral Small 2 24B, QLoRA", "devstral_small2_24b_4bit_24gb"),
    ("1 x 24 GB", "Llama 8B, full", FULL),
    ("1 x 80 GB", "Mistral Small 24B, LoRA", "mistral_small_24b_lora_80gb"),
    ("1 x 80 GB", "Llama 70B, QLoRA", "llama3.3_70b_4bit_80gb"),
    ("1 x 80 GB", "Qwen3 14B, LoRA", "qwen3_14b_lora_80gb"),
    ("1 x 80 GB", "Llama 8B, full, in bf16", "llama3.1_8b_full_80gb"),
    ("1 x 80 GB", "Llama 8B, full", FULL),
    ("8 x 80 GB", "Llama 70B, LoRA", "llama3.3_70b_lora_8x80gb"),
    ("8 x 80 GB", "Llama 8B, full", "llama3.1_8b_full_8x80gb"),
    ("8 x 80 GB", "Qwen3.5 27B, full", "qwen3.5_27b_full_8x80gb"),
)
LEFT = 20
GAP = 22
PANEL = (svg.WIDTH - 2 * LEFT - 2 * GAP) / 3
TOP = 118
ROW = 52
BAR = 18
HATCHED = (
    '<defs><pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="3" height="7" class="red"/></pattern></defs>'
)
STYLE = "    .hatched { fill: url(#hatch); }\n"


class Bar(NamedTuple):
    """What a run needs of each GPU."""

    card: str
    label: str
    gib: float

    @property
    def fits(self) -> bool:
        return self.gib <= CARDS[self.card]


def read_bars() -> list[Bar]:
    """Return all bars in the order of the picture: of each card from the smallest to the largest."""
    [full] = [bar for bar in memory.read_bars() if bar["method"] == FULL]
    bars = []
    for card, label, source in BARS:
        if source == FULL:
            gib = full["gpu_bytes"] / memory.GIB
        else:
            [planned] = PLANNED.findall((CONFIGS / f"{source}.yaml").read_text())
            gib = float(planned)
        bars.append(Bar(card, label, gib))
    return sorted(bars, key=lambda bar: (list(CARDS).index(bar.card), bar.gib))


def describe() -> str:
    """The numbers in words."""
    cards = []
    for card, capacity in CARDS.items():
        bars = [bar for bar in read_bars() if bar.card == card]
        texts = [f"{bar.label}: {bar.gib:.1f}{'' if bar.fits else ', too much'}" for bar in bars]
        cards.append(f"{card}, {capacity} GiB usable. {'. '.join(texts)}")
    return f"Planned GiB per GPU. {'. '.join(cards)}."


def draw() -> str:
    title = "What fits, planned without a GPU"
    note = "GiB per GPU. A frame ends where the memory of the GPU ends."
    body = [HATCHED, svg.text(LEFT, 34, title, "title"), svg.text(LEFT, 56, note, "small")]
    rows = 0
    for number, (card, capacity) in enumerate(CARDS.items()):
        x = LEFT + number * (PANEL + GAP)
        bars = [bar for bar in read_bars() if bar.card == card]
        rows = max(rows, len(bars))
        body.append(svg.text(x, TOP - 26, card, "bold"))
        body.append(svg.text(x + PANEL, TOP - 26, f"{capacity} GiB", "small", anchor="end"))
        for row, bar in enumerate(bars):
            body += draw_bar(bar, x, TOP + ROW * row)
    return svg.picture(TOP + ROW * rows, title, describe(), body, STYLE)


def draw_bar(bar: Bar, x: float, y: float) -> list[str]:
    """A bar with its label and its number above it. One that does not fit leaves its frame."""
    number = f"{bar.gib:.1f}" if bar.fits else f"{bar.gib:.1f}: too much"
    elements = [
        svg.text(x, y, bar.label, "small"),
        svg.text(x + PANEL, y, number, "bold", anchor="end"),
    ]
    if bar.fits:
        width = PANEL * bar.gib / CARDS[bar.card]
        elements.append(svg.rect(x, y + 8, width, BAR, "blue", note=f"{bar.label}: {number} GiB"))
    else:
        elements.append(svg.rect(x, y + 8, PANEL + GAP / 2, BAR, "hatched"))
    elements.append(svg.rect(x, y + 8, PANEL, BAR, "empty"))
    return elements
