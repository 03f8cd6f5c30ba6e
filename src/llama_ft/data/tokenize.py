"""From a chat to tokens and labels: what the model reads, and which of it it learns to say."""

from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from llama_ft.data.chat_template import ALPACA_TEMPLATE, INPUT_HEADING, ChatRenderer, Span
from llama_ft.data.formats import BadRow, Message, Row, RowFormat, alpaca_messages, chat_messages, token_row
from llama_ft.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100  # torch's cross_entropy leaves such labels out


class Encoded(NamedTuple):
    """One row as tokens.

    Attributes:
        input_ids: tokens, at most context_length.
        labels: the same tokens where they are trained on, elsewhere -100. Not shifted: position i is predicted from
            the positions before it, as transformers' models have it.
        truncated: the end was cut off.
    """

    input_ids: list[int]
    labels: list[int]
    truncated: bool

    @property
    def target_tokens(self) -> int:
        """Labels that count in the loss; nothing predicts position 0."""
        return sum(label != IGNORED for label in self.labels[1:])


class Encoder:
    """Turns rows into tokens and labels.

    Labels are a matter of position, never of the id: where the pad token is the end-of-turn token too, the end of a
    turn is still trained on.

    Args:
        tokenizer: a fast tokenizer with a chat template (`ensure_chat_template`), unless rows are tokenized already.
        context_length: longer rows lose their end.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", context_length: int) -> None:
        self.tokenizer = tokenizer
        self.context_length = context_length
        self._input_heading = INPUT_HEADING if tokenizer.chat_template == ALPACA_TEMPLATE else ""
        self._vocabulary_size = len(tokenizer)

    @cached_property
    def _renderer(self) -> ChatRenderer:
        """Made when the first chat comes: rows that are tokenized already make no demands on the tokenizer."""
        if not self.tokenizer.is_fast:
            raise UserError(
                f"the tokenizer ({type(self.tokenizer).__name__}) cannot tell which characters a token stands for.\n"
                "Expected a fast tokenizer, one with a tokenizer.json."
            )
        return ChatRenderer(self.tokenizer)

    def messages(self, row: Row, row_format: RowFormat) -> list[Message] | None:
        """The chat in a row, None when it is tokenized already.

        Raises:
            BadRow: the row is not as its format demands.
        """
        if row_format == "tokenized":
            return None
        if row_format == "alpaca":
            return alpaca_messages(row, input_heading=self._input_heading)
        return chat_messages(row)

    def encode(self, row: Row, row_format: RowFormat) -> Encoded:
        """Turn a row of data into tokens and labels.

        Raises:
            BadRow: the row is not as its format demands, or the chat template cannot take it.
        """
        messages = self.messages(row, row_format)
        if messages is None:
            return self._cut(*token_row(row, self._vocabulary_size))
        return self.encode_messages(messages)

    def encode_messages(self, messages: list[Message]) -> Encoded:
        """Turn a chat into tokens and labels.

        Raises:
            BadRow: the chat template cannot take it, or it holds what is no Unicode text.
        """
        text, spans = self._renderer.render(messages)
        _check_is_unicode(text)
        # The template writes the special tokens: adding them here would double BOS.
        tokens: Any = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False
        )
        input_ids: list[int] = tokens["input_ids"]
        mask = answer_mask(text, tokens["offset_mapping"], spans)
        return self._cut(input_ids, [token if mine else IGNORED for token, mine in zip(input_ids, mask, strict=True)])

    def _cut(self, input_ids: list[int], labels: list[int]) -> Encoded:
        length = self.context_length
        return Encoded(input_ids[:length], labels[:length], truncated=len(input_ids) > length)


def _check_is_unicode(text: str) -> None:
    r"""JSON can write half of a character (\ud800 without its other half), which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise BadRow(f"{half} is half of a character (a lone surrogate); expected Unicode text.") from None


def answer_mask(text: str, offsets: list[tuple[int, int]], spans: list[Span]) -> list[bool]:
    """Tell for each token whether it belongs to an answer.

    A token inside a span does. One that reaches over the edge of a span does when more than white space of it lies
    inside: in `Answer: Yes` the token ` Yes` is the answer's, though its space is the prompt's; but the token of two
    line breaks, one of which is the prompt's, is not.

    Args:
        text: the rendered chat.
        offsets: the characters [start, end) of each token.
        spans: the answers, in order.

    Returns:
        One bool a token.
    """
    mask = []
    covered = 0  # characters accounted for so far
    remaining = iter(spans)
    span = next(remaining, None)
    for token_start, token_end in offsets:
        # Byte-level tokenizers may leave white space out of their offsets (trim_offsets): a token begins where the
        # one before ended. The bytes of one character share its offsets, hence the minimum.
        start = min(token_start, covered)
        covered = end = max(token_end, covered)
        while span is not None and start >= span[1]:
            span = next(remaining, None)
        mask.append(span is not None and _belongs(text, start, end, span))
    return mask


def _belongs(text: str, start: int, end: int, span: Span) -> bool:
    if span[0] <= start and end <= span[1]:
        return True
    return bool(text[max(start, span[0]) : min(end, span[1])].strip())
