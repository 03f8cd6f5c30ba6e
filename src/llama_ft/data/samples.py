"""Rows as people read them: what is trained on in colour, or between [[ and ]] where there is no colour."""

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
SAMPLE_TOKENS, BATCH_TOKENS = 2000, 300  # longest text of a row; of a longer one the middle is left out
PADDING_RUN = 4
# One token after the other in two shades, so that it can be seen where a token ends.
TRAINED, CONTEXT = ("black on green", "black on bright_green"), ("default", "dim")


def show_samples(rows: "Dataset", tokenizer: "PreTrainedTokenizerBase", count: int) -> None:
    """Print the first rows token by token, on the rank whose log is read.

    Args:
        rows: columns input_ids, labels and source.
        tokenizer: theirs.
        count: how many rows.
    """
    if not log.isEnabledFor(logging.INFO):
        return
    for index in range(min(count, len(rows))):
        row = rows[index]
        ids, labels = row["input_ids"], [IGNORED, *row["labels"][1:]]  # nothing predicts the first token
        trained = len(labels) - labels.count(IGNORED)
        legend = "in colour" if console.is_terminal else "between [[ and ]]"
        console.print(f"\n{row['source']}: {len(ids):,} tokens, {trained:,} of them trained on, {legend}")
        console.print(marked_text(ids, labels, tokenizer, SAMPLE_TOKENS, colour=console.is_terminal))
    console.print()


def describe_first_batch(batch: "Batch", tokenizer: "PreTrainedTokenizerBase") -> str:
    """The text of a batch's first rows for the log, what is trained on between [[ and ]]."""
    if batch.is_packed:
        rows = zip(*(part[0].split(batch.row_lengths) for part in (batch.input_ids, batch.labels)), strict=True)
    else:
        rows = zip(batch.input_ids, batch.labels, strict=True)
    count = len(batch.row_lengths)
    lines = [f"The first batch: {count:,} row{'s' if count > 1 else ''}; what is trained on is between [[ and ]]:"]
    for (ids, labels), length in zip(itertools.islice(rows, BATCH_ROWS), batch.row_lengths, strict=False):
        text = marked_text(ids.tolist(), [IGNORED, *labels.tolist()[1:]], tokenizer, BATCH_TOKENS, colour=False)
        lines.append(f"  {length:,} tokens: {text.plain}")
    return "\n".join(lines)


def marked_text(
    input_ids: Sequence[int], labels: Sequence[int], tokenizer: "PreTrainedTokenizerBase", most: int, colour: bool
) -> Text:
    """The text of a row with its label mask. Padding at its end is counted instead of shown.

    Args:
        input_ids: its tokens.
        labels: -100 where not trained on.
        tokenizer: theirs.
        most: tokens shown; of a longer row the beginning and the end.
        colour: in colour instead of between [[ and ]].
    """
    end = len(input_ids)
    while end > 0 and input_ids[end - 1] == input_ids[-1] and labels[end - 1] == IGNORED:
        end -= 1
    padding = len(input_ids) - end if len(input_ids) - end >= PADDING_RUN else 0
    end = len(input_ids) - padding
    text = Text()
    for start, stop in [(0, end)] if end <= most else [(0, most - most // 4), (end - most // 4, end)]:
        if start > 0:
            text.append(f" ... {start - (most - most // 4):,} tokens ... ")
        _append(text, input_ids, labels, range(start, stop), tokenizer, colour)
    if padding:
        text.append(f" ... {padding:,} x {tokenizer.decode([input_ids[-1]])}")
    return text


def _append(
    text: Text,
    input_ids: Sequence[int],
    labels: Sequence[int],
    shown: range,
    tokenizer: "PreTrainedTokenizerBase",
    colour: bool,
) -> None:
    waiting: list[int] = []  # tokens that are only a part of a character
    inside = False
    for position in shown:
        waiting.append(input_ids[position])
        trained = labels[position] != IGNORED
        ends = position + 1 == shown.stop or (labels[position + 1] != IGNORED) != trained
        before = list(input_ids[max(shown.start, position + 1 - len(waiting) - 1) : position + 1 - len(waiting)])
        # Decoded after its neighbour: alone it would lose the space that SentencePiece's tokens begin with.
        piece = str(tokenizer.decode(before + waiting))[len(tokenizer.decode(before)) :]
        if piece.endswith("\N{REPLACEMENT CHARACTER}") and not ends and len(waiting) < 4:
            continue
        waiting = []
        if colour:
            text.append(piece, style=(TRAINED if trained else CONTEXT)[position % 2])
            continue
        text.append(("[[" if trained and not inside else "") + piece + ("]]" if trained and ends else ""))
        inside = trained and not ends
