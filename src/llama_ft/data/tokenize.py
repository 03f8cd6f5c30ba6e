"""Tokenize samples and build their labels, which say which tokens are in the loss."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from llama_ft.data import formats
from llama_ft.data.chat_template import ALPACA, INPUT_HEADING, Span, added_bos
from llama_ft.data.formats import FORMATS, BadRow, Content, Row, RowFormat, TokenRow
from llama_ft.data.loss_mask import (
    ChatDiffers,
    ChatRenderer,
    RenderedChat,
    drop_reasoning,
)
from llama_ft.errors import UserError

# characters; a tokenizer takes up to 200 bytes per character, and 20 s for all of them
LONGEST_TEXT = 10_000_000
SPACE = "\u2581"  # as SentencePiece writes it
IGNORED = -100  # cross_entropy of PyTorch ignores this label by default
Truncation = Literal["right", "left", "drop", "split"]
Labels = Literal["auto", "assistant", "completion", "all"]
Reasoning = Literal["keep", "drop"]
Example = tuple[list[int], list[int]]  # input ids and labels of any length, from `Encoder.tokenize`


class Encoded(NamedTuple):
    """An example of at most context_length tokens, or a piece of a longer one.

    A label is the token itself if the token is in the loss, otherwise -100. Labels are not shifted:
    as in Transformers, the logits at position i-1 predict the label at position i.
    """

    input_ids: list[int]
    labels: list[int]
    truncated: bool  # tokens were cut off and are lost

    @property
    def target_tokens(self) -> int:
        """Number of labels in the loss. Position 0 does not count, because no position predicts
        it."""
        return len(self.labels) - 1 - self.labels[1:].count(IGNORED) if self.labels else 0


class Encoder:
    """Turns samples into tokens and labels.

    Labels depend on the position, never on the token id: even if the pad token is also the
    end-of-turn token, the end of a message stays in the loss. An encoder can be pickled and sent to
    another process.

    Args:
        tokenizer: a fast tokenizer. Chats need a chat template (`ensure_chat_template`).
        context_length: maximum number of tokens of an example.
        truncation: what happens to longer examples, see `Encoder.fit`.
        labels: tokens in the loss; auto: responses of chats, completions of prompts, all of plain
            text.
        reasoning_content: drop removes that of all responses of a chat.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        context_length: int,
        truncation: Truncation = "right",
        labels: Labels = "auto",
        reasoning_content: Reasoning = "keep",
    ) -> None:
        self.tokenizer = tokenizer
        self.context_length = context_length
        self.truncation = truncation
        self.labels = labels
        self.reasoning_content = reasoning_content
        self._vocabulary_size = len(tokenizer)
        if not tokenizer.is_fast:
            raise UserError(
                f"{type(tokenizer).__name__}: expected a fast tokenizer, one with a tokenizer.json."
            )
        # this also disables the truncation and padding stored in the tokenizer
        self._bos = added_bos(tokenizer)

    @cached_property
    def _renderer(self) -> ChatRenderer:
        """Created for the first chat, because samples without chats need no valid chat template."""
        return ChatRenderer(self.tokenizer, "assistant" if self.labels == "auto" else self.labels)

    def read(self, row: Row, row_format: RowFormat) -> Content:
        """Return the content of a sample: the messages of a chat, or its texts.

        Raises:
            BadRow: the sample does not follow its format, or holds images, video or audio.
        """
        for column in row.keys() & formats.MEDIA:
            formats.expect(not row[column], column, row[column], "nothing: only text is trained on")
        if row_format == "alpaca" and self.tokenizer.chat_template == ALPACA:
            return self._without_dropped(formats.alpaca_messages(row, input_heading=INPUT_HEADING))
        try:
            return self._without_dropped(FORMATS[row_format].read(row))
        # raised by a user's own format
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise BadRow(f"format {row_format}: {type(error).__name__}: {error}") from error

    def _without_dropped(self, content: Content) -> Content:
        if isinstance(content, list) and self.reasoning_content == "drop":
            return drop_reasoning(content)
        return content

    def encode(self, row: Row, row_format: RowFormat) -> list[Encoded]:
        """Tokenize a sample and bring it to pieces of at most context_length tokens. See `tokenize`
        and `fit`. A chat that must be split becomes a piece per response."""
        try:
            return self.fit(*self.tokenize(row, row_format))
        except ChatDiffers as chat:
            parts = self.piece_rows(chat, row)
            return [piece for part in parts for piece in self.encode(part, "messages")]

    def piece_rows(self, chat: ChatDiffers, row: Row) -> list[Row]:
        """Return the samples, in the format messages, that a chat must be split into."""
        tools = formats.tools_of(row)
        return [{"messages": messages, "tools": tools} for messages in chat.pieces]

    def text_tokens(self, text: str) -> int:
        """Return the number of tokens of a text that a template has written."""
        return len(self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)

    def tokenize(self, row: Row, row_format: RowFormat) -> Example:
        """Return tokens and labels of a sample of any length.

        Raises:
            BadRow: the sample does not follow its format, or the chat template rejects it.
            ChatDiffers: it is a chat that must be split, see `piece_rows`.
            UserError: samples of this format do not have the requested kind of labels.
        """
        return self.tokenize_content(self.read(row, row_format), row, row_format)

    def tokenize_content(self, content: Content, row: Row, row_format: RowFormat) -> Example:
        """Do what `tokenize` does, for content that was already read from the sample."""
        content = self._without_dropped(content)
        if isinstance(content, list):
            chat = self._renderer.render(content, formats.tools_of(row))
            return self._tokenize_chat(chat)
        fitting = ("auto",) if isinstance(content, TokenRow) else ("auto", "all")
        if (isinstance(content, TokenRow) or not content[0]) and self.labels not in fitting:
            raise UserError(
                f"--labels {self.labels}: expected {' or '.join(fitting)} for the format {row_format}."
            )
        if isinstance(content, TokenRow):
            tokens = (*content.input_ids, *(label for label in content.labels if label != IGNORED))
            if bad := [token for token in tokens if not 0 <= token < self._vocabulary_size]:
                raise BadRow(
                    f"it holds the token {bad[0]}; expected 0 to {self._vocabulary_size - 1}."
                )
            return content
        return self._tokenize_text(*content)

    def _tokenize_text(self, prompt: str, completion: str) -> Example:
        """Tokenize text without a chat: BOS (if the tokenizer adds one), prompt, completion, EOS.

        The joined text is tokenized, so that the completion begins with the same token as in
        running text.
        """
        start = 0 if self.labels == "all" else len(prompt)
        text = prompt + completion
        input_ids, labels = self._tokenize(text, [(start, len(text))])
        if self._bos and input_ids[:1] != self._bos:
            input_ids = [*self._bos, *input_ids]
            labels = [IGNORED, *labels]
        end = self.tokenizer.eos_token_id
        if isinstance(end, int) and input_ids[-1:] != [end]:
            input_ids = [*input_ids, end]
            labels = [*labels, end]
        return input_ids, labels

    def fit(self, input_ids: list[int], labels: list[int]) -> list[Encoded]:
        """Bring an example to at most context_length tokens.

        truncation=right keeps the beginning of a longer example, left keeps its end, drop returns
        nothing. split makes pieces that overlap by one token: the first token of a piece is only
        context, because no position predicts it there, and the piece before has it in the loss. So
        every label except the first is in the loss exactly once.

        Args:
            input_ids, labels: of the example, both of the same length.

        Returns:
            One piece; with truncation=split perhaps several; [] if the example is skipped.
        """
        length = self.context_length
        whole = len(input_ids)
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

    def _tokenize_chat(self, chat: RenderedChat) -> Example:
        """Tokenize a chat, in which the template has written all special tokens, including BOS.

        At inference the prompt is tokenized without the response. So no token may cross its end,
        such as two line breaks of which the prompt has the first. If one does, the text is
        tokenized in two parts.
        """
        text, spans, prompts = chat
        self._check_text(text)
        backend = self.tokenizer.backend_tokenizer
        whole = backend.encode(text, add_special_tokens=False)
        ends = []
        for end in _crossed(whole.offsets, prompts):
            prompt = backend.encode(text[:end], add_special_tokens=False)
            if prompt.ids != whole.ids[: len(prompt.ids)]:
                ends.append(end)
        input_ids = list[int]()
        offsets = list[Span]()
        for start, end in pairwise([0, *ends, len(text)]) if ends else ():
            part = backend.encode(text[start:end], add_special_tokens=False)
            if part.tokens[0].startswith(SPACE) and not text[start].isspace():
                # this tokenizer puts a space before every text, so it cannot tokenize a part
                ends = []
            input_ids += part.ids
            offsets += [(first + start, last + start) for first, last in part.offsets]
        if not ends:
            return self._labelled(text, whole.ids, whole.offsets, spans)
        return self._labelled(text, input_ids, offsets, spans)

    def _tokenize(self, text: str, spans: list[Span]) -> Example:
        self._check_text(text)
        # Calling the backend takes a tenth of the time: tokenizer(text) sets truncation and padding
        # again in each call.
        encoding = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        return self._labelled(text, encoding.ids, encoding.offsets, spans)

    def _labelled(
        self, text: str, input_ids: list[int], offsets: list[Span], spans: list[Span]
    ) -> Example:
        labels = [IGNORED] * len(input_ids)
        for first, last in tokens_of_spans(text, offsets, spans):
            labels[first:last] = input_ids[first:last]
        return input_ids, labels

    def _check_text(self, text: str) -> None:
        if len(text) > LONGEST_TEXT:
            raise BadRow(
                f"its text has {len(text):,} characters; expected at most {LONGEST_TEXT:,}."
            )
        try:
            text.encode("utf-8")
        # JSON allows half a surrogate pair, but tokenizers reject it
        except UnicodeEncodeError as error:
            raise BadRow(
                f"\\u{ord(text[error.start]):04x} is half of a character (a lone surrogate); expected Unicode text."
            ) from None


