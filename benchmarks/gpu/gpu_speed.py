"""Speed and memory for gpu_check.py: runs of 3B and 8B on a GPU. On a CPU a tiny model runs,
without expectations."""

import gzip
import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.gpu_bench import (
    LORA,
    ON_GPU,
    REPOSITORY,
    Bench,
    Row,
    failed_row,
    last_line,
    left_out,
)
from benchmarks.gpu.gpu_factors import MEASURED, PLANNED, planned_per_token
from benchmarks.gpu.gpu_models import EIGHT_B, SHALLOW, THREE_B, TINY, make_model, make_samples

LENGTH = 4096 if ON_GPU else 128
MEASURED_STEPS = 5
SKIPPED_STEPS = 5  # allocator, clocks, compiling
PROFILED_UNTIL = 8  # the profile covers steps 4 to 6, and is written during the next ones
SECONDS_PER_RUN = 60.0 if ON_GPU else 20.0
MOST_SECONDS = 150.0  # then a run is killed
# tokens of samples of which several share a packed sequence
SHORT = [40 + 61 * n % 500 for n in range(400)]
FULL_LENGTH = [LENGTH] * 24


class Speed(NamedTuple):
    """A run that is measured."""

    shape: dict[str, Any]
    flags: list[str]
    least: float  # tokens/s expected of an H100
    lengths: list[int] = FULL_LENGTH
    is_profiled: bool = False

    @property
    def skipped(self) -> int:
        return PROFILED_UNTIL if self.is_profiled else SKIPPED_STEPS


def _flags(bench: Bench, shape: dict[str, Any], lengths: list[int], steps: int = 10) -> list[str]:
    """Return the flags of a run of so many steps of one packed sequence each."""
    shape = shape if ON_GPU else TINY
    layers = f"{shape['hidden_size']}x{shape['num_hidden_layers']}"
    model = make_model(bench.scratch / f"model-{layers}", shape)
    lengths = lengths if ON_GPU else [min(length, LENGTH) for length in lengths]
    samples = make_samples(bench.scratch / f"{len(lengths)}-samples.jsonl", lengths)
    flags = ["--model_name", str(model), "--dataset", str(samples), "--lr", "1e-5"]
    flags += ["--context_length", str(LENGTH), "--batch_size_training", "1", "--device", "auto"]
    flags += ["--max_train_step", str(steps), "--save_model", "false", "--overwrite"]
    return [*flags, "--save_every_epoch", "false"]


def _tokens_per_second(bench: Bench, name: str, skipped: int = SKIPPED_STEPS) -> float:
    steps = bench.steps(name)[skipped:]
    return statistics.median(line["perf/tokens_per_second"] for line in steps)


def _runs(bench: Bench, part: str, runs: dict[str, Speed]) -> Iterator[Row]:
    """Show each run's tokens/s, MFU, time per step by the wall clock, its measured and planned
    memory, and the kernels of a profiled one."""
    for name, speed in runs.items():
        if bench.seconds_left < SECONDS_PER_RUN:  # making the model takes time, too
            yield left_out(part, name)
            continue
        steps = speed.skipped + MEASURED_STEPS
        flags = [*_flags(bench, speed.shape, speed.lengths, steps), *speed.flags]
        flags += ["--use_profiler"] if speed.is_profiled else []
        for case in bench.run({name: flags}, needs=SECONDS_PER_RUN / 2, limit=MOST_SECONDS):
            if case.error:
                yield failed_row(part, f"{steps} steps", case)
                continue
            yield from bench.guarded(part, f"{name}: speed", _speed(bench, part, name, speed))
            yield from bench.guarded(part, f"{name}: memory", _memory(bench, part, name))
            if speed.is_profiled:
                profile = _profile(bench, part, name, speed)
                yield from bench.guarded(part, f"{name}: profile", profile)


def _speed(bench: Bench, part: str, name: str, speed: Speed) -> Iterator[Row]:
    steps = bench.steps(name)[speed.skipped :]
    least = speed.least if ON_GPU else 0.0
    tokens = _tokens_per_second(bench, name, speed.skipped)
    mfu = statistics.median(line.get("perf/mfu", 0.0) for line in steps)
    found = f"{tokens:,.0f}, MFU {mfu:.1%}"
    yield Row(part, f"{name}: {MEASURED}", f">= {least:,.0f}", found, tokens >= least)
    begun = bench.records[name]["seconds"]
    wall = (begun[-2] - begun[speed.skipped]) / (len(begun) - 2 - speed.skipped)
    measured = statistics.mean(line["perf/step_seconds"] for line in steps[:-1])
    limit = 0.05 if ON_GPU else 1.0
    claim = f"{name}: perf/step_seconds by the wall clock"
    is_near = abs(measured / wall - 1) < limit
    yield Row(part, claim, f"1 within {limit:g}", f"{measured / wall:.3f}", is_near)


