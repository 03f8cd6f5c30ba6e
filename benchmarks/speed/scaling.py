"""Measure time and memory of a step with more tokens, longer samples, more layers and more ranks.

    python benchmarks/speed/scaling.py    # minutes, on a CPU
    python benchmarks/speed/scaling.py --longest 131072    # samples of up to 128k tokens; attention alone takes minutes

Every line is a run of recipes/finetuning.py under torchrun, on a random Llama and samples of one
length with all tokens in the loss. Seconds are the median of all steps but the first. Memory is the
peak of the rank with the highest memory: the process's anonymous memory on a CPU, torch's memory on
a GPU. The tables:

    tokens      per step, in micro-batches of more and more samples of 512 tokens: full fine-tuning
    length      of a sample, one per step: LoRA, --activation_checkpointing full
    layers      full fine-tuning
    ranks       full fine-tuning and LoRA, with the same samples per step on every rank

Below each table is the growth: seconds ~ FLOPs^e, fitted to the logarithms. 1 is linear; less means
a fixed cost that larger steps share; more is a loss. The FLOPs of a step are those of its matmuls:
2 per weight and token for each of forward, recomputation, backward to the inputs and backward to
the weights; and of causal attention: 2 x length x width per token and layer, twice that backward.
Peaks are fitted by a line: a constant, and an amount per item.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `import benchmarks`

from benchmarks.checkpoints.crash import REPOSITORY, write_inputs
from benchmarks.shared.text_files import read_json_lines
from benchmarks.shared.torchrun_command import torchrun_command

VOCABULARY = 8000
HEAD_WIDTH = 64
KIB = 2**10
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        method: full, or lora.
        ranks: processes.
        micro_batch: rows a rank and step.
        length: tokens of a row.
        layers: of the model.
        width: hidden size.
        steps: how many; the first is not counted.
        recomputes: whether layers are computed again in the backward pass.
    """

    method: str = "full"
    ranks: int = 1
    micro_batch: int = 4
    length: int = 512
    layers: int = 4
    width: int = 256
    steps: int = 5
    recomputes: bool = False

    @property
    def tokens(self) -> int:
        """Of a step, all ranks'."""
        return self.ranks * self.micro_batch * self.length

    @property
    def flops(self) -> float:
        """Of a step, all ranks'."""
        weights = self.layers * (4 * self.width**2 + 3 * self.width * intermediate(self.width))
        head = VOCABULARY * self.width
        passes = 2 + self.recomputes + (self.method == "full")
        attention = 2 * self.length * self.width * self.layers * (3 + self.recomputes)
        return self.tokens * (
            2 * weights * passes + 2 * head * (2 + (self.method == "full")) + attention
        )


def intermediate(width: int) -> int:
    """As Llama has it: 8 / 3 of the width."""
    return 8 * width // 3 // 8 * 8


@dataclass(frozen=True)
class Cost:
    """Of a step: seconds, and the largest rank's peak."""

    seconds: float
    peak_bytes: int


