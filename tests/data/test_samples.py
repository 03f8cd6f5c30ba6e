"""How samples are shown to people."""

import io

import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from llama_ft.data import Encoder, collate
from llama_ft.data.samples import TRAINED, describe_first_batch, marked_text, show_samples
from llama_ft.runtime import configure_console, console

ROW = {"instruction": "Hi é", "output": "yes é no"}


def test_samples_are_printed_by_rank_0_with_their_place_and_what_is_trained_on(
    chatml: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    [encoded] = Encoder(chatml, 100).encode(ROW, "alpaca")
    row = {"input_ids": encoded.input_ids, "labels": encoded.labels, "source": "a.jsonl:3"}
    monkeypatch.setattr(console, "file", io.StringIO())
    configure_console(rank=1)
    show_samples(Dataset.from_list([row]), chatml, 1)
    assert console.file.getvalue() == ""
    configure_console(rank=0)
    show_samples(Dataset.from_list([row, row]), chatml, 1)
    text = "<|im_start|>user\nHi é<|im_end|>\n<|im_start|>assistant\n[[yes é no<|im_end|>]]\n"
    assert f"a.jsonl:3: 19 tokens, what is trained on is between [[ and ]]\n{text}" in console.file.getvalue()
    assert console.file.getvalue().count("a.jsonl:3") == 1


def test_in_color_the_text_is_the_same_and_the_answer_alone_is_marked(chatml: PreTrainedTokenizerFast) -> None:
    [encoded] = Encoder(chatml, 100).encode(ROW, "alpaca")
    text = marked_text(encoded.input_ids, encoded.labels, chatml, 100, color=True)
    assert text.plain == chatml.decode(encoded.input_ids)
    trained = [text.plain[span.start : span.end] for span in text.spans if span.style in TRAINED]
    assert "".join(trained) == "yes é no<|im_end|>"


def test_of_a_long_row_beginning_and_end_are_shown(chatml: PreTrainedTokenizerFast) -> None:
    ids = chatml("Hi" + " yes" * 98 + " no")["input_ids"]
    text = marked_text(ids, [-100] * 99 + ids[99:], chatml, 8).plain
    assert text == "Hi yes yes yes yes yes ... 92 tokens ...  yes[[ no]]"


def test_the_first_batch_is_described_row_by_row(chatml: PreTrainedTokenizerFast) -> None:
    ids = [chatml(text)["input_ids"] for text in ("Hi yes no", "no yes", "yes yes")]
    rows = Dataset.from_list([{"input_ids": it, "labels": [-100, *it[1:]], "source": "a.jsonl:1"} for it in ids])
    pad = chatml.convert_tokens_to_ids("no")
    shown = ["  3 tokens: Hi[[ yes no]]", "  2 tokens: no[[ yes]]"]  # the first two are enough
    for is_packed in (True, False):
        assert describe_first_batch(collate(rows, [0, 1, 2], pad, is_packed), chatml).splitlines()[1:] == shown
