"""Check on this machine's GPU what llama_ft promises of CUDA, in parts of less than 10 minutes.

    python benchmarks/gpu_check.py --only start,cases,waits,attention,quantized,resume,ends,oom  # 8 minutes
    python benchmarks/gpu_check.py --only lora8b,quant8b,full  # 9 minutes, 80 GB
    python benchmarks/gpu_check.py  # everything

Each line of the table is written to OUTPUT/gpu_check.jsonl at once. Models are made from a seed, and nothing is
downloaded. Without a GPU the small parts run on the CPU, which checks this script. Exit code 1: a check failed.
"""

import argparse
import importlib.util
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY / "src"), str(Path(__file__).resolve().parent)]

import torch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

RECIPE = REPOSITORY / "recipes" / "finetuning.py"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "equal", "is_nonzero"}
ON_HOST = ("batches.py", "objective.py", "packed_attention.py")  # look at tensors of the host, on a GPU too
TINY = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512}
EIGHT_B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
EIGHT_B |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "rope_theta": 500000.0}
THREE_B = EIGHT_B | {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24}
LORA = ["--use_peft", "--target_modules", "all-linear", "--lora_dropout", "0"]
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
    "full, low_cpu_fsdp": ["--enable_fsdp", "--low_cpu_fsdp"],
}
ON_GPU_ONLY = {
    "full, fp16": ["--precision", "fp16"],
    "LoRA, nf4, offload": [*LORA, "--quantization", "4bit", "--enable_fsdp", "--fsdp_cpu_offload"],
}
COMMON = "--lr 1e-3 --no_plan --context_length 256 --batch_size_training 2 --save_model false --overwrite".split()


class Row(NamedTuple):
    """A line of the table."""

    check: str
    claim: str
    expected: str
    found: str
    ok: bool


