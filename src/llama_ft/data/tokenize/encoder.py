"""Tokenize samples and build their labels, which say which tokens are in the loss."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from itertools import chain, pairwise
from operator import itemgetter
from typing import Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from llama_ft.data.chat.chat_template import (
    ALPACA,
    INPUT_HEADING,
    LONGEST_TEXT,
    Span,
    Tools,
    added_bos,
    template_for,
    templates_in_use,
    turn_ends,
)
from llama_ft.data.chat.loss_mask import ChatDiffers, ChatRenderer, RenderedChat, drop_reasoning
from llama_ft.data.media import Media, MediaExample
from llama_ft.data.read import formats
from llama_ft.data.read.formats import (
    FORMATS,
    BadSample,
    Content,
    Sample,
    SampleFormat,
    TokenizedSample,
)
from llama_ft.data.read.media import ALL_MEDIA, KIND, has_media, have_media
from llama_ft.data.tokenize.notes import notes_of
from llama_ft.data.tokenize.prompt_tokens import check_unicode
from llama_ft.errors import UserError

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
    # of a `MediaExample`
    text: str | None = None
    media: tuple[str, ...] = ()

    @property
    def target_tokens(self) -> int:
        """Number of labels in the loss. Position 0 does not count, because no position predicts
        it."""
        predicted = self.labels[1:]
        return len(predicted) - predicted.count(IGNORED)


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
        media: reads what chats hold in addition to text; None: such samples are bad.
        no_media: why they are, for messages.
        takes_media: the model takes media, also if no sample has any.
        stop_ids: the model's tokens that end generation, see `turn_ends`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        context_length: int,
        truncation: Truncation = "right",
        labels: Labels = "auto",
        reasoning_content: Reasoning = "keep",
        media: Media | None = None,
        no_media: str = "only text is trained on",
        takes_media: bool = False,
        stop_ids: Collection[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = sorted(stop_ids)
        # by template; made with the first chat, because samples without chats need none
        self._renderers = dict[str, ChatRenderer]()
        self.media = media
        self._no_media = no_media
        self.takes_media = takes_media
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

    def _renderer(self, tools: Tools | None) -> ChatRenderer:
        """Return the renderer of chats with these tools, for which there can be another template."""
        template = template_for(self.tokenizer, tools)
        if template not in self._renderers:
            labels = "assistant" if self.labels == "auto" else self.labels
            self._renderers[template] = ChatRenderer(
                self.tokenizer, labels, template, self.stop_ids
            )
        return self._renderers[template]

    @property
    def turn_ends(self) -> list[dict[str, str]]:
        """The ends of responses that templates do not write, see `turn_ends`; [] if there are
        none."""
        if not (self.stop_ids and self.tokenizer.chat_template):
            return []
        templates = templates_in_use(self.tokenizer)
        ends = [turn_ends(self.tokenizer, template, self.stop_ids) for template in templates]
        return ends if any(ends) else []

    def read(self, sample: Sample, sample_format: SampleFormat) -> Content:
        """Return the content of a sample: the messages of a chat, or its texts.

        Raises:
            BadSample: the sample does not follow its format, or holds media that are not read.
        """
        sample = self.with_media(sample, sample_format)
        try:
            return self._read_text_and_parts(sample, sample_format)
        except BadSample as error:
            if self.media is None and have_media([sample]):
                raise BadSample(f"it has {KIND}, but {self._no_media}.") from error
            raise

    def with_media(self, sample: Sample, sample_format: SampleFormat) -> Sample:
        """Return a sample whose media are parts of its messages, if they are read. Such a sample
        stays as it is."""
        return self.media.with_parts(sample, sample_format) if self.media is not None else sample

    def _read_text_and_parts(self, sample: Sample, sample_format: SampleFormat) -> Content:
        formats.check_columns(sample, sample_format)
        for column in sample.keys() & ALL_MEDIA:
            value = sample[column]
            expected = f"nothing: samples of the format {sample_format} are text only"
            formats.expect(not value, column, value, expected)
        if sample_format == "alpaca" and self.tokenizer.chat_template == ALPACA:
            messages = formats.alpaca_messages(sample, input_heading=INPUT_HEADING)
            return self._without_dropped(messages)
        try:
            return self._without_dropped(FORMATS[sample_format].read(sample))
        # raised by a user's own format
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise BadSample(f"format {sample_format}: {type(error).__name__}: {error}") from error

    def _without_dropped(self, content: Content) -> Content:
        if isinstance(content, list) and self.reasoning_content == "drop":
            return drop_reasoning(content)
        return content

    def encode(self, sample: Sample, sample_format: SampleFormat) -> list[Encoded]:
        """Tokenize a sample and bring it to pieces of at most context_length tokens. See `tokenize`
        and `fit`. A chat that must be split becomes several pieces."""
        try:
            input_ids, labels = self.tokenize(sample, sample_format)
        except ChatDiffers as chat:
            pieces = list[Encoded]()
            for part in self.piece_rows(chat, sample):
                pieces += self.encode(part, "messages")
            return pieces
        return self.fit(input_ids, labels)

    def piece_rows(self, chat: ChatDiffers, sample: Sample) -> list[Sample]:
        """Return the samples, in the format messages, that a chat must be split into."""
        tools = formats.tools_of(sample)
        return [{"messages": messages, "tools": tools} for messages in chat.pieces]

    def notes_of(self, sample: Sample, sample_format: SampleFormat, place: str) -> set[str]:
        """Return what should be said about a valid sample, see `notes_of`."""
        template = self.tokenizer.chat_template
        return notes_of(sample, sample_format, place, template, self.takes_media)

    def text_tokens(self, text: str) -> int:
        """Return the number of tokens of a text that a template has written."""
        return len(self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)

    def tokenize(self, sample: Sample, sample_format: SampleFormat) -> Example:
        """Return tokens and labels of a sample of any length.

        Raises:
            BadSample: the sample does not follow its format, or the chat template rejects it.
            ChatDiffers: it is a chat that must be split, see `piece_rows`.
            UserError: samples of this format do not have the requested kind of labels.
        """
        return self.tokenize_content(self.read(sample, sample_format), sample, sample_format)

    def tokenize_content(
        self, content: Content, sample: Sample, sample_format: SampleFormat
    ) -> Example:
        """Do what `tokenize` does, for content that was already read from the sample."""
        example = self._tokenize_content(content, sample, sample_format)
        if self.media is not None and not isinstance(example, MediaExample):
            self.media.check_text(example[0])
        return example

    def _tokenize_content(
        self, content: Content, sample: Sample, sample_format: SampleFormat
    ) -> Example:
        content = self._without_dropped(content)
        if isinstance(content, list):
            tools = formats.tools_of(sample)
            chat = self._renderer(tools).render(content, tools)
            if any(has_media(message["content"]) for message in content):
                assert self.media is not None  # otherwise the sample is bad
                return self.media.tokenize(chat, content, self)
            return self.tokenize_chat(chat)
        if isinstance(content, TokenizedSample):
            self._check_labels(sample_format, "auto")
            self._check_tokens(content)
            return content
        prompt, completion = content
        if not prompt:
            self._check_labels(sample_format, "auto", "all")
        return self._tokenize_text(prompt, completion)

    def _check_labels(self, sample_format: SampleFormat, *supported: Labels) -> None:
        if self.labels not in supported:
            raise UserError(
                f"--labels {self.labels}: expected {' or '.join(supported)} for the format {sample_format}."
            )

    def _check_tokens(self, content: TokenizedSample) -> None:
        """Raise BadSample if a token or label is not in the vocabulary."""
        in_loss = (label for label in content.labels if label != IGNORED)
        for token in chain(content.input_ids, in_loss):
            if not 0 <= token < self._vocabulary_size:
                raise BadSample(
                    f"it holds the token {token}; expected 0 to {self._vocabulary_size - 1}."
                )

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

    def fit_example(self, example: Example) -> list[Encoded]:
        """Do what `fit` does, and keep the media of an example. `tokenize` has checked that none is
        cut."""
        input_ids, labels = example
        pieces = self.fit(input_ids, labels)
        if not isinstance(example, MediaExample):
            return pieces
        return [piece._replace(text=example.text, media=tuple(example.media)) for piece in pieces]

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
            # No position predicts the first token that is left.
            kept_labels = [IGNORED, *labels[1 - length :]]
            return [Encoded(input_ids[-length:], kept_labels, truncated=True)]
        if self.truncation == "drop":
            return []
        pieces = []
        # length - 1, because neighboring pieces share a token
        for start in range(0, whole - 1, length - 1):
            piece_ids = input_ids[start : start + length]
            piece_labels = labels[start : start + length]
            if start > 0:
                piece_labels[0] = IGNORED
            pieces.append(Encoded(piece_ids, piece_labels, truncated=False))
        return pieces

    def tokenize_chat(self, chat: RenderedChat) -> Example:
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
        bounds = [0, *ends, len(text)] if ends else []
        for start, end in pairwise(bounds):
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
            raise BadSample(
                f"its text has {len(text):,} characters; expected at most {LONGEST_TEXT:,}."
            )
        check_unicode(text)


# Sample, its format, encoder -> the examples that the objective needs. Their number is the same for
# all samples.
ExamplesOf = Callable[[Sample, SampleFormat, Encoder], list[Example]]


def one_example(sample: Sample, sample_format: SampleFormat, encoder: Encoder) -> list[Example]:
    """Return the only example of supervised fine-tuning: the sample itself."""
    return [encoder.tokenize(sample, sample_format)]


def two_examples(sample: Sample, sample_format: SampleFormat, encoder: Encoder) -> list[Example]:
    """Return two examples of a preference pair: the prompt with the chosen and with the rejected
    response."""
    sample = encoder.with_media(sample, sample_format)
    encoder.read(sample, sample_format)  # checks the whole sample and raises BadSample
    return [
        encoder.tokenize_content(content, sample, sample_format)
        for content in formats.pair_contents(sample)
    ]


def unpaired_examples(
    sample: Sample, sample_format: SampleFormat, encoder: Encoder
) -> list[Example]:
    """Return the example of a completion with a label, twice. `mismatch` gives the second one
    another completion."""
    return [encoder.tokenize(sample, sample_format)] * 2


def mismatch(samples: Sequence[list[Example]], context_length: int) -> None:
    """Give the second example of each sample the completion of another one, in place, for an
    estimate of the KL divergence. The other sample is half a list away, since neighbors often have
    the same prompt. A single sample keeps its own completion. No such example is longer than
    context_length, unless the sample itself is.

    Args:
        samples: of each what `unpaired_examples` returns.
        context_length: of the encoder.
    """
    originals = [examples[0] for examples in samples]
    starts = [_completion_start(labels) for _, labels in originals]
    # numbers of the samples with a token in the loss
    answered = []
    for number, (_, labels) in enumerate(originals):
        if starts[number] < len(labels):
            answered.append(number)
    for position, number in enumerate(answered):
        other = answered[(position + len(answered) // 2) % len(answered)]
        input_ids, labels = originals[number]
        other_ids, other_labels = originals[other]
        prompt = slice(starts[number])
        completion = slice(starts[other], None)
        longest = max(context_length, len(input_ids))
        mismatched_ids = [*input_ids[prompt], *other_ids[completion]]
        mismatched_labels = [*labels[prompt], *other_labels[completion]]
        samples[number][1] = mismatched_ids[:longest], mismatched_labels[:longest]


def _completion_start(labels: list[int]) -> int:
    """Return the first position whose token is in the loss; the number of labels if there is
    none."""
    for position, label in enumerate(labels):
        if label != IGNORED:
            return position
    return len(labels)


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
    starts = []
    ends = []
    covered = 0
    for start, end in offsets:
        starts.append(min(start, covered))
        covered = max(covered, end)
        ends.append(covered)

    def belongs(token: int, span: Span) -> bool:
        start = max(starts[token], span[0])
        end = min(ends[token], span[1])
        return bool(text[start:end].strip())

    ranges = []
    for span in spans:
        span_start, span_end = span
        first = bisect_left(starts, span_start)
        last = bisect_left(starts, span_end)
        # tokens across the beginning of the span
        while first > 0 and ends[first - 1] > span_start:
            if not belongs(first - 1, span):
                break
            first -= 1
        # tokens across its end
        while last > first and ends[last - 1] > span_end:
            if belongs(last - 1, span):
                break
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


def check_ids(
    largest_id: int, name: str, tokenizer: PreTrainedTokenizerBase, vocabulary_size: int | None
) -> None:
    """Raise a UserError if the model has no embedding for `largest_id`; training would fail at that
    token's sample."""
    if vocabulary_size is not None and largest_id >= vocabulary_size:
        token = tokenizer.convert_ids_to_tokens(largest_id)
        raise UserError(
            f"{name}: token {largest_id} ({token}) is outside the model's vocabulary of {vocabulary_size}.\n"
            "The tokenizer does not match the model. Set --tokenizer_name."
        )
