"""From a row to tokens and labels: what the model reads, and which of it it learns to say."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from llama_ft.data import formats
from llama_ft.data.chat_template import ALPACA, INPUT_HEADING, Span, added_bos
from llama_ft.data.formats import FORMATS, BadRow, Content, Row, RowFormat, TokenRow
from llama_ft.data.loss_mask import ChatRenderer
from llama_ft.errors import UserError

LONGEST_TEXT = 10_000_000  # characters: a tokenizer takes up to 200 bytes for each, and 20 s for all
IGNORED = -100  # torch's cross_entropy leaves such labels out
Truncation = Literal["right", "left", "drop", "split"]
Labels = Literal["auto", "assistant", "completion", "all"]
Example = tuple[list[int], list[int]]  # input ids and labels of any length, as of `Encoder.tokenize`


class Encoded(NamedTuple):
    """An example of at most context_length tokens, or a piece of a longer one.

    Labels are the same tokens where they are trained on, elsewhere -100. They are not shifted: position i is predicted
    from the positions before it, as transformers' models have it.
    """

    input_ids: list[int]
    labels: list[int]
    truncated: bool  # a part was cut off and is lost

    @property
    def target_tokens(self) -> int:
        """Labels that count in the loss; nothing predicts position 0."""
        return len(self.labels) - 1 - self.labels[1:].count(IGNORED) if self.labels else 0


class Encoder:
    """Turns rows into tokens and labels.

    Labels are a matter of position, never of the id: if the pad token is the end-of-turn token too, the end of a
    message is still trained on. An encoder can be pickled and sent to another process.

    Args:
        tokenizer: a fast tokenizer; for chats with a chat template (`ensure_chat_template`).
        context_length: tokens of the longest row.
        truncation: what happens to a longer one, see `Encoder.fit`.
        labels: what is trained on; auto: responses of chats, completions of prompts, all of plain text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        context_length: int,
        truncation: Truncation = "right",
        labels: Labels = "auto",
    ) -> None:
        self.tokenizer, self.context_length = tokenizer, context_length
        self.truncation, self.labels = truncation, labels
        self._vocabulary_size = len(tokenizer)
        if not tokenizer.is_fast:
            raise UserError(f"{type(tokenizer).__name__}: expected a fast tokenizer, one with a tokenizer.json.")
        self._bos = added_bos(tokenizer)  # this also switches off the truncation and padding it was saved with

    @cached_property
    def _renderer(self) -> ChatRenderer:
        """Made when the first chat comes: other rows make no demands on the chat template."""
        return ChatRenderer(self.tokenizer, "assistant" if self.labels == "auto" else self.labels)

    def read(self, row: Row, row_format: RowFormat) -> Content:
        """What a row holds.

        Raises:
            BadRow: the row is not as its format demands, or has images, videos or sound.
        """
        for column in row.keys() & formats.MEDIA:
            formats.expect(not row[column], column, row[column], "nothing: only text is trained on")
        if row_format == "alpaca" and self.tokenizer.chat_template == ALPACA:
            return formats.alpaca_messages(row, input_heading=INPUT_HEADING)
        try:
            return FORMATS[row_format].read(row)
        except (LookupError, TypeError, AttributeError, ValueError) as error:  # of a format of the user's own
            raise BadRow(f"format {row_format}: {type(error).__name__}: {error}") from error

    def encode(self, row: Row, row_format: RowFormat) -> list[Encoded]:
        """Turn a row of data into pieces of at most context_length tokens, see `tokenize` and `fit`."""
        return self.fit(*self.tokenize(row, row_format))

    def tokenize(self, row: Row, row_format: RowFormat) -> Example:
        """Turn a row of data into tokens and labels, however long it is.

        Raises:
            BadRow: the row is not as its format demands, or the chat template cannot take it.
            UserError: such rows have no labels of the kind that was asked for.
        """
        return self.tokenize_content(self.read(row, row_format), row, row_format)

    def tokenize_content(self, content: Content, row: Row, row_format: RowFormat) -> Example:
        """As `tokenize`, of what was read from the row."""
        if isinstance(content, list):
            # The template writes all special tokens, BOS among them.
            return self._tokenize(*self._renderer.render(content, formats.tools_of(row)))
        fitting = ("auto",) if isinstance(content, TokenRow) else ("auto", "all")
        if (isinstance(content, TokenRow) or not content[0]) and self.labels not in fitting:
            raise UserError(f"--labels {self.labels}: expected {' or '.join(fitting)} for the format {row_format}.")
        if isinstance(content, TokenRow):
            tokens = (*content.input_ids, *(label for label in content.labels if label != IGNORED))
            if bad := [token for token in tokens if not 0 <= token < self._vocabulary_size]:
                raise BadRow(f"it holds the token {bad[0]}; expected 0 to {self._vocabulary_size - 1}.")
            return content
        return self._tokenize_text(*content)

    def _tokenize_text(self, prompt: str, completion: str) -> Example:
        """Turn text without a chat into BOS (if the tokenizer adds one), prompt, completion and EOS.

        Tokens are those of the joined text, so that the completion begins with the token it has in running text.
        """
        start = 0 if self.labels == "all" else len(prompt)
        text = prompt + completion
        input_ids, labels = self._tokenize(text, [(start, len(text))])
        if self._bos and input_ids[:1] != self._bos:
            input_ids, labels = [*self._bos, *input_ids], [IGNORED, *labels]
        end = self.tokenizer.eos_token_id
        if isinstance(end, int) and input_ids[-1:] != [end]:
            input_ids, labels = [*input_ids, end], [*labels, end]
        return input_ids, labels

    def fit(self, input_ids: list[int], labels: list[int]) -> list[Encoded]:
        """Bring an example to context_length: one piece or, with truncation split, several; [] if it is dropped.

        right keeps its beginning, left its end, drop none of it. split makes pieces that overlap by one token: a
        piece's first token is context only, as nothing predicts it there, and the piece before has trained it. So
        every label but the row's first is trained on exactly once.
        """
        length, whole = self.context_length, len(input_ids)
        if whole <= length:
            return [Encoded(input_ids, labels, truncated=False)]
        if self.truncation == "right":
            return [Encoded(input_ids[:length], labels[:length], truncated=True)]
        if self.truncation == "left":
            return [Encoded(input_ids[-length:], [IGNORED, *labels[1 - length :]], truncated=True)]
        if self.truncation == "drop":
            return []
        pieces = []
        for start in range(0, whole - 1, length - 1):
            own = [labels[0] if start == 0 else IGNORED, *labels[start + 1 : start + length]]
            pieces.append(Encoded(input_ids[start : start + length], own, truncated=False))
        return pieces

    def _tokenize(self, text: str, spans: list[Span]) -> Example:
        if len(text) > LONGEST_TEXT:
            raise BadRow(f"its text has {len(text):,} characters; expected at most {LONGEST_TEXT:,}.")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:  # JSON can write half of a character, which no tokenizer takes
            raise BadRow(
                f"\\u{ord(text[error.start]):04x} is half of a character (a lone surrogate); expected Unicode text."
            ) from None
        # The backend's own call: tokenizer(text) sets truncation and padding anew each time, a tenth of the time here.
        encoding = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        input_ids: list[int] = encoding.ids
        labels = [IGNORED] * len(input_ids)
        for first, last in tokens_of_spans(text, encoding.offsets, spans):
            labels[first:last] = input_ids[first:last]
        return input_ids, labels


