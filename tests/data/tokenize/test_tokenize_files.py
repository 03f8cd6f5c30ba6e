"""Tokenizing on several processes: the same files as on one, whatever the samples, and an end when
something is killed."""

import json
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from conftest import write_jsonl
from forked import forked
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from llama_ft.config.settings.settings import DataConfig
from llama_ft.data import (
    BatchLayout,
    DataRequest,
    Encoder,
    TokenizedData,
    collate,
    one_example,
    prepare,
    unpaired_examples,
)
from llama_ft.data.batches.sampler import (
    BatchSampler,
    evaluation_batches,
    example_lengths,
    group_size,
)
from llama_ft.data.tokenize.tokenize_files import CHUNK_SAMPLES, encode_chunks
from llama_ft.errors import RunFailure, UserError

REPOSITORY = Path(__file__).resolve().parents[3]


def pairs(count: int, answer: str = "yes") -> list[Any]:
    return [{"instruction": f"Hi {number}", "output": answer} for number in range(count)]


def prepared(
    path: Path, tokenizer: Any, cache: Path, processes: int, length: int = 40, **settings: Any
) -> TokenizedData:
    config = DataConfig(dataset=str(path), tokenize_processes=processes, **settings)
    return prepare(
        config, tokenizer, DataRequest(context_length=length, want_validation=True), cache=cache
    )


def built(cache: Path) -> list[Path]:
    return sorted((cache / "tokenized").iterdir())


@pytest.fixture
def odd_rows(tmp_path: Path) -> Path:
    """Some are bad, some too long, some have no answer in the context, some are twins."""
    samples = pairs(11 * CHUNK_SAMPLES)
    for number in range(0, len(samples), 7):
        samples[number] = {"instruction": "Hi", "output": f"no {number}" + " yes" * (number % 90)}
    for number in range(5, len(samples), 500):
        samples[number] = "{" if number % 2 else {"instruction": "Hi"}
    for number in range(9, len(samples), 100):
        samples[number] = {"instruction": "Hi" * 60, "output": "yes", "number": number}
    return write_jsonl(tmp_path / "odd.jsonl", samples)