def write_model(folder: Path, case: Case) -> Path:
    """A random Llama with crash.py's tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = folder / f"model-{case.layers}-{case.width}"
    if not model.exists():
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=case.width,
            intermediate_size=intermediate(case.width),
            num_hidden_layers=case.layers,
            num_attention_heads=case.width // HEAD_WIDTH,
            vocab_size=VOCABULARY,
            max_position_embeddings=2**17,
        )
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(model)
        for file in (folder / "model").glob("token*"):
            (model / file.name).write_bytes(file.read_bytes())
    return model


def write_rows(folder: Path, case: Case) -> Path:
    """As many rows of one length as the run takes."""
    count = case.ranks * case.micro_batch * case.steps
    file = folder / f"rows-{case.length}-{count}.jsonl"
    with open(file, "w") as lines:
        for number in range(count):
            ids = []
            for place in range(case.length):
                ids.append((7 * place + place * place // 64 + number) % 256)
            lines.write(json.dumps({"input_ids": ids, "labels": ids}) + "\n")
    return file


def measure(folder: Path, case: Case, device: str, precision: str) -> Cost:
    """Run the recipe."""
    run = Path(tempfile.mkdtemp(dir=folder)) / "run"
    flags = [
        "--model_name",
        str(write_model(folder, case)),
        "--dataset",
        str(write_rows(folder, case)),
    ]
    flags += ["--context_length", str(case.length), "--batch_size_training", str(case.micro_batch)]
    flags += ["--max_train_step", str(case.steps), "--device", device, "--precision", precision]
    flags += [
        "--output_dir",
        str(run),
        "--save_model",
        "false",
        "--no_plan",
        "--lr",
        "1e-4",
        "--log_steps",
        "1",
    ]
    flags += ["--enable_fsdp"] if case.ranks > 1 else []
    flags += (
        ["--use_peft", "--target_modules", "all-linear", "--peft.r", "16"]
        if case.method == "lora"
        else []
    )
    flags += ["--activation_checkpointing", "full"] if case.recomputes else []
    command = torchrun_command(case.ranks)
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    finished = subprocess.run(
        [*command, str(REPOSITORY / "recipes" / "finetuning.py"), *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={
            **os.environ,
            **hidden,
            "PYTHONPATH": str(REPOSITORY / "src"),
            "LLAMA_FT_CACHE": str(folder / "cache"),
        },
    )
    if finished.returncode:
        raise SystemExit(f"{case} failed:\n{finished.stdout}")
    lines = read_json_lines(run / "metrics.jsonl")
    steps = [line for line in lines if "perf/step_seconds" in line]
    peaks = [
        line.get("memory/device_peak_bytes") or line["memory/host_peak_bytes"] for line in steps
    ]
    seconds = statistics.median(line["perf/step_seconds"] for line in steps[1:])
    return Cost(seconds, max(map(max, peaks)))


def exponent(work: Sequence[float], seconds: Sequence[float]) -> float:
    """e of seconds ~ work^e, by least squares of the logarithms."""
    log_work = list(map(math.log, work))
    log_seconds = list(map(math.log, seconds))
    return statistics.linear_regression(log_work, log_seconds).slope


def table(
    title: str,
    column: str,
    cases: dict[str, Case],
    amounts: list[float],
    unit: str,
    asked: argparse.Namespace,
    folder: Path,
) -> None:
    """Measure and print.

    Args:
        title: above it.
        column: the heading of what varies.
        cases: by their names in that column.
        amounts: of what varies, for the line of the peaks.
        unit: of the amounts.
        asked: the settings of the command line.
        folder: for models, rows and runs.
    """
    print(
        f"\n{title}\n\n| {column} | tokens/s | GFLOP/s | s a step | peak, GiB a rank |\n"
        + "|---" * 5
        + "|"
    )
    costs = []
    for name, case in cases.items():
        cost = measure(folder, case, asked.device, asked.precision)
        costs.append(cost)
        print(
            f"| {name} | {case.tokens / cost.seconds:,.0f} | {case.flops / cost.seconds / 1e9:,.1f} | "
            f"{cost.seconds:.3f} | {cost.peak_bytes / GIB:.2f} |",
            flush=True,
        )
    if len(costs) < 2:
        return
    work = [case.flops for case in cases.values()]
    seconds = [cost.seconds for cost in costs]
    line = statistics.linear_regression(amounts, [cost.peak_bytes for cost in costs])
    print(
        f"\nseconds ~ FLOPs^{exponent(work, seconds):.2f}, between the last two "
        f"^{exponent(work[-2:], seconds[-2:]):.2f}; peak = {line.intercept / GIB:.2f} GiB + "
        f"{line.slope / KIB:,.1f} KiB a {unit}",
        flush=True,
    )


def doubling(first: int, last: int) -> list[int]:
    return [first * 2**power for power in range(int(math.log2(last // first)) + 1)]


def ranks_table(base: Case, asked: argparse.Namespace, folder: Path) -> None:
    """Every rank has the same work: the seconds of a step should stay."""
    print(f"\n{base.micro_batch} rows of {base.length} tokens a rank\n")
    print(
        "| method | ranks | tokens/s | tokens/s a rank | s a step | peak, GiB a rank |\n"
        + "|---" * 6
        + "|"
    )
    for method in ("full", "lora"):
        for ranks in map(int, asked.ranks.split(",")):
            case = replace(base, method=method, ranks=ranks)
            cost = measure(folder, case, asked.device, asked.precision)
            rate = case.tokens / cost.seconds
            numbers = f"{rate:,.0f} | {rate / ranks:,.0f} | {cost.seconds:.3f} | {cost.peak_bytes / GIB:.2f}"
            print(f"| {method} | {ranks} | {numbers} |", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", default="tokens,length,layers,ranks")
    parser.add_argument(
        "--most_tokens", type=int, default=16384, help="of a step in the first table"
    )
    parser.add_argument("--longest", type=int, default=32768, help="row in the second table")
    parser.add_argument("--most_layers", type=int, default=16)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument(
        "--width", type=int, default=256, help="hidden size; the second table takes 64 on a CPU"
    )
    parser.add_argument(
        "--steps", type=int, default=5, help="a run; rows longer than 8192 take 3, than 65536 2"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--folder", help="for models, rows and runs; a temporary one by default")
    asked = parser.parse_args()
    wanted = asked.tables.split(",")
    base = Case(width=asked.width, steps=asked.steps)
    with tempfile.TemporaryDirectory(prefix="scaling-", dir=asked.folder) as name:
        folder = Path(name)
        write_inputs(folder)
        if "tokens" in wanted:
            sizes = doubling(512, asked.most_tokens)
            cases = {f"{size:,}": replace(base, micro_batch=size // 512) for size in sizes}
            table(
                "Tokens of a step", "tokens", cases, list(map(float, sizes)), "token", asked, folder
            )
        if "length" in wanted:
            lengths = doubling(1024, asked.longest)
            narrow = replace(base, method="lora", micro_batch=1, recomputes=True, layers=2)
            narrow = replace(narrow, width=HEAD_WIDTH) if asked.device == "cpu" else narrow
            cases = {}
            for length in lengths:
                steps = asked.steps
                if length > 8192:
                    steps = 2 if length > 65536 else 3
                cases[f"{length:,}"] = replace(narrow, length=length, steps=steps)
            title = "Length of a row (LoRA, layers recomputed)"
            table(title, "tokens", cases, list(map(float, lengths)), "token", asked, folder)
        if "layers" in wanted:
            counts = doubling(2, asked.most_layers)
            cases = {str(count): replace(base, layers=count) for count in counts}
            table("Layers", "layers", cases, list(map(float, counts)), "layer", asked, folder)
        if "ranks" in wanted:
            ranks_table(base, asked, folder)


if __name__ == "__main__":
    main()
