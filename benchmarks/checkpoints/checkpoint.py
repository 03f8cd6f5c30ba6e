"""Measure how long a checkpoint takes and stalls training, compared with copying and writing the
same bytes.

    python benchmarks/checkpoints/checkpoint.py

The model is a random Llama on 1 and 2 ranks under torchrun (full: trained in fp32, with AdamW's
states; lora: adapters only). Every round runs these one after another, on all ranks at once, each
with its own rows:

    copy        a plain clone of every tensor into host memory
    torch.save  of those clones, and fsync
    write       of their bytes with os.write in blocks of 4 MiB, and fsync
    sync        a save with --save_async false; then a new optimizer and the weights are restored from it
    async       a save while training continues, until it is complete

`stall` is how long training waits. `total` is the time until the checkpoint is complete: synced,
with checksums, under its final name. `resume` is the time to restore, and `read` the time to read
the same bytes. The bounds are 1.5 x the copy + 50 ms, 2 x the faster of the two writes + 0.5 s, and
2 x the reading + 0.5 s. Times are medians over rounds of the slowest rank; `x` is the median of
each round's ratio. `slowed` is the additional time of training steps (compared with `step`), as a
share of the total. All times are in seconds.
"""

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "src")]

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.shared.text_files import print_columns, read_json_lines
from benchmarks.shared.torchrun_command import torchrun_command
from llama_ft import models, runtime
from llama_ft.checkpoint import Checkpoint, CheckpointWriter, restore
from llama_ft.checkpoint.state import own_state
from llama_ft.config import CheckpointConfig, FSDPConfig, ModelConfig, PeftConfig, TrainConfig
from llama_ft.models.base.shards import local_shard
from llama_ft.runtime import Ranks
from llama_ft.training import build_optimizer

PIECE_BYTES = 2**22
USUAL_STEPS = 3  # in each round, for the speed of undisturbed training
KINDS = {"full": PeftConfig(), "lora": PeftConfig(use_peft=True, target_modules="all-linear")}
SETTINGS = TrainConfig(precision="fp32")
Round = dict[str, float]