@pytest.mark.parametrize("truncation", [pytest.param("right", marks=pytest.mark.slow), "split"])
def test_several_processes_write_the_same_files_as_one(
    llama3: PreTrainedTokenizerFast, tmp_path: Path, odd_rows: Path, truncation: str
) -> None:
    settings: dict[str, Any] = {
        "truncation": truncation,
        "validation": "0.1",
        "skip_bad_rows": True,
    }
    one = prepared(odd_rows, llama3, tmp_path / "one", 1, **settings)
    three = prepared(odd_rows, llama3, tmp_path / "three", 3, **settings)
    (first,), (second,) = built(tmp_path / "one"), built(tmp_path / "three")
    for name in ("train.arrow", "validation.arrow"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    assert one.summary == three.summary
    train = one.report.train
    assert one.report.bad_samples == 6 and (train.skipped > 20) == (truncation != "split")
    assert (train.truncated > 0) == (truncation == "right")
    assert multiprocessing.active_children() == []


def test_samples_on_disk_are_those_of_the_encoder(
    llama3: PreTrainedTokenizerFast, tmp_path: Path, odd_rows: Path
) -> None:
    data = prepared(odd_rows, llama3, tmp_path, 3, truncation="split", skip_bad_rows=True)
    encoder = Encoder(llama3, 40, "split")
    expected = []
    whole = []
    for number, line in enumerate(odd_rows.read_text().splitlines(), start=1):
        if line != "{" and "output" in (sample := json.loads(line)):
            expected += [
                (f"{odd_rows}:{number}", piece) for piece in encoder.encode(sample, "alpaca")
            ]
            [uncut] = Encoder(llama3, 10_000).encode(sample, "alpaca")
            whole.append(len(uncut.input_ids))
    expected = [(location, piece) for location, piece in expected if piece.target_tokens]
    assert data.train["source"][:] == [location for location, _ in expected]
    assert data.train["input_ids"][:] == [piece.input_ids for _, piece in expected]
    assert data.train["labels"][:] == [piece.labels for _, piece in expected]
    counts = [sum(label != -100 for label in piece.labels[1:]) for _, piece in expected]
    assert data.train["target_tokens"][:] == counts
    assert data.report.train.tokens == sum(len(piece.input_ids) for _, piece in expected)
    assert data.report.train.target_tokens == sum(counts)
    assert data.report.train.samples == len(expected)
    assert data.report.train.longest == max(whole)


@pytest.mark.parametrize("truncation", ["right", "left", "drop", "split"])
def test_the_table_counts_kept_truncated_and_skipped_samples(
    llama3: PreTrainedTokenizerFast, tmp_path: Path, truncation: str
) -> None:
    """Ten samples of 15 tokens, one of 94, and one of 72 whose answer is at its end."""
    samples = [
        *pairs(10),
        {"instruction": "Hi 0", "output": "yes" * 40},
        {"instruction": "Hi" * 60, "output": "yes"},
    ]
    data = prepared(
        write_jsonl(tmp_path / "my.jsonl", samples), llama3, tmp_path, 1, truncation=truncation
    )
    train = data.report.train
    assert train.longest == 94
    counts = {"right": (11, 1, 1), "left": (12, 2, 0), "drop": (10, 0, 2), "split": (14, 0, 0)}[
        truncation
    ]
    assert (train.samples, train.truncated, train.skipped) == counts
    words = [
        "training",
        train.samples,
        train.tokens,
        train.target_tokens,
        94,
        train.truncated,
        train.skipped,
    ]
    assert data.summary[2].split() == list(map(str, words))


def when_tokenizing(act: Callable[[Any], None]) -> threading.Thread:
    """Call `act` with a worker once there is one and it has had time to begin."""

    def wait() -> None:
        while not (workers := multiprocessing.active_children()):
            time.sleep(0.005)
        time.sleep(0.3)
        act(workers[0])

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("number", "ends_with", "message"),
    [
        (
            signal.SIGKILL,
            RunFailure,
            r"was killed, most .*\n.*near .*my.jsonl:\d+. --tokenize_processes 1 ",
        ),
        (signal.SIGINT, KeyboardInterrupt, None),
    ],
    ids=["a worker is killed", "Ctrl-C"],
)
def test_a_killed_worker_or_ctrl_c_ends_tokenizing_and_leaves_nothing_behind(
    llama3: PreTrainedTokenizerFast,
    tmp_path: Path,
    number: int,
    ends_with: type[BaseException],
    message: str | None,
) -> None:
    path = write_jsonl(tmp_path / "my.jsonl", pairs(200_000, "yes " * 20))
    # a shell has background jobs ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = when_tokenizing(
        lambda worker: os.kill(os.getpid() if number == signal.SIGINT else worker.pid, number)
    )
    with pytest.raises(ends_with, match=message):
        prepared(path, llama3, tmp_path, 2)
        thread.join()  # a Ctrl-C that comes too late must not end the tests
    thread.join()
    assert multiprocessing.active_children() == [] and built(tmp_path) == []


