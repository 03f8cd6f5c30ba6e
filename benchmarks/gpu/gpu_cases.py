"""Checks of gpu_check.py that run the recipe: every kind of run on a tiny model compared with the
CPU, saving, resuming, and the ways in which a run ends."""

import json
import math
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from benchmarks.gpu.gpu_bench import (
    LORA,
    NO_TIME,
    ON_GPU,
    RECIPES,
    REPOSITORY,
    Bench,
    Case,
    Row,
    end_processes,
    failed_row,
    last_line,
    left_out,
)
from benchmarks.gpu.gpu_models import (
    DEVICE,
    SHALLOW,
    THREE_B,
    TINY,
    make_architecture,
    make_model,
    make_samples,
)
from benchmarks.shared.torchrun_command import torchrun_command

PADDING = ["--batching_strategy", "padding"]
SELECTIVE = ["--activation_checkpointing", "selective"]
NF4 = ["--quantization", "4bit"]
EIGHT_BIT = ["--quantization", "8bit"]
AS_STORED = ["--quantization", "as_stored"]
SCORED = "--validation 0.2 --eval_steps 2 --score exact --score_tokens 4".split()
CASES: dict[str, list[str]] = {
    "full": [],
    "full, padding": PADDING,
    "full, fp32": ["--precision", "fp32"],
    "full, bf16_pure, anyprecision": ["--precision", "bf16_pure", "--optimizer", "anyprecision"],
    "AdamW8bit": ["--optimizer", "AdamW8bit"],
    "SGD": ["--optimizer", "SGD", "--momentum", "0.9"],
    "Adafactor": ["--optimizer", "Adafactor"],
    "checkpointing full": ["--activation_checkpointing", "full"],
    "checkpointing selective": SELECTIVE,
    "checkpointing every_k": ["--activation_checkpointing", "every_k"],
    "LoRA": LORA,
    "LoRA, padding": [*LORA, *PADDING],
    "LoRA, 8 bit": [*LORA, *EIGHT_BIT],
    "LoRA, nf4": [*LORA, *NF4],
    "LoRA, fp4": [*LORA, *NF4, "--quant_type", "fp4"],
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


class Method(NamedTuple):
    """A run of a tiny model with samples, see `Bench.tiny`."""

    model: str
    flags: list[str]
    limit: float = 5e-3  # of the relative difference from the losses on the CPU
    samples: str = "tokens"


METHODS = {
    "MoE, LoRA": Method("qwen3_moe", LORA),
    "MoE, LoRA, 8 bit": Method("qwen3_moe", [*LORA, *EIGHT_BIT]),
    "MoE, LoRA, nf4": Method("qwen3_moe", [*LORA, *NF4]),
    "MoE, LoRA, selective": Method("qwen3_moe", [*LORA, *SELECTIVE]),
    "MoE, full": Method("qwen3_moe", []),
    # The loss is about 0.69, a difference of sums of 40 log-probabilities: rounding weighs more.
    "DPO, LoRA": Method("", [*LORA, "--objective", "dpo"], 2e-2, "pairs"),
    "DPO, full": Method("", ["--objective", "dpo"], 2e-2, "pairs"),
    "sliding window": Method("mistral", []),
    "sliding window, padding": Method("mistral", PADDING),
    "eager attention, soft caps": Method("gemma2", ["--attn_implementation", "eager"]),
    "eager attention, LoRA, padding": Method(
        "gemma2", [*LORA, *PADDING, "--attn_implementation", "eager"]
    ),
    "tied head": Method("llama", []),
    "DoRA": Method("", [*LORA, "--use_dora"]),
    "LoRA, evaluation": Method("", [*LORA, "--validation", "0.2", "--eval_steps", "2"]),
}
EXPERTS = ["--target_parameters", "mlp.experts.gate_up_proj,mlp.experts.down_proj"]
LORA_ON_EXPERTS = [
    "--use_peft",
    "--target_modules",
    "q_proj,o_proj",
    "--lora_dropout",
    "0",
    *EXPERTS,
]
MUON = f"{REPOSITORY / 'examples' / 'muon.py'}:muon"
FURTHER = {
    "KTO": Method("", [*LORA, "--objective", "kto"], 2e-2, "rated"),
    "ORPO": Method("", [*LORA, "--objective", "orpo"], 2e-2, "pairs"),
    "reward model": Method("", [*LORA, "--objective", "reward"], 2e-2, "pairs"),
    "distillation": Method("", [*LORA, "--objective", "distill", "--distill_top_k", "8"], 2e-2),
    "scored answers": Method("", [*LORA, *SCORED], samples="answers"),
    "gpt-oss, LoRA on experts": Method("gpt_oss", LORA_ON_EXPERTS),
    "Falcon-H1": Method("falcon_h1", LORA),
    "FP8 as stored": Method("FP8", [*LORA, *AS_STORED]),
    "FP8 as stored, checkpointing": Method(
        "FP8", [*LORA, *AS_STORED, "--activation_checkpointing", "full"]
    ),
    "MXFP4 as stored": Method("MXFP4", [*LORA_ON_EXPERTS, *AS_STORED]),
    "images": Method("images", LORA, samples="chats"),
    "images, projector": Method("images", [*LORA, "--train_vision", "projector"], samples="chats"),
    "nf4, double_quant": Method("", [*LORA, *NF4, "--double_quant"]),
    "groups": Method("", [*LORA, "--groups", "[{match: lora_A, lr: 0.1x}]"]),
    "Muon": Method("", ["--precision", "bf16_pure", "--optimizer", MUON]),
}
GRPO = (
    "--objective grpo --prompts_per_step 2 --num_generations 4 --max_completion_length 16 --generate_batch_size 8"
).split()
REWARD = """
def letters(prompt, answer, sample):
    return sum(character.isalpha() for character in answer) / 16
"""
# Of the mean importance weight from 1: training gives sampled tokens the probabilities of sampling.
MOST_WEIGHT_ERROR = 0.05
COMPILED = {  # on a GPU: name -> base of METHODS or CASES, and its additional flags
    "LoRA, compiled": ("LoRA", ["--compile"]),
    "selective, compiled": ("checkpointing selective", ["--compile"]),
    "sliding window, compiled": ("sliding window", ["--compile"]),
    "MoE, LoRA, compiled": ("MoE, LoRA", ["--compile"]),
}
# Of the relative difference of losses, where it is not 5e-3: three steps change them by 0.2 to 4%.
LIMITS = {"full, fp32": 1e-4, "LoRA, dropout": 2e-2, "LoRA, 8 bit, int8_threshold 0": 2e-2}
MOST_GRADIENT_ERROR = 5e-2  # of the gradient's norm; 2e-2 was seen between bf16 and fp32 on a CPU
OTHER_NUMBERS = ("LoRA, dropout",)  # random numbers of a GPU are not those of the CPU
SECONDS_TO_COMPILE = 150.0
SECONDS_TO_SAVE = 130.0
# of a checkpoint, per weight: the weight and AdamW's two states
MIXED_BYTES = 12
PURE_BYTES = 6


def cases(bench: Bench) -> Iterator[Row]:
    """Run three steps of every kind of run, and compare with the same in fp32 on the CPU."""
    on_gpu = ON_GPU_ONLY if ON_GPU else {}
    bases = {name: name for name in CASES} | {name: base for name, (base, _) in on_gpu.items()}
    more = {name: flags for name, (_, flags) in on_gpu.items()}
    tiny = bench.tiny()
    flags = {name: [*tiny, *CASES[base], *more.get(name, [])] for name, base in bases.items()}
    yield from _beside_the_cpu(bench, "cases", flags, bases, {})


def methods(bench: Bench) -> Iterator[Row]:
    """Run three steps of mixtures of experts, DPO, sliding windows, eager attention and DoRA, and
    compare with fp32 on the CPU."""
    yield from _methods(bench, "methods", METHODS)


def further(bench: Bench) -> Iterator[Row]:
    """Run three steps of other objectives, of gpt-oss, a hybrid, models as they are stored and
    images, and compare with fp32 on the CPU. Run GRPO."""
    yield from _methods(bench, "further", FURTHER)
    yield from bench.guarded("further", "GRPO", _grpo(bench))


def _grpo(bench: Bench) -> Iterator[Row]:
    """Run three steps of GRPO, whose answers the model samples itself. Other answers than the CPU's are
    as good, so the importance weights are looked at."""
    reward = bench.scratch / "reward.py"
    reward.write_text(REWARD)
    flags = [*bench.tiny("", "answers"), *LORA, *GRPO, "--reward", f"{reward}:letters"]
    flags += ["--max_train_step", "3", "--save_every_epoch", "false", "--device", DEVICE]
    expected = f"3 steps, mean importance weights within {MOST_WEIGHT_ERROR:g} of 1"
    for case in bench.run({"GRPO": flags}):
        if case.error:
            yield failed_row("further", expected, case)
            continue
        steps = bench.steps("GRPO")
        error = max(abs(line["train/sampler/weight"] - 1) for line in steps)
        is_right = len(steps) == 3 and error < MOST_WEIGHT_ERROR
        yield Row("further", "GRPO", expected, f"{len(steps)} steps, {error:.1e}", is_right)


def _methods(bench: Bench, part: str, runs: dict[str, Method]) -> Iterator[Row]:
    flags: dict[str, list[str]] = {}
    for name, method in runs.items():
        # Pillow may be missing, or a class of Transformers
        yield from bench.guarded(part, name, _make_inputs(bench, name, method, flags))
    bases = {name: name for name in flags}
    limits = {name: method.limit for name, method in runs.items()}
    yield from _beside_the_cpu(bench, part, flags, bases, limits)


def _make_inputs(
    bench: Bench, name: str, method: Method, flags: dict[str, list[str]]
) -> Iterator[Row]:
    """Make the model and the samples of a method, and put its flags into `flags`."""
    flags[name] = _method_flags(bench, method)
    yield from ()


def compiled(bench: Bench) -> Iterator[Row]:
    """Run three steps with torch.compile, and compare with fp32 on the CPU."""
    if not ON_GPU:
        return
    flags: dict[str, list[str]] = {}
    bases: dict[str, str] = {}
    base_flags: dict[str, list[str]] = {}
    for name, (base, more) in COMPILED.items():
        is_method = base in METHODS
        plain = _method_flags(bench, METHODS[base]) if is_method else [*bench.tiny(), *CASES[base]]
        flags[name] = [*plain, *more]
        bases[name] = base
        base_flags[base] = plain
    yield from _beside_the_cpu(bench, "compiled", flags, bases, {}, base_flags, SECONDS_TO_COMPILE)


def _method_flags(bench: Bench, method: Method) -> list[str]:
    flags = [*bench.tiny(method.model, method.samples), *method.flags]
    if "distill" in method.flags:
        teacher = make_architecture(bench.scratch / "tiny-llama", "llama")
        flags += ["--teacher_model", str(teacher)]
    return flags


def _beside_the_cpu(
    bench: Bench,
    part: str,
    flags: dict[str, list[str]],
    bases: dict[str, str],
    limits: dict[str, float],
    base_flags: dict[str, list[str]] | None = None,
    seconds: float = 60.0,
) -> Iterator[Row]:
    """Run each case after its base on the CPU in fp32, and yield a line as soon as both have ended.

    Args:
        bench: of this command.
        part: name of the check.
        flags: by name of the case.
        bases: by name of the case: the case that runs on the CPU.
        limits: by name of the case: of the relative difference of losses.
        base_flags: of the bases; None: they are among `flags`.
        seconds: limit of one case.
    """
    three = ["--max_train_step", "3", "--save_every_epoch", "false"]
    runs: dict[str, list[str]] = {}
    for name, own in flags.items():
        base = bases[name]
        reference = (base_flags or flags)[base]
        # the last --precision counts
        precision = [] if "bf16_pure" in reference else ["--precision", "fp32"]
        runs.setdefault(f"{base} on the CPU", [*reference, *three, *precision, "--device", "cpu"])
        runs[name] = [*own, *three, "--device", DEVICE]
    ended: dict[str, Case] = {}
    for case in bench.run(runs, limit=seconds):
        ended[case.name] = case
        if case.name not in flags:
            continue
        reference_case = ended[f"{bases[case.name]} on the CPU"]
        expected = "3 steps"
        if "liger-kernel cannot be imported" in case.error:
            yield left_out(part, case.name)._replace(found="left out: no liger-kernel")
        elif case.error:
            yield failed_row(part, expected, case)
        elif reference_case.error:
            yield failed_row(part, expected, reference_case)
        else:
            limit = limits.get(case.name, LIMITS.get(case.name, 5e-3))
            row = compare_losses(bench, part, case.name, reference_case.name, limit)
            yield from bench.guarded(part, case.name, row)


def compare_losses(
    bench: Bench, part: str, name: str, reference: str, limit: float
) -> Iterator[Row]:
    """Compare the losses of a run with those of its reference.

    In fp16 the first steps may be skipped, because the loss scale is still too high. The reference
    does not skip them, so only losses before the first missing update are compared.
    """
    steps = bench.steps(name)
    expected = bench.steps(reference)
    skipped = [line.get("train/skipped_steps", 0) for line in steps]
    # the loss of step n depends on the updates of the steps before it
    comparable = 1 + sum(count == 0 for count in skipped[:-1])
    pairs = list(zip(steps, expected, strict=True))[:comparable]
    error = max(abs(line["train/loss"] / other["train/loss"] - 1) for line, other in pairs)
    norms = [
        abs(line["train/grad_norm"] / other["train/grad_norm"] - 1)
        for (line, other), count in zip(pairs, skipped, strict=False)
        if count == 0 and name not in OTHER_NUMBERS
    ]
    gradient_error = max(norms, default=0.0)
    is_right = error < limit and gradient_error < MOST_GRADIENT_ERROR and skipped[-1] < len(steps)
    is_finite = all(math.isfinite(line["train/loss"]) for line in steps)
    note = f", {skipped[-1]:.0f} steps skipped" if skipped[-1] else ""
    found = f"losses {error:.1e}, norms {gradient_error:.1e}{note}"
    claim = f"the CPU's in fp32: losses within {limit:g}, gradient norms {MOST_GRADIENT_ERROR:g}"
    yield Row(part, name, claim, found, is_right and is_finite)


def waits(bench: Bench) -> Iterator[Row]:
    """From the second step on, the host waits for nothing: neither forward nor backward nor the
    update. With images it waits at most 3 times per micro-batch."""
    names = ["full", "full, padding", "LoRA", "LoRA, nf4", "LoRA, 8 bit", "checkpointing selective"]
    common = ["--max_train_step", "3", "--device", DEVICE]
    runs = {f"waits, {name}": [*bench.tiny(), *common, *CASES[name]] for name in names}
    yield from _waiting(bench, runs, "none", "fail at waits")
    # Only 9.0 and 10.0 have a kernel for all experts; elsewhere the host reads once per layer how many
    # tokens each of them has.
    has_kernel = ON_GPU and torch.cuda.get_device_capability() in ((9, 0), (10, 0))
    expected, toggle = "none", "fail at waits"
    if not has_kernel:
        expected, toggle = "one per layer", "fail over 4 waits"
    experts = [*bench.tiny("qwen3_moe"), *LORA_ON_EXPERTS, *common]
    yield from _waiting(bench, {"waits, experts": experts}, expected, toggle)
    images = [*_method_flags(bench, FURTHER["images"]), *common]
    yield from _waiting(bench, {"waits, images": images}, "at most 3", "fail over 3 waits")


def _waiting(bench: Bench, runs: dict[str, list[str]], expected: str, toggle: str) -> Iterator[Row]:
    for case in bench.run(runs, toggle=toggle):
        if case.error:
            yield failed_row("waits", expected, case)
        else:
            yield Row("waits", case.name, expected, expected, True)


def resume(bench: Bench) -> Iterator[Row]:
    """A run resumed from its middle has the losses of the uninterrupted one."""
    flags = [*bench.tiny(), "--max_train_step", "6", "--save_steps", "3", "--device", DEVICE]
    yield from _whole_run(bench, "resume", "whole", flags)
    yield from _resumed_run(bench, "resume", "whole", flags, step=3)


def save(bench: Bench) -> Iterator[Row]:
    """Save the weights and AdamW's states of 3B: how long training waits, how long writing takes,
    how much host memory is pinned; and resume from it."""
    shape = THREE_B if ON_GPU else TINY
    name = f"model-{shape['hidden_size']}x{shape['num_hidden_layers']}"
    model = make_model(bench.scratch / name, shape)
    length = 1024 if ON_GPU else 128
    samples = make_samples(bench.scratch / "save-samples.jsonl", [length] * 24)
    for run in ("save", "save resumed"):  # of an earlier command
        bench.remove_run(run)
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors")) // 2
    fitting = shutil.disk_usage(bench.scratch).free / (1.05 * weights)  # bytes per weight
    if fitting < PURE_BYTES:
        too_little = f"left out: only {fitting:.0f} bytes of disk per weight"
        yield left_out("save", "3B")._replace(found=too_little)
        return
    precision = "bf16_mixed" if fitting > MIXED_BYTES else "bf16_pure"
    # The second checkpoint of a run shows what saving costs when memory is pinned already.
    has_two = fitting > 2 * MIXED_BYTES
    flags = ["--model_name", str(model), "--dataset", str(samples), "--lr", "1e-5", "--overwrite"]
    flags += ["--context_length", str(length), "--batch_size_training", "1", "--device", DEVICE]
    flags += ["--precision", precision, "--save_model", "false", "--save_every_epoch", "false"]
    flags += ["--max_train_step", "4" if has_two else "3", "--keep_last", "2"]
    yield from _whole_run(bench, "save", "save", [*flags, "--save_steps", "2"], SECONDS_TO_SAVE)
    # of a run that failed, too
    yield from bench.guarded("save", "costs", _save_costs(bench, "save"))
    shutil.rmtree(bench.scratch / "save" / "checkpoints" / "step-000004", ignore_errors=True)
    yield from _resumed_run(bench, "save", "save", flags, 2, SECONDS_TO_SAVE)
    for run in ("save", "save resumed"):
        bench.remove_run(run)


def _whole_run(
    bench: Bench, part: str, name: str, flags: list[str], limit: float = 60.0
) -> Iterator[Row]:
    for case in bench.run({name: flags}, limit=limit):
        if case.error:
            yield failed_row(part, "finishes", case)


def _resumed_run(
    bench: Bench, part: str, whole: str, flags: list[str], step: int, limit: float = 60.0
) -> Iterator[Row]:
    """Resume from the checkpoint after `step` of a whole run, and compare the losses after it."""
    if whole not in bench.records:
        return
    checkpoint = bench.scratch / whole / "checkpoints" / f"step-{step:06d}"
    name = f"{whole} resumed"
    for case in bench.run({name: [*flags, "--resume", str(checkpoint)]}, limit=limit):
        if case.error:
            yield failed_row(part, "finishes", case)
            return
    after = bench.losses(whole)[step:]
    again = bench.losses(name)[-len(after) :]
    error = max(abs(loss / other - 1) for loss, other in zip(again, after, strict=True))
    most = 2e-3 if ON_GPU else 0.0  # flash attention's backward pass adds in any order
    claim = f"losses after step {step}"
    yield Row(part, claim, f"those of one run, within {most:g}", f"{error:.1e}", error <= most)


def _save_costs(bench: Bench, name: str) -> Iterator[Row]:
    """Yield lines about the checkpoints of a run. The first one also pins the memory."""
    metrics = bench.scratch / name / "metrics.jsonl"
    if not metrics.exists():
        return
    values = [json.loads(line) for line in metrics.read_text().splitlines()]
    for key in ("perf/save_stall_seconds", "perf/save_seconds"):
        times = ", ".join(f"{line[key]:.2f} s" for line in values if key in line)
        yield Row("save", key, "a time per checkpoint", times, bool(times))
    peaks = [
        max(line["memory/host_peak_bytes"]) for line in values if "memory/host_peak_bytes" in line
    ]
    if peaks:
        yield Row("save", "host peak", "a number", f"{max(peaks) / 2**30:.2f} GiB", True)
    plan_file = bench.scratch / name / "plan.json"
    if not plan_file.exists():
        yield Row("save", "plan", "plan.json", "missing", False)
        return
    plan = json.loads(plan_file.read_text())
    size = f"{plan['checkpoint_bytes'] / 2**30:.2f} GiB"
    yield Row("save", "size on disk, planned", "a number", size, True)
    if name not in bench.records:
        return
    pinned = bench.records[name]["pinned_bytes"]
    spent = bench.records[name]["pinning_seconds"]
    planned = plan["host_save_bytes"]
    found = f"{pinned / 2**30:.2f} GiB, planned {planned / 2**30:.2f}, pinned in {spent:.1f} s"
    claim = "pinned host memory"
    yield Row("save", claim, "at most 1.1 of the plan", found, pinned <= 1.1 * planned)


def ends(bench: Bench) -> Iterator[Row]:
    """How a run under torchrun ends: by itself, by a mistake, by a loss that is not a number, by
    signals."""
    script = str(RECIPES / "finetuning.py")
    command = [*torchrun_command(1), script, *bench.tiny()]
    command += ["--device", DEVICE, "--enable_fsdp"]
    endless = ["--num_epochs", "100000", "--save_steps", "1000000"]
    for name, flags, expected in (
        ("finishes", ["--max_train_step", "3"], 0),
        ("unknown flag", ["--lrr", "1"], 1),
        ("loss is NaN", ["--lr", "1e30"], 1),
    ):
        if bench.seconds_left < 15:
            yield left_out("ends", name)
        else:
            yield _ends_by_itself(bench, name, [*command, *flags], expected)
    for name, number in (("SIGTERM", signal.SIGTERM), ("kill -9", signal.SIGKILL)):
        if bench.seconds_left < 30:
            yield left_out("ends", name)
        else:
            row = _ends_by_signal(bench, name, [*command, *endless], number)
            yield from bench.guarded("ends", name, row)


def _ends_by_itself(bench: Bench, name: str, command: list[str], expected: int) -> Row:
    run = ["--output_dir", str(bench.scratch / f"ends {name}")]
    exit_code, printed = bench.run_command(f"ends {name}", [*command, *run], limit=90.0)
    is_right = exit_code == expected
    found = "did not end" if exit_code is None else str(exit_code)
    if not is_right:
        bench.keep(f"ends {name}", f"exit code {found}", printed)
    return Row("ends", name, f"exit code {expected}", found, is_right)


def _ends_by_signal(
    bench: Bench, name: str, command: list[str], number: signal.Signals
) -> Iterator[Row]:
    """SIGTERM goes to torchrun; kill -9 goes to the rank."""
    is_term = number == signal.SIGTERM
    state = "stopped" if is_term else "running"
    expected = f"{state}, {'a' if is_term else 'no'} checkpoint"
    run = bench.scratch / f"ends {name}"
    shutil.rmtree(run, ignore_errors=True)  # of an earlier command
    log = bench.scratch / f"ends {name}.log"
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [*command, "--output_dir", str(run)],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        found, is_right = _signal_after_a_step(bench, process, run, number)
    finally:
        end_processes(process)
    if not is_right:
        bench.keep(f"ends {name}", found, log.read_text(errors="replace"))
    yield Row("ends", name, expected, found, is_right)


def _signal_after_a_step(
    bench: Bench, process: subprocess.Popen[bytes], run: Path, number: signal.Signals
) -> tuple[str, bool]:
    """Send the signal, and return what the run's directory says, and whether that is right."""
    until = time.monotonic() + min(60.0, bench.seconds_left - 20)
    while not (run / "metrics.jsonl").exists():
        if time.monotonic() > until or process.poll() is not None:
            return "no step was made", False
        time.sleep(0.2)
    time.sleep(2)
    is_term = number == signal.SIGTERM
    if is_term:
        process.send_signal(number)
    else:
        children = psutil.Process(process.pid).children()
        rank = next(
            child for child in children if str(RECIPES / "finetuning.py") in child.cmdline()
        )
        rank.send_signal(number)
    begun = time.monotonic()
    try:
        process.wait(timeout=max(10.0, min(90.0, bench.seconds_left)))
    except subprocess.TimeoutExpired:
        return "did not end", False
    seconds = time.monotonic() - begun
    state = json.loads((run / "status.json").read_text())["state"]
    has_checkpoint = any((run / "checkpoints").glob("step-*"))
    found = f"{state} after {seconds:.1f} s, {'a' if has_checkpoint else 'no'} checkpoint"
    expected_state = "stopped" if is_term else "running"
    is_right = state == expected_state and has_checkpoint == is_term and process.returncode != 0
    return found, is_right


def oom(bench: Bench) -> Iterator[Row]:
    """Out of memory on the GPU ends in a message that names what holds it, and what would fit."""
    if not ON_GPU:
        return
    expected = "out of memory, and what would fit"
    model = make_model(bench.scratch / "model-4096x4", SHALLOW)
    # weights and gradients alone take 15 GiB
    share = 16 * 2**30 / torch.cuda.get_device_properties(0).total_memory
    flags = [*bench.tiny(), "--model_name", str(model), "--device_memory_fraction", f"{share:.4f}"]
    for case in bench.run({"oom": flags}, limit=120.0):
        if case.error == NO_TIME:
            yield left_out("oom", "message")
            return
        message = bench.printed.get("oom", "")
        is_explained = "out of memory" in message.lower() and "fit" in message
        yield Row("oom", "message", expected, last_line(message), is_explained)
