"""run.svg: the steps of a run, and what each rank holds at each of them."""

from . import svg

TOP = 84  # px, of the first step
STEP_HEIGHT = 68
RANKS = {"rank 0": ("blue", 440), "rank 1": ("green", 574), "rank 2": ("orange", 708)}  # left: px
ROW_WIDTH = 56  # px
ROW_HEIGHT = 11
ROW_PITCH = 13
LORA_LEFT = ROW_WIDTH + 4  # px right of the weight
UNIT_LEFT = ROW_WIDTH + 16
STYLE = """
    .dashed { fill: none; stroke-dasharray: 3 2; stroke-width: 1.3; }
    .dashed.blue { stroke: #1f6feb; fill: none; }
    .dashed.green { stroke: #1a7f5a; fill: none; }
    .dashed.orange { stroke: #d9730d; fill: none; }
    .dashed.purple { stroke: #8250df; fill: none; }
    .unsharded { fill-opacity: 0.35; }
    .paper { fill: none; stroke: #848d97; stroke-width: 1.3; }
    .text-line { stroke: #848d97; stroke-width: 3; }
    .step { fill: #57606a; }
    @media (prefers-color-scheme: dark) {
      .dashed.blue { stroke: #58a6ff; }
      .dashed.green { stroke: #3fb950; }
      .dashed.purple { stroke: #bc8cff; }
    }
"""
DESCRIPTION = (
    "The steps of a run on three ranks, and what each rank holds. Up to the shard step, no rank holds a weight: "
    "build and adapt make shapes without storage. From the load step on, each rank holds its third of the weights. "
    "In the train step it also holds gradients, optimizer state and one unsharded FSDP unit at a time."
)
# The step, two lines on what it does, what draws a rank's part, and the line under the three.
STEPS = (
    ("config", "settings from command line,", "config and defaults", "box", "settings, no tensors"),
    ("runtime", "process group, device mesh", "", "box", "a process, no tensors"),
    ("data", "samples become tokens,", "loss mask, packed sequences", "batch", "its own batches, no weights"),
    ("build", "the model on the meta device:", "shapes without storage", "shapes",
     "0 bytes: the shapes of the whole model"),
    ("adapt", "quantize layers, add LoRA,", "freeze the base", "adapted", "0 bytes; purple: LoRA"),
    ("shard", "activation checkpointing,", "fully_shard on every FSDP unit", "shard_shapes",
     "0 bytes: the shapes of its own rows"),
    ("load", "safetensors into the shards", "", "shard", "its own rows of the weights"),
    ("train", "all-gather a unit, compute,", "reduce gradients", "unsharded",
     "its rows, gradients, optimizer state; one FSDP unit"),
    ("checkpoint", "each rank writes its shard", "", "written", "as in training"),
    ("export", "the final model or adapter", "in Hugging Face format", "exported",
     "its rows; rank 0: one whole tensor at a time"),
)  # fmt: skip


def draw_shapes(x: float, y: float) -> list[str]:
    """A weight matrix without storage: the rows of each rank."""
    return [
        svg.rect(x, y + ROW_PITCH * number, ROW_WIDTH, ROW_HEIGHT, f"dashed {color}")
        for number, (color, _) in enumerate(RANKS.values())
    ]


def draw_lora_shapes(x: float, y: float) -> list[str]:
    """The two matrices of an adapter without storage."""
    left = x + LORA_LEFT
    return [
        svg.rect(left, y, 6, 2 * ROW_PITCH + ROW_HEIGHT, "dashed purple"),
        svg.rect(left + 9, y, 26, 6, "dashed purple"),
    ]


def draw_shard(x: float, y: float, rank: int, color: str, style: str = "") -> list[str]:
    """A rank's rows of a weight and of its adapter."""
    top = y + ROW_PITCH * rank
    return [
        svg.rect(x, top, ROW_WIDTH, ROW_HEIGHT, f"{style} {color}".strip()),
        svg.rect(x + LORA_LEFT, top, 6, ROW_HEIGHT, f"{style} purple".strip()),
    ]


def draw_unsharded(x: float, y: float) -> list[str]:
    """An all-gathered unit: the rows of all ranks."""
    colors = [color for color, _ in RANKS.values()]
    return [
        svg.rect(x + UNIT_LEFT, y + ROW_PITCH * number, 26, ROW_HEIGHT, f"unsharded {color}")
        for number, color in enumerate(colors)
    ]


def draw_file(x: float, y: float) -> list[str]:
    """A file with a turned corner."""
    return [
        f'<path d="M{svg.number(x)} {svg.number(y)}h14l6 6v22h-20z" class="paper"/>',
        f'<path d="M{svg.number(x + 14)} {svg.number(y)}v6h6" class="paper"/>',
    ]


def draw_rank(kind: str, x: float, y: float, rank: int, color: str) -> list[str]:
    """What a rank holds at a step."""
    match kind:
        case "box":
            return [svg.rect(x, y + 6, ROW_WIDTH, 24, "paper", radius=4)]
        case "batch":
            lengths = (38, 28, 34, 20)
            return [
                svg.line(x, y + 4 + 10 * row, x + length, y + 4 + 10 * row, "text-line")
                for row, length in enumerate(lengths)
            ]
        case "shapes":
            return draw_shapes(x, y)
        case "adapted":
            return draw_shapes(x, y) + draw_lora_shapes(x, y)
        case "shard_shapes":
            return draw_shard(x, y, rank, color, "dashed")
    body = draw_shard(x, y, rank, color)
    if kind == "unsharded" or (kind == "exported" and rank == 0):
        body += draw_unsharded(x, y)
    if kind == "written":
        middle = y + ROW_PITCH * rank + ROW_HEIGHT / 2
        body.append(svg.arrow(x + LORA_LEFT + 9, middle, x + LORA_LEFT + 22, middle))
        body += draw_file(x + LORA_LEFT + 26, y + 6)
    return body


def draw() -> str:
    """Return the picture."""
    body = [
        svg.text(24, 34, "The steps of a run", "title"),
        svg.text(440, 34, "What each rank holds, on three ranks", "title"),
        svg.line(76, TOP + 34, 76, TOP + STEP_HEIGHT * (len(STEPS) - 1) + 34),
    ]
    for name, (_, left) in RANKS.items():
        body.append(svg.text(left, 66, name, "small"))
    for number, (name, first, second, kind, held) in enumerate(STEPS):
        top = TOP + STEP_HEIGHT * number
        color = "green" if number == len(STEPS) - 1 else "step"
        body += [
            svg.line(24, top, svg.WIDTH - 24, top, "grid"),
            svg.rect(24, top + 20, 104, 28, color, radius=14),
            svg.text(76, top + 39, name, "on-color", anchor="middle"),
            svg.text(146, top + (30 if second else 39), first),
            svg.text(146, top + 49, second) if second else "",
        ]
        for rank, (rank_color, left) in enumerate(RANKS.values()):
            body += draw_rank(kind, left, top + 7, rank, rank_color)
        body.append(svg.text(440, top + 60, held, "small"))
    height = TOP + STEP_HEIGHT * len(STEPS) + 16
    return svg.picture(height, "The steps of a run", DESCRIPTION, list(filter(None, body)), STYLE)
