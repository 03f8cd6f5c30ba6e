"""Measure how long loading a model takes and how much memory it needs, compared with Transformers
and accelerate.

    python benchmarks/speed/loading.py
    python benchmarks/speed/loading.py --published fp8 --targets bf16,4bit --device cpu

The table has a row per number of ranks, way of loading, and target. Each is measured alternately
with one process that calls `from_pretrained(dtype=bfloat16)` and then clones every parameter (the
call alone only maps the files). `x` is the median of the ratios to it. `peak` is a rank's highest
memory minus its memory after imports and the start of the process group: anonymous host memory
(RssAnon in /proc/<pid>/status), or device memory on CUDA, in separate rows. The bound is

    own shards + 1.5 x the largest tensor in its target dtype + 64 MiB     rank 0 of scatter
    own shards + 1.0 x the largest tensor's slice             + 64 MiB     every other rank

On CUDA the shards do not count in host memory. Weights are in the page cache. `verdict` compares
with these bounds, and for slices and scatter in bf16 with 1.2 and 2 times the baseline.

`--published` loads a checkpoint that is quantized in that format: a Llama, or for mxfp4 a gpt-oss.
The baseline cannot read them, so seconds are compared with the first row.
"""

import argparse
import contextlib
import importlib.util
import json
import multiprocessing
import os
import re
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, get_args

SOURCES = str(Path(__file__).resolve().parents[2] / "src")
sys.path.insert(0, SOURCES)

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
)
from transformers.modeling_utils import PreTrainedModel

from llama_ft import models, observe, runtime
from llama_ft.config import FSDPConfig, ModelConfig, PeftConfig, QuantizationConfig
from llama_ft.models.base.shards import local_shard
from llama_ft.runtime import Ranks

MIB = 2**20
SAMPLE_SECONDS = 0.003
LORA = PeftConfig(use_peft=True, target_modules="all-linear")
TARGETS: dict[str, tuple[str, PeftConfig, QuantizationConfig]] = {
    "bf16": ("bf16_pure", PeftConfig(), QuantizationConfig()),
    "fp32": ("bf16_mixed", PeftConfig(), QuantizationConfig()),
    "8bit": ("bf16_mixed", LORA, QuantizationConfig(mode="8bit")),
    "4bit": ("bf16_mixed", LORA, QuantizationConfig(mode="4bit")),
}
Device = Literal["auto", "cuda", "cpu"]
Format = Literal["fp8", "int4", "mxfp4", "gptq"]
INT4_GROUP = 32
# quantization_config of each format
NOTES: dict[Format, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "mxfp4": {"quant_method": "mxfp4"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": INT4_GROUP},
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "strategy": "group", "group_size": INT4_GROUP},
            }
        },
    },
}
LIMITS = {"slices": 1.2, "scatter": 2.0}  # times the baseline, in bf16


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    ranks: int
    way: str  # slices, scatter, accelerate, from_pretrained
    target: str


@dataclass(frozen=True)
class Loaded:
    """What one rank says after loading; sizes in bytes. `largest` is the largest tensor, whole, in
    its target dtype, and `slice` this rank's part of it."""

    seconds: float
    shards: int
    largest: int
    slice: int
    device_peak: int | None


@dataclass
class Result:
    """Seconds of every turn, and the turn with the highest peak in host and device memory, per
    rank."""

    seconds: list[float] = field(default_factory=list)
    ranks: list[Loaded] = field(default_factory=list)
    host_peaks: list[int] = field(default_factory=list)
    device_peaks: list[int] = field(default_factory=list)


def load(folder: Path, case: Case, job: Ranks) -> PreTrainedModel:
    """Skeleton, shards, weights: the steps of build_model in recipes/finetuning.py."""
    precision_name, peft, settings = TARGETS[case.target]
    precision = runtime.PRECISIONS[precision_name]
    model_config = models.load_model_config(folder, False)
    quantization = models.choose_quantization(settings, model_config, peft.use_peft)
    built = models.build_on_meta(model_config, ModelConfig(model_name=str(folder)), folder=folder)
    model = built.model
    if quantization is not None:
        models.quantize_linears(built, quantization)
    if peft.use_peft:
        built.adapter = models.inject_lora(built, peft, str(folder))
    models.set_storage_dtypes(model, precision)
    models.apply_fsdp(built, job.mesh, FSDPConfig(enable_fsdp=True), precision)
    how = models.LoadSettings(peft, 0, precision.frozen, scatter=case.way == "scatter")
    models.load_weights(built, job, how)
    return model


