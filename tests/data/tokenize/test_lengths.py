"""What each context length keeps, and the warning about responses without an end."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from llama_ft.config.settings.settings import DataConfig
from llama_ft.data import DataRequest, Encoder, TokenizedData, one_example, prepare, two_examples
from llama_ft.data.read.formats import Sample

LENGTHS = (8192, 16_384, 32_768, 65_536, 131_072, 262_144)


def chat(*words: int) -> Sample:
    """A chat whose user and assistant say so many words in turn."""
    roles = ["user", "assistant"] * (len(words) // 2)
    messages = [
        {"role": role, "content": "Hi" + " yes" * count}
        for role, count in zip(roles, words, strict=True)
    ]
    return {"messages": messages}


LONG = [
    chat(5, 5),
    chat(9000, 3000),  # its prompt alone is longer than 8,192
    chat(10, 12_000, 10, 7000),
    chat(8000, 100, 9000, 20_000, 5, 5),
    chat(40_000, 50),
]


@pytest.fixture
def prepared(llama3: PreTrainedTokenizerFast, tmp_path: Path) -> Callable[..., TokenizedData]:
    def make(
        samples: list[Sample], length: int, examples: Any = one_example, **settings: Any
    ) -> TokenizedData:
        file = tmp_path / "my.jsonl"
        file.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
        config = DataConfig(dataset=str(file), tokenize_processes=1, **settings)
        request = DataRequest(context_length=length, want_validation=False, examples=examples)
        return prepare(config, llama3, request, cache=tmp_path)

    return make


def test_the_table_says_what_runs_with_each_length_keep(
    llama3: PreTrainedTokenizerFast, prepared: Callable[..., TokenizedData]
) -> None:
    data = prepared(LONG, 4096)
    lengths = data.facts()["train"]["lengths"]
    assert tuple(lengths["context_lengths"]) == LENGTHS
    examples = [Encoder(llama3, 4096).tokenize(sample, "messages") for sample in LONG]
    for number, length in enumerate(LENGTHS):
        for truncation, column in (("drop", "loss_tokens"), ("right", "loss_tokens_right")):
            encoder = Encoder(llama3, length, truncation)
            pieces = [piece for example in examples for piece in encoder.fit(*example)]
            assert lengths[column][number] == sum(piece.target_tokens for piece in pieces)
            if truncation == "drop":
                assert lengths["samples"][number] == len(pieces)
    assert lengths["all_samples"] == len(LONG)
    table = data.summary[data.summary.index(next(x for x in data.summary if "keeps" in x)) :]
    rows = [line.split() for line in table[2:]]
    # up to the length that keeps everything
    assert [row[0] for row in rows] == [f"{length:,}" for length in LENGTHS[:4]]
    assert rows[0][1:3] == ["1", "20.0%"] and rows[-1][1:3] == ["5", "100.0%"]
    assert rows[-1][4] == rows[-1][6] == "100.0%" and rows[-2][4] != "100.0%"


def test_there_is_no_table_without_long_samples(prepared: Callable[..., TokenizedData]) -> None:
    data = prepared([chat(5, 6000)], 100)
    assert not any("keeps" in line for line in data.summary)
    assert data.report.train.lengths.samples == [1] * len(LENGTHS)


def test_a_pair_fits_if_both_of_its_examples_do(
    llama3: PreTrainedTokenizerFast, prepared: Callable[..., TokenizedData]
) -> None:
    answers = [[{"role": "assistant", "content": " yes" * count}] for count in (5, 9000)]
    pair = {"prompt": chat(5, 5)["messages"][:1], "chosen": answers[0], "rejected": answers[1]}
    data = prepared([pair], 400, two_examples, dataset_format="preference")
    lengths = data.report.train.lengths
    assert lengths.samples[:2] == [0, 1]
    counts = []
    for labels in (labels for _, labels in two_examples(pair, "preference", Encoder(llama3, 400))):
        counts.append((sum(x != -100 for x in labels[1:8192]), sum(x != -100 for x in labels)))
    assert lengths.loss_tokens_right[0] == sum(kept for kept, _ in counts)
    assert lengths.all_loss_tokens == lengths.loss_tokens[1] == sum(whole for _, whole in counts)


@pytest.mark.parametrize("truncation", ["right", "left", "drop", "split"])
def test_a_warning_counts_samples_that_lose_the_end_of_a_response(
    llama3: PreTrainedTokenizerFast, prepared: Callable[..., TokenizedData], truncation: str
) -> None:
    sample = chat(4, 5, 4, 5)
    [whole] = Encoder(llama3, 1000).encode(sample, "messages")
    warned = set()
    step = 1 if truncation == "right" else 7
    for length in range(15, len(whole.input_ids) + 2, step):
        data = prepared([chat(1, 1), sample, sample], length, truncation=truncation)
        for line in data.warnings:
            assert (
                line.startswith("2 samples: an assistant message is truncated")
                and "my.jsonl:2)" in line
            )
            assert "--truncation drop" in line
            warned.add(length)
    # Cuts after which a response goes on: the text before ends with a part of it.
    open_ends = set()
    for length in range(15, len(whole.input_ids)):
        heading, _, last = llama3.decode(whole.input_ids[:length]).rpartition("<|end_header_id|>")
        if heading.endswith("assistant") and last.strip() and "<|eot_id|>" not in last:
            open_ends.add(length)
    assert warned == (open_ends if truncation == "right" else set())
    assert len(open_ends) >= 10


def test_texts_that_are_in_the_loss_as_a_whole_have_no_end_to_lose(
    prepared: Callable[..., TokenizedData],
) -> None:
    assert not prepared([{"text": "Hi" + " yes" * 50}], 20).warnings
    data = prepared([{"prompt": "Hi", "completion": " yes" * 50}], 20)
    assert ["never stop" in line for line in data.warnings] == [True]