def test_a_worker_killed_while_it_sends_its_tokens_ends_tokenizing(
    llama3: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of what it began to send never comes: who waits for that, waits forever."""
    receive = Connection._recv

    def kill_the_sender(connection: Connection, size: int, *rest: Any) -> Any:
        if size > 1000:  # the length has been received, most of the result has not been sent
            for worker in multiprocessing.active_children():  # none in a worker
                os.kill(worker.pid, signal.SIGKILL)
        return receive(connection, size, *rest)

    monkeypatch.setattr(Connection, "_recv", kill_the_sender)
    chunk = [("my.jsonl:1", pickle.dumps(({"input_ids": [5] * 1_000_000}, "tokenized")))]
    with pytest.raises(RunFailure, match="near my.jsonl:1"):
        list(encode_chunks(iter([chunk] * 4), Encoder(llama3, 10**8), one_example, 2))


TOKENIZE = """
import os, sys
from pathlib import Path
from transformers import AutoTokenizer
from llama_ft.config.settings.settings import DataConfig
from llama_ft.data import DataRequest, prepare
folder = Path(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
config = DataConfig(dataset=str(folder / "my.jsonl"), tokenize_processes=2)
os.symlink(str(os.getpid()), folder / "pid")
prepare(config, tokenizer, DataRequest(context_length=40, want_validation=True), folder / "cache")
"""


def test_a_killed_run_leaves_no_process_and_the_next_run_removes_its_directory(
    llama3: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "my.jsonl", pairs(100_000, "yes " * 20))
    llama3.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "job.py").write_text(TOKENIZE)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(forked, tmp_path / "job.py", tmp_path)
        pid = tmp_path / "pid"
        workers: list[str] = []
        while len(workers) < 2:
            assert not run.done(), run.result().output
            time.sleep(0.05)
            if pid.is_symlink():
                number = os.readlink(pid)
                workers = Path(f"/proc/{number}/task/{number}/children").read_text().split()
        time.sleep(0.3)
        os.kill(int(number), signal.SIGKILL)
        assert run.result().exit_code == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() and "Z" not in state_of(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (left,) = built(tmp_path / "cache")
    assert left.name.startswith(".building-")
    small = write_jsonl(tmp_path / "small.jsonl", pairs(3))
    prepared(small, llama3, tmp_path / "cache", 1)
    assert left in built(tmp_path / "cache"), "too young: its builder may still work"
    for path in (*left.iterdir(), left):
        os.utime(path, (time.time() - 90_000,) * 2)
    prepared(small, llama3, tmp_path / "cache", 1, skip_bad_rows=True)
    assert left not in built(tmp_path / "cache") and len(built(tmp_path / "cache")) == 2


def state_of(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_the_fingerprint_depends_on_the_tokens_alone(
    llama3: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Rows left out shift the boundaries of chunks, and another place of the file changes
    nothing."""
    samples = pairs(600)
    with_bad = [sample for pair in zip(samples, ["{"] * 600, strict=True) for sample in pair]
    one, two, swapped = (
        prepared(
            write_jsonl(tmp_path / name, lines), llama3, tmp_path, 1, skip_bad_rows=True
        ).fingerprints()
        for name, lines in (
            ("a.jsonl", samples),
            ("b.jsonl", with_bad),
            ("c.jsonl", [samples[1], samples[0], *samples[2:]]),
        )
    )
    assert one == two and one != swapped


def test_the_fingerprint_of_a_stream_depends_on_everything_that_affects_its_tokens(
    save_model: Callable[..., Path], tmp_path: Path
) -> None:
    save_model(tmp_path / "model")

    def fingerprint(name: str, samples: list[Any], **settings: Any) -> str:
        config = DataConfig(
            dataset=str(write_jsonl(tmp_path / name, samples)), streaming=True, **settings
        )
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
        data = prepare(
            config, tokenizer, DataRequest(context_length=40, want_validation=False), cache=tmp_path
        )
        assert data.train is None
        return data.fingerprints()["dataset"]

    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.role + m.content + eos_token }}{% endfor %}")
    first = fingerprint("a.jsonl", pairs(3))
    assert (
        fingerprint("moved.jsonl", pairs(3))
        == fingerprint("a.jsonl", pairs(3), skip_bad_rows=True)
        == first
    )
    assert fingerprint("a.jsonl", pairs(4)) != first
    assert fingerprint("a.jsonl", pairs(3), chat_template=str(template)) != first


OTHER_SAMPLES = """
import sys
from datasets import Dataset
from transformers import AutoTokenizer
from llama_ft import data, runtime
from llama_ft.config import Config, DataConfig
from llama_ft.errors import UserError
from pathlib import Path
folder = Path(sys.argv[1])
with runtime.start("cpu", 1, False, None, 60) as ranks:
    for name in ("same.jsonl", f"other-{ranks.rank}.jsonl"):
        config = DataConfig(dataset=str(folder / name))
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        request = data.DataRequest(context_length=40, want_validation=False)
        samples = data.prepare(config, tokenizer, request, cache=folder)
        settings = Config(data=config)
        layout = data.training_layout(settings, 40, 0, ranks)
        try:
            data.plan_training(settings, samples, layout, 2, None, ranks)
            print(ranks.rank, "planned", flush=True)
        except UserError as error:
            print(ranks.rank, error, flush=True)
    if ranks.is_main:
        for file in (folder / "tokenized").glob("*/train.arrow"):
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
    config = DataConfig(dataset=str(folder / "same.jsonl"))
    with ranks.local_main_process_first():
        samples = data.prepare(
            config, tokenizer, request, cache=folder, verify_cache=ranks.local_rank == 0
        )
    places = [f"{folder}/same.jsonl:{line}" for line in (1, 2, 3, 4)]
    print(ranks.rank, "samples again", samples.train["source"][:] == places, flush=True)
"""


