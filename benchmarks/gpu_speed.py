"""Speed and memory for gpu_check.py: runs of 3B and 8B on a GPU. On a CPU a tiny model runs,
without expectations."""

import gzip
import json
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_bench
from gpu_bench import EIGHT_B, LORA, NO_TIME, ON_GPU, SHALLOW, THREE_B, TINY, Bench, Row, last_line

LENGTH = 4096 if ON_GPU else 128
SKIPPED_STEPS = 5  # of 10: allocator, clocks, compiling
SECONDS_PER_RUN = 60.0 if ON_GPU else 20.0
# tokens of samples of which several share a packed sequence
SHORT = [40 + 61 * n % 500 for n in range(400)]


def _flags(bench: Bench, shape: dict[str, Any], lengths: list[int], steps: int = 10) -> list[str]:
    """Of a run of so many steps of one packed sequence each."""
    shape = shape if ON_GPU else TINY
    layers = f"{shape['hidden_size']}x{shape['num_hidden_layers']}"
    model = gpu_bench.make_model(bench.output / f"model-{layers}", shape)
    lengths = lengths if ON_GPU else [min(length, LENGTH) for length in lengths]
    samples = gpu_bench.make_samples(bench.output / f"{len(lengths)}-samples.jsonl", lengths)
    flags = [
        "--model_name",
        str(model),
        "--dataset",
        str(samples),
        "--context_length",
        str(LENGTH),
        "--lr",
        "1e-5",
    ]
    flags += [
        "--batch_size_training",
        "1",
        "--max_train_step",
        str(steps),
        "--save_model",
        "false",
        "--overwrite",
    ]
    return [*flags, "--device", "auto"]


def _tokens_per_second(bench: Bench, name: str) -> float:
    return statistics.median(
        line["perf/tokens_per_second"] for line in bench.steps(name)[SKIPPED_STEPS:]
    )


def _runs(
    bench: Bench, part: str, runs: dict[str, tuple[dict[str, Any], list[str], float]]
) -> Iterator[Row]:
    """Show each run's tokens/s, MFU, time per step by the wall clock, and its measured and planned
    memory."""
    for name, (shape, flags, expected) in runs.items():
        lengths = SHORT if "short" in name else [LENGTH] * 24
        case = {name: [*_flags(bench, shape, lengths), *flags]}
        if wrong := bench.run(case, needs=SECONDS_PER_RUN).get(name):
            yield Row(part, name, "10 steps", last_line(wrong), wrong == NO_TIME)
            continue
        steps, expected = bench.steps(name)[SKIPPED_STEPS:], expected if ON_GPU else 0.0
        speed, mfu = (
            _tokens_per_second(bench, name),
            statistics.median(it.get("perf/mfu", 0.0) for it in steps),
        )
        yield Row(
            part,
            f"{name}: tokens/s",
            f">= {expected:,.0f}",
            f"{speed:,.0f}, MFU {mfu:.1%}",
            speed >= expected,
        )
        begun = bench.seconds[name]
        wall = (begun[-2] - begun[SKIPPED_STEPS]) / (len(begun) - 2 - SKIPPED_STEPS)
        measured = statistics.mean(line["perf/step_seconds"] for line in steps[:-1])
        limit, found = 0.05 if ON_GPU else 1.0, f"{measured / wall:.3f}"
        claim = f"{name}: perf/step_seconds by the wall clock"
        yield Row(part, claim, f"1 within {limit:g}", found, abs(measured / wall - 1) < limit)
        yield from _memory(bench, part, name)


def _memory(bench: Bench, part: str, name: str) -> Iterator[Row]:
    """Compare the plan with torch's allocated and reserved memory (max_memory_allocated,
    max_memory_reserved)."""
    plan = json.loads((bench.output / name / "plan.json").read_text())
    phases = json.loads((bench.output / name / "facts.json").read_text())["memory"]["phases"]
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