def load_with_accelerate(folder: Path, case: Case, job: Ranks) -> PreTrainedModel:
    """cpu_ram_efficient_loading: rank 0 loads the model, the others are to have it on the meta
    device, and fsdp2_prepare_model, which Accelerator.prepare calls, shards it and sends it out."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin  # type: ignore[import-untyped]
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model  # type: ignore[import-untyped]

    warnings.simplefilter("ignore")  # about OMP_NUM_THREADS
    os.environ |= {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    }
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_ram_efficient_loading=True, auto_wrap_policy="transformer_based_wrap"
    )
    accelerator = Accelerator(cpu=job.device.type == "cpu", fsdp_plugin=plugin)
    accelerator.state.fsdp_plugin = plugin  # on the CPU it would run DDP instead
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[case.target]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return fsdp2_prepare_model(accelerator, model)


def load_and_clone(folder: Path, case: Case, job: Ranks) -> PreTrainedModel:
    """The baseline."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device=job.device, copy=True)
    return model


WAYS: dict[str, Callable[[Path, Case, Ranks], PreTrainedModel]] = {
    "slices": load,
    "scatter": load,
    "accelerate": load_with_accelerate,
    "from_pretrained": load_and_clone,
}
BASELINE = Case(1, "from_pretrained", "bf16")


