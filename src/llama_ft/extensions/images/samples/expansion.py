"""Where the characters of a chat are after a processor has replaced the marks of its images."""

from typing import Any

from llama_ft.data.chat.chat_template import Span


class Expansion:
    """A text in which marks are replaced by what a processor inserts.

    Args:
        replaced: of each mark its `span` and `replacement`, in order.
    """

    def __init__(self, replaced: list[dict[str, Any]]) -> None:
        self._replaced = replaced

    def of(self, text: str) -> str:
        """Return the text with the replacements."""
        pieces = []
        at = 0
        for each in self._replaced:
            start, end = each["span"]
            pieces += [text[at:start], each["replacement"]]
            at = end
        return "".join([*pieces, text[at:]])

    def position(self, position: int) -> int:
        """Return where a character of the text is after the replacements."""
        added = 0
        for each in self._replaced:
            start, end = each["span"]
            if end <= position:
                added += len(each["replacement"]) - (end - start)
        return position + added

    def moved(self, start: int, end: int) -> Span:
        """Return where a span is after the replacements."""
        return self.position(start), self.position(end)


def placeholder_of(processor: Any, replacement: str) -> str:
    """Return the token of which an image has one for each of its features: the most frequent of the
    processor's tokens in what it inserts for an image. Others mark its begin, rows and end.

    Args:
        processor: of Transformers.
        replacement: what it has inserted for an image that has features.

    Returns:
        The token's text, or "" if the processor has none of its tokens there.
    """
    ids = [token for token in processor.image_token_ids if token is not None]
    names = [str(name) for name in processor.tokenizer.convert_ids_to_tokens(ids)]
    placeholder = max(names, key=replacement.count, default="")
    return placeholder if placeholder in replacement else ""


def without_spans(spans: list[Span], removed: list[Span]) -> list[Span]:
    """Return the parts of spans that are in none of the removed ones. Both are in order."""
    parts = []
    for start, end in spans:
        at = start
        for first, last in removed:
            if first >= end or last <= at:
                continue
            parts.append((at, first))
            at = last
        parts.append((at, end))
    return [(start, end) for start, end in parts if start < end]
