"""Compare tokens per second of recipes/finetuning.py and of other trainers, in alternating runs on
identical data.

    python benchmarks/trainers/throughput.py                                    # with TRL, whose environment it makes
    python benchmarks/trainers/throughput.py --peers trl,torchtune,llama-recipes
    python benchmarks/trainers/throughput.py --trl_python ~/trl/bin/python --only full,lora --turns 5
    python benchmarks/trainers/throughput.py --objective dpo --only full,lora   # pairs, with TRL's DPOTrainer

The figures of an AMD EPYC (Zen 5) on docs/development/benchmarks.md, without and with --objective dpo:

    python benchmarks/trainers/throughput.py --only full,lora --ways accelerate --turns 3 --warmup 3 --steps 1
    python benchmarks/trainers/throughput.py --objective dpo --pairs 4 --only full,lora \\
      --ways accelerate,precomputed --turns 1 --warmup 1 --steps 1

On CPUs: a random Llama of 110 M parameters, 2 ranks, 4 x 512 tokens per micro-batch. The cases are
full fine-tuning, LoRA (all-linear, r=16) on bf16, 8-bit and nf4 weights, and full fine-tuning on
the embedded demo's samples, which the other trainer (the peer) pads or packs itself. On CUDA:
Llama-3.1-8B's shapes with random weights, packed sequences of 4096 tokens, all GPUs.

With --objective dpo a micro-batch has --pairs pairs; by default half as many, and so as many tokens. In full
fine-tuning the recipe computes the reference once. TRL holds a second model (its way accelerate),
or computes the reference once, too (precomputed, which it can also do with LoRA). In bf16 only the
losses of the first step must agree: TRL's log-probabilities are then bf16 numbers.

Before the timing each side runs two steps. A peer with several ways to distribute the model runs
them in each way. The losses must agree, or there is no table. (On the demo's samples, which each
side packs differently, the losses of the untrained model on the same samples must agree.) The
fastest way is measured; the others are listed below the table. If a peer's step takes longer than
--longest_step, only the second of its two steps is measured.

Tokens are counted without padding. The time is from the end of the last warm-up step to the end of
the last step, at which each step's record appears (here: the longer of that and the recipe's
step_seconds). Both sides clip gradients at 1, use fused AdamW with one learning rate, log every
step and neither evaluate nor save. Peers get OMP_NUM_THREADS = cores / ranks, as accelerate's
launcher sets it. On a CPU that only emulates bf16, which slows peers down many times,
--peer_precision fp32 compares with their best case. MFU is that of the recipe; a peer's is computed
by the ratio of tokens per second. Memory is the highest anonymous memory of a rank, read from
outside; on CUDA it is torch.cuda.max_memory_allocated. "added" leaves out what a rank had just
before its model was built: Python, libraries and samples. CPU seconds per step are those of all ranks.
On a machine that others use, too, they say more than the clock.
"""

import argparse
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / folder) for folder in ("src", ".")]

import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.shared.text_files import print_columns, read_json, read_json_lines
from benchmarks.trainers.peers import PEERS, RunFailed, launch, make_environment
from llama_ft.data import build_demo, cache_dir
from llama_ft.data.batches.sampler import BatchLayout, BatchSampler

MIB = 2**20
LR = 1e-4
LORA_RANK = 16
SEED = 42
CHECKED_STEPS = 2
CHECKED_ROWS = 64
# Relative: bf16 has 8 bits, and accelerate's FSDP2 returns the model's outputs, log-probabilities,
# in it.
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 6e-3}
QUANTIZED_TOLERANCE = 1e-2
# a way of distributing that takes so many times the best one's time for the checked steps is given
# up
PATIENCE = 1.5
SECONDS_A_RUN = 1500.0
SMALL_LLAMA = dict(
    hidden_size=1024, intermediate_size=2432, num_hidden_layers=8, num_attention_heads=8
)
SMALL_LLAMA |= dict(num_key_value_heads=8, vocab_size=8000, max_position_embeddings=2048)
LLAMA_8B = dict(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32
)
LLAMA_8B |= dict(
    num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072, rms_norm_eps=1e-5
)
METHODS = {
    "full": [],
    "lora": [],
    "8bit": ["--quantization", "8bit"],
    "nf4": ["--quantization", "4bit"],
}