# Sample, its format, encoder -> the examples that the objective needs. Their number is the same for
# all samples.
ExamplesOf = Callable[[Row, RowFormat, Encoder], list[Example]]


def one_example(row: Row, row_format: RowFormat, encoder: Encoder) -> list[Example]:
    """Return the only example of supervised fine-tuning: the sample itself."""
    return [encoder.tokenize(row, row_format)]


def two_examples(row: Row, row_format: RowFormat, encoder: Encoder) -> list[Example]:
    """Return two examples of a preference pair: the prompt with the chosen and with the rejected
    response."""
    encoder.read(row, row_format)  # checks the whole sample and raises BadRow
    return [
        encoder.tokenize_content(content, row, row_format) for content in formats.pair_contents(row)
    ]


def unpaired_examples(row: Row, row_format: RowFormat, encoder: Encoder) -> list[Example]:
    """Return the example of a completion with a label, twice. `mismatch` gives the second one
    another completion."""
    return [encoder.tokenize(row, row_format)] * 2


def mismatch(samples: Sequence[list[Example]], context_length: int) -> None:
    """Give the second example of each sample the completion of another one, in place, for an
    estimate of the KL divergence. The other sample is half a list away, since neighbors often have
    the same prompt. A single sample keeps its own completion. No such example is longer than
    context_length, unless the sample itself is.

    Args:
        samples: of each what `unpaired_examples` returns.
        context_length: of the encoder.
    """
    own = [examples[0] for examples in samples]
    starts = [
        next((at for at, label in enumerate(labels) if label != IGNORED), len(labels))
        for _, labels in own
    ]
    answered = [number for number, (_, labels) in enumerate(own) if starts[number] < len(labels)]
    for place, number in enumerate(answered):
        other = answered[(place + len(answered) // 2) % len(answered)]
        longest = max(context_length, len(own[number][0]))
        ids, labels = (
            [*ours[: starts[number]], *theirs[starts[other] :]][:longest]
            for ours, theirs in zip(own[number], own[other], strict=True)
        )
        samples[number][1] = ids, labels


def tokens_of_spans(
    text: str, offsets: list[tuple[int, int]], spans: list[Span]
) -> list[tuple[int, int]]:
    """Return the tokens that belong to each span.

    A token inside a span belongs to it. A token across the edge of a span belongs to it if the part
    inside is more than white space. In `Answer: Yes` the token ` Yes` belongs to the response,
    although its space is part of the prompt. A token of two line breaks, one of them in the prompt,
    does not belong to the response.

    Args:
        text: the rendered chat.
        offsets: the characters [start, end) of each token.
        spans: the responses as characters [start, end), in order.

    Returns:
        Ranges [first, last) of tokens, one per span.
    """
    # Byte-level tokenizers can exclude white space from the offsets (trim_offsets), so a token
    # begins where the previous one ended. All bytes of one character have the same offsets, so the
    # minimum is needed.
    ends = list(accumulate((end for _, end in offsets), max))
    starts = [min(start, covered) for (start, _), covered in zip(offsets, [0, *ends], strict=False)]

    def belongs(token: int, span: Span) -> bool:
        return bool(text[max(starts[token], span[0]) : min(ends[token], span[1])].strip())

    ranges = []
    for span in spans:
        first = bisect_left(starts, span[0])
        last = bisect_left(starts, span[1])
        while first > 0 and ends[first - 1] > span[0] and belongs(first - 1, span):
            first -= 1
        while last > first and ends[last - 1] > span[1] and not belongs(last - 1, span):
            last -= 1
        ranges.append((first, last))
    return ranges


def _crossed(offsets: Sequence[Span], edges: Sequence[int]) -> list[int]:
    """Return the edges, places in a text, that may lie inside of a token.

    As in `tokens_of_spans`, white space before a token may not be in its offsets.
    """
    inside = []
    for edge in edges:
        token = bisect_right(offsets, edge, key=itemgetter(1))
        before = offsets[token - 1][1] if token else 0
        if token < len(offsets) and min(offsets[token][0], before) < edge:
            inside.append(edge)
    return inside
