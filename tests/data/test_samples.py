"""How samples are shown to people."""

import io

import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from llama_ft.data import Encoder, collate
from llama_ft.data.samples import describe_first_batch, marked_text, show_samples
from llama_ft.runtime import configure_console, console

SAMPLE = {"instruction": "Hi é", "output": "yes é no"}


def test_rank_0_prints_samples_with_their_location_and_loss_tokens(
    chatml: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    [encoded] = Encoder(chatml, 100).encode(SAMPLE, "alpaca")
    sample = {"input_ids": encoded.input_ids, "labels": encoded.labels, "source": "a.jsonl:3"}
    monkeypatch.setattr(console, "file", io.StringIO())
    configure_console(rank=1)
    show_samples(Dataset.from_list([sample]), chatml, 1)
    assert console.file.getvalue() == ""
    configure_console(rank=0)
    show_samples(Dataset.from_list([sample, sample]), chatml, 1)
    text = "<|im_start|>user\nHi é<|im_end|>\n<|im_start|>assistant\n[[yes é no<|im_end|>]]\n"
    assert (
        f"a.jsonl:3: 19 tokens, those in the loss between [[ and ]]\n{text}"
        in console.file.getvalue()
    )
    assert console.file.getvalue().count("a.jsonl:3") == 1


def test_the_beginning_of_a_long_sample_is_printed(chatml: PreTrainedTokenizerFast) -> None:
    ids = chatml("Hi" + " yes" * 98 + " no")["input_ids"]
    text = marked_text(ids, [-100] * 3 + ids[3:], chatml, 5)
    assert text == "Hi yes yes[[ yes yes]] ... 95 more tokens"


def test_the_first_sample_of_the_first_batch_is_printed(chatml: PreTrainedTokenizerFast) -> None:
    ids = [chatml(text)["input_ids"] for text in ("Hi yes no", "no yes", "yes yes")]
    more = {"source": "a.jsonl:1", "desirable": None}
    tokens = [{"input_ids": sample, "labels": [-100, *sample[1:]]} for sample in ids]
    samples = Dataset.from_list([sample | more for sample in tokens])
    pad = chatml.convert_tokens_to_ids("no")
    shown = ["  3 tokens: Hi[[ yes no]]"]
    for is_packed in (True, False):
        batch = collate(samples, [0, 1, 2], pad, is_packed)
        assert describe_first_batch(batch, chatml).splitlines()[1:] == shown
        prompts = describe_first_batch(batch, chatml, are_prompts=True)
        assert prompts.splitlines() == [
            "First batch: 3 prompts; only tokens of answers are in the loss:",
            "  1 token: Hi",
        ]