def test_ranks_with_other_samples_than_rank_0_end_the_run_and_a_corrupted_cache_is_rebuilt(
    save_model: Callable[..., Path], tmp_path: Path
) -> None:
    save_model(tmp_path / "model")
    for name, samples in (("same", pairs(4)), ("other-0", pairs(4)), ("other-1", pairs(4)[::-1])):
        write_jsonl(tmp_path / f"{name}.jsonl", samples)
    (tmp_path / "job.py").write_text(OTHER_SAMPLES)
    finished = forked(tmp_path / "job.py", tmp_path, ranks=2)
    assert finished.output.count("planned") == 2
    assert finished.output.count("error: --dataset: rank 1 has other samples than rank 0.") == 2
    assert finished.output.count("train.arrow is corrupted or missing") == 1
    assert finished.output.count("samples again True") == 2


def right_and_wrong(sample: Any, sample_format: str, encoder: Encoder) -> list[Any]:
    """What an objective over pairs makes of a sample: its response, and another one."""
    wrong = {**sample, "output": sample["output"] + " no" * 3}
    return [encoder.tokenize(sample, sample_format), encoder.tokenize(wrong, sample_format)]


@pytest.mark.parametrize("pack_length", [None, 60])
@pytest.mark.parametrize("world_size", [1, 2])
def test_examples_of_one_sample_stay_together(
    llama3: PreTrainedTokenizerFast, tmp_path: Path, pack_length: int | None, world_size: int
) -> None:
    samples = []
    for number in range(1, 41):
        samples.append({"instruction": f"Hi {number}", "output": "yes" * (1 + number % 9)})
    samples[7]["output"] += " yes" * 100  # dropped with its twin
    config = DataConfig(dataset=str(write_jsonl(tmp_path / "my.jsonl", samples)), truncation="drop")
    kwargs: dict[str, Any] = {"context_length": 60, "want_validation": False}
    single = prepare(config, llama3, DataRequest(**kwargs), cache=tmp_path).train
    assert group_size(single) == 1
    request = DataRequest(examples=right_and_wrong, **kwargs)
    data = prepare(config, llama3, request, cache=tmp_path).train
    assert group_size(data) == 2
    assert data["source"][::2] == data["source"][1::2]
    assert len(data) < 2 * len(samples)
    lengths = example_lengths(data)
    seen = list[int]()
    for rank in range(world_size):
        layout = BatchLayout(
            data_size=world_size, data_rank=rank, micro_batch=1, pack_length=pack_length
        )
        plan = BatchSampler.of(data, layout, global_batch=4, seed=1)
        for step in range(plan.steps_per_epoch):
            for indices in plan.step(0, step):
                check_pairs(indices)
                seen += indices
                if not indices:
                    continue
                batch = collate(data, indices, 0, pack_length is not None)
                assert batch.example_lengths == lengths[indices].tolist()
                assert batch.locations[::2] == batch.locations[1::2]
                assert pack_length is None or batch.tokens <= 2 * pack_length
    assert sorted(seen) == list(range(len(data)))
    evaluated = list[int]()
    for rank in range(world_size):
        layout = BatchLayout(
            data_size=world_size, data_rank=rank, micro_batch=2, pack_length=pack_length
        )
        for indices in evaluation_batches(lengths, layout, examples_per_sample=2):
            check_pairs(indices)
            evaluated += indices
    assert sorted(evaluated) == list(range(len(data)))


def check_pairs(indices: list[int]) -> None:
    """An even index is followed by its successor."""
    for first, second in zip(indices[::2], indices[1::2], strict=True):
        assert first % 2 == 0 and second == first + 1


def completions(count: int) -> list[dict[str, Any]]:
    samples = []
    for n in range(count):
        prompt = f"Hi {n}" + "?" * (n % 3)
        samples.append({"prompt": prompt, "completion": " yes" * (1 + n % 5), "label": n % 4 > 0})
    return samples


