"""Measure what each part of recipes/finetuning.py adds to its speed, beginning with a loop of
twenty lines.

    python benchmarks/speed/ablation.py                        # 2 ranks on the CPU, a Llama of 110 M parameters
    python benchmarks/speed/ablation.py --device cuda --nproc 1 --model DIR

Rows of the table are cumulative. Each row runs the recipe's own functions, where the parts of later
rows are replaced by plain versions (in this file, not in src). All rows of a table run in the same
processes and take steps in turns, so that other load on the machine affects all of them. On CUDA,
where several models may not fit, they run one after another.

    loop        Transformers' model, PEFT, fully_shard on every layer, padded samples, the model's own loss, fused
                AdamW, clipping, loss.item(); with the threads of the other rows, not the single one
                that torchrun sets
    recipe      the model and step of recipes/finetuning.py without the parts below
    loss        chunked cross-entropy; positions without a label are skipped
    packing     packed sequences, attention within each sample, no mask and no padding
    lora        fused LoRA linear; nothing is stored that a frozen path does not need
    sharding    the parts of models/sharding/fsdp.py beyond fully_shard on every layer and the root
    late        loss and norm are read one step late (CUDA)
    compile     --compile (CUDA)

There are tables for full fine-tuning and LoRA (all-linear, r=16), each on full sequences (4 x 512
tokens per micro-batch) and on the demo's samples. Tokens are counted without padding; tokens/s is
from the median step. Memory is the peak of a rank's tensors: its shards and states, and what a step
adds to the process (from its resident size, on the CPU). On a CPU that emulates bf16 a step takes a
minute; --precision fp32 is faster.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / folder) for folder in ("src", "recipes", ".")]

import finetuning
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.shared.text_files import write_json_lines
from benchmarks.shared.torchrun_command import torchrun_command
from benchmarks.trainers.throughput import SMALL_LLAMA, dense_rows, natural_rows, word_tokenizer
from llama_ft import data, models, runtime, training
from llama_ft.config import Config, load
from llama_ft.models.adapters import lora
from llama_ft.models.built import Unit
from llama_ft.phases import NULL_MONITOR
from llama_ft.runtime import Ranks
from llama_ft.training.train_state import LossScale

LENGTH = 512
LORA_RANK = 16
LR = 1e-4
GIB = 2**30
PARTS = ("loss", "packing", "lora", "sharding", "late", "compile")
Feed = Iterator[tuple[list[data.Batch], int]]


def parts_for(method: str, device: str) -> list[str]:
    """Those that can change anything there."""
    without = {"late", "compile"} if device == "cpu" else set[str]()
    if method == "full":
        without.add("lora")
    return [part for part in PARTS if part not in without]


@contextlib.contextmanager
def switched_off(off: set[str]) -> Iterator[None]:
    """The recipe's functions with some of its parts replaced by plain ones."""
    with contextlib.ExitStack() as stack:
        if "loss" in off:
            stack.enter_context(patch.object(models, "use_chunked_loss", lambda built: True))
            stack.enter_context(
                patch.object(training.SupervisedFineTuning, "loss", loss_of_all_logits)
            )
        if "lora" in off:
            stack.enter_context(patch.object(lora, "use_fused_lora", lambda model: None))
        if "sharding" in off:
            stack.enter_context(patch.object(models, "apply_fsdp", shard_plainly))
        yield


def loss_of_all_logits(
    _: Any, built: models.BuiltModel, batch: data.Batch, job: runtime.Ranks
) -> training.LossSum:
    """SupervisedFineTuning.loss, as it is usually written."""
    device = job.device
    layout: dict[str, Any] = (
        {"attention_mask": batch.attention_mask.to(device)} if not batch.is_packed else {}
    )
    if batch.is_packed:
        layout = models.packed_arguments(built, batch.example_lengths, device)
    input_ids = batch.input_ids.to(device)
    logits = built.model(input_ids=input_ids, use_cache=False, **layout).logits.float()
    targets = batch.labels[:, 1:].flatten().to(device)
    flat = logits[:, :-1].flatten(0, 1)
    loss = nn.functional.cross_entropy(flat, targets, ignore_index=data.IGNORED, reduction="sum")
    return training.LossSum(loss, batch.target_tokens)


def shard_plainly(model: Any, mesh: Any, fsdp: Any, precision: Any) -> list[Any]:
    """models.shard: fully_shard on every layer and on what is left; gradients are summed."""
    policy = MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=precision.reduce)
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return [Unit("", type(model).__name__, models.total_weights(model), 0)]


