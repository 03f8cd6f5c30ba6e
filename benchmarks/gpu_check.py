"""Check llama_ft's CUDA features on this machine's GPU, in parts of less than 10 minutes.

    python benchmarks/gpu_check.py --only
    start,cases,waits,attention,quantized,sharded,resume,ends,oom
    python benchmarks/gpu_check.py --only lora8b,fixes  # 80 GB
    python benchmarks/gpu_check.py --only full,quant8b,profile,inference,plan  # 80 GB
    python benchmarks/gpu_check.py --seconds 600  # everything that fits into 10 minutes

Each line of the table is written to OUTPUT/gpu_check.jsonl at once. Models are made from a seed,
and nothing is downloaded. Without a GPU the small parts run on the CPU, which checks this script.
Exit code 1: a check failed. docs/development/gpu-check.md says how to run it on a machine without a
network.
"""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
from gpu_bench import (
    DEVICE,
    LORA,
    ON_GPU,
    RECIPES,
    SHALLOW,
    Bench,
    Row,
    last_line,
    make_model,
    run_child,
)
from gpu_kernels import attention, kernels, one_pass, quantized, sharded
from gpu_speed import fixes, full, inference, lora8b, plan, profile, quant8b

CASES = {
    "full": [],
    "full, padding": ["--batching_strategy", "padding"],
    "full, fp32": ["--precision", "fp32"],
    "full, bf16_pure, anyprecision": ["--precision", "bf16_pure", "--optimizer", "anyprecision"],
    "AdamW8bit": ["--optimizer", "AdamW8bit"],
    "SGD": ["--optimizer", "SGD", "--momentum", "0.9"],
    "Adafactor": ["--optimizer", "Adafactor"],
    "checkpointing full": ["--activation_checkpointing", "full"],
    "checkpointing selective": ["--activation_checkpointing", "selective"],
    "checkpointing every_k": ["--activation_checkpointing", "every_k"],
    "LoRA": LORA,
    "LoRA, padding": [*LORA, "--batching_strategy", "padding"],
    "LoRA, 8 bit": [*LORA, "--quantization", "8bit"],
    "LoRA, nf4": [*LORA, "--quantization", "4bit"],
    "LoRA, fp4": [*LORA, "--quantization", "4bit", "--quant_type", "fp4"],
    "LoRA, dropout": [*LORA[:-1], "0.05"],
    "full, low_cpu_fsdp": ["--enable_fsdp", "--low_cpu_fsdp"],
}
ON_GPU_ONLY = {  # name -> base case, and its additional flags
    "full, fp16": ("full", ["--precision", "fp16"]),
    "activation_offload": ("checkpointing full", ["--activation_offload"]),
    "LoRA, 8 bit, int8_threshold 0": ("LoRA, 8 bit", ["--int8_threshold", "0"]),
    "LoRA, nf4, offload": ("LoRA, nf4", ["--enable_fsdp", "--fsdp_cpu_offload"]),
    "full, Liger": ("full", ["--use_liger", "true"]),
}