def worker(
    rank: int, case: Case, folder: Path, device: Device, port: int, pipe: Connection
) -> None:
    """One rank, in a process of its own: says that it is ready, loads when told to, says how it
    went."""
    os.environ |= {name: str(rank) for name in ("RANK", "LOCAL_RANK")}
    os.environ |= {name: str(case.ranks) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with runtime.start(device, "world") as job:
        dist.all_reduce(torch.zeros(1, device=job.device))  # connects the ranks
        observe.reset_peaks(job.device)
        pipe.send("ready")
        pipe.recv()
        dist.barrier()
        started = time.perf_counter()
        model = WAYS[case.way](folder, case, job)
        if job.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        shards = [local_shard(parameter) for parameter in model.parameters()]
        whole = [parameter.numel() * parameter.itemsize for parameter in model.parameters()]
        sizes = [shard.nbytes for shard in shards]
        peak = observe.memory_use(job.device).device_peak or None
        pipe.send(Loaded(seconds, sum(sizes), max(whole), max(sizes), peak))
        pipe.recv()


def preload() -> None:
    """Have ranks forked from a server that has imported the libraries: 0.2 s each instead of 8."""
    os.environ["PYTHONPATH"] = SOURCES
    libraries = [
        "transformers.models.llama.modeling_llama",
        "transformers.models.gpt_oss.modeling_gpt_oss",
        "llama_ft.models",
        "accelerate.utils.fsdp_utils",
    ]
    multiprocessing.get_context("forkserver").set_forkserver_preload(libraries)


def measure(
    case: Case, folder: Path, device: Device, result: Result, start_method: str = "forkserver"
) -> None:
    """One turn of one case: starts its ranks, and watches their memory while they load."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context: Any = multiprocessing.get_context(start_method)
    pipes = []
    processes = []
    for rank in range(case.ranks):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=worker, args=(rank, case, folder, device, port, theirs), daemon=True
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    for pipe in pipes:
        pipe.recv()
    levels = [anonymous_bytes(process.pid) for process in processes]
    peaks = list(levels)
    for pipe in pipes:
        pipe.send("go")
    waiting = list(pipes)
    while waiting:
        peaks = [
            max(peak, anonymous_bytes(process.pid))
            for peak, process in zip(peaks, processes, strict=True)
        ]
        ready = wait(waiting, timeout=SAMPLE_SECONDS)
        waiting = [pipe for pipe in waiting if pipe not in ready]
    ranks: list[Loaded] = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send("end")
    for process in processes:
        process.join()
    result.seconds.append(max(rank.seconds for rank in ranks))
    result.ranks = ranks
    host = [peak - level for peak, level in zip(peaks, levels, strict=True)]
    on_device = [rank.device_peak for rank in ranks if rank.device_peak is not None]
    result.host_peaks = [max(pair) for pair in zip(host, result.host_peaks or host, strict=True)]
    result.device_peaks = [
        max(pair) for pair in zip(on_device, result.device_peaks or on_device, strict=True)
    ]


def anonymous_bytes(pid: int | None) -> int:
    """Resident memory of a process that no file stands behind."""
    found = re.search(
        r"^RssAnon:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE
    )
    return int(found.group(1)) * 1024 if found else 0


def bounds(case: Case, ranks: list[Loaded], shards_count: bool) -> list[int]:
    """What each rank may hold, in bytes."""
    return [
        (loaded.shards if shards_count else 0)
        + (loaded.largest * 3 // 2 if case.way == "scatter" and rank == 0 else loaded.slice)
        + 64 * MIB
        for rank, loaded in enumerate(ranks)
    ]


def codes_and_scales(form: Format, name: str, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Random tensors of a quantized weight. Stacks of mxfp4 are transposed: [experts, in, out]."""
    if form == "mxfp4":
        experts, columns, rows = shape
        grid = (experts, rows, columns // 32)
        return {
            f"{name}_blocks": torch.randint(256, (*grid, 16), dtype=torch.uint8),
            f"{name}_scales": torch.randint(115, 124, grid, dtype=torch.uint8),
        }
    rows, columns = shape
    if form == "fp8":
        codes = torch.randint(0x70, shape, dtype=torch.uint8)
        scale = torch.rand(-(-rows // 128), -(-columns // 128))
        return {name: codes.view(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
    words = torch.randint(-(2**31), 2**31, (rows, columns // 8))
    if form == "gptq":
        prefix = name.removesuffix("weight")
        groups = columns // INT4_GROUP
        return {
            f"{prefix}qweight": words.int().T.contiguous(),
            f"{prefix}qzeros": torch.full((groups, rows // 8), 0x77777777, dtype=torch.int32),
            f"{prefix}scales": torch.rand(groups, rows).half(),
            f"{prefix}g_idx": torch.arange(columns, dtype=torch.int32) // INT4_GROUP,
        }
    return {
        f"{name}_packed": words.int(),
        f"{name}_scale": torch.rand(rows, columns // INT4_GROUP).bfloat16(),
        f"{name}_shape": torch.tensor([rows, columns]),
    }


def save_published(folder: Path, config: PretrainedConfig, form: Format) -> None:
    """Save a random checkpoint whose projections (of mxfp4: experts) are quantized, tensor by
    tensor, in a file per layer."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    config.quantization_config = NOTES[form]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    files = dict[str, dict[str, torch.Tensor]]()
    for name, tensor in model.state_dict().items():
        layer = re.search(r"layers\.\d+", name)
        file = f"model-{layer[0] if layer else 'rest'}.safetensors"
        shape = tuple(tensor.shape)
        is_projection = "_proj" in name and len(shape) == (3 if form == "mxfp4" else 2)
        if is_projection:
            made = codes_and_scales(form, name, shape)
        else:
            made = {name: torch.full(shape, 0.01, dtype=torch.bfloat16)}
        files.setdefault(file, {}).update(made)
    weight_map = dict[str, str]()
    for file, tensors in files.items():
        save_file(tensors, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@contextlib.contextmanager
def published_folder(form: Format, millions: int) -> Iterator[Path]:
    """A random checkpoint in a published format, of about so many million weights, removed at the
    end."""
    shape = {"hidden_size": 1536, "num_attention_heads": 12, "vocab_size": 32000}
    if form == "mxfp4":
        config: PretrainedConfig = GptOssConfig(
            **shape,
            intermediate_size=1536,
            num_key_value_heads=4,
            head_dim=128,
            num_local_experts=8,
            num_hidden_layers=max(1, round((millions - 98) / 63)),
        )
    else:
        config = LlamaConfig(
            **shape, intermediate_size=4096, num_hidden_layers=max(1, round((millions - 98) / 28.3))
        )
    with tempfile.TemporaryDirectory(prefix="loading-") as temporary:
        save_published(Path(temporary), config, form)
        yield Path(temporary)


@contextlib.contextmanager
def model_folder(given: str | None, millions: int) -> Iterator[Path]:
    """The folder asked for, or a random Llama in bf16 of about so many million weights, removed at
    the end."""
    if given:
        yield Path(given)
        return
    layers = max(1, round((millions - 98) / 28.3))
    config = LlamaConfig(
        hidden_size=1536,
        intermediate_size=4096,
        num_attention_heads=12,
        num_key_value_heads=12,
        num_hidden_layers=layers,
        vocab_size=32000,
    )
    with tempfile.TemporaryDirectory(prefix="loading-") as temporary:
        torch.set_default_dtype(torch.bfloat16)
        LlamaForCausalLM(config).save_pretrained(temporary, max_shard_size="300MB")
        torch.set_default_dtype(torch.float32)
        yield Path(temporary)


def row(case: Case, result: Result, baseline: Result) -> list[tuple[str, ...]]:
    """The table's lines of one case: host memory and, on CUDA, device memory."""
    ratio = statistics.median(
        own / base for own, base in zip(result.seconds, baseline.seconds, strict=True)
    )
    ours = case.way in LIMITS
    on_time = case.target != "bf16" or not ours or ratio <= LIMITS[case.way]
    lines = []
    for kind, peaks in (("host", result.host_peaks), ("device", result.device_peaks)):
        if not peaks:
            continue
        allowed = bounds(
            case, result.ranks, shards_count=kind == "device" or not result.device_peaks
        )
        within = all(peak <= bound for peak, bound in zip(peaks, allowed, strict=True))
        verdict = (
            ""
            if case == BASELINE
            else "pass"
            if within and on_time
            else "too slow"
            if within
            else "over"
        )
        seconds = f"{statistics.median(result.seconds):.2f}"
        shown = ["/".join(f"{size / MIB:,.0f}" for size in sizes) for sizes in (peaks, allowed)]
        shards = f"{result.ranks[0].shards / MIB:,.0f}"
        lines.append(
            (
                str(case.ranks),
                case.way,
                case.target,
                seconds,
                f"{ratio:.2f}",
                kind,
                shards,
                *shown,
                verdict,
            )
        )
    return lines


def print_table(lines: list[tuple[str, ...]]) -> None:
    titles = (
        "ranks",
        "way",
        "target",
        "s",
        "x",
        "memory",
        "shards",
        "peak MiB of each rank",
        "bound",
        "verdict",
    )
    widths = [max(len(line[column]) for line in [titles, *lines]) for column in range(len(titles))]
    for line in [titles, *lines]:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a model's folder instead of a random Llama")
    parser.add_argument(
        "--millions", type=int, default=550, help="weights of the random Llama, in millions"
    )
    parser.add_argument(
        "--ranks", default="1,2,4", help="numbers of ranks; more than there are GPUs are left out"
    )
    parser.add_argument("--ways", default="slices,scatter,accelerate")
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument(
        "--device",
        choices=get_args(Device),
        default="auto",
        help="auto is CUDA where there is a GPU",
    )
    parser.add_argument("--turns", type=int, default=3, help="how often each row is measured")
    parser.add_argument("--published", choices=get_args(Format), help="a quantized checkpoint")
    asked = parser.parse_args()
    if not importlib.util.find_spec("accelerate"):
        print("accelerate is not installed: its rows are left out")
        asked.ways = asked.ways.replace("accelerate", "").strip(",")
    gpus = 0 if asked.device == "cpu" else torch.cuda.device_count()
    cases = [
        Case(int(ranks), way, target)
        for ranks in asked.ranks.split(",")
        for target in asked.targets.split(",")
        for way in asked.ways.split(",")
        if (way != "accelerate" or target in ("bf16", "fp32"))  # it does not quantize
        and (way != "accelerate" or not asked.published)
        and (gpus == 0 or int(ranks) <= gpus)
    ]
    preload()
    baseline = cases[0] if asked.published else BASELINE
    with contextlib.ExitStack() as stack:
        if asked.published:
            opened = published_folder(asked.published, asked.millions)
        else:
            opened = model_folder(asked.model, asked.millions)
        folder = stack.enter_context(opened)
        measure(baseline, folder, asked.device, Result())  # the files are in the page cache now
        results = {case: Result() for case in [baseline, *cases]}
        for turn in range(asked.turns):
            for case, result in results.items():
                measure(case, folder, asked.device, result)
                about = (
                    f"turn {turn + 1} of {asked.turns}: {case.ranks} x {case.way}, {case.target}"
                )
                print(f"{about}: {result.seconds[-1]:.2f} s", file=sys.stderr)
    print_table(
        [line for case, result in results.items() for line in row(case, result, results[baseline])]
    )


if __name__ == "__main__":
    main()