@dataclass(frozen=True)
class Case:
    """What is trained, by both sides.

    Attributes:
        name: for --only.
        method: full, lora, or lora on 8bit or nf4 weights.
        micro_batch: packs, or rows of `length` tokens, on a rank.
        length: tokens of a pack.
        natural: rows have lengths of their own.
        checkpointing: recompute every decoder layer.
        pure: all in bf16, for what would not fit otherwise.
        targets: ratios to reach, by the peer's layout of rows.
    """

    name: str
    method: str
    micro_batch: int
    length: int
    natural: bool = False
    checkpointing: bool = False
    pure: bool = False
    targets: dict[str, float] = field(default_factory=dict, hash=False)

    @property
    def layouts(self) -> tuple[str, ...]:
        return ("padding", "packing") if self.natural else ("dense",)


CASES = {
    "cpu": [
        Case("full", "full", 4, 512, targets={"dense": 1.8}),
        Case("lora", "lora", 4, 512, targets={"dense": 2.05}),
        Case("nf4", "nf4", 4, 512, targets={"dense": 2.0}),
        Case("8bit", "8bit", 4, 512),
        Case("natural", "full", 4, 512, natural=True, targets={"padding": 4.0, "packing": 2.0}),
    ],
    "cuda": [
        Case("lora", "lora", 1, 4096),
        Case("lora-2", "lora", 2, 4096, checkpointing=True),
        Case("full", "full", 1, 4096, checkpointing=True, pure=True),
        Case("8bit", "8bit", 1, 4096),
        Case("nf4", "nf4", 1, 4096),
    ],
}


@dataclass(frozen=True)
class Contender:
    """A side: ours, or a peer with one layout of rows and one way of distributing the model."""

    trainer: str
    layout: str
    way: str = ""

    def __str__(self) -> str:
        words = (self.trainer, "" if self.layout == "dense" else self.layout, self.way)
        return " ".join(word for word in words if word)


OURS = Contender("ours", "")


@dataclass
class Run:
    """What one run showed.

    Attributes:
        ends: wall clock at the end of each step.
        tokens: of each step, over all ranks, without padding.
        losses: of each step.
        step_seconds: by the trainer's own count; empty where it has none.
        started: wall clock at the launch.
        peak_bytes: of the fullest rank.
        added_bytes: the same without what the rank had just before the model was built; 0 if that
            is not known.
        untuned_loss: over the checked rows, where it was asked for.
        mfu: of each step, where it is known.
        distributed: how the trainer says that the model is.
        clocks: wall clock and CPU seconds of all ranks so far, every 50 ms.
    """

    ends: list[float]
    tokens: list[float]
    losses: list[float]
    step_seconds: list[float]
    started: float
    peak_bytes: int
    added_bytes: int = 0
    untuned_loss: float | None = None
    mfu: list[float] = field(default_factory=list)
    distributed: str = ""
    clocks: list[tuple[float, float]] = field(default_factory=list)

    def cpu_seconds(self, warmup: int) -> float:
        """Of a step after the warm-up."""
        first = self._cpu_seconds_at(self.ends[warmup - 1])
        last = self._cpu_seconds_at(self.ends[-1])
        return (last - first) / (len(self.ends) - warmup)

    def _cpu_seconds_at(self, end: float) -> float:
        before = [cpu for wall, cpu in self.clocks if wall <= end]
        return before[-1]

    def usable_warmup(self, warmup: int) -> int:
        """Return the steps of the warm-up, at most all but one."""
        return min(warmup, len(self.ends) - 1)

    def tokens_per_second(self, warmup: int) -> float:
        """Over the steps after the warm-up."""
        between_ends = self.ends[-1] - self.ends[warmup - 1]
        seconds = max(between_ends, sum(self.step_seconds[warmup:]))
        return sum(self.tokens[warmup:]) / seconds

    @property
    def first_step_seconds(self) -> float:
        """From the launch to the end of the first step."""
        return self.ends[0] - self.started


