"""packing.svg and quantized_sharding.svg: two ideas, drawn once."""

from . import svg

TOKEN = 30  # px
SAMPLES = {"a": ("blue", 5), "b": ("orange", 3), "c": ("green", 6), "d": ("purple", 2)}
LENGTH = 8  # tokens of a sequence
RANKS = ("blue", "green", "orange")
# The pictures in words.
PACKING = (
    "Four samples of 5, 3, 6 and 2 tokens, in sequences of 8 tokens. Padding takes four sequences, half of whose "
    "tokens are padding. Packing takes two full sequences. Position ids start at 0 in every sample, and a token "
    "attends only to earlier tokens of its own sample."
)
QUANTIZED_SHARDING = (
    "A quantized weight is two tensors with the same rows: 8-bit values with one scale per row, or packed 4-bit "
    "values with one scale per 64 weights of a row. Both are sharded by rows, so each rank holds whole rows with "
    "their scales. The ranks all-gather 1 or 0.56 bytes per weight, and bitsandbytes computes with the pair."
)


def token(x: float, y: float, sample: str, position: int) -> str:
    """A token: its sample's color, the position id in it."""
    color, _ = SAMPLES[sample]
    box = svg.rect(x + 1, y + 1, TOKEN - 2, TOKEN - 2, color, radius=3)
    return box + svg.text(x + TOKEN / 2, y + 20, str(position), "on-color", anchor="middle")


def draw_sequence(x: float, y: float, samples: str) -> list[str]:
    """A sequence of whole samples, one after the other, and padding."""
    body = []
    place = 0
    for sample in samples:
        _, length = SAMPLES[sample]
        for position in range(length):
            body.append(token(x + TOKEN * place, y, sample, position))
            place += 1
    for rest in range(place, LENGTH):
        left = x + TOKEN * rest
        body.append(svg.rect(left + 1, y + 1, TOKEN - 2, TOKEN - 2, "empty", radius=3))
    return body


def draw_mask(x: float, y: float, samples: str) -> list[str]:
    """Which token (row) attends to which (column): the causal triangle of its own sample."""
    cell = 26
    owners = [sample for sample in samples for _ in range(SAMPLES[sample][1])]
    body = []
    for row, owner in enumerate(owners):
        for column in range(len(owners)):
            is_seen = owners[column] == owner and column <= row
            style = SAMPLES[owner][0] if is_seen else "grid"
            body.append(
                svg.rect(x + cell * column + 1, y + cell * row + 1, cell - 2, cell - 2, style)
            )
    return body


def draw_packing() -> str:
    body = [
        svg.text(24, 34, "Packing: whole samples share a sequence", "title"),
        svg.text(24, 70, "Padding: 4 sequences, half empty", "bold"),
        svg.text(24, 262, "Packing: 2 sequences, full", "bold"),
        svg.text(24, 376, "A color is a sample. The numbers are position ids:", "small"),
        svg.text(24, 394, "they start at 0 in every sample.", "small"),
        svg.text(330, 70, "Attention in the first packed sequence", "bold"),
        svg.text(570, 110, "A row is a token. It attends", "small"),
        svg.text(570, 128, "to the colored columns:", "small"),
        svg.text(570, 146, "earlier tokens of its sample.", "small"),
        svg.text(570, 182, "Samples a and b never see", "small"),
        svg.text(570, 200, "each other. A run checks this", "small"),
        svg.text(570, 218, "on its own data before it", "small"),
        svg.text(570, 236, "trains.", "small"),
        svg.text(570, 272, "No such mask is built: the", "small"),
        svg.text(570, 290, "kernel gets the lengths 5, 3.", "small"),
    ]
    for number, sample in enumerate(SAMPLES):
        body += draw_sequence(24, 84 + 38 * number, sample)
    body += draw_sequence(24, 276, "ab")
    body += draw_sequence(24, 314, "cd")
    body += draw_mask(330, 84, "ab")
    return svg.picture(414, "Packing", PACKING, body)


def draw_matrix(x: float, y: float, columns: int, label: str, cell: int = 18) -> list[str]:
    """A matrix of six rows, two per rank."""
    body = [svg.text(x, y - 10, label, "small")]
    for row in range(6):
        for column in range(columns):
            body.append(
                svg.rect(
                    x + cell * column,
                    y + 22 * row,
                    cell - 2,
                    20,
                    RANKS[row // 2],
                )
            )
    return body


def draw_quantized_sharding() -> str:
    body = [
        svg.text(24, 34, "Quantized weights are sharded by rows", "title"),
        svg.text(
            24,
            56,
            "Each row brings its own scales, so a shard is what quantizing the whole weight gives.",
            "small",
        ),
        svg.text(24, 92, "8 bits", "bold"),
        svg.text(24, 286, "4 bits", "bold"),
    ]
    body += draw_matrix(24, 124, 10, "int8 weight [out, in]")
    body += draw_matrix(224, 124, 1, "scale [out]")
    body += draw_matrix(24, 318, 5, "uint8 weight [out, in / 2]")
    body += draw_matrix(224, 318, 3, "absmax [out, in / 64]")
    for rank, color in enumerate(RANKS):
        for top in (124, 318):
            y = top + 44 * rank
            body.append(svg.arrow(330, y + 21, 388, y + 21))
            body.append(svg.rect(396, y + 3, 116, 36, color, radius=4))
            body.append(svg.text(454, y + 26, f"rank {rank}", "on-color", anchor="middle"))
    for top, share in ((124, "1 byte"), (318, "0.56 bytes")):
        body.append(svg.line(524, top + 6, 524, top + 124))
        body.append(svg.arrow(524, top + 65, 572, top + 65))
        body.append(svg.text(582, top + 24, "all-gather, one FSDP unit", "bold"))
        body.append(svg.text(582, top + 44, f"{share} per weight is sent,", "small"))
        body.append(svg.text(582, top + 62, "not 2 as in bf16", "small"))
        body.append(svg.text(582, top + 100, "bitsandbytes' matmul", "bold"))
        body.append(svg.text(582, top + 122, "with the gathered pair", "small"))
    return svg.picture(468, "Quantized sharding", QUANTIZED_SHARDING, body)
