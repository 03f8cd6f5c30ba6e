"""Samples as people read them: what is trained on in color, or between [[ and ]] without colors."""

import itertools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from llama_ft.data.tokenize import IGNORED
from llama_ft.runtime.console import console, log

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from llama_ft.data.batches import Batch

BATCH_ROWS = 2
SAMPLE_TOKENS, BATCH_TOKENS = 2000, 300  # tokens shown of a sample; of a longer one the beginning and the end
# One token after the other in two shades, so that it can be seen where a token ends.
TRAINED, CONTEXT = ("black on green", "black on bright_green"), ("default", "dim")


def show_samples(rows: "Dataset", tokenizer: "PreTrainedTokenizerBase", count: int) -> None:
    """Print the first samples token by token, on the rank whose log is read.

    Args:
        rows: columns input_ids, labels and source.
        tokenizer: theirs.
        count: how many samples.
    """
    if not log.isEnabledFor(logging.INFO):
        return
    legend = "in color" if console.is_terminal else "between [[ and ]]"
    for row in itertools.islice(rows, count):
        text = marked_text(row["input_ids"], row["labels"], tokenizer, SAMPLE_TOKENS, color=console.is_terminal)
        console.print(
            f"\n{row['source']}: {len(row['labels']):,} tokens, what is trained on is {legend}", text, sep="\n"
        )
    console.print()


def describe_first_batch(batch: "Batch", tokenizer: "PreTrainedTokenizerBase") -> str:
    """The text of a batch's first samples for the log, what is trained on between [[ and ]]."""
    if batch.is_packed:
        rows = zip(*(part[0].split(batch.row_lengths) for part in (batch.input_ids, batch.labels)), strict=True)
    else:
        rows = zip(batch.input_ids, batch.labels, strict=True)
    lines = [f"The first batch: {len(batch.row_lengths):,} rows; what is trained on is between [[ and ]]:"]
    for (ids, labels), length in zip(itertools.islice(rows, BATCH_ROWS), batch.row_lengths, strict=False):
        text = marked_text(ids[:length].tolist(), labels[:length].tolist(), tokenizer, BATCH_TOKENS)
        lines.append(f"  {length:,} tokens: {text.plain}")
    return "\n".join(lines)


def marked_text(
    input_ids: Sequence[int],
    labels: Sequence[int],
    tokenizer: "PreTrainedTokenizerBase",
    most: int,
    color: bool = False,
) -> Text:
    """The text of a sample with its loss mask.

    Args:
        input_ids: its tokens.
        labels: -100 where not trained on; nothing predicts the first token.
        tokenizer: theirs.
        most: tokens shown.
        color: in color instead of between [[ and ]].
    """
    text, waiting, inside = Text(), list[int](), False  # waiting: tokens that are only a part of a character
    end = len(input_ids)
    shown = [*range(end)] if end <= most else [*range(most - most // 4), *range(end - most // 4, end)]
    for position, following in itertools.zip_longest(shown, shown[1:]):
        waiting.append(input_ids[position])
        is_trained = position > 0 and labels[position] != IGNORED
        ends = following != position + 1 or (labels[following] != IGNORED) != is_trained
        # Decoded after its neighbor: alone it would lose the space that SentencePiece's tokens begin with.
        first = position + 1 - len(waiting)
        before = list(input_ids[max(0, first - 1) : first])
        piece = str(tokenizer.decode([*before, *waiting]))[len(tokenizer.decode(before)) :]
        if piece.endswith("\N{REPLACEMENT CHARACTER}") and not ends and len(waiting) < 4:
            continue
        waiting = []
        if color:
            text.append(piece, style=(TRAINED if is_trained else CONTEXT)[position % 2])
        else:
            text.append(("[[" if is_trained and not inside else "") + piece + ("]]" if is_trained and ends else ""))
            inside = is_trained and not ends
        if following not in (None, position + 1):
            text.append(f" ... {following - position - 1:,} tokens ... ")
    return text