def start(bench: Bench) -> Iterator[Row]:
    """Versions, libraries, and how long one process takes to join a group of its own."""
    import peft
    import transformers

    name = torch.cuda.get_device_name() if ON_GPU else "CPU"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}"
    yield Row("start", "device", "a GPU", name, ON_GPU)
    yield Row("start", "versions", "imported", versions, True)
    for library, is_needed in (("bitsandbytes", True), ("liger_kernel", False)):
        try:
            importlib.import_module(library)
            yield Row("start", library, "imported", version(library), True)
        except Exception as error:
            yield Row(
                "start",
                library,
                "imported" if is_needed else "optional",
                repr(error)[:80],
                not is_needed,
            )
    if ON_GPU:
        major, minor = torch.cuda.get_device_capability()
        found = (
            f"{major}.{minor}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
        )
        yield Row("start", "compute capability", ">= 8.0", found, major >= 8)
    begun = time.monotonic()
    dist.init_process_group(
        "nccl" if ON_GPU else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    dist.all_reduce(torch.ones(1, device=DEVICE))
    dist.destroy_process_group()
    seconds = time.monotonic() - begun
    yield Row(
        "start",
        "a group of one rank, made, used and ended",
        "< 20 s",
        f"{seconds:.1f} s",
        seconds < 20,
    )


def cases(bench: Bench) -> Iterator[Row]:
    """Run three steps of every kind of run, and compare with the same in fp32 on the CPU."""
    common = [*bench.tiny(), "--max_train_step", "3"]
    every = {name: (name, list[str]()) for name in CASES} | (ON_GPU_ONLY if ON_GPU else {})
    runs = {
        name: [*common, *CASES[case], *more, "--device", DEVICE]
        for name, (case, more) in every.items()
    }
    for name, flags in CASES.items():  # the last --precision counts
        precision = [] if "bf16_pure" in flags else ["--precision", "fp32"]
        runs[f"{name} on the CPU"] = [*common, *flags, *precision, "--device", "cpu"]
    failed = bench.run(runs)
    for name, (case, _) in every.items():
        if wrong := failed.get(name) or failed.get(f"{case} on the CPU"):
            is_missing = "liger-kernel cannot be imported" in wrong  # liger-kernel
            yield Row("cases", name, "3 steps", last_line(wrong), is_missing)
            continue
        found, expected = (
            [it["train/loss"] for it in bench.steps(run)] for run in (name, f"{case} on the CPU")
        )
        error = max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))
        limit = 1e-4 if "fp32" in name else 2e-2
        yield Row(
            "cases",
            name,
            f"losses of the CPU in fp32, within {limit:g}",
            f"{error:.1e}",
            error < limit,
        )


def waits(bench: Bench) -> Iterator[Row]:
    """From the second step on, the host waits for nothing: neither forward nor backward nor the
    update."""
    names = ["full", "full, padding", "LoRA", "LoRA, nf4", "LoRA, 8 bit", "checkpointing selective"]
    common = [*bench.tiny(), "--max_train_step", "3", "--device", DEVICE]
    failed = bench.run(
        {f"waits, {name}": [*common, *CASES[name]] for name in names}, toggle="fail at waits"
    )
    for name in names:
        wrong = failed.get(f"waits, {name}")
        yield Row("waits", name, "none", last_line(wrong) if wrong else "none", wrong is None)


def resume(bench: Bench) -> Iterator[Row]:
    """A run resumed from its middle has the losses of the uninterrupted one."""
    common = [*bench.tiny(), "--max_train_step", "6", "--save_steps", "3", "--device", DEVICE]
    on = ["--resume", str(bench.output / "whole" / "checkpoints" / "step-000003")]
    failed = bench.run({"whole": common, "resumed": [*common, *on]})
    if failed:
        yield Row("resume", "both runs", "finished", last_line(next(iter(failed.values()))), False)
        return
    losses = [
        [line["train/loss"] for line in bench.steps(name)][-3:] for name in ("whole", "resumed")
    ]
    error = max(abs(a / b - 1) for a, b in zip(*losses, strict=True))
    limit = 2e-3 if ON_GPU else 0.0  # flash attention's backward pass adds in any order
    yield Row(
        "resume",
        "losses after step 3",
        f"those of one run, within {limit:g}",
        f"{error:.1e}",
        error <= limit,
    )


