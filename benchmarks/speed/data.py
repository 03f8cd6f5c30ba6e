"""Measure the cost of data: tokenization, the cache's checksums, the fill of packed sequences,
the tokens of padding, packing against padding, waiting for batches.

    python benchmarks/speed/data.py
    python benchmarks/speed/data.py --rows 1000000     # also that many short samples from another file

It uses the embedded demo's samples and model, on one process. `packing` and `padding` are measured
in alternating steps with the same number of samples per step and tokens per micro-batch. Their
ratio is that of loss tokens per second, so padding and masks count as waste. `dense mask` is
Transformers' own way to compute packed sequences. Peak memory is the anonymous memory of this
process and of those that tokenize, minus the memory at the start; shared pages count once
(Pss_Anon).
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

SOURCES = str(Path(__file__).resolve().parents[2] / "src")
sys.path.insert(0, SOURCES)

import numpy
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from llama_ft import data, models, runtime, training
from llama_ft.config import Config, DataConfig, FSDPConfig, ModelConfig, PeftConfig
from llama_ft.data.batches.prefetch import PreparedBatches, StepBatches
from llama_ft.data.batches.sampler import Batch, BatchLayout, BatchSampler, pack_samples
from llama_ft.data.cache import checksum
from llama_ft.processes import cores
from llama_ft.runtime import Ranks
from llama_ft.training.train_state import LossScale

GIB = 2**30
CAPACITIES = (256, 1024, 2048)
MICRO_BATCH_TOKENS = 2048
PADDED_SAMPLES = (4, 16)
MICRO_BATCHES_A_STEP = (1, 4, 16)
WORDS = "shard rank gather token weight adapter scale mesh row block mask pack epoch step loss norm head layer".split()


class Peak:
    """Samples the anonymous memory of this process and its children; `bytes` is the most above the
    beginning."""

    def __init__(self) -> None:
        self.bytes = 0
        self._start = self._now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(0.05):
            self.bytes = max(self.bytes, self._now() - self._start)

    def _now(self) -> int:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):
                children += (task / "children").read_text().split()
        return sum(self._anonymous(pid) for pid in {"self", *children})

    @staticmethod
    def _anonymous(pid: str) -> int:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss_Anon:"):
                    return int(line.split()[1]) * 1024
        return 0


def tokenize(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, length: int
) -> tuple[data.TokenizedData, float]:
    """Tokenize with an empty cache; seconds of it."""
    with tempfile.TemporaryDirectory() as folder:
        os.symlink(data.build_demo(data.cache_dir()).model_dir.parent, Path(folder) / "demo")
        started = time.perf_counter()
        rows = data.prepare(
            config,
            tokenizer,
            data.DataRequest(context_length=length, want_validation=False),
            cache=Path(folder),
        )
        seconds = time.perf_counter() - started
        processes = config.tokenize_processes or cores()
        train = rows.report.train
        name = "demo" if config.dataset == "demo" else "generated"
        counts = f"{train.samples:,} | {train.tokens:,} | {processes} | {seconds:.1f} s"
        print(
            f"| {name} | {counts} | {train.samples / seconds:,.0f} | {train.tokens / seconds:,.0f} |",
            end="",
        )
        return rows, seconds


def checksums_table() -> None:
    """Time the checksum of a file, as at the start of every run with cached data."""
    size = 2 * GIB
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokens"
        block = random.Random(0).randbytes(2**24)
        with open(file, "wb") as opened:
            for _ in range(size // len(block)):
                opened.write(block)
            opened.flush()
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        print("\n| checksum of 2 GiB read from | seconds | GB/s |\n|---|---|---|")
        for place in ("disk", "memory"):
            started = time.perf_counter()
            checksum(file)
            seconds = time.perf_counter() - started
            print(f"| {place} | {seconds:.2f} | {size / seconds / 1e9:.1f} |")


def packs_table(lengths: numpy.ndarray) -> None:
    print(
        "\n| tokens a pack | rows | packs | full, the last pack aside | least number (tokens / pack) | seconds |"
    )
    print("|---|---|---|---|---|---|")
    for pack_length in CAPACITIES:
        short = numpy.minimum(lengths, pack_length)
        started = time.perf_counter()
        packs, tokens = pack_samples(short, pack_length)
        seconds = time.perf_counter() - started
        full = numpy.sort(tokens)[1:].mean() / pack_length
        least = -(-int(short.sum()) // pack_length)
        print(
            f"| {pack_length} | {len(short):,} | {len(packs):,} | {full:.2%} | {least:,} | {seconds:.2f} |"
        )


def padding_table(lengths: numpy.ndarray) -> None:
    """Count the tokens of padded micro-batches, padding included. A step's samples are sorted by
    length before they are distributed to its micro-batches."""
    print("\n| samples a micro-batch | micro-batches a step | padding |\n|---|---|---|")
    for samples in PADDED_SAMPLES:
        layout = BatchLayout(data_size=1, data_rank=0, micro_batch=samples)
        for micro_batches in MICRO_BATCHES_A_STEP:
            size = samples * micro_batches
            plan = BatchSampler(lengths, lengths, layout, global_batch=size, seed=1)
            computed = 0
            for step in range(plan.steps_per_epoch):
                for rows in plan.step(0, step):
                    computed += int(lengths[rows].max()) * len(rows)
            share = 1 - lengths.sum() / computed
            print(f"| {samples} | {micro_batches} | {share:.0%} of all tokens |")


def build(folder: Path, job: Ranks, packed: bool) -> models.BuiltModel:
    """The demo's model on a mesh of one, as recipes/finetuning.py makes it."""
    precision = runtime.PRECISIONS["fp32"]
    model_config = models.load_model_config(folder, False)
    built = models.build_on_meta(model_config, ModelConfig(model_name=str(folder)), folder=folder)
    if packed:
        built.mixers = models.use_packed_attention(built)
    models.set_storage_dtypes(built.model, precision)
    built.sharding = models.apply_fsdp(built, job.mesh, FSDPConfig(), precision)
    models.load_weights(built, job, models.LoadSettings(PeftConfig(), 0, precision.frozen))
    return built