class Bench:
    """Runs the contenders of one device and precision, in folders of their own.

    Args:
        asked: the command line.
        device: cpu or cuda.
        folder: for model, rows and runs.
        pythons: interpreter of each peer.
    """

    def __init__(
        self, asked: argparse.Namespace, device: str, folder: Path, pythons: dict[str, Path]
    ) -> None:
        self.asked = asked
        self.device = device
        self.folder = folder
        self.pythons = pythons
        self.launches = 0

    def precision(self, case: Case) -> str:
        return (
            "bf16_pure"
            if case.pure and self.asked.precision != "fp32"
            else str(self.asked.precision)
        )

    def run(
        self,
        case: Case,
        who: Contender,
        steps: int,
        check: bool = False,
        seconds: float = SECONDS_A_RUN,
    ) -> Run:
        """One launch. With `check` the loss of the untuned model on natural rows is asked for
        too."""
        self.launches += 1
        output = self.folder / f"run-{self.launches:03d}"
        output.mkdir()
        try:
            if who == OURS:
                return self._run_ours(case, steps, output, check and case.natural, seconds)
            return self._run_peer(case, who, steps, output, check and case.natural, seconds)
        finally:
            if not self.asked.keep:
                shutil.rmtree(output / "run", ignore_errors=True)

    def _run_ours(self, case: Case, steps: int, output: Path, check: bool, seconds: float) -> Run:
        flags: list[Any] = ["--model_name", self.model(case), "--dataset", self.rows(case, "ours")]
        flags += ["--objective", "dpo"] if self.asked.objective == "dpo" else []
        flags += METHODS[case.method]
        if case.method != "full":
            flags += [
                "--use_peft",
                "--peft.r",
                LORA_RANK,
                "--target_modules",
                "all-linear",
                "--lora_dropout",
                0,
            ]
        flags += ["--enable_fsdp"] if self.asked.nproc > 1 else []
        flags += ["--activation_checkpointing", "full"] if case.checkpointing else []
        flags += (
            ["--validation", self.rows(case, "check")] if check else ["--run_validation", False]
        )
        flags += [
            "--context_length",
            case.length,
            "--batch_size_training",
            case.micro_batch,
            "--seed",
            SEED,
        ]
        flags += [
            "--lr",
            LR,
            "--lr_scheduler",
            "constant",
            "--gradient_clipping",
            "--precision",
            self.precision(case),
        ]
        flags += ["--max_train_step", steps, "--save_model", False, "--device", self.device]
        metrics = output / "run" / "metrics.jsonl"
        ends: list[float] = []

        def look() -> None:
            lines = metrics.read_bytes().splitlines(keepends=True) if metrics.exists() else []
            done = sum(line.endswith(b"\n") and b'"train/loss"' in line for line in lines)
            ends.extend([time.time()] * (done - len(ends)))

        environment = {
            "PYTHONPATH": str(REPOSITORY / "src"),
            "LLAMA_FT_CACHE": str(self.folder / "cache"),
        }
        script = REPOSITORY / "benchmarks" / "trainers" / "finetuning_job.py"
        arguments = [str(output), *map(str, flags), *self.asked.ours.split()]
        arguments += ["--output_dir", str(output / "run")]
        python = Path(sys.executable)
        log = output / "log.txt"
        watched = launch(
            python, script, arguments, self.asked.nproc, log, seconds, environment, look
        )
        records = read_json_lines(metrics)
        found = [record for record in records if "train/loss" in record]
        device_peaks = [max(record.get("memory/device_peak_bytes", [0])) for record in found]
        own = [record["perf/step_seconds"] for record in found]
        return Run(
            ends=ends,
            tokens=[
                record["perf/tokens_per_second"] * record["perf/step_seconds"] for record in found
            ],
            losses=[record["train/loss"] for record in found],
            step_seconds=own,
            started=watched.started,
            peak_bytes=max(device_peaks) if self.device == "cuda" else max(watched.peaks.values()),
            added_bytes=added_bytes(
                watched.peaks, [read_json(file) for file in output.glob("before-*.json")]
            ),
            untuned_loss=next(
                (record["eval/loss"] for record in records if record["step"] == 0), None
            ),
            mfu=[record[key] for record in found if (key := "perf/matmul_utilization") in record],
            clocks=watched.clocks,
        )

    def _run_peer(
        self, case: Case, who: Contender, steps: int, output: Path, check: bool, seconds: float
    ) -> Run:
        job = {
            **asdict(case),
            "model": str(self.model(case)),
            "rows": str(self.rows(case, who.trainer)),
            "check": str(self.rows(case, "check")) if check else None,
            "output": str(output),
            "layout": who.layout,
            "way": "accelerate" if who.way == "precomputed" else who.way,
            "device": self.device,
            "precision": self.asked.peer_precision or self.precision(case),
            "steps": steps,
            "lr": LR,
            "r": LORA_RANK,
            "trainer": self.asked.objective,
            "settings": {"precompute_ref_log_probs": who.way == "precomputed"}
            if self.asked.objective == "dpo"
            else {},
            "adapter": None,
            "accumulation": 1,
        }
        if who.layout == "padding":  # as many rows a step as ours has on average
            job["micro_batch"] = max(
                1, round(case.micro_batch * case.length / self.mean_length(case))
            )
        (output / "job.json").write_text(json.dumps(job))
        environment = {
            "HF_HOME": str(self.folder / "cache" / "hf"),
            "TOKENIZERS_PARALLELISM": "false",
        }
        if self.device == "cpu":
            environment["OMP_NUM_THREADS"] = str(
                max(1, len(os.sched_getaffinity(0)) // self.asked.nproc)
            )
        script = PEERS[who.trainer].job
        arguments = [str(output / "job.json")]
        python = self.pythons[who.trainer]
        log = output / "log.txt"
        watched = launch(python, script, arguments, self.asked.nproc, log, seconds, environment)
        ranks = [
            json.loads((output / f"rank-{rank}.json").read_text())
            for rank in range(self.asked.nproc)
        ]
        told = ranks[0]
        return Run(
            ends=told["ends"],
            tokens=[
                now - before
                for before, now in zip([0, *told["tokens"]], told["tokens"], strict=False)
            ],
            losses=told["losses"],
            step_seconds=[],
            started=watched.started,
            peak_bytes=max(rank["device_peak"] for rank in ranks) or max(watched.peaks.values()),
            added_bytes=added_bytes(
                watched.peaks, [rank["before"] for rank in ranks if "before" in rank]
            ),
            untuned_loss=told.get("untuned_loss"),
            distributed=told["is"],
            clocks=watched.clocks,
        )

    def model(self, case: Case) -> Path:
        """Its folder, made when first asked for. Natural rows are the demo tokenizer's, and so is
        their vocabulary."""
        if self.asked.model:
            return Path(self.asked.model)
        folder = self.folder / ("model-natural" if case.natural else "model")
        if not folder.exists():
            print(f"writing a random Llama to {folder}", file=sys.stderr)
            shapes = LLAMA_8B if self.device == "cuda" else SMALL_LLAMA
            if case.natural:
                tokenizer = AutoTokenizer.from_pretrained(build_demo(cache_dir()).model_dir)
                shapes = {**shapes, "vocab_size": len(tokenizer)}
            else:
                tokenizer = word_tokenizer(shapes["vocab_size"])
            ids = {
                f"{name}_token_id": getattr(tokenizer, f"{name}_token_id")
                for name in ("bos", "eos", "pad")
            }
            torch.manual_seed(0)
            with torch.device(self.device):
                model = LlamaForCausalLM(LlamaConfig(**shapes, **ids, dtype="bfloat16")).bfloat16()
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            del model
        return folder

    def rows(self, case: Case, reader: str) -> Path:
        """A file of tokenized rows: dense ones for a peer are in the order in which ours takes
        them; `check` is for the untuned model's loss."""
        has_pairs = self.asked.objective == "dpo"
        kind = "natural" if case.natural else f"{case.length}x{case.micro_batch}"
        order = reader if reader in ("ours", "check") or case.natural else "peers"
        file = (
            self.folder
            / f"rows-{kind}-{order if not case.natural or reader == 'check' else 'all'}.jsonl"
        )
        if not file.exists():
            steps = self.asked.warmup + self.asked.steps
            batch = case.micro_batch * self.asked.nproc
            if case.natural:
                rows = natural_rows(
                    self.model(case), case.length, (steps + 2) * batch * case.length
                )
            else:
                vocabulary = len(AutoTokenizer.from_pretrained(self.model(case)))
                make = dense_pairs if has_pairs else dense_rows
                rows = make(vocabulary, case.length, max(steps, CHECKED_STEPS) * batch)
            if reader == "check":
                rows = rows[:CHECKED_ROWS]
            elif order == "peers":
                lengths = [case.length] * len(rows) * (1 + has_pairs)
                rows = [
                    rows[number] for number in our_order(lengths, case.length, batch, 1 + has_pairs)
                ]
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file

    def mean_length(self, case: Case) -> float:
        lines = self.rows(case, "ours").read_text().splitlines()
        return statistics.mean(len(json.loads(line)["input_ids"]) for line in lines)


def added_bytes(peaks: dict[int, int], before: list[dict[str, int]]) -> int:
    """The most that a rank's peak is above its memory before the model was built."""
    return max((peaks[rank["pid"]] - rank["bytes"] for rank in before), default=0)


def word_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of so many tokens, which nothing is tokenized with."""
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    words = [*special.values(), *(f"t{number}" for number in range(size - len(special)))]
    tokenizer = Tokenizer(
        WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[-1])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def dense_rows(vocabulary: int, length: int, count: int) -> list[dict[str, list[int]]]:
    """Rows that fill a pack each. Small ids are frequent, so that there is something to learn:
    losses that agree after a step say that the weights were changed alike. No label before the
    first token, whoever shifts them."""
    chance = random.Random(0)
    rows = []
    for _ in range(count):
        ids = [3 + int((vocabulary - 3) * chance.random() ** 3) for _ in range(length)]
        labels = [-100, *ids[1:]]
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def natural_rows(model: Path, longest: int, tokens: int) -> list[dict[str, list[int]]]:
    """The demo's rows with the chat template, of at least so many tokens, in a random order; all is
    trained on."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    lines = build_demo(cache_dir()).train_file.read_text(encoding="utf-8").splitlines()
    random.Random(0).shuffle(lines)
    rows = list[dict[str, list[int]]]()
    while tokens > 0:
        row = json.loads(lines[len(rows) % len(lines)])
        question = "\n".join(row[name] for name in ("instruction", "input") if row.get(name))
        chat = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": row["output"]},
        ]
        ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)[:longest]
        rows.append({"input_ids": ids, "labels": [-100, *ids[1:]]})
        tokens -= len(ids)
    return rows