def layers_of(model: nn.Module) -> nn.ModuleList:
    return next(module for name, module in model.named_modules() if name.endswith("model.layers"))  # type: ignore[return-value]


class Row:
    """One line of the table: a model, its optimizer and its rows, and how a step is made.

    Args:
        name: of the part it adds.
        feed: of its batches.
        off: parts it is without.
    """

    def __init__(self, name: str, feed: Feed, off: set[str]) -> None:
        self.name = name
        self.feed = feed
        self.off = off
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.peak_bytes = 0
        self.model: nn.Module
        self.optimizer: torch.optim.Optimizer

    def steps(self, count: int) -> None:
        """Take steps, and wait until they are done."""
        raise NotImplementedError

    def measured(self, count: int, job: Ranks) -> tuple[float, float]:
        """Take `count` steps; seconds of one, and all ranks' tokens of one, without padding."""
        self.tokens = 0
        with switched_off(self.off):
            dist.barrier()
            started = time.perf_counter()
            self.steps(count)
            if job.device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - started
        everyone = torch.tensor([seconds, self.tokens], dtype=torch.float64, device=job.device)
        both = [torch.empty_like(everyone) for _ in range(job.world_size)]
        dist.all_gather(both, everyone)
        slowest_seconds = max(of_rank[0].item() for of_rank in both)
        tokens = sum(of_rank[1].item() for of_rank in both)
        return slowest_seconds / count, tokens / count

    def next_batches(self) -> tuple[list[data.Batch], int]:
        batches, targets = next(self.feed)
        self.tokens += sum(sum(batch.example_lengths) for batch in batches)
        return batches, targets


class Loop(Row):
    """What people write with transformers, peft and FSDP2."""

    def __init__(self, name: str, feed: Feed, config: Config, folder: Path, job: Ranks) -> None:
        super().__init__(name, feed, set(PARTS))
        precision = runtime.PRECISIONS[config.train.precision]
        dtype = precision.compute if config.peft.use_peft else torch.float32
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        if config.peft.use_peft:
            wanted = LoraConfig(r=LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM")
            model = get_peft_model(model, wanted, autocast_adapter_dtype=False).to(dtype)
        model.to(job.device)
        policy = MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=precision.reduce)
        for layer in layers_of(model):
            fully_shard(layer, mesh=job.mesh, mp_policy=policy)
        fully_shard(model, mesh=job.mesh, mp_policy=policy)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.model = model
        self.trained = trained
        self.device = job.device
        self.optimizer = torch.optim.AdamW(trained, lr=LR, fused=True)
        model.train()

    def steps(self, count: int) -> None:
        for _ in range(count):
            (batch,), _ = self.next_batches()
            parts = [
                part.to(self.device)
                for part in (batch.input_ids, batch.attention_mask, batch.labels)
            ]
            ids, mask, labels = parts
            loss = self.model(input_ids=ids, attention_mask=mask, labels=labels).loss
            loss.backward()
            clip_grad_norm_(self.trained, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())


class Recipe(Row):
    """recipes/finetuning.py's model and step, without some of its parts."""

    def __init__(
        self, name: str, feed: Feed, off: set[str], config: Config, folder: Path, job: Ranks
    ) -> None:
        super().__init__(name, feed, off)
        self.config = config
        self.job = job
        model_config = models.load_model_config(folder, False)
        with switched_off(off):
            request = models.ModelRequest(config, folder, model_config)
            self.built = finetuning.build_model(request, job, NULL_MONITOR)
        self.model = self.built.model
        self.optimizer = training.build_optimizer(self.model, config.train)
        training.set_learning_rate(self.optimizer, LR)
        self.loop = training.LoopState(config, LossScale(1.0), job.device)
        self.model.train()

    def steps(self, count: int) -> None:
        unread = []
        for _ in range(count):
            batches, targets = self.next_batches()
            objective = training.SupervisedFineTuning()
            step = data.StepBatches(batches=batches, target_tokens=targets, samples=len(batches))
            outcome = finetuning.train_step(
                self.built, objective, self.optimizer, step, self.loop, self.job
            )
            unread.append(outcome)
            while len(unread) > ("late" not in self.off):
                self.losses.append(unread.pop(0).read()[0])
        self.losses += [outcome.read()[0] for outcome in unread]