def _memory(bench: Bench, part: str, name: str) -> Iterator[Row]:
    """Compare the plan with torch's allocated and reserved memory (max_memory_allocated,
    max_memory_reserved)."""
    plan_file = bench.scratch / name / "plan.json"
    if not plan_file.exists():
        yield Row(part, f"{name}: plan", "plan.json", "missing: it took too long", False)
        return
    plan = json.loads(plan_file.read_text())
    yield Row(part, f"{name}: {PLANNED}", "numbers", planned_per_token(plan), True)
    phases = json.loads((bench.scratch / name / "facts.json").read_text())["memory"]["phases"]
    kinds = ("device_peak_bytes", "device_reserved_bytes") if ON_GPU else ("anonymous_peak_bytes",)
    planned = {kinds[0]: max(peak["bytes"] for peak in plan["peaks"] if peak["phase"] in phases)}
    planned |= {kinds[-1]: plan["reserved_bytes"]} if ON_GPU else {}
    for kind, most in planned.items():
        ratio = most / max(rank[kind] for ranks in phases.values() for rank in ranks)
        limits = (
            (0.95, 1.05) if kind == "device_peak_bytes" else (0.9, 1.15) if ON_GPU else (0.0, 1.0)
        )
        expected = f"{limits[0]:g} to {limits[1]:g}"
        is_near = limits[0] <= ratio <= limits[1]
        yield Row(
            part,
            f"{name}: planned / {kind}",
            expected,
            f"{ratio:.3f} of {most / 2**30:.2f} GiB",
            is_near,
        )


def _profile(bench: Bench, part: str, name: str, speed: Speed) -> Iterator[Row]:
    """Show kernels of three steps by torch.profiler: which attention runs, how many launches, how
    long the GPU is idle. All kernels go to profile-*.txt."""
    trace = bench.scratch / name / "profile" / "rank-0.json.gz"
    spent, calls, launches, busy = _kernels(trace)
    trace.unlink()  # hundreds of MB
    attention = [kernel for kernel in spent if any(w in kernel for w in ("flash", "fmha", "cudnn"))]
    shown = ", ".join(kernel[:50] for kernel in sorted(attention)[:3]).replace("|", "/") or "none"
    is_right = bool(attention) or not ON_GPU
    yield Row(part, f"{name}: attention", "flash attention or cuDNN", shown, is_right)
    layers = (speed.shape if ON_GPU else TINY)["num_hidden_layers"]
    claim = f"{name}: launches per step and layer"
    yield Row(part, claim, "a number", f"{launches / 3 / layers:,.0f}", True)
    least = 0.9 if ON_GPU else 0.0
    claim = f"{name}: share of time with a kernel"
    yield Row(part, claim, f">= {least:.0%}", f"{busy:.1%}", busy >= least)
    table = [
        f"{microseconds / 3000:10.3f} ms per step  {calls[kernel] / 3:8.1f} calls  {kernel}"
        for kernel, microseconds in spent.most_common()
    ]
    file = bench.output / f"profile-{name.replace(' ', '-').replace(',', '')}.txt"
    file.write_text("\n".join(table) + "\n")
    slowest = "; ".join(
        f"{kernel[:40]} {microseconds / 3000:.1f} ms"
        for kernel, microseconds in spent.most_common(8)
    )
    claim = f"{name}: slowest kernels, per step"
    yield Row(part, claim, "names", slowest.replace("|", "/"), bool(slowest))