def dense(model: PreTrainedModel, batch: Batch, device: torch.device) -> torch.Tensor:
    """The loss of a pack as transformers computes it from positions alone."""
    positions = torch.cat([torch.arange(length) for length in batch.example_lengths])[None]
    logits = model(
        input_ids=batch.input_ids.to(device), position_ids=positions.to(device), use_cache=False
    ).logits
    targets = batch.labels[:, 1:].flatten().to(device)
    return torch.nn.functional.cross_entropy(
        logits[0, :-1].float(), targets, ignore_index=-100, reduction="sum"
    )


def speed(rows: data.TokenizedData, folder: Path, job: Ranks, turns: int) -> None:
    """Steps with packs and with padding in turns, and how long each feed was waited for."""
    assert rows.train is not None
    rows_a_pack = round(MICRO_BATCH_TOKENS / data.example_lengths(rows.train).mean())
    packing = BatchLayout(data_size=1, data_rank=0, micro_batch=1, pack_length=MICRO_BATCH_TOKENS)
    padding = BatchLayout(data_size=1, data_rank=0, micro_batch=rows_a_pack)
    ways = {"packing": packing, "padding": padding, "dense mask": packing}
    rates: dict[str, list[float]] = {way: [] for way in ways}
    waited = dict.fromkeys(ways, 0.0)
    stepped = dict.fromkeys(ways, 0.0)
    built = {way: build(folder, job, way == "packing") for way in ways}
    loop = training.LoopState(Config(), LossScale(1.0), job.device)
    with contextlib.ExitStack() as stack:
        feeds: dict[str, Iterator[StepBatches]] = {}
        ahead = {}
        for way, layout in ways.items():
            size = layout.micro_batch
            sampler = BatchSampler.of(rows.train, layout, global_batch=size, seed=1)
            prepared = PreparedBatches(rows.train, sampler, 1, 0)
            ahead[way] = stack.enter_context(data.Prefetcher(prepared.steps(1, turns + 1, {})))
            feeds[way] = iter(ahead[way])
        for turn in range(turns + 1):
            for way, one in built.items():
                todo = next(feeds[way])
                started = time.perf_counter() - ahead[way].waited_seconds
                if way == "dense mask":
                    (dense(one.model, todo.batches[0], job.device) / todo.target_tokens).backward()
                else:
                    objective = training.SupervisedFineTuning()
                    for batch in training.micro_batches(one, todo, loop, job):
                        loss = objective.loss(one, batch, job).loss
                        (loss / todo.target_tokens).backward()
                one.model.zero_grad()
                if job.device.type == "cuda":
                    torch.cuda.synchronize()
                if turn == 0:  # warm-up
                    continue
                seconds = time.perf_counter() - started
                rates[way].append(todo.target_tokens / seconds)
                waited[way] += ahead[way].waited_seconds
                stepped[way] += seconds
    print(
        f"\n| {MICRO_BATCH_TOKENS} tokens a micro-batch | target tokens/s | packing is faster by | waited for data |"
    )
    print("|---|---|---|---|")
    for way, rate in rates.items():
        ratio = statistics.median(
            ours / theirs for ours, theirs in zip(rates["packing"], rate, strict=True)
        )
        print(
            f"| {way} | {statistics.median(rate):,.0f} | {ratio:.2f} x | {waited[way] / stepped[way]:.2%} |"
        )


def generated(file: Path, count: int) -> Path:
    """A .jsonl file of `count` short rows, no two alike."""
    chance = random.Random(0)
    with open(file, "w") as lines:
        for number in range(count):
            question = f"{number} {' '.join(chance.choices(WORDS, k=chance.randint(4, 20)))}?"
            answer = " ".join(chance.choices(WORDS, k=chance.randint(1, 40)))
            lines.write(json.dumps({"instruction": question, "output": answer}) + "\n")
    return file


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", type=int, default=0, help="tokenize and pack so many generated rows too"
    )
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    asked = parser.parse_args()
    demo = data.build_demo(data.cache_dir())
    tokenizer = AutoTokenizer.from_pretrained(demo.model_dir)
    print(
        "| rows of | rows | tokens | processes | seconds | rows/s | tokens/s | peak memory |\n"
        + "|---" * 8
        + "|"
    )
    with Peak() as peak:
        rows, _ = tokenize(DataConfig(dataset="demo"), tokenizer, MICRO_BATCH_TOKENS)
    print(f" {peak.bytes / GIB:.2f} GiB |")
    if asked.rows:
        with tempfile.TemporaryDirectory() as folder:
            file = generated(Path(folder) / "rows.jsonl", asked.rows)
            with Peak() as peak:
                many, _ = tokenize(DataConfig(dataset=str(file)), tokenizer, MICRO_BATCH_TOKENS)
                lengths = data.example_lengths(many.train)
                started = time.perf_counter()
                packs, _ = pack_samples(lengths, MICRO_BATCH_TOKENS)
                seconds = time.perf_counter() - started
            print(f" {peak.bytes / GIB:.2f} GiB, packed into {len(packs):,} in {seconds:.1f} s |")
    checksums_table()
    packs_table(data.example_lengths(rows.train))
    padding_table(data.example_lengths(rows.train))
    with runtime.start(asked.device, 1, False, None, 1800) as job:
        speed(rows, demo.model_dir, job, asked.turns)


if __name__ == "__main__":
    main()