def ends(bench: Bench) -> Iterator[Row]:
    """How a run under torchrun ends: by itself, by a mistake, by a loss that is not a number, by
    signals."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "1",
    ]
    command = [
        *launcher,
        str(RECIPES / "finetuning.py"),
        *bench.tiny(),
        "--device",
        DEVICE,
        "--enable_fsdp",
    ]
    by_itself = (("finishes", ["--max_train_step", "3"], 0), ("unknown flag", ["--lrr", "1"], 1))
    for name, flags, expected in (*by_itself, ("loss is NaN", ["--lr", "1e30"], 1)):
        run = ["--output_dir", str(bench.output / f"ends {name}")]
        done = subprocess.run([*command, *flags, *run], capture_output=True, text=True, timeout=300)
        yield Row(
            "ends", name, f"exit code {expected}", str(done.returncode), done.returncode == expected
        )
    endless = ["--num_epochs", "100000", "--save_steps", "1000000"]
    for name, number, expected in (
        ("SIGTERM", signal.SIGTERM, "stopped"),
        ("kill -9", signal.SIGKILL, "running"),
    ):
        run = bench.output / f"ends {name}"
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen([*command, *endless, "--output_dir", str(run)], **streams)
        until = time.monotonic() + 120
        while (
            not (run / "metrics.jsonl").exists()
            and time.monotonic() < until
            and process.poll() is None
        ):
            time.sleep(0.5)
        time.sleep(2)
        rank = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
        os.kill(process.pid if number == signal.SIGTERM else rank, number)
        begun = time.monotonic()
        process.wait(timeout=120)
        state, seconds = (
            json.loads((run / "status.json").read_text())["state"],
            time.monotonic() - begun,
        )
        kept = bool(list((run / "checkpoints").glob("step-*")))
        found = f"{state} after {seconds:.1f} s, {'a' if kept else 'no'} checkpoint"
        is_right = (
            state == expected and kept == (number == signal.SIGTERM) and process.returncode != 0
        )
        yield Row(
            "ends",
            name,
            f"{expected}, {'a' if expected == 'stopped' else 'no'} checkpoint",
            found,
            is_right,
        )


def oom(bench: Bench) -> Iterator[Row]:
    """Out of memory on the GPU ends in a message that names what holds it, and what would fit."""
    if not ON_GPU:
        return
    model = make_model(bench.output / "model-4096x4", SHALLOW)
    # weights and gradients alone take 15 GiB
    share = 16 * 2**30 / torch.cuda.get_device_properties(0).total_memory
    flags = [*bench.tiny(), "--model_name", str(model), "--device_memory_fraction", f"{share:.4f}"]
    message = bench.run({"oom": flags}).get("oom", "no error")
    is_explained = "out of memory" in message.lower() and "fit" in message
    yield Row(
        "oom", "message", "out of memory, and what would fit", last_line(message), is_explained
    )


PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    part.__name__: part
    for part in (
        *(start, cases, waits, attention, kernels, quantized, one_pass, sharded, resume, ends, oom),
        *(lora8b, fixes, full, quant8b, profile, inference, plan),
    )
}


def main() -> int:
    """Run the parts that are asked for; print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument(
        "--seconds", type=float, default=3000.0, help="what does not fit into this time is left out"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("output/gpu_check"),
        help="models, runs, gpu_check.jsonl",
    )
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--recipe", default="finetuning", help=argparse.SUPPRESS)
    parser.add_argument("--toggle", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        run_child(given.child, given.recipe, given.toggle)
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "4")
    bench = Bench(given.output.resolve(), given.seconds)
    rows: list[Row] = []
    for name in given.only.split(",") if given.only else PARTS:
        if bench.seconds_left < 20:
            break
        try:
            for row in PARTS[name](bench):
                rows.append(row)
                print(f"| {' | '.join(map(str, row))} |", flush=True)
                with open(bench.output / "gpu_check.jsonl", "a") as file:
                    file.write(json.dumps(row._asdict()) + "\n")
        except Exception as error:
            rows.append(Row(name, "runs", "no exception", repr(error)[:200], False))
            traceback.print_exc()
    wrong = [row for row in rows if not row.ok and not (not ON_GPU and row.claim == "device")]
    print(f"{len(rows) - len(wrong)} of {len(rows)} checks hold")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
