"""Samples as people read them, with their loss mask."""

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

SAMPLE_TOKENS, BATCH_TOKENS = 2000, 300  # shown of a sample


def show_samples(rows: "Dataset", tokenizer: "PreTrainedTokenizerBase", count: int) -> None:
    """Print the first `count` samples (columns input_ids, labels and source), on the rank whose log is read."""
    if not log.isEnabledFor(logging.INFO):
        return
    for row in itertools.islice(rows, count):
        text = marked_text(row["input_ids"], row["labels"], tokenizer, SAMPLE_TOKENS)
        title = f"\n{row['source']}: {len(row['labels']):,} tokens, those in the loss between [[ and ]]"
        console.print(title, text, sep="\n")


def describe_first_batch(batch: "Batch", tokenizer: "PreTrainedTokenizerBase") -> str:
    """The text of a batch's first two samples for the log."""
    columns = [
        part[0].split(batch.row_lengths) if batch.is_packed else part for part in (batch.input_ids, batch.labels)
    ]
    lines = [f"The first batch: {len(batch.row_lengths):,} rows; what is trained on is between [[ and ]]:"]
    for ids, labels, length in list(zip(*columns, batch.row_lengths, strict=False))[:2]:
        text = marked_text(ids[:length].tolist(), labels[:length].tolist(), tokenizer, BATCH_TOKENS)
        lines.append(f"  {length:,} tokens: {text.plain}")
    return "\n".join(lines)


def marked_text(
    input_ids: Sequence[int], labels: Sequence[int], tokenizer: "PreTrainedTokenizerBase", most: int
) -> Text:
    """The text of a sample's first `most` tokens; those in the loss stand between [[ and ]] and are green."""
    text, shown = Text(), list(input_ids[:most])
    # Nothing predicts the first token.
    for is_trained, run in itertools.groupby(range(len(shown)), lambda n: n > 0 and labels[n] != IGNORED):
        first, *others = run
        # Decoded after its neighbors: alone it would lose the space that SentencePiece's tokens begin with.
        before, whole = (str(tokenizer.decode(shown[:end])) for end in (first, first + len(others) + 1))
        piece = whole[len(before) :]
        text.append(f"[[{piece}]]" if is_trained else piece, style="green" if is_trained else "")
    return text.append(f" ... {len(input_ids) - most:,} more tokens" if len(input_ids) > most else "")
