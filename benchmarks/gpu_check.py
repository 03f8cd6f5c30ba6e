"""Check llama_ft's CUDA features on this machine's GPU, in three commands of a few minutes each.

    python3 benchmarks/gpu_check.py --command 1  # 8 minutes, 80 GB: attention, 8B LoRA, every flag
    python3 benchmarks/gpu_check.py --command 2  # 8 minutes, 80 GB: methods, quantized, plan, full
    python3 benchmarks/gpu_check.py --command 3  # 5 minutes, 80 GB: saving, resuming, ends, memory
    python3 benchmarks/gpu_check.py --only waits,oom --seconds 120

Each command is useful alone. Each line of the table is written to OUTPUT/gpu_check.jsonl at once,
what failed cases printed to OUTPUT/failed.log. Models are made from a seed, and nothing is
downloaded; they stay in SCRATCH for the next command. Without a GPU the small parts run on the CPU,
which checks this script. Exit code 1: a check failed. docs/development/gpu-check.md says how to run
it on a machine without a network.
"""

import argparse
import faulthandler
import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import torch
from gpu_bench import ON_GPU, REPOSITORY, Bench, Row, last_line, left_out
from gpu_cases import cases, ends, methods, oom, resume, save, waits
from gpu_kernels import attention, kernels, one_pass, quantized, sharded
from gpu_models import DEVICE
from gpu_speed import fixes, full, inference, lora8b, lora8b_more, plan, quant8b

SECONDS_FOR_A_PART = 10.0  # no part starts with less
SECONDS_FOR_A_GROUP = 60.0
SECONDS_TO_END = 15.0  # after the time limit: then this process ends even if a part hangs
GROUP_OF_ONE = """
import sys, torch, torch.distributed as dist
backend, device = sys.argv[1:]
dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1, device=device))
dist.destroy_process_group()
"""


def start(bench: Bench) -> Iterator[Row]:
    """Versions, libraries, and how long one process takes to join a group of its own."""
    import peft
    import transformers

    name = torch.cuda.get_device_name() if ON_GPU else "CPU"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}"
    yield Row("start", "device", "a GPU", name, True if ON_GPU else None)
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
    yield _group_of_one()


def _group_of_one() -> Row:
    """Make, use and end a process group in another process: if NCCL hangs, this one does not."""
    claim = "a group of one rank, made, used and ended"
    begun = time.monotonic()
    command = [sys.executable, "-c", GROUP_OF_ONE, "nccl" if ON_GPU else "gloo", DEVICE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_FOR_A_GROUP)
    except subprocess.TimeoutExpired:
        return Row("start", claim, f"< {SECONDS_FOR_A_GROUP:g} s", "hangs", False)
    found = f"{time.monotonic() - begun:.1f} s with importing torch"
    if done.returncode != 0:
        found = last_line(done.stderr)
    return Row("start", claim, f"< {SECONDS_FOR_A_GROUP:g} s", found, done.returncode == 0)


PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    part.__name__: part
    for part in (
        *(start, waits, attention, kernels, one_pass, lora8b, cases),
        *(methods, quantized, sharded, full, quant8b),
        *(save, resume, ends, oom),
        *(inference, fixes, lora8b_more, plan),  # in no command
    )
}
# parts, and seconds after which nothing starts and the running case is killed
COMMANDS: dict[int, tuple[str, float]] = {
    1: ("start,waits,attention,kernels,one_pass,lora8b,cases", 450.0),
    2: ("methods,quantized,sharded,full,quant8b", 450.0),
    3: ("save,resume,ends,oom", 280.0),
}


def main() -> int:
    """Run the parts that are asked for; print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--command", type=int, choices=COMMANDS, help="the parts of one command")
    which.add_argument("--only", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument(
        "--seconds",
        type=float,
        help="after these no case starts, and the running one is killed; the command's own by "
        "default, or 3000",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("output/gpu_check"), help="for small files: the results"
    )
    parser.add_argument(
        "--scratch",
        type=Path,
        default=Path("output/gpu_check_scratch"),
        help="for models and runs, up to 64 GB; the next command finds the models here",
    )
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--recipe", default="finetuning", help=argparse.SUPPRESS)
    parser.add_argument("--toggle", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        from gpu_child import run_child

        run_child(given.child, given.recipe, given.toggle)
        return 0
    names, seconds = COMMANDS.get(given.command, (given.only or ",".join(PARTS), 3000.0))
    unknown = [name for name in names.split(",") if name not in PARTS]
    if unknown:
        parser.error(f"--only {','.join(unknown)}: expected some of {', '.join(PARTS)}")
    os.environ.setdefault("OMP_NUM_THREADS", "4")
    # torchrun's ranks run the recipes themselves; llama_ft need not be installed
    paths = [str(REPOSITORY / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    seconds = given.seconds if given.seconds is not None else seconds
    bench = Bench(given.output.resolve(), given.scratch.resolve(), seconds)
    with open(bench.output / "failed.log", "a") as log:
        faulthandler.dump_traceback_later(seconds + SECONDS_TO_END, exit=True, file=log)
        rows = list(run_parts(bench, names.split(",")))
        faulthandler.cancel_dump_traceback_later()
    wrong = [row for row in rows if row.ok is False]
    skipped = [row for row in rows if row.ok is None]
    print(f"{len(rows) - len(wrong) - len(skipped)} of {len(rows) - len(skipped)} checks hold")
    if skipped:
        print(f"left out: {', '.join(f'{row.check} {row.claim}' for row in skipped)}")
    if wrong:
        print(f"failed: {', '.join(f'{row.check} {row.claim}' for row in wrong)}")
    return 1 if wrong else 0


def run_parts(bench: Bench, names: list[str]) -> Iterator[Row]:
    """Run parts, and print and write each line of the table at once."""
    started = time.monotonic()
    for name in names:
        for row in run_part(bench, name):
            seconds = time.monotonic() - started
            print(f"| {' | '.join(map(str, row))} | {seconds:.0f} s |", flush=True)
            with open(bench.output / "gpu_check.jsonl", "a") as file:
                file.write(json.dumps(row._asdict() | {"seconds": round(seconds, 1)}) + "\n")
            yield row


def run_part(bench: Bench, name: str) -> Iterator[Row]:
    """Run one part. An exception is a failed line, and the next part runs all the same."""
    if bench.seconds_left < SECONDS_FOR_A_PART:
        yield left_out(name, "all of it")
        return
    try:
        yield from PARTS[name](bench)
    except Exception as error:
        bench.keep(name, "exception in gpu_check.py", "", traceback.format_exc())
        yield Row(name, "runs", "no exception", repr(error)[:200], False)


if __name__ == "__main__":
    sys.exit(main())
