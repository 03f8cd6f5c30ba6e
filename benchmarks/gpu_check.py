"""Check llama_ft's CUDA features on this machine's GPU, in four commands of a few minutes each.

    python3 benchmarks/gpu_check.py --command 1  # 8 minutes, 80 GB: attention, 8B LoRA, every flag
    python3 benchmarks/gpu_check.py --command 2  # 8 minutes, 80 GB: methods, quantized, plan, full
    python3 benchmarks/gpu_check.py --command 3  # 8 minutes, 80 GB: saving, ends, formats, two GPUs
    python3 benchmarks/gpu_check.py --command 4  # 8 minutes, 24 GB: all that needs no 80 GB
    python3 benchmarks/gpu_check.py --only waits,oom --seconds 120

Each command is useful alone. Each line of the table is written to OUTPUT/gpu_check.jsonl at once,
what failed cases printed to OUTPUT/failed.log, and what no result in OUTPUT has checked to
OUTPUT/not_checked.txt. Models are made from a seed, and nothing is
downloaded; they stay in SCRATCH for the next command. Without a GPU the small parts run on the CPU,
which checks this script. Exit code 1: a check failed. docs/development/gpu-check.md says how to run
it on a machine without a network.
"""

import argparse
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TextIO

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `import benchmarks`

from benchmarks.gpu import gpu_kernels
from benchmarks.gpu.gpu_bench import (
    ON_GPU,
    REPOSITORY,
    Bench,
    Row,
    end_descendants,
    failed_row,
    left_out,
)
from benchmarks.gpu.gpu_cases import (
    cases,
    compiled,
    ends,
    further,
    methods,
    oom,
    resume,
    save,
    waits,
)
from benchmarks.gpu.gpu_coverage import PUBLISHED, not_checked, read_rows
from benchmarks.gpu.gpu_factors import speed_factors
from benchmarks.gpu.gpu_ranks import two_ranks
from benchmarks.gpu.gpu_speed import fixes, full, inference, lora8b, lora8b_more, plan, quant8b

SECONDS_FOR_A_PART = 10.0  # no part starts with less
SECONDS_TO_END = 15.0  # after the time limit: then all processes end, whatever hangs
# A case is killed after its own limit; CUDA compiles some kernels.
SECONDS_PER_COMPUTATION = 90.0


def computed(part: str, bench: Bench) -> Iterator[Row]:
    """Compute a part of gpu_kernels in another process."""
    checks = gpu_kernels.PARTS[part]()
    no_flags: dict[str, list[str]] = {claim: [] for claim in checks}
    for case in bench.run(no_flags, recipe=part, limit=SECONDS_PER_COMPUTATION):
        expected = checks[case.name].expected
        if case.error:
            yield failed_row(part, expected, case)
        else:
            record = bench.records[case.name]
            yield Row(part, case.name, expected, record["found"], record["ok"])


def device(_: Bench) -> Iterator[Row]:
    """Name the GPU, which `start` does, too: rows of a file belong to the GPU that is named before."""
    if ON_GPU:
        yield Row("start", "device", "a GPU", torch.cuda.get_device_name(), True)


RUNS = (
    *(waits, lora8b, cases),
    *(methods, full, quant8b, compiled),
    *(resume, ends, oom, save),
    *(further, two_ranks),
    *(inference, fixes, lora8b_more, plan),  # in no command
)
PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    **{part: partial(computed, part) for part in gpu_kernels.PARTS},
    **{part.__name__: part for part in RUNS},
    "device": device,
}
# parts, and seconds after which nothing starts and the running case is killed
COMMANDS: dict[int, tuple[str, float]] = {
    1: ("start,waits,attention,triton,one_pass,lora8b,cases", 440.0),
    2: ("methods,quantized,sharded,full,quant8b,compiled", 440.0),
    3: ("resume,ends,oom,save,further,two_ranks", 440.0),
    4: ("start,waits,attention,triton,cases,methods,further,quantized,sharded,two_ranks", 440.0),
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--command", type=int, choices=COMMANDS, help="the parts of one command")
    which.add_argument(
        "--not_checked", action="store_true", help="print what no published result has checked"
    )
    which.add_argument(
        "--speed_factors",
        action="store_true",
        help="print measured over computed speed of published results, for llama_ft/plan/duration.py",
    )
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
    return parser


def main() -> int:
    """Run the parts that are asked for; print the table."""
    parser = build_parser()
    given = parser.parse_args()
    if given.child:
        from benchmarks.gpu.gpu_child import run_child

        run_child(given.child, given.recipe, given.toggle)
        return 0
    if given.not_checked:
        print(not_checked(read_rows(PUBLISHED)))
        return 0
    if given.speed_factors:
        print(speed_factors(read_rows(PUBLISHED)))
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the processes, too
    with open(bench.output / "failed.log", "a") as log:
        end = threading.Timer(seconds + SECONDS_TO_END, end_all, [log, bench.output])
        end.daemon = True
        end.start()
        # if a library does not let go of Python's lock; gpu_child.py's processes end with this one
        faulthandler.dump_traceback_later(seconds + 1.5 * SECONDS_TO_END, exit=True, file=log)
        parts = names.split(",")
        rows = list(run_parts(bench, parts if "start" in parts else ["device", *parts]))
        end.cancel()
        faulthandler.cancel_dump_traceback_later()
    write_not_checked(bench.output)
    wrong = [row for row in rows if row.ok is False]
    skipped = [row for row in rows if row.ok is None]
    print(f"{len(rows) - len(wrong) - len(skipped)} of {len(rows) - len(skipped)} checks hold")
    if skipped:
        print(f"left out: {', '.join(f'{row.check} {row.claim}' for row in skipped)}")
    if wrong:
        print(f"failed: {', '.join(f'{row.check} {row.claim}' for row in wrong)}")
    return 1 if wrong else 0


def write_not_checked(output: Path) -> None:
    """Write what no result in a folder has checked on a GPU."""
    (output / "not_checked.txt").write_text(f"{not_checked(read_rows(output))}\n")


def end_all(log: TextIO, output: Path) -> None:
    """End this process, which hangs, and all that it has started."""
    print("ended: a part has not come to an end", flush=True)
    faulthandler.dump_traceback(log)
    end_descendants(os.getpid())
    write_not_checked(output)
    os._exit(1)


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
    """Run one part, unless the time is up."""
    if bench.seconds_left < SECONDS_FOR_A_PART and name != "device":
        yield left_out(name, "all of it")
    else:
        yield from bench.guarded(name, "runs", PARTS[name](bench))


if __name__ == "__main__":
    sys.exit(main())
