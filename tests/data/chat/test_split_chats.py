"""Chats that become several samples, from --dataset to the report."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import write_jsonl
from forked import forked
from transformers import PreTrainedTokenizerFast

from llama_ft.config.settings.settings import DataConfig
from llama_ft.data import DataRequest, TokenizedData, prepare, two_examples
from llama_ft.data.tokenize.encoder import Encoder
from llama_ft.errors import UserError

QWEN3 = Path(__file__).with_name("chat_templates") / "qwen3.jinja"
R1 = Path(__file__).with_name("chat_templates") / "deepseek_r1_distill.jinja"
TOKENS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
R1_TOKENS = ["<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<think>", "</think>"]


def chats(count: int, responses: int = 2) -> list[dict[str, Any]]:
    """Chats with reasoning content in every response."""
    samples = []
    for number in range(count):
        messages = []
        for turn in range(responses):
            messages.append({"role": "user", "content": f"Hi {number} {turn}"})
            answer = {"role": "assistant", "content": "yes", "reasoning_content": "no no"}
            messages.append(answer)
        samples.append({"messages": messages})
    return samples


@pytest.fixture
def qwen3(make_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> PreTrainedTokenizerFast:
    return make_tokenizer(TOKENS, QWEN3.read_text(), eos_token="<|im_end|>")


@pytest.fixture
def r1(make_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> PreTrainedTokenizerFast:
    return make_tokenizer(R1_TOKENS, R1.read_text(), eos_token="<｜end▁of▁sentence｜>")


def prepared(path: Path, tokenizer: Any, **settings: Any) -> TokenizedData:
    config = DataConfig(dataset=str(path), **settings)
    return prepare(
        config,
        tokenizer,
        DataRequest(context_length=400, want_validation=True),
        cache=path.parent / "cache",
    )


def test_the_data_report_counts_split_chats_and_gives_the_reason(
    qwen3: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    whole = {"messages": chats(1)[0]["messages"][:2]}
    path = write_jsonl(tmp_path / "my.jsonl", [whole, *chats(2, responses=3)])
    data = prepared(path, qwen3)
    assert data.train["source"][:] == [
        f"{path}:1",
        *(f"{path}:{line}, part {number} of 3" for line in (2, 3) for number in (1, 2, 3)),
    ]
    [table, reason] = [line for line in data.summary if "became" in line or "inference" in line]
    after = sum(len(ids) for ids in data.train["input_ids"][1:])
    before = 0
    for sample in chats(2, responses=3):
        before += len(qwen3.apply_chat_template(sample["messages"], return_dict=False))
    assert f"2 chats became 6 samples ({before:,} -> {after:,} tokens" in table
    assert f"{after / before:.2f}x" in table
    assert reason.startswith(f"  {path}:2: messages[1] is ")
    assert r"<think>\nno" in reason
    [counts] = [line for line in data.summary if line.startswith("training  ")]
    assert counts.split()[1] == "7"
    statistics = data.report.train
    assert (statistics.split_chats, statistics.split_samples) == (2, 6)


def test_all_pieces_of_a_chat_are_on_one_side_of_the_validation_split(
    qwen3: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "my.jsonl", chats(60, responses=3))
    data = prepared(path, qwen3, validation="0.3")
    assert data.validation is not None
    sides = []
    for split in (data.train, data.validation):
        places = [source.partition(",")[0] for source in split["source"]]
        assert all(places.count(place) == 3 for place in set(places))
        sides.append(set(places))
    assert len(sides[0]) + len(sides[1]) == 60
    assert not sides[0] & sides[1]
    assert len(sides[1]) > 5
    assert data.report.validation.split_samples == 3 * len(sides[1])


def test_dropped_reasoning_content_is_neither_rendered_nor_taken_from_the_cache(
    qwen3: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "my.jsonl", chats(2))
    kept = prepared(path, qwen3)
    dropped = prepared(path, qwen3, reasoning_content="drop")
    assert "no no" in qwen3.decode(kept.train[0]["input_ids"])
    # Qwen3's template writes empty reasoning content into the last message only
    assert len(dropped.train) == 4
    for sample in dropped.train:
        trained = [label for label in sample["labels"] if label != -100]
        assert qwen3.decode(trained) == "<think>\n\n</think>\n\nyes<|im_end|>"
    assert kept.fingerprints() != dropped.fingerprints()
    assert "reasoning_content" not in json.dumps(dropped.report.chat_sample)
    streams = [
        prepared(path, qwen3, streaming=True, reasoning_content=wanted).fingerprints()
        for wanted in ("keep", "drop")
    ]
    assert streams[0] != streams[1]


def test_several_processes_split_chats_as_one_does(
    qwen3: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "my.jsonl", chats(300))  # of two chunks
    tables = []
    for processes in (1, 2):
        config = DataConfig(dataset=str(path), tokenize_processes=processes)
        cache = tmp_path / str(processes)
        data = prepare(
            config, qwen3, DataRequest(context_length=400, want_validation=False), cache=cache
        )
        tables.append((data.train["source"][:], data.fingerprints(), data.summary))
    assert tables[0] == tables[1]
    assert len(tables[0][0]) == 600


def test_a_piece_that_is_too_long_is_skipped_and_counted(
    qwen3: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "my.jsonl", chats(1, responses=3))
    config = DataConfig(dataset=str(path), truncation="drop")
    lengths = [len(ids) for ids in prepared(path, qwen3).train["input_ids"]]
    data = prepare(
        config,
        qwen3,
        DataRequest(context_length=lengths[1], want_validation=False),
        cache=tmp_path / "c",
    )
    assert [len(ids) for ids in data.train["input_ids"]] == lengths[:2]
    assert data.report.train.skipped == 1
    assert data.report.train.longest == lengths[2]


def test_the_responses_of_pairs_follow_the_prompt_of_inference(r1: PreTrainedTokenizerFast) -> None:
    prompt = chats(1)[0]["messages"][:3]
    answers = [{"role": "assistant", "content": text} for text in ("yes", "no")]
    sample = {"prompt": prompt, "chosen": [answers[0]], "rejected": [answers[1]]}
    encoder = Encoder(r1, 400)
    ids = r1.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    for (input_ids, labels), answer in zip(
        two_examples(sample, "preference", encoder), answers, strict=True
    ):
        start = next(place for place, label in enumerate(labels) if label != -100)
        assert input_ids[:start] == ids
        trained = r1.decode(input_ids[start:])
        assert trained == f"\n</think>\n\n{answer['content']}<｜end▁of▁sentence｜>"


def test_pairs_whose_responses_would_have_to_be_split_are_rejected(
    qwen3: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    long = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "Hi"},
        {"role": "assistant", "content": "yes"},
    ]
    sample = {
        "prompt": [{"role": "user", "content": "Hi"}],
        "chosen": long,
        "rejected": [{"role": "assistant", "content": "no"}],
    }
    path = write_jsonl(tmp_path / "my.jsonl", [sample])
    config = DataConfig(dataset=str(path), dataset_format="preference")
    with pytest.raises(UserError, match=r"my.jsonl:1: .* Put all but the last message into the"):
        prepare(
            config,
            qwen3,
            DataRequest(context_length=400, want_validation=False, examples=two_examples),
            cache=tmp_path,
        )


STREAM = """
import sys
from pathlib import Path
from transformers import AutoTokenizer
from llama_ft import data, runtime
from llama_ft.config import Config, DataConfig, TrainConfig
folder = Path(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(folder)
with runtime.start("cpu", 1, False, None, 60) as ranks:
    config = DataConfig(
        dataset=str(folder / "my.jsonl"), streaming=True, batching_strategy="padding", shuffle_buffer=100
    )
    train = TrainConfig(max_train_step=3, batch_size_training=4)
    request = data.DataRequest(context_length=400, want_validation=False)
    found = data.prepare(config, tokenizer, request, cache=folder)
    config = Config(train=train, data=config)
    layout = data.training_layout(config, 400, 0, ranks)
    batches = data.plan_training(config, found, layout, 4, None, ranks)
    places = []
    with data.Prefetcher(batches.steps(1, 3, {})) as steps:
        for step in steps:
            places += [place for batch in step.batches for place in batch.locations]
    print("places", sorted(places))
"""


def test_streamed_chats_are_split_too(qwen3: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    qwen3.save_pretrained(tmp_path)
    path = write_jsonl(tmp_path / "my.jsonl", chats(4, responses=3))
    (tmp_path / "job.py").write_text(STREAM)
    finished = forked(tmp_path / "job.py", tmp_path, ranks=1)
    assert finished.exit_code == 0, finished.output
    places = [f"{path}:{line}, part {n} of 3" for line in (1, 2, 3, 4) for n in (1, 2, 3)]
    assert json.dumps(places) in finished.output.replace("'", '"')
    assert finished.output.count("chats become several samples") == 1
    assert f"{path}:1: messages[1] is " in finished.output.replace("\n", "")