def own_bytes(row: Row) -> int:
    """A rank's part of parameters and optimizer states."""
    tensors = [*row.model.parameters(), *row.model.buffers()]
    for state in row.optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(getattr(tensor, "_local_tensor", tensor).nbytes for tensor in tensors)


def note_peak(row: Row, job: Ranks) -> None:
    """Take a step, and note what the rank that holds most holds in it."""
    gc.collect()
    if job.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        row.measured(1, job)
        added = torch.cuda.max_memory_allocated() - before
    else:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = resident("VmRSS")
        row.measured(1, job)
        added = resident("VmHWM") - before
    held = torch.tensor(float(own_bytes(row) + added), device=job.device)
    dist.all_reduce(held, op=dist.ReduceOp.MAX)
    row.peak_bytes = int(held.item())


def resident(name: str) -> int:
    """VmRSS or VmHWM of this process, bytes."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def config_for(
    asked: argparse.Namespace, folder: Path, part_names: set[str], mean_length: float
) -> Config:
    """The recipe's settings with these parts."""
    packed = "packing" in part_names
    rows = 4 if packed else max(1, round(4 * LENGTH / mean_length))
    flags = ["--model_name", str(folder), "--dataset", str(folder / "rows.jsonl"), "--enable_fsdp"]
    flags += [
        "--context_length",
        str(LENGTH),
        "--batch_size_training",
        str(rows),
        "--precision",
        asked.precision,
    ]
    flags += [
        "--lr",
        str(LR),
        "--gradient_clipping",
        "--device",
        asked.device,
        "--num_epochs",
        "1000",
    ]
    flags += ["--batching_strategy", "packing" if packed else "padding"]
    if asked.method == "lora":
        flags += [
            "--use_peft",
            "--peft.r",
            str(LORA_RANK),
            "--target_modules",
            "all-linear",
            "--lora_dropout",
            "0",
        ]
    if "compile" in part_names:
        flags += ["--compile"]
    return load(flags)[0]


def feed_for(config: Config, folder: Path, job: Ranks) -> Feed:
    """This rank's micro-batches, step by step, as the recipe deals them."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    vocabulary = models.vocabulary_size(models.load_model_config(folder, False))
    with job.local_main_process_first():
        rows = data.prepare(
            config.data,
            tokenizer,
            data.DataRequest(
                context_length=LENGTH, want_validation=False, vocabulary_size=vocabulary
            ),
            cache=folder / "cache",
        )
    batch = config.train.batch_size_training * job.world_size
    pad = data.pad_token_id(tokenizer, vocabulary)
    layout = data.training_layout(config, LENGTH, pad, job)
    steps = data.plan_training(config, rows, layout, batch, vocabulary, job)
    with data.Prefetcher(steps.steps(1, steps.total_steps, {})) as ahead:
        for todo in ahead:
            yield todo.batches, todo.target_tokens


def makers(asked: argparse.Namespace, job: Ranks) -> list[Callable[[], Row]]:
    """What builds each row of a table, from the plain loop on."""
    folder = Path(asked.inputs)
    lines = (folder / "rows.jsonl").read_text().splitlines()
    mean_length = statistics.mean(len(json.loads(line)["input_ids"]) for line in lines)
    on = parts_for(asked.method, job.device.type)

    def loop() -> Row:
        config = config_for(asked, folder, set(), mean_length)
        return Loop("loop", feed_for(config, folder, job), config, folder, job)

    def recipe(name: str, parts: set[str]) -> Row:
        config = config_for(asked, folder, parts, mean_length)
        return Recipe(name, feed_for(config, folder, job), set(PARTS) - parts, config, folder, job)

    counts = range(len(on) + 1)
    return [
        loop,
        *(
            partial(recipe, on[count - 1] if count else "recipe", set(on[:count]))
            for count in counts
        ),
    ]


def measure(asked: argparse.Namespace, job: Ranks) -> list[Row]:
    """Build, warm up and time all rows of a table."""
    build = makers(asked, job)
    rows = list[Row]()
    is_alternating = job.device.type == "cpu"
    for group in [build] if is_alternating else [[one] for one in build]:
        here = [make() for make in group]
        for row in here:
            row.measured(1, job)
            note_peak(row, job)
        for _ in range(asked.turns):
            for row in here:
                seconds, tokens = row.measured(1 if is_alternating else asked.steps, job)
                row.rates.append(tokens / seconds)
        if not is_alternating:
            for row in here:
                del row.model, row.optimizer
            torch.cuda.empty_cache()
        rows += here
    return rows


def job_main(asked: argparse.Namespace) -> None:
    """On each rank: one table."""
    with runtime.start(asked.device, "world", False, None, 1800) as job:
        runtime.log.setLevel("WARNING")  # not what every model that is built has to say
        rows = measure(asked, job)
        first = [row.losses[0] for row in rows]
        if max(first) > 1.05 * min(first):
            raise RuntimeError(f"The rows do not train the same: their first losses are {first}")
        if job.is_main:
            told = [
                {"name": row.name, "rates": row.rates, "peak_bytes": row.peak_bytes} for row in rows
            ]
            Path(asked.inputs, "result.json").write_text(json.dumps(told))


def write_inputs(
    folder: Path, kind: str, model: str | None, shape: dict[str, Any], nproc: int
) -> None:
    """Model, tokenizer and rows: dense, or of the demo's natural lengths."""
    demo = data.build_demo(data.cache_dir()).model_dir
    if model is not None:
        for file in Path(model).iterdir():
            (folder / file.name).symlink_to(file.absolute())
        tokenizer = AutoTokenizer.from_pretrained(model)
    else:
        tokenizer = (
            AutoTokenizer.from_pretrained(demo)
            if kind == "natural"
            else word_tokenizer(shape["vocab_size"])
        )
        torch.manual_seed(0)
        LlamaForCausalLM(
            LlamaConfig(**{**shape, "vocab_size": len(tokenizer)})
        ).bfloat16().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    if kind == "natural":
        rows = natural_rows(folder, LENGTH, 64 * nproc * 4 * LENGTH)
    else:
        rows = dense_rows(len(tokenizer), LENGTH, 8 * nproc * 4)
    write_json_lines(folder / "rows.jsonl", rows)