@pytest.fixture
def unpaired(llama3: PreTrainedTokenizerFast, tmp_path: Path) -> Callable[..., TokenizedData]:
    """Tokenizes completions with a label, as KTO trains on them."""

    def build(samples: list[Any], **changes: Any) -> TokenizedData:
        file = write_jsonl(tmp_path / "my.jsonl", samples)
        settings = {"dataset_format": "unpaired_preference", **changes}
        config = DataConfig(dataset=str(file), **settings)
        request = DataRequest(context_length=14, want_validation=False, examples=unpaired_examples)
        return prepare(config, llama3, request, cache=tmp_path)

    return build


@pytest.mark.parametrize("truncation", ["right", "left", "drop"])
def test_a_completion_with_a_label_comes_with_its_prompt_and_another_completion(
    llama3: PreTrainedTokenizerFast, unpaired: Callable[..., TokenizedData], truncation: Any
) -> None:
    samples = completions(21)
    samples[5]["completion"] *= 9  # too long by itself
    bad = {"prompt": "Hi", "completion": "", "label": 1}
    data = unpaired([*samples[:8], bad, *samples[8:]], truncation=truncation, skip_bad_rows=True)
    examples = data.train
    assert set(examples["group"]) == {2}
    encoder = Encoder(llama3, 99)
    whole = [encoder.tokenize(sample, "prompt_completion") for sample in samples]
    starts = [next(n for n, label in enumerate(labels) if label != -100) for _, labels in whole]
    kept = slice(-14, None) if truncation == "left" else slice(14)
    at = 0
    for number, (ids, labels) in enumerate(whole):
        if number == 5 and truncation == "drop":
            continue
        other = (number + 10) % 21
        other_ids, other_labels = whole[other]
        longest = max(14, len(ids))
        joined_ids = (ids[: starts[number]] + other_ids[starts[other] :])[:longest]
        joined_labels = (labels[: starts[number]] + other_labels[starts[other] :])[:longest]
        own = examples[at]
        mismatched = examples[at + 1]
        assert own["desirable"] == samples[number]["label"]
        assert mismatched["desirable"] is None
        assert own["input_ids"] == ids[kept]
        assert own["labels"][1:] == labels[kept][1:]
        assert mismatched["input_ids"] == joined_ids[kept]
        assert mismatched["labels"][1:] == joined_labels[kept][1:]
        at += 2
    assert at == len(examples) and data.report.bad_samples == 1
    counts = f"{15 - (truncation == 'drop')} desirable, 6 undesirable"
    assert f"labels of the training data: {counts}" in data.summary
    layout = BatchLayout(data_size=1, data_rank=0, micro_batch=1, pack_length=14)
    plan = BatchSampler.of(examples, layout, global_batch=1, seed=1)
    for step in range(plan.steps_per_epoch):
        batch = collate(examples, plan.step(0, step)[0], 0, True)
        assert sum(batch.example_lengths[::2]) <= 14
        assert batch.desirable[1::2] == [None] * (len(batch.locations) // 2)


def test_labels_of_completions_are_part_of_the_fingerprint(
    unpaired: Callable[..., TokenizedData],
) -> None:
    samples = completions(21)
    data = unpaired(samples)
    samples[3]["label"] = not samples[3]["label"]
    flipped = unpaired([{**sample, "label": str(sample["label"])} for sample in samples])
    assert flipped.train["input_ids"][:] == data.train["input_ids"][:]
    assert flipped.fingerprints() != data.fingerprints()
    with pytest.raises(UserError, match="my.jsonl: all 3 completions have the label False"):
        unpaired([{**sample, "label": 0} for sample in samples[:3]])


def test_pairs_become_completions_with_labels(unpaired: Callable[..., TokenizedData]) -> None:
    pairs = [{"prompt": "Hi", "chosen": " yes", "rejected": f" no {n}"} for n in range(3)]
    apart = []
    for pair in pairs:
        for key in ("chosen", "rejected"):
            apart.append({"prompt": "Hi", "completion": pair[key], "label": key == "chosen"})
    from_pairs = unpaired(pairs).train
    from_completions = unpaired(apart).train
    for name in ("input_ids", "labels", "desirable"):
        assert from_pairs[name][:] == from_completions[name][:]
    with pytest.raises(UserError, match='my.jsonl:1: "rejected" is "no"; expected another respo'):
        unpaired([{"prompt": "Hi", "chosen": "no", "rejected": "no"}])