def dense_pairs(vocabulary: int, length: int, count: int) -> list[dict[str, str]]:
    """Pairs whose prompt and response fill `length` tokens with the end of the text; words of
    `word_tokenizer`."""
    chance = random.Random(0)

    def words(number: int) -> str:
        return "".join(f" t{int((vocabulary - 3) * chance.random() ** 3)}" for _ in range(number))

    prompt = length // 2
    response = length - length // 2 - 1
    return [
        {"prompt": words(prompt), "chosen": words(response), "rejected": words(response)}
        for _ in range(count)
    ]


def our_order(lengths: list[int], length: int, batch: int, group: int) -> list[int]:
    """Numbers of the rows, or of the pairs where `group` is 2, in the order of our steps."""
    layout = BatchLayout(data_size=1, data_rank=0, micro_batch=batch, pack_length=length)
    plan = BatchSampler(
        lengths,
        lengths,
        layout,
        global_batch=batch,
        seed=SEED,
        examples_per_sample=group,
    )
    steps = [plan.step(0, step) for step in range(plan.steps_per_epoch)]
    return [row // group for step in steps for share in step for row in share[::group]]


def disagreement(ours: Run, theirs: Run, tolerance: float, natural: bool, steps: int) -> str:
    """What is wrong with a peer's losses in the first `steps`, in words; nothing if they agree."""
    pairs = list(zip(ours.losses[:steps], theirs.losses[:steps], strict=True))
    named = [(f"step {number + 1}", *pair) for number, pair in enumerate(pairs)]
    if natural:
        if ours.untuned_loss is None or theirs.untuned_loss is None:
            return "the loss of the untuned model is missing"
        named = [("the untuned model", ours.untuned_loss, theirs.untuned_loss)]
    wrong = [
        f"{what}: {own:.5f} and {other:.5f}"
        for what, own, other in named
        if not math.isclose(own, other, rel_tol=tolerance)
    ]
    return "; ".join(wrong)


def tolerance_of(case: Case, precision: str) -> float:
    return (
        QUANTIZED_TOLERANCE
        if case.method in ("nf4", "8bit")
        else LOSS_TOLERANCE[precision.split("_")[0]]
    )


def choose_ways(bench: Bench, case: Case, ours: Run) -> tuple[dict[Contender, Run], list[str]]:
    """Two steps of every peer in every way that it has; the losses are compared with ours.

    Returns:
        The fastest way of each peer and layout with its run, and a line about each of the other
        ways.

    Raises:
        SystemExit: losses do not agree.
    """
    chosen = dict[Contender, Run]()
    lines = list[str]()
    for name in bench.pythons:
        for layout in case.layouts:
            peer = PEERS[name]
            if (case.method, layout) not in peer.can:
                lines.append(f"{case.name}: {name} has no {case.method} on {layout} rows here")
                continue
            ways = [
                way
                for way in peer.ways
                if bench.asked.nproc > 1 or way == {"trl": "ddp"}.get(name, peer.ways[-1])
            ]
            ways = [
                way for way in ways if not bench.asked.ways or way in bench.asked.ways.split(",")
            ]
            if bench.asked.objective == "sft":
                ways = [way for way in ways if way != "precomputed"]
            runs = dict[Contender, Run]()
            patience = SECONDS_A_RUN
            for way in ways:
                who = Contender(name, layout, way)
                started = time.time()
                try:
                    run = bench.run(case, who, CHECKED_STEPS, check=True, seconds=patience)
                except RunFailed as error:
                    lines.append(f"{case.name}: {who} did not run: {error}")
                    print(lines[-1], file=sys.stderr)
                    continue
                # In bf16 TRL under FSDP2 adds up log-probabilities in bf16: sums of 2,000 nats are
                # wrong by up to 8.
                checked = (
                    1
                    if bench.asked.objective == "dpo" and bench.precision(case) != "fp32"
                    else CHECKED_STEPS
                )
                tolerance = tolerance_of(case, bench.precision(case))
                if wrong := disagreement(ours, run, tolerance, case.natural, checked):
                    raise SystemExit(
                        f"{case.name}: the losses of ours and of {who} do not agree: {wrong}"
                    )
                runs[who] = run
                patience = min(patience, PATIENCE * (time.time() - started))
                seconds = run.ends[-1] - run.ends[0]
                print(
                    f"{case.name}: {who} ({run.distributed}): losses agree, {seconds:.1f} s a step",
                    file=sys.stderr,
                )
            if runs:
                best = min(runs, key=lambda who: runs[who].ends[-1] - runs[who].ends[0])
                chosen[best] = runs[best]
                for who in runs.keys() - {best}:
                    rate = runs[who].tokens[-1] / (runs[who].ends[-1] - runs[who].ends[0])
                    about = f"{case.name}: {who} ({runs[who].distributed}): {rate:,.0f} tokens/s"
                    memory = f"added {runs[who].added_bytes / MIB:,.0f} MiB"
                    lines.append(f"{about} in one step, {memory}")
    return chosen, lines


def measure(bench: Bench, case: Case) -> tuple[dict[Contender, list[Run]], list[str]]:
    """Check one case, then run its contenders in turns."""
    checked = bench.run(case, OURS, CHECKED_STEPS, check=True)
    chosen, lines = choose_ways(bench, case, checked)
    runs: dict[Contender, list[Run]] = {who: [] for who in (OURS, *chosen)}
    warmup = bench.asked.warmup
    steps = bench.asked.warmup + bench.asked.steps
    slow = {
        who: run
        for who, run in chosen.items()
        if run.ends[-1] - run.ends[0] > bench.asked.longest_step
    }
    for turn in range(bench.asked.turns):
        for who, done in runs.items():
            if who in slow:
                runs[who] = [slow[who]]
                continue
            done.append(bench.run(case, who, steps))
            rate = done[-1].tokens_per_second(warmup)
            about = f"{case.name}, turn {turn + 1} of {bench.asked.turns}: {who}"
            print(f"{about}: {rate:,.0f} tokens/s", file=sys.stderr)
    for who, run in chosen.items():
        shown = [
            f"{value:.4f}"
            for value in (checked.untuned_loss, run.untuned_loss)
            if value is not None
        ]
        shown = shown or [
            f"{pair[0]:.4f}/{pair[1]:.4f}" for pair in zip(checked.losses, run.losses, strict=False)
        ]
        lines.append(
            f"{case.name}: {who} is {run.distributed}; losses checked (ours/theirs): {' '.join(shown)}"
        )
        lines[-1] += "; one step, measured once" if who in slow else ""
    return runs, lines


def table_lines(case: Case, runs: dict[Contender, list[Run]], warmup: int) -> list[list[str]]:
    """The table's lines of one case. The ratio is the median over the turns of ours by the
    peer's."""
    rates = {}
    for who, done in runs.items():
        rates[who] = [run.tokens_per_second(run.usable_warmup(warmup)) for run in done]
    mfu = [value for run in runs[OURS] for value in run.mfu[warmup:]]
    lines = []
    for who, done in runs.items():
        ours = rates[OURS]
        theirs = rates[who] if len(rates[who]) > 1 else rates[who] * len(ours)
        ratio = statistics.median(own / rate for own, rate in zip(ours, theirs, strict=True))
        target = case.targets.get(who.layout)
        verdict = ""
        if target is not None:
            verdict = f"{target:g} {'reached' if ratio >= target else 'missed'}"
        cpu_seconds = [run.cpu_seconds(run.usable_warmup(warmup)) for run in done]
        lines.append(
            [
                case.name,
                str(who),
                *(f"{pick(rates[who]):,.0f}" for pick in (statistics.median, min, max)),
                "" if who == OURS else f"{ratio:.2f}",
                verdict,
                f"{statistics.median(mfu) / ratio:.1%}" if mfu else "-",
                f"{max(run.peak_bytes for run in done) / MIB:,.0f}",
                f"{max(run.added_bytes for run in done) / MIB:,.0f}",
                f"{statistics.median(run.first_step_seconds for run in done):.1f}",
                f"{statistics.median(cpu_seconds):.1f}",
            ]
        )
    return lines


def print_table(lines: list[list[str]]) -> None:
    titles = [
        "case",
        "trainer",
        "tokens/s",
        "min",
        "max",
        "ours/its",
        "target",
        "matmul",
        "peak MiB",
        "added MiB",
        "1st step s",
        "CPU s",
    ]
    print_columns([titles, *lines])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peers", default="trl", help=f"of {', '.join(PEERS)}; each in an environment made for it"
    )
    parser.add_argument(
        "--trl_python", type=Path, help="an interpreter that has TRL, instead of making one"
    )
    parser.add_argument(
        "--objective", choices=("sft", "dpo"), default="sft", help="dpo: dense cases, with TRL"
    )
    parser.add_argument("--pairs", type=int, help="with dpo: of a micro-batch")
    parser.add_argument(
        "--ways", default="", help="only these of a peer's ways to distribute the model"
    )
    parser.add_argument("--only", default="", help="only these cases")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=2, help="steps that are not measured")
    parser.add_argument("--steps", type=int, default=4, help="measured steps of a turn")
    parser.add_argument("--longest_step", type=float, default=60.0, help="seconds; see above")
    parser.add_argument(
        "--precision", choices=("bf16_mixed", "fp32"), default="bf16_mixed", help="of both sides"
    )
    parser.add_argument(
        "--peer_precision", choices=("bf16_mixed", "fp32"), help="of the peers, where it is another"
    )
    parser.add_argument(
        "--nproc", type=int, help="ranks; by default 2 on the CPU, all GPUs on CUDA"
    )
    parser.add_argument("--model", help="a model's folder instead of a random Llama")
    parser.add_argument("--ours", default="", help="further flags for recipes/finetuning.py")
    parser.add_argument(
        "--folder", type=Path, help="for model, rows and logs; a temporary one by default"
    )
    parser.add_argument("--keep", action="store_true", help="keep the run directories in --folder")
    parser.add_argument("--json", type=Path, help="write every run's figures into this file")
    asked = parser.parse_args()
    if asked.turns < 1 or asked.warmup < 1 or asked.steps < 1:
        parser.error("--turns, --warmup and --steps are 1 or more")
    if unknown := set(asked.peers.split(",")) - PEERS.keys():
        parser.error(f"--peers {','.join(sorted(unknown))}: there are {', '.join(PEERS)}")
    return asked