def lora8b(bench: Bench) -> Iterator[Row]:
    """LoRA on 8B."""
    dropout = ["--use_peft", "--target_modules", "all-linear", "--lora_dropout", "0.05"]
    runs = {
        "lora": (EIGHT_B, LORA, 12_000.0),
        "lora, short samples": (EIGHT_B, LORA, 12_000.0),
        "lora, selective": (EIGHT_B, [*LORA, "--activation_checkpointing", "selective"], 9_000.0),
        "lora, dropout": (EIGHT_B, dropout, 10_500.0),
    }
    yield from _runs(bench, "lora8b", runs)


def quant8b(bench: Bench) -> Iterator[Row]:
    """LoRA on a quantized 8B."""
    runs = {
        "qlora": (EIGHT_B, [*LORA, "--quantization", "4bit"], 6_000.0),
        "lora, 8 bit": (EIGHT_B, [*LORA, "--quantization", "8bit"], 4_000.0),
    }
    yield from _runs(bench, "quant8b", runs)


def full(bench: Bench) -> Iterator[Row]:
    """Full fine-tuning of 3B and 8B."""
    pure = ["--precision", "bf16_pure", "--activation_checkpointing", "selective", "--optimizer"]
    runs = {
        "full 3b": (THREE_B, [], 15_000.0),
        "full 8b": (EIGHT_B, [*pure, "anyprecision"], 7_000.0),
        "full 8b, AdamW8bit": (EIGHT_B, [*pure, "AdamW8bit"], 7_000.0),
    }
    yield from _runs(bench, "full", runs)


def fixes(bench: Bench) -> Iterator[Row]:
    """What each of a few decisions gains: tokens/s of a run without it over those of the run as it
    is."""
    padding = ["--batching_strategy", "padding"]
    lora, padded = (
        _flags(bench, EIGHT_B, [LENGTH] * 24),
        [*_flags(bench, SHALLOW, SHORT), *LORA, *padding],
    )
    on_gpu = {
        "--use_liger true": ("as it is", [*lora, *LORA, "--use_liger", "true"], ""),
        "--use_liger false": ("as it is", [*lora, *LORA, "--use_liger", "false"], ""),
        "--compile": ("as it is", [*lora, *LORA, "--compile"], ""),
        "padding": ("", padded, ""),
        "padding, cuDNN on": ("padding", padded, "cuDNN on"),
        "padding, cuDNN off": ("padding", padded, "cuDNN off"),
    }
    runs = {
        "as it is": ("", [*lora, *LORA], ""),
        "a wait per micro-batch": ("as it is", [*lora, *LORA], "a wait per micro-batch"),
        "adapters in fully_shard": ("as it is", [*lora, *LORA], "adapters in fully_shard"),
    } | (on_gpu if ON_GPU else {})
    speeds: dict[str, float] = {}
    for name, (beside, flags, toggle) in runs.items():
        case = {f"fixes, {name}": [*flags, "--no_plan"]}
        for wrong in bench.run(case, toggle=toggle, needs=SECONDS_PER_RUN).values():
            # liger-kernel
            is_left_out = wrong == NO_TIME or "liger-kernel cannot be imported" in wrong
            yield Row("fixes", name, "10 steps", last_line(wrong), is_left_out)
            break
        else:
            speeds[name] = _tokens_per_second(bench, f"fixes, {name}")
            ratio = speeds[name] / speeds[beside] if beside in speeds else 1.0
            found = f"{speeds[name]:,.0f} tokens/s, {ratio:.3f} of {beside or 'itself'}"
            yield Row("fixes", name, "a ratio" if beside else "tokens/s", found, True)