def print_table(title: str, rows: list[dict[str, Any]]) -> None:
    print(
        f"\n{title}\n\n| | tokens/s (min to max) | x the row before | x the first | peak, GiB a rank |"
    )
    print("|---" * 5 + "|")
    for number, row in enumerate(rows):
        before = rows[max(0, number - 1)]

        def ratio(other: dict[str, Any], row: dict[str, Any] = row) -> float:
            return statistics.median(
                mine / its for mine, its in zip(row["rates"], other["rates"], strict=True)
            )

        rate = f"{statistics.median(row['rates']):,.0f} ({min(row['rates']):,.0f} to {max(row['rates']):,.0f})"
        name = row["name"] if number == 0 else f"+ {row['name']}"
        print(
            f"| {name} | {rate} | {ratio(before):.2f} | {ratio(rows[0]):.2f} | {row['peak_bytes'] / GIB:.2f} |"
        )


def main() -> None:
    """Start a job for every table, and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--precision", default="bf16_mixed")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=10, help="a turn, on CUDA; on the CPU a turn is a step"
    )
    parser.add_argument("--methods", default="full,lora")
    parser.add_argument("--rows", default="dense,natural")
    parser.add_argument(
        "--model", help="a model's folder; default: a random Llama of 110 M parameters"
    )
    parser.add_argument(
        "--layers", type=int, default=SMALL_LLAMA["num_hidden_layers"], help="of the random Llama"
    )
    parser.add_argument(
        "--width", type=int, default=SMALL_LLAMA["hidden_size"], help="of the random Llama"
    )
    parser.add_argument("--inputs", help=argparse.SUPPRESS)
    parser.add_argument("--method", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inputs:
        job_main(asked)
        return
    shape = {**SMALL_LLAMA, "num_hidden_layers": asked.layers, "hidden_size": asked.width}
    for kind in asked.rows.split(","):
        with tempfile.TemporaryDirectory(prefix="ablation-") as folder:
            write_inputs(Path(folder), kind, asked.model, shape, asked.nproc)
            for method in asked.methods.split(","):
                command = [*torchrun_command(asked.nproc), __file__, "--inputs", folder]
                command += ["--method", method]
                command += ["--device", asked.device, "--precision", asked.precision]
                command += ["--turns", str(asked.turns), "--steps", str(asked.steps)]
                subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
                rows = json.loads(Path(folder, "result.json").read_text())
                print_table(f"{method}, {kind} rows", rows)


if __name__ == "__main__":
    main()