class CountWaits(TorchDispatchMode):
    """Counts operators that make the host wait for the device; on the CPU they are cheap and show all the same.

    Attributes:
        found: operator and line of the nearest frame outside torch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.split("::")[1]
        if name in WAITING:
            frames = [frame for frame in traceback.extract_stack()[:-1] if "/torch/" not in frame.filename]
            self.found.append(f"{name} at line {frames[-1].lineno} of {Path(frames[-1].filename).name}")
        return function(*args, **(kwargs or {}))


def make_model(folder: Path, shape: dict[str, Any]) -> Path:
    """Write a Llama with random bf16 weights, one file per layer, and a tokenizer of single bytes."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(**shape, tie_word_embeddings=False, max_position_embeddings=8192, dtype="bfloat16")
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    torch.manual_seed(0)
    files: dict[str, dict[str, torch.Tensor]] = {}
    where = {}
    for name, parameter in model.named_parameters():
        file = f"model-{name.split('.')[2] if '.layers.' in name else 'ends'}.safetensors"
        value = torch.ones(parameter.shape) if parameter.ndim == 1 else torch.empty(parameter.shape, device=DEVICE)
        value = value if parameter.ndim == 1 else value.normal_(std=0.02)
        files.setdefault(file, {})[name] = value.to(torch.bfloat16).cpu()
        where[name] = file
        if sum(map(len, files.values())) >= 9:  # a layer: written, and freed
            _write_files(folder, files, save_file)
    _write_files(folder, files, save_file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    vocabulary = {"<s>": 0, "</s>": 1, "<pad>": 2, **{chr(33 + n): 3 + n for n in range(200)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


def _write_files(folder: Path, files: dict[str, dict[str, torch.Tensor]], save_file: Callable[..., None]) -> None:
    for file, tensors in files.items():
        target = folder / file
        if target.exists():
            from safetensors.torch import load_file

            tensors = load_file(target) | tensors
        save_file(tensors, target, metadata={"format": "pt"})
    files.clear()


def make_samples(file: Path, lengths: list[int], vocabulary: int = 200) -> Path:
    """Write tokenized samples of these lengths."""
    generator = torch.Generator().manual_seed(len(lengths))
    with open(file, "w") as lines:
        for length in lengths:
            ids = torch.randint(3, vocabulary, (length,), generator=generator).tolist()
            lines.write(json.dumps({"input_ids": ids, "labels": [-100] * 4 + ids[4:]}) + "\n")
    return file


class Bench:
    """Where models, samples and runs are, and the seconds that are left."""

    def __init__(self, output: Path, seconds: float) -> None:
        self.output, self._until = output, time.monotonic() + seconds
        output.mkdir(parents=True, exist_ok=True)

    @property
    def seconds_left(self) -> float:
        return self._until - time.monotonic()

    def tiny(self) -> list[str]:
        """Flags of a tiny model and samples of uneven length."""
        model = make_model(self.output / "tiny", TINY)
        samples = make_samples(self.output / "samples.jsonl", [20 + 37 * n % 200 for n in range(64)])
        return ["--model_name", str(model), "--dataset", str(samples), *COMMON]

    def run(self, cases: dict[str, list[str]], watch_waits: bool = False) -> dict[str, str]:
        """Run the recipe for each case, as many as possible in one process; return what went wrong by case."""
        failed: dict[str, str] = {}
        left = dict(cases)
        while left and self.seconds_left > 0:
            file = self.output / "cases.json"
            file.write_text(
                json.dumps([[*flags, "--output_dir", str(self.output / name)] for name, flags in left.items()])
            )
            (self.output / "done").unlink(missing_ok=True)
            command = [sys.executable, __file__, "--child", str(file), *(["--watch_waits"] if watch_waits else [])]
            child = subprocess.run(command, capture_output=True, text=True, timeout=max(self.seconds_left, 1))
            done = len((self.output / "done").read_text()) if (self.output / "done").exists() else 0
            names = list(left)
            for name in names[:done]:
                del left[name]
            if left and done < len(names):
                failed[names[done]] = (child.stderr or child.stdout).strip().splitlines()[-1][-300:]
                del left[names[done]]
        return failed | dict.fromkeys(left, "no time was left")

    def steps(self, name: str) -> list[dict[str, Any]]:
        """Lines of a run's metrics.jsonl that are steps."""
        lines = [json.loads(line) for line in (self.output / name / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if "train/loss" in line]


def child(cases: Path, watch_waits: bool) -> None:
    """Run the recipe once per list of flags; with `watch_waits`, fail at the first wait in a step after the first."""
    spec = importlib.util.spec_from_file_location("finetuning", RECIPE)
    assert spec is not None and spec.loader is not None
    finetuning = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(finetuning)
    from llama_ft import training
    from llama_ft.config.parse import as_keywords

    if watch_waits:
        forward_backward, calls = training.accumulate_gradients, [0]

        def watched(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == 1:
                return forward_backward(*args, **kwargs)
            if DEVICE == "cuda":
                torch.cuda.set_sync_debug_mode("error")
                try:
                    return forward_backward(*args, **kwargs)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            with CountWaits() as counter:
                result = forward_backward(*args, **kwargs)
            if found := {wait for wait in counter.found if not wait.endswith(ON_HOST)}:
                sys.exit(f"the host waits for the device: {'; '.join(sorted(found))}")
            return result

        training.accumulate_gradients = watched
    for flags in json.loads(cases.read_text()):
        finetuning.main(**as_keywords(flags))
        with open(cases.with_name("done"), "a") as done:
            done.write(".")


def start(bench: Bench) -> Iterator[Row]:
    """Versions, libraries, and how long one process takes to join a group of its own."""
    import peft
    import transformers

    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}"
    yield Row("start", "device", "a GPU", name, DEVICE == "cuda")
    yield Row("start", "versions", "imported", versions, True)
    try:
        import bitsandbytes

        yield Row("start", "bitsandbytes", "imported", bitsandbytes.__version__, True)
    except Exception as error:
        yield Row("start", "bitsandbytes", "imported", repr(error)[:80], False)
    if DEVICE == "cuda":
        major, minor = torch.cuda.get_device_capability()
        yield Row("start", "compute capability", ">= 8.0", f"{major}.{minor}", major >= 8)


def cases(bench: Bench) -> Iterator[Row]:
    """Three steps of every kind of run, beside the same in fp32 on the CPU."""
    common = [*bench.tiny(), "--max_train_step", "3"]
    every = CASES | (ON_GPU_ONLY if DEVICE == "cuda" else {})
    exact = {
        f"{name} on the CPU": [*common, *flags, *_without_precision(flags), "--device", "cpu"]
        for name, flags in every.items()
    }
    failed = bench.run(exact | {name: [*common, *flags, "--device", DEVICE] for name, flags in every.items()})
    for name in every:
        if wrong := failed.get(name) or failed.get(f"{name} on the CPU"):
            yield Row("cases", name, "3 steps", wrong, False)
            continue
        found = [line["train/loss"] for line in bench.steps(name)]
        expected = [line["train/loss"] for line in bench.steps(f"{name} on the CPU")]
        error = max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))
        limit = 1e-4 if "fp32" in name else 2e-2
        yield Row("cases", name, f"losses of the CPU in fp32, within {limit:g}", f"{error:.1e}", error < limit)


def _without_precision(flags: list[str]) -> list[str]:
    """fp32, unless the optimizer is made for bf16 weights."""
    return [] if "bf16_pure" in flags else ["--precision", "fp32"]  # the last --precision counts


def waits(bench: Bench) -> Iterator[Row]:
    """From the second step on, forward and backward make the host wait for nothing."""
    names = ["full", "full, padding", "LoRA", "LoRA, nf4", "LoRA, 8 bit", "checkpointing selective"]
    common = [*bench.tiny(), "--max_train_step", "3", "--device", DEVICE]
    failed = bench.run({f"waits, {name}": [*common, *CASES[name]] for name in names}, watch_waits=True)
    for name in names:
        wrong = failed.get(f"waits, {name}")
        yield Row("waits", name, "none", wrong or "none", wrong is None)


def attention(bench: Bench) -> Iterator[Row]:
    """Attention on packed rows beside fp64, row by row; its time on a full row."""
    from types import SimpleNamespace

    from llama_ft.models import packed_attention

    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    for heads, shared, width, window in ((8, 2, 64, None), (8, 8, 128, None), (8, 2, 64, 16), (4, 4, 96, None)):
        lengths = [1, 7, 64, 33, 128, 1, 22]
        torch.manual_seed(0)
        tokens = sum(lengths)
        module = SimpleNamespace(num_key_value_groups=heads // shared, is_causal=True, training=True)
        shapes = [(1, heads, tokens, width), (1, shared, tokens, width), (1, shared, tokens, width)]
        parts = [torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True) for shape in shapes]
        offsets = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)
        rows = packed_attention.PackedRows(tuple(lengths), offsets, max(lengths))
        extra = {"scaling": width**-0.5, "sliding_window": window, "packed_rows": rows}
        output, _ = packed_attention._packed_sdpa(module, *parts, None, **extra)  # type: ignore[arg-type]
        output.sum().backward()
        doubles = [part.detach().double().requires_grad_() for part in parts]
        expected = _by_rows(doubles, lengths, heads // shared, window)
        expected.sum().backward()
        pairs = [(output, expected), *((a.grad, b.grad) for a, b in zip(parts, doubles, strict=True))]
        error = max(((a.double() - b).abs().max() / b.abs().max()).item() for a, b in pairs)
        limit = 2e-2 if dtype == torch.bfloat16 else 1e-5
        name = f"heads {heads}/{shared}, width {width}, window {window}"
        yield Row("attention", name, f"forward and gradients of fp64, within {limit:g}", f"{error:.1e}", error < limit)


def _by_rows(parts: list[torch.Tensor], lengths: list[int], groups: int, window: int | None) -> torch.Tensor:
    outputs, start = [], 0
    for length in lengths:
        query, key, value = (part[:, :, start : start + length] for part in parts)
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
        allowed = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        allowed = allowed if window is None else allowed.triu(1 - window)
        scores = (query @ key.transpose(2, 3)) / math.sqrt(query.shape[-1])
        outputs.append(scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ value)
        start += length
    return torch.cat(outputs, dim=2).transpose(1, 2)


def quantized(bench: Bench) -> Iterator[Row]:
    """bitsandbytes on this device beside its CPU backend; a block of rows is quantized as in the whole matrix."""
    from bitsandbytes import functional

    torch.manual_seed(0)
    weight = torch.randn(256, 512)
    for kind in ("nf4", "fp4"):
        restored = []
        for device in ("cpu", DEVICE):
            packed, state = functional.quantize_4bit(weight.to(device), blocksize=64, quant_type=kind)
            restored.append(functional.dequantize_4bit(packed, state).cpu())
        error = (restored[0] - restored[1]).abs().max().item()
        yield Row("quantized", f"{kind} beside the CPU", "equal within 1e-3", f"{error:.1e}", error < 1e-3)
    half, _ = functional.quantize_4bit(weight[:128].to(DEVICE), blocksize=64, quant_type="nf4")
    whole, _ = functional.quantize_4bit(weight.to(DEVICE), blocksize=64, quant_type="nf4")
    same = torch.equal(half.flatten(), whole.flatten()[: half.numel()])
    yield Row("quantized", "a block of rows", "bits of the whole", "equal" if same else "differ", same)


def resume(bench: Bench) -> Iterator[Row]:
    """A run resumed from its middle has the losses of the uninterrupted one."""
    common = [*bench.tiny(), "--max_train_step", "6", "--save_steps", "3", "--device", DEVICE]
    on = ["--resume", str(bench.output / "whole" / "checkpoints" / "step-000003")]
    failed = bench.run({"whole": common, "resumed": [*common, *on]})
    if failed:
        yield Row("resume", "both runs", "finished", str(failed), False)
        return
    losses = [[line["train/loss"] for line in bench.steps(name)][-3:] for name in ("whole", "resumed")]
    yield Row("resume", "losses after step 3", str(losses[0]), str(losses[1]), losses[0] == losses[1])


def ends(bench: Bench) -> Iterator[Row]:
    """How a run under torchrun ends: by itself, by SIGTERM, by a mistake."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1", str(RECIPE)]
    tiny = [*bench.tiny(), "--device", DEVICE, "--enable_fsdp"]
    for name, flags, expected in (("finishes", ["--max_train_step", "3"], 0), ("unknown flag", ["--lrr", "1"], 1)):
        done = subprocess.run(
            [*torchrun, *tiny, *flags, "--output_dir", str(bench.output / f"ends {name}")],
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        yield Row("ends", name, f"exit code {expected}", str(done.returncode), done.returncode == expected)
    run = bench.output / "ends stopped"
    command = [*torchrun, *tiny, "--num_epochs", "100000", "--save_steps", "1000000", "--output_dir", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while not (run / "metrics.jsonl").exists() and time.monotonic() < until and process.poll() is None:
        time.sleep(0.5)
    time.sleep(2)
    process.send_signal(signal.SIGTERM)
    begun = time.monotonic()
    process.wait(timeout=120)
    state = json.loads((run / "status.json").read_text())["state"]
    seconds = time.monotonic() - begun
    kept = bool(list((run / "checkpoints").glob("step-*")))
    found = f"{state} after {seconds:.1f} s, {'a' if kept else 'no'} checkpoint"
    yield Row("ends", "SIGTERM", "stopped, a checkpoint", found, state == "stopped" and kept)


def oom(bench: Bench) -> Iterator[Row]:
    """Out of memory on the GPU ends in a message that names what holds it."""
    if DEVICE != "cuda":
        return
    flags = [
        *bench.tiny(),
        "--batch_size_training",
        "512",
        "--context_length",
        "8192",
        "--device_memory_fraction",
        "0.01",
    ]
    message = bench.run({"oom": flags}).get("oom", "")
    yield Row("oom", "message", "memory, and what would fit", message[-200:], "memory" in message)


def _throughput(bench: Bench, part: str, runs: dict[str, tuple[dict[str, Any], list[str], float]]) -> Iterator[Row]:
    """Runs of 10 steps of one dense packed sequence of 4,096 tokens: tokens/s, MFU, and memory beside the plan."""
    samples = make_samples(bench.output / "dense.jsonl", [4096] * 24)
    for name, (shape, flags, expected) in runs.items():
        if DEVICE != "cuda" or bench.seconds_left < 60:
            continue
        model = make_model(bench.output / f"model-{shape['hidden_size']}", shape)
        common = ["--model_name", str(model), "--dataset", str(samples), "--context_length", "4096", "--lr", "1e-5"]
        common += ["--batch_size_training", "1", "--max_train_step", "10", "--save_model", "false", "--overwrite"]
        if wrong := bench.run({name: [*common, *flags]}).get(name):
            yield Row(part, name, "10 steps", wrong, False)
            continue
        steps = bench.steps(name)[5:]
        speed = statistics.median(line["perf/tokens_per_second"] for line in steps)
        mfu = statistics.median(line.get("perf/mfu", 0.0) for line in steps)
        yield Row(part, f"{name}: tokens/s", f">= {expected:,.0f}", f"{speed:,.0f}, MFU {mfu:.1%}", speed >= expected)
        plan = json.loads((bench.output / name / "plan.json").read_text())
        peak = max(max(line["memory/device_peak_bytes"]) for line in bench.steps(name))
        planned = max(peak_["bytes"] for peak_ in plan["peaks"]) if plan.get("peaks") else 0
        ratio = planned / peak
        yield Row(part, f"{name}: planned / measured", "0.95 to 1.05", f"{ratio:.3f}", 0.95 <= ratio <= 1.05)


def lora8b(bench: Bench) -> Iterator[Row]:
    """LoRA on 8 B."""
    runs = {
        "lora": (EIGHT_B, LORA, 12_000.0),
        "lora, liger": (EIGHT_B, [*LORA, "--use_liger", "true"], 14_000.0),
        "lora, selective": (EIGHT_B, [*LORA, "--activation_checkpointing", "selective"], 9_000.0),
    }
    yield from _throughput(bench, "lora8b", runs)


def quant8b(bench: Bench) -> Iterator[Row]:
    """LoRA on a quantized 8 B."""
    runs = {
        "qlora": (EIGHT_B, [*LORA, "--quantization", "4bit"], 6_000.0),
        "lora, 8 bit": (EIGHT_B, [*LORA, "--quantization", "8bit"], 4_000.0),
    }
    yield from _throughput(bench, "quant8b", runs)


def full(bench: Bench) -> Iterator[Row]:
    """Full fine-tuning of 3 B and 8 B."""
    pure = ["--precision", "bf16_pure", "--optimizer", "anyprecision", "--activation_checkpointing", "selective"]
    runs = {"full 3b": (THREE_B, [], 15_000.0), "full 8b": (EIGHT_B, pure, 7_000.0)}
    yield from _throughput(bench, "full", runs)


def one_pass(bench: Bench) -> Iterator[Row]:
    """What is one kernel on CUDA: anyprecision's update, and weights out of 8 bits. A pass has to move 26 bytes per
    parameter, and 3 per weight."""
    from llama_ft.models.quantized import Int8
    from llama_ft.runtime.one_kernel import runs_compiled
    from llama_ft.training.anyprecision import AnyPrecisionAdamW

    count = 2**26 if DEVICE == "cuda" else 2**16
    weight = torch.nn.Parameter(torch.ones(count // 4096, 4096, device=DEVICE, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    optimizer, scheme = AnyPrecisionAdamW([weight], lr=1e-3), Int8(6.0)
    packed = scheme.quantize(torch.randn(weight.shape, device=DEVICE))
    work = {
        "anyprecision": (optimizer.step, 26),
        "8bit": (lambda: scheme.dequantize(*packed, torch.bfloat16), 3),
    }
    for name, (compute, nbytes) in work.items():
        for _ in range(3):
            compute()
        started = time.perf_counter()
        for _ in range(10):
            compute()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        rate = 10 * nbytes * count / (time.perf_counter() - started) / 1e9
        expected = "at least 500 GB/s" if DEVICE == "cuda" else "runs"
        yield Row("one_pass", name, expected, f"{rate:.0f} GB/s", rate > 500 or not runs_compiled(weight))
    exact = scheme.quantize(torch.randn(256, 512))
    beside = scheme.dequantize(*exact, torch.bfloat16)
    same = torch.equal(scheme.dequantize(*(it.to(DEVICE) for it in exact), torch.bfloat16).cpu(), beside)
    yield Row("one_pass", "8bit beside the CPU", "equal", "equal" if same else "differ", same)


PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    part.__name__: part
    for part in (start, cases, waits, attention, quantized, one_pass, resume, ends, oom, lora8b, quant8b, full)
}


def main() -> int:
    """Run the parts that are asked for; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--seconds", type=float, default=3000.0, help="what does not fit into this time is left out")
    parser.add_argument("--output", type=Path, default=Path("output/gpu_check"), help="models, runs, gpu_check.jsonl")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--watch_waits", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child, given.watch_waits)
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
    wrong = [row for row in rows if not row.ok and not (DEVICE == "cpu" and row.claim == "device")]
    print(f"{len(rows) - len(wrong)} of {len(rows)} checks hold")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