class Trainee:
    """A model that is trained on one batch, over and over."""

    def __init__(self, folder: Path, kind: str, tokens: int, job: Ranks) -> None:
        precision = runtime.PRECISIONS["fp32"]
        peft = KINDS[kind]
        self.job = job
        model_config = models.load_model_config(folder, False)
        settings = ModelConfig(model_name=str(folder))
        built = models.build_on_meta(model_config, settings, folder=folder)
        self.model = built.model
        if peft.use_peft:
            built.adapter = models.inject_lora(built, peft, str(folder))
        models.set_storage_dtypes(self.model, precision)
        models.apply_fsdp(built, job.mesh, FSDPConfig(enable_fsdp=True), precision)
        models.load_weights(built, job, models.LoadSettings(peft, 0, precision.frozen))
        self.optimizer = build_optimizer(self.model, SETTINGS)
        self.batch = torch.randint(0, self.model.config.vocab_size, (1, tokens), device=job.device)
        self.step()

    def step(self) -> None:
        """One optimizer step; it ends with a collective that waits for every rank, as the recipe's
        does."""
        loss = self.model(input_ids=self.batch, labels=self.batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.job.all_gather_floats(loss.item())


def measure_round(number: int, trainee: Trainee, folder: Path, job: Ranks) -> Round:
    """Each way once, another one first each time: how quickly memory and page cache can be had
    depends on what was freed just before."""
    usual = statistics.median(slowest(trainee.step, job) for _ in range(USUAL_STEPS))
    nbytes = sum(tensor.nbytes for tensor in own_rows(trainee, job).values())
    all_bytes = job.all_gather_floats(nbytes).sum().item()
    found: Round = {"usual step": usual, "bytes": all_bytes}
    ways = list(WAYS)
    first = number % len(ways)
    for way in ways[first:] + ways[:first]:
        if job.is_main:
            (folder / way).mkdir()
        dist.barrier()
        found |= WAYS[way](way, number, usual, trainee, folder / way, job)
        dist.barrier()
        if job.is_main:
            shutil.rmtree(folder / way)
    return found


def measure_plain(
    way: str, number: int, usual: float, trainee: Trainee, folder: Path, job: Ranks
) -> Round:
    """Copy and write, without llama_ft."""
    tensors = own_rows(trainee, job)
    copies: dict[str, torch.Tensor] = {}

    def copy() -> None:
        for name, tensor in tensors.items():
            copies[name] = tensor.to("cpu", copy=True)

    copy_seconds = slowest(copy, job)
    write = write_with_torch if way == "torch.save" else write_bytes
    seconds = slowest(lambda: write(copies, folder / str(job.rank)), job)
    return {f"{way} copy": copy_seconds, way: seconds}


def own_rows(trainee: Trainee, job: Ranks) -> dict[str, torch.Tensor]:
    """What this rank writes, where training has it."""
    state = own_state(trainee.model, trainee.optimizer, job)
    return {name: local_shard(tensor) for name, tensor in state.items()}


def measure_save(
    way: str, number: int, usual: float, trainee: Trainee, folder: Path, job: Ranks
) -> Round:
    """Save one checkpoint, while training continues until it is complete."""
    about = {"config": {"train": dataclasses.asdict(SETTINGS)}}
    writer = CheckpointWriter(folder, CheckpointConfig(save_async=way == "async"), about, job)
    timings: Round = {}
    stall = slowest(lambda: writer.save(number, trainee.model, trainee.optimizer, {}), job)
    resumed = time.perf_counter()
    steps = 0
    complete = way == "sync"
    while not complete:
        trainee.step()
        steps += 1
        timings |= writer.timings()
        complete = bool(job.all_gather_floats("perf/save_seconds" in timings).all())
    lost = time.perf_counter() - resumed - steps * usual
    writer.finish()
    timings |= writer.timings()
    total = job.all_gather_floats(timings["perf/save_seconds"]).max().item()
    if way == "sync" and writer.last is not None:
        timings = measure_resume(Checkpoint(writer.last), trainee, job)
    return {f"{way} stall": stall, f"{way} total": total, f"{way} lost": lost, **timings}


def measure_resume(saved: Checkpoint, trainee: Trainee, job: Ranks) -> Round:
    """Read a rank's file, and restore from all files, which are in the page cache both times."""
    file = sorted(saved.folder.glob("*.safetensors"))[job.rank]
    trainee.optimizer = build_optimizer(trainee.model, SETTINGS)
    file.read_bytes()  # brings it into the page cache
    return {
        "read": slowest(lambda: len(file.read_bytes()) and None, job),
        "resume": slowest(lambda: restore(saved, trainee.model, trainee.optimizer, job), job),
    }


def write_with_torch(tensors: dict[str, torch.Tensor], file: Path) -> None:
    with open(file, "wb") as opened:
        torch.save(tensors, opened)
        opened.flush()
        os.fsync(opened.fileno())


def write_bytes(tensors: dict[str, torch.Tensor], file: Path) -> None:
    with open(file, "wb", buffering=0) as opened:
        for tensor in tensors.values():
            data = tensor.view(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), PIECE_BYTES):
                opened.write(data[start : start + PIECE_BYTES])
        os.fsync(opened.fileno())


WAYS: dict[str, Callable[[str, int, float, Trainee, Path, Ranks], Round]] = {
    "torch.save": measure_plain,
    "write": measure_plain,
    "sync": measure_save,
    "async": measure_save,
}


def slowest(work: Callable[[], None], job: Ranks) -> float:
    """Seconds that the slowest rank takes; all begin together."""
    dist.barrier()
    started = time.perf_counter()
    work()
    if job.device.type == "cuda":
        torch.cuda.synchronize()
    return job.all_gather_floats(time.perf_counter() - started).max().item()


