"""Checks of gpu_check.py with two ranks: over NCCL on two GPUs, over gloo on a CPU."""

from collections.abc import Iterator

import torch

from benchmarks.gpu.gpu_bench import LORA, ON_GPU, RECIPES, Bench, Row, last_line, left_out
from benchmarks.gpu.gpu_cases import NF4, SCORED, compare_losses
from benchmarks.gpu.gpu_models import DEVICE
from benchmarks.shared.torchrun_command import torchrun_command

SHARDED = ["--enable_fsdp"]
SHARED = [*SHARDED, "--sequence_parallel_size", "2"]
# name -> model and samples, see `Bench.tiny`, and flags
TWO_RANKS: dict[str, tuple[str, str, list[str]]] = {
    "full": ("", "tokens", SHARDED),
    "full, SHARD_GRAD_OP": ("", "tokens", [*SHARDED, "--sharding_strategy", "SHARD_GRAD_OP"]),
    "LoRA in DDP": ("", "tokens", LORA),
    "LoRA, nf4": ("", "tokens", [*LORA, *NF4, *SHARDED]),
    "shared sequences": ("", "tokens", [*LORA, *SHARED]),
    "scored answers": ("", "answers", [*LORA, *SHARDED, *SCORED]),
    "images": ("images", "chats", [*LORA, *SHARDED]),
}
ONE_RANK = ("--enable_fsdp", "--sequence_parallel_size", "--sharding_strategy")  # not with it
SECONDS_PER_LAUNCH = 60.0


def run_name(name: str) -> str:
    """Return the name of a run, which is its claim in the table, too."""
    return f"two ranks, {name}"


def two_ranks(bench: Bench) -> Iterator[Row]:
    """Run three steps on two ranks, and compare with one rank on the CPU in fp32."""
    if ON_GPU and torch.cuda.device_count() < 2:
        yield left_out("two_ranks", "NCCL")._replace(found="left out: one GPU")
        return
    for name, (model, samples, flags) in TWO_RANKS.items():
        if bench.seconds_left < SECONDS_PER_LAUNCH / 2:
            yield left_out("two_ranks", run_name(name))
            continue
        row = _beside_one_rank(bench, name, (model, samples), flags)
        yield from bench.guarded("two_ranks", run_name(name), row)


def _beside_one_rank(
    bench: Bench, name: str, inputs: tuple[str, str], flags: list[str]
) -> Iterator[Row]:
    run = run_name(name)
    common = [*bench.tiny(*inputs), "--max_train_step", "3", "--save_every_epoch", "false"]
    command = [*torchrun_command(2), str(RECIPES / "finetuning.py"), *common, *flags]
    command += ["--device", DEVICE, "--output_dir", str(bench.scratch / run)]
    exit_code, printed = bench.run_command(run, command, SECONDS_PER_LAUNCH)
    if exit_code != 0:
        found = "did not end" if exit_code is None else last_line(printed)
        bench.keep(run, f"exit code {exit_code}", printed)
        yield Row("two_ranks", run, "3 steps", found, False)
        return
    alone = f"one rank, {name}"
    # the same samples per step
    steps = "1" if "--sequence_parallel_size" in flags else "2"
    words = [*common, *_without(flags, ONE_RANK), "--gradient_accumulation_steps", steps]
    words += ["--precision", "fp32", "--device", "cpu"]
    for case in bench.run({alone: words}):
        if case.error:
            yield Row("two_ranks", run, "3 steps of one rank", case.error, False)
            return
    yield from compare_losses(bench, "two_ranks", run, alone, 5e-3)


def _without(flags: list[str], names: tuple[str, ...]) -> list[str]:
    """Return flags without those of `names` and their values."""
    remaining = []
    is_left_out = False
    for word in flags:
        if word.startswith("--"):
            is_left_out = word in names
        if not is_left_out:
            remaining.append(word)
    return remaining
