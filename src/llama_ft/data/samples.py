"""Show samples as text, with their loss mask."""

import itertools
import re
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

from llama_ft.data.tokenize.encoder import IGNORED
from llama_ft.errors import plural
from llama_ft.runtime.console import log

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from llama_ft.data.batches.sampler import Batch

# most tokens shown per sample
SAMPLE_TOKENS = 2000
BATCH_TOKENS = 300
REPEATED = re.compile(r"(<[^<>\s]{2,40}>)\1{3,}")  # special tokens, such as those of a picture


def show_samples(
    samples: "Dataset", tokenizer: "PreTrainedTokenizerBase", count: int, are_prompts: bool = False
) -> None:
    """Log the first `count` samples of `samples`, a table with the columns input_ids, labels and
    source. `are_prompts`: only their prompts are shown."""
    for sample in itertools.islice(samples, count):
        labels = sample["labels"]
        ending = ", those in the loss between [[ and ]]"
        if are_prompts:
            labels = _prompt_labels(labels)
            ending = ""
        title = f"{sample['source']}: {len(labels):,} tokens{ending}"
        text = marked_text(sample["input_ids"][: len(labels)], labels, tokenizer, SAMPLE_TOKENS)
        log.info(f"\n{title}\n{text}")


def describe_first_batch(
    batch: "Batch", tokenizer: "PreTrainedTokenizerBase", are_prompts: bool = False
) -> str:
    """Return two lines: a heading, and the text of the batch's first sample. `are_prompts`: only its
    prompt is shown."""
    count = len(batch.example_lengths)
    ids, labels = (column.tolist() for column in batch.examples()[0])
    heading = f"First batch: {plural(count, 'sample')}; tokens in the loss are between [[ and ]]:"
    if are_prompts:
        labels = _prompt_labels(labels)
        heading = f"First batch: {plural(count, 'prompt')}; only tokens of answers are in the loss:"
    text = marked_text(ids[: len(labels)], labels, tokenizer, BATCH_TOKENS)
    in_one_line = text.replace("\n", "\\n")
    return f"{heading}\n  {plural(len(labels), 'token')}: {in_one_line}"


def _prompt_labels(labels: Sequence[int]) -> list[int]:
    """Return those of a prompt: before the first token that is in the loss, which stands in place of
    an answer."""
    return list(itertools.takewhile(lambda label: label == IGNORED, labels))


def marked_text(
    input_ids: Sequence[int], labels: Sequence[int], tokenizer: "PreTrainedTokenizerBase", most: int
) -> str:
    """Return the text of a sample's first `most` tokens; those in the loss are between [[ and
    ]]."""
    text = ""
    before = ""
    added_tokens = frozenset(tokenizer.added_tokens_decoder)
    shown = list(input_ids[: _end_of_shown(input_ids, added_tokens, most)])

    def is_in_loss(position: int) -> bool:
        # The first token is never in the loss: no position predicts it.
        return position > 0 and labels[position] != IGNORED

    for in_loss, run in itertools.groupby(range(len(shown)), is_in_loss):
        # Decode the text from its beginning: a SentencePiece token that is decoded alone loses its
        # leading space.
        whole = str(tokenizer.decode(shown[: max(run) + 1]))
        added = whole[len(before) :]
        text += f"[[{added}]]" if in_loss else added
        before = whole
    text = REPEATED.sub(lambda run: f"{run[1]} x {len(run[0]) // len(run[1]):,} ", text)
    if len(input_ids) > len(shown):
        text += f" ... {len(input_ids) - len(shown):,} more tokens"
    return text


def _end_of_shown(input_ids: Sequence[int], added: Set[int], most: int) -> int:
    """Return the number of tokens to show. Equal neighbors count once if they are of those that were
    `added` to the vocabulary: a picture has hundreds of them."""
    runs = 0
    previous = None
    for position, token in enumerate(input_ids):
        runs += token != previous or token not in added
        previous = token
        if runs > most:
            return position
    return len(input_ids)