def profile(bench: Bench) -> Iterator[Row]:
    """Kernels of three steps by torch.profiler: which attention runs, how many launches, how long
    the GPU is idle."""
    runs = {"lora": LORA, "full": []}
    every = {
        f"profile, {name}": [*_flags(bench, SHALLOW, [LENGTH] * 24, 7), *flags]
        for name, flags in runs.items()
    }
    failed = bench.run(
        {name: [*flags, "--use_profiler", "--no_plan"] for name, flags in every.items()}
    )
    for name in every:
        if name in failed:
            yield Row("profile", name, "a trace", last_line(failed[name]), False)
            continue
        kernels, launches, busy = _kernels(bench.output / name / "profile" / "rank-0.json.gz")
        attends = sorted(
            {
                kernel
                for kernel in kernels
                if any(word in kernel for word in ("flash", "fmha", "cudnn"))
            }
        )
        shown = ", ".join(kernel[:50] for kernel in attends[:3]).replace("|", "/") or "none"
        yield Row(
            "profile",
            f"{name}: attention",
            "flash attention or cuDNN",
            shown,
            bool(attends) or not ON_GPU,
        )
        layers = SHALLOW["num_hidden_layers"] if ON_GPU else TINY["num_hidden_layers"]
        yield Row(
            "profile",
            f"{name}: launches per step and layer",
            "a number",
            f"{launches / 3 / layers:,.0f}",
            True,
        )
        limit = 0.9 if ON_GPU else 0.0
        yield Row(
            "profile",
            f"{name}: share of time with a kernel",
            f">= {limit:.0%}",
            f"{busy:.1%}",
            busy >= limit,
        )
        slowest = "; ".join(
            f"{kernel[:40]} {spent / 1000:.1f} ms" for kernel, spent in kernels.most_common(8)
        )
        yield Row(
            "profile",
            f"{name}: slowest kernels in 3 steps",
            "names",
            slowest.replace("|", "/"),
            bool(slowest),
        )


def _kernels(trace: Path) -> tuple[Counter[str], int, float]:
    """Microseconds by kernel, launches, and the share of time in which a kernel ran; of operators
    on the CPU."""
    with gzip.open(trace, "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    kernels = [event for event in events if event.get("cat") == ("kernel" if ON_GPU else "cpu_op")]
    launches = sum(
        "Launch" in event["name"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
    )
    spent: Counter[str] = Counter()
    busy, until = 0.0, min((event["ts"] for event in kernels), default=0.0)
    begun = until
    for event in sorted(kernels, key=lambda event: event["ts"]):
        spent[event["name"]] += event["dur"]
        end = event["ts"] + event["dur"]
        busy, until = busy + max(0.0, end - max(until, event["ts"])), max(until, end)
    return spent, launches if ON_GPU else len(kernels), busy / max(until - begun, 1e-9)


def inference(bench: Bench) -> Iterator[Row]:
    """64 new tokens after a prompt of 64, twice: the second answer shows what the first had to
    prepare."""
    model = gpu_bench.make_model(
        bench.output / ("model-4096x32" if ON_GPU else "tiny"), EIGHT_B if ON_GPU else TINY
    )
    prompts, tokens = bench.output / "prompts.txt", 64 if ON_GPU else 8
    prompts.write_text(f"{'a' * 64}\n{'b' * 64}\n")
    for toggle in ("", "cuDNN on") if ON_GPU else ("",):
        name = f"inference {toggle}".strip()
        answers = bench.output / f"{name.replace(' ', '-')}.jsonl"
        answers.unlink(missing_ok=True)
        flags = [
            str(model),
            "--prompts",
            str(prompts),
            "--output_file",
            str(answers),
            "--batch_size",
            "1",
        ]
        flags += ["--max_new_tokens", str(tokens), "--temperature", "0"]
        if wrong := bench.run({name: flags}, "inference", toggle).get(name):
            yield Row("inference", name, "two answers", last_line(wrong), False)
            continue
        first, second = (
            b - a for a, b in zip(bench.seconds[name], bench.seconds[name][1:], strict=False)
        )
        found = f"{tokens / first:.1f} and {tokens / second:.1f}"
        is_fast = not ON_GPU or bool(toggle) or tokens / first >= 10
        yield Row(
            "inference",
            f"{name}: tokens/s of both answers",
            ">= 10" if ON_GPU else "numbers",
            found,
            is_fast,
        )


def plan(bench: Bench) -> Iterator[Row]:
    """Run benchmarks/plan.py on one rank: 16 runs and their plans."""
    if not ON_GPU:
        return
    command = [sys.executable, str(Path(__file__).with_name("plan.py"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=bench.seconds_left)
    said = last_line(done.stdout.strip() or done.stderr.strip() or "nothing")
    yield Row("plan", "16 runs", "within 5% of max_memory_allocated", said, done.returncode == 0)