def _kernels(trace: Path) -> tuple[Counter[str], Counter[str], int, float]:
    """Return microseconds and calls by kernel, launches, and the share of time in which a kernel
    ran; of operators on the CPU."""
    with gzip.open(trace, "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    kernels = [event for event in events if event.get("cat") == ("kernel" if ON_GPU else "cpu_op")]
    runtime = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    launches = sum("Launch" in event["name"] for event in runtime)
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    begun = min((event["ts"] for event in kernels), default=0.0)
    until = begun
    busy = 0.0
    for event in sorted(kernels, key=lambda event: event["ts"]):
        spent[event["name"]] += event["dur"]
        calls[event["name"]] += 1
        end = event["ts"] + event["dur"]
        busy += max(0.0, end - max(until, event["ts"]))
        until = max(until, end)
    return spent, calls, launches if ON_GPU else len(kernels), busy / max(until - begun, 1e-9)


def lora8b(bench: Bench) -> Iterator[Row]:
    """LoRA on 8B, with a profile of three steps."""
    yield from _runs(bench, "lora8b", {"lora": Speed(EIGHT_B, LORA, 12_000.0, is_profiled=True)})


def lora8b_more(bench: Bench) -> Iterator[Row]:
    """LoRA on 8B: short samples, selective activation checkpointing, dropout."""
    selective = [*LORA, "--activation_checkpointing", "selective"]
    dropout = [*LORA[:-1], "0.05"]
    runs = {
        "lora, short samples": Speed(EIGHT_B, LORA, 12_000.0, SHORT),
        "lora, selective": Speed(EIGHT_B, selective, 9_000.0),
        "lora, dropout": Speed(EIGHT_B, dropout, 10_500.0),
    }
    yield from _runs(bench, "lora8b_more", runs)


def quant8b(bench: Bench) -> Iterator[Row]:
    """LoRA on a quantized 8B."""
    runs = {
        "qlora": Speed(EIGHT_B, [*LORA, "--quantization", "4bit"], 6_000.0),
        "lora, 8 bit": Speed(EIGHT_B, [*LORA, "--quantization", "8bit"], 4_000.0),
    }
    yield from _runs(bench, "quant8b", runs)


def full(bench: Bench) -> Iterator[Row]:
    """Full fine-tuning of 3B and 8B."""
    pure = ["--precision", "bf16_pure", "--activation_checkpointing", "selective", "--optimizer"]
    runs = {
        "full 3b": Speed(THREE_B, [], 15_000.0, is_profiled=True),
        "full 8b": Speed(EIGHT_B, [*pure, "anyprecision"], 7_000.0),
        "full 8b, AdamW8bit": Speed(EIGHT_B, [*pure, "AdamW8bit"], 7_000.0),
    }
    yield from _runs(bench, "full", runs)


def fixes(bench: Bench) -> Iterator[Row]:
    """What each of a few decisions gains: tokens/s of a run without it over those of the run as it
    is."""
    lora = [*_flags(bench, EIGHT_B, FULL_LENGTH), *LORA]
    padded = [*_flags(bench, SHALLOW, SHORT), *LORA, "--batching_strategy", "padding"]
    on_gpu = {
        "--use_liger true": ("as it is", [*lora, "--use_liger", "true"], ""),
        "--use_liger false": ("as it is", [*lora, "--use_liger", "false"], ""),
        "--compile": ("as it is", [*lora, "--compile"], ""),
        "padding": ("", padded, ""),
        "padding, cuDNN on": ("padding", padded, "cuDNN on"),
        "padding, cuDNN off": ("padding", padded, "cuDNN off"),
    }
    runs = {
        "as it is": ("", lora, ""),
        "a wait per micro-batch": ("as it is", lora, "a wait per micro-batch"),
        "adapters in fully_shard": ("as it is", lora, "adapters in fully_shard"),
    } | (on_gpu if ON_GPU else {})
    speeds: dict[str, float] = {}
    for name, (beside, flags, toggle) in runs.items():
        run = {f"fixes, {name}": [*flags, "--no_plan"]}
        for case in bench.run(run, toggle=toggle, needs=SECONDS_PER_RUN / 2, limit=MOST_SECONDS):
            if "liger-kernel cannot be imported" in case.error:
                yield left_out("fixes", name)._replace(found="left out: no liger-kernel")
            elif case.error:
                yield failed_row("fixes", "10 steps", case)
            else:
                speeds[name] = _tokens_per_second(bench, case.name)
                ratio = speeds[name] / speeds[beside] if beside in speeds else 1.0
                found = f"{speeds[name]:,.0f} tokens/s, {ratio:.3f} of {beside or 'itself'}"
                yield Row("fixes", name, "a ratio" if beside else "tokens/s", found, True)


def inference(bench: Bench) -> Iterator[Row]:
    """64 new tokens after a prompt of 64, twice: the second answer shows what the first had to
    prepare."""
    name = "model-4096x32" if ON_GPU else "tiny"
    model = make_model(bench.scratch / name, EIGHT_B if ON_GPU else TINY)
    prompts = bench.scratch / "prompts.txt"
    prompts.write_text(f"{'a' * 64}\n{'b' * 64}\n")
    tokens = 64 if ON_GPU else 8
    for toggle in ("", "cuDNN on") if ON_GPU else ("",):
        name = f"inference {toggle}".strip()
        answers = bench.scratch / f"{name.replace(' ', '-')}.jsonl"
        answers.unlink(missing_ok=True)
        flags = [str(model), "--prompts", str(prompts), "--output", str(answers)]
        flags += ["--batch_size", "1", "--max_new_tokens", str(tokens), "--temperature", "0"]
        for case in bench.run({name: flags}, "inference", toggle, limit=MOST_SECONDS):
            if case.error:
                yield failed_row("inference", "two answers", case)
                continue
            begun = bench.records[name]["seconds"]
            first = tokens / (begun[1] - begun[0])
            second = tokens / (begun[2] - begun[1])
            is_fast = not ON_GPU or bool(toggle) or first >= 10
            claim = f"{name}: tokens/s of both answers"
            expected = ">= 10" if ON_GPU else "numbers"
            yield Row("inference", claim, expected, f"{first:.1f} and {second:.1f}", is_fast)


def plan(bench: Bench) -> Iterator[Row]:
    """Run benchmarks/planner/plan.py on one rank: 16 runs and their plans."""
    if not ON_GPU:
        return
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "planner" / "plan.py")]
    exit_code, printed = bench.run_command("plan", command, limit=bench.seconds_left)
    if exit_code is None:
        yield left_out("plan", "16 runs")
        return
    if exit_code != 0:
        bench.keep("plan", f"exit code {exit_code}", printed)
    expected = "within 5% of max_memory_allocated"
    yield Row("plan", "16 runs", expected, last_line(printed), exit_code == 0)