def find_pythons(asked: argparse.Namespace) -> dict[str, Path]:
    """Interpreter of each peer; one whose environment cannot be made is left out, and said so."""
    pythons = {}
    for name in asked.peers.split(","):
        try:
            given = asked.trl_python if name == "trl" else None
            pythons[name] = given or make_environment(PEERS[name], cache_dir())
        except OSError as error:
            print(f"{name} cannot be installed: {error}")
    return pythons


def describe_machine(asked: argparse.Namespace, device: str) -> str:
    """A line about what it was measured on."""
    if device == "cuda":
        return f"{asked.nproc} x {torch.cuda.get_device_name()}, torch {torch.__version__}, {asked.precision}"
    models = (
        subprocess.run(["lscpu"], capture_output=True, text=True).stdout
        if shutil.which("lscpu")
        else ""
    )
    name = next(
        (
            line.split(":")[1].strip()
            for line in models.splitlines()
            if line.startswith("Model name")
        ),
        "CPU",
    )
    load = os.getloadavg()[0]
    about = f"{len(os.sched_getaffinity(0))} cores of {name}, {asked.nproc} ranks, torch {torch.__version__}"
    precision = asked.precision + (
        f" (peers {asked.peer_precision})" if asked.peer_precision else ""
    )
    return f"{about}, {precision}; load average {load:.1f} at the start"