# Row, its format, encoder -> the examples that an objective trains on, always the same number of them.
ExamplesOf = Callable[[Row, RowFormat, Encoder], list[Example]]


def one_example(row: Row, row_format: RowFormat, encoder: Encoder) -> list[Example]:
    """The example of supervised fine-tuning: the row itself."""
    return [encoder.tokenize(row, row_format)]


def two_examples(row: Row, row_format: RowFormat, encoder: Encoder) -> list[Example]:
    """The examples of a pair: its prompt with the chosen and with the rejected response, which is in the loss."""
    encoder.read(row, row_format)  # also says what else is wrong with the row
    return [encoder.tokenize_content(content, row, row_format) for content in formats.pair_contents(row)]


def unpaired_examples(row: Row, row_format: RowFormat, encoder: Encoder) -> list[Example]:
    """The examples of a completion with a label: itself, twice. `mismatch` gives the second another completion."""
    return [encoder.tokenize(row, row_format)] * 2


def mismatch(samples: Sequence[list[Example]], context_length: int) -> None:
    """Give the second example of each sample the completion of another one, in place, for an estimate of the KL
    divergence: that of the sample half the list further, since neighbors often have one prompt. A sample alone keeps
    its own. No such example is longer than context_length, unless the sample itself is.

    Args:
        samples: of each what `unpaired_examples` returns.
        context_length: of the encoder.
    """
    own = [examples[0] for examples in samples]
    starts = [next((at for at, label in enumerate(labels) if label != IGNORED), len(labels)) for _, labels in own]
    answered = [number for number, (_, labels) in enumerate(own) if starts[number] < len(labels)]
    for place, number in enumerate(answered):
        other = answered[(place + len(answered) // 2) % len(answered)]
        longest = max(context_length, len(own[number][0]))
        ids, labels = (
            [*ours[: starts[number]], *theirs[starts[other] :]][:longest]
            for ours, theirs in zip(own[number], own[other], strict=True)
        )
        samples[number][1] = ids, labels


def tokens_of_spans(text: str, offsets: list[tuple[int, int]], spans: list[Span]) -> list[tuple[int, int]]:
    """Tell which tokens belong to a response.

    A token inside a span does. One that reaches over the edge of a span does when more than white space of it lies
    inside: in `Answer: Yes` the token ` Yes` is the response's, though its space is the prompt's; but the token of two
    line breaks, one of which is the prompt's, is not.

    Args:
        text: the rendered chat.
        offsets: the characters [start, end) of each token.
        spans: the responses, in order.

    Returns:
        Ranges [first, last) of tokens, one per span.
    """
    # Byte-level tokenizers may leave white space out of their offsets (trim_offsets): a token begins where the one
    # before ended. The bytes of one character share its offsets, hence the minimum.
    ends = list(accumulate((end for _, end in offsets), max))
    starts = [min(start, covered) for (start, _), covered in zip(offsets, [0, *ends], strict=False)]

    def belongs(token: int, span: Span) -> bool:
        return bool(text[max(starts[token], span[0]) : min(ends[token], span[1])].strip())

    ranges = []
    for span in spans:
        first, last = bisect_left(starts, span[0]), bisect_left(starts, span[1])
        while first > 0 and ends[first - 1] > span[0] and belongs(first - 1, span):
            first -= 1
        while last > first and ends[last - 1] > span[1] and not belongs(last - 1, span):
            last -= 1
        ranges.append((first, last))
    return ranges