def worker(asked: argparse.Namespace) -> None:
    """Run by torchrun: the rounds of one model on these ranks. Rank 0 writes the results next to
    the model."""
    with runtime.start(asked.device, "world") as job:
        trainees = {kind: Trainee(asked.worker, kind, asked.tokens, job) for kind in KINDS}
        for number in range(asked.rounds + 1):
            for kind, trainee in trainees.items():
                found = measure_round(number, trainee, asked.worker, job)
                if job.is_main and number > 0:  # the first warms up
                    with open(asked.worker / "found.jsonl", "a") as file:
                        file.write(
                            json.dumps({"kind": kind, "ranks": job.world_size, **found}) + "\n"
                        )
                    print(
                        f"round {number} of {asked.rounds}: {kind} on {job.world_size}",
                        file=sys.stderr,
                    )


@contextmanager
def model_folder(parent: str, layers: int) -> Iterator[Path]:
    """Save a random Llama in bf16. At the end it is deleted with all files next to it."""
    config = LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_attention_heads=12,
        num_key_value_heads=12,
        num_hidden_layers=layers,
        vocab_size=16000,
    )
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=parent) as temporary:
        LlamaForCausalLM(config).bfloat16().save_pretrained(temporary)
        yield Path(temporary)


def row(kind: str, ranks: int, way: str, rounds: list[Round]) -> tuple[str, ...]:
    """A line of the table."""

    def median(of: Callable[[Round], float]) -> float:
        return statistics.median(of(each) for each in rounds)

    def copy(each: Round) -> float:
        return (each["torch.save copy"] + each["write copy"]) / 2

    def quicker(each: Round) -> float:
        return min(each["write"], each["torch.save"])

    stall = median(lambda each: each[f"{way} stall"])
    total = median(lambda each: each[f"{way} total"])
    read = median(lambda each: each["read"])
    resume = median(lambda each: each["resume"])
    late = []
    # sync: all of it is
    if way == "async" and stall > 1.5 * median(copy) + 0.05:
        late.append("stall")
    if total > 2 * median(quicker) + 0.5:
        late.append("total")
    if resume > 2 * read + 0.5:
        late.append("resume")
    line = [kind, str(ranks), way, f"{rounds[0]['bytes'] / 2**20:,.0f}", f"{median(copy):.3f}"]
    waits = [f"{stall:.3f}", f"{median(lambda each: each['async stall'] / copy(each)):.2f}"]
    line += waits if way == "async" else ["", ""]
    line += [
        f"{median(lambda each, name=name: each[name]):.2f}" for name in ("torch.save", "write")
    ]  # type: ignore[misc]
    line += [f"{total:.2f}", f"{median(lambda each: each[f'{way} total'] / quicker(each)):.2f}"]
    line += [f"{read:.3f}", f"{resume:.3f}"] if way == "sync" else ["", ""]
    step = median(lambda each: each["usual step"])
    slowed = ""
    if total > step:  # else it is all chance
        slowed = f"{median(lambda each: each['async lost'] / each['async total']):.0%}"
    return (
        *line,
        *((slowed, f"{step:.2f}") if way == "async" else ("", "")),
        f"over: {', '.join(late)}" if late else "pass",
    )


def print_table(lines: list[tuple[str, ...]]) -> None:
    titles = "weights ranks way MiB copy stall x torch.save write total x read resume slowed step verdict"
    table = [tuple(titles.split()), *lines]
    print_columns(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--layers", type=int, default=12, help="of the Llama; 12 are 110 M parameters"
    )
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=8, help="how often everything is measured")
    parser.add_argument("--tokens", type=int, default=16, help="of a training step")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--folder", default=".", help="on the disk that is measured")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        return worker(asked)
    with model_folder(asked.folder, asked.layers) as folder:
        for ranks in asked.ranks.split(","):
            command = [*torchrun_command(int(ranks)), __file__, *sys.argv[1:]]
            subprocess.run([*command, "--worker", str(folder.resolve())], check=True)
        found = read_json_lines(folder / "found.jsonl")
    lines = []
    for kind in KINDS:
        for count in map(int, asked.ranks.split(",")):
            rounds = [each for each in found if each["kind"] == kind and each["ranks"] == count]
            lines += [row(kind, count, way, rounds) for way in ("sync", "async")]
    print_table(lines)


if __name__ == "__main__":
    main()