def main() -> None:
    asked = parse()
    # so that what was launched is ended too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    asked.nproc = asked.nproc or (torch.cuda.device_count() if device == "cuda" else 2)
    wanted = asked.only.split(",") if asked.only else [case.name for case in CASES[device]]
    if unknown := set(wanted) - {case.name for case in CASES[device]}:
        raise SystemExit(
            f"--only {','.join(unknown)}: there are {', '.join(case.name for case in CASES[device])}"
        )
    pythons = find_pythons(asked)
    about = describe_machine(asked, device)
    has_pairs = asked.objective == "dpo"
    if asked.folder:
        asked.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="throughput-", dir=asked.folder))
    bench = Bench(asked, device, folder, pythons)
    lines = list[list[str]]()
    notes = list[str]()
    found = dict[str, Any]()
    try:
        for case in (
            case
            for case in CASES[device]
            if case.name in wanted and not (has_pairs and case.natural)
        ):
            if has_pairs:
                case = replace(
                    case,
                    micro_batch=asked.pairs or max(1, case.micro_batch // 2),
                    targets={"dense": 1.0},
                )
            runs, said = measure(bench, case)
            notes += said
            lines += table_lines(case, runs, asked.warmup)
            found[case.name] = {}
            for who, done in runs.items():
                found[case.name][str(who)] = [asdict(run) for run in done]
            if asked.json:
                asked.json.write_text(json.dumps(found))
    except RunFailed as error:
        raise SystemExit(f"a run failed: {error}\nIts log is the last in {folder}") from None
    if not asked.folder:
        shutil.rmtree(folder)
    print(about)
    print_table(lines)
    print("\n".join(["", *notes]))


if __name__ == "__main__":
    main()
