"""Plan the longest packed sequences of five models on GPUs of 16 to 80 GB, for the tables of
docs/guides/long-context.md and README.md.

    python benchmarks/planner/longest.py --model "Llama 3.1 8B"   # plans all its weights
    python benchmarks/planner/longest.py --weights QLoRA          # of all models
    python benchmarks/planner/longest.py --write                  # writes the tables

Planned rows are in benchmarks/results/longest.jsonl, from the moment at which they are planned: a run
that is stopped loses none. It needs no GPU, no weights and no network: the
models' config.json comes from tests/model_shapes.py. Adapters have rank 32 on all linear layers, as in
the lengths that Unsloth publishes. Prices in speed are not planned.
"""

import argparse
import math
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / folder) for folder in (".", "src", "recipes", "tests")]

import finetuning
from model_shapes import write_config

from benchmarks.shared.text_files import read_json_lines, write_json_lines
from llama_ft.config import load
from llama_ft.plan.fit import USABLE
from llama_ft.plan.flags import device_bytes
from llama_ft.plan.longest import Method, Room, find_positions
from llama_ft.plan.types import PlanRequest, SharedResults

RESULTS = REPOSITORY / "benchmarks" / "results" / "longest.jsonl"
PAGE = REPOSITORY / "docs" / "guides" / "long-context.md"
README = REPOSITORY / "README.md"
MODELS = {
    "Llama 3.1 8B": "meta-llama/Llama-3.1-8B-Instruct",
    "Qwen3 14B": "Qwen/Qwen3-14B",
    "Qwen3 30B A3B": "Qwen/Qwen3-30B-A3B",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "Gemma 3 12B": "google/gemma-3-12b-it",
}
QUANTIZATIONS = {
    "QLoRA": "4bit",
    "LoRA": "none",
    "LoRA, MXFP4 as stored": "as_stored",
    "full": "none",
}
GPUS = {"16 GB": "rtx4080", "24 GB": "rtx4090", "48 GB": "l40s", "80 GB": "h100"}
NODE = {"8 x 80 GB": "h100"}
RANKS = 8
CHECKPOINTED = "--activation_checkpointing full"
ALL = f"{CHECKPOINTED} --tiled_mlp 2048 --activation_offload"
SHARED = f"--enable_fsdp --sequence_parallel_size {RANKS}"
ADAPTERS = "--use_peft --peft.r 32"
FULL = "full"  # fine-tuning; weights, gradients and optimizer states are in host memory
ON_HOST = "--enable_fsdp --fsdp_cpu_offload"
ONE = "--batch_size_training 1 --val_batch_size 1 --gradient_accumulation_steps 1"


def methods_of(model: str) -> list[str]:
    """Return the kinds of weights of a model's table rows."""
    if MODELS[model].startswith("openai/"):
        return ["LoRA, MXFP4 as stored", "LoRA"]
    if model == "Llama 3.1 8B":
        return ["QLoRA", "LoRA", FULL]
    return ["QLoRA", "LoRA"]


def plan_rows(model: str, method: str, folder: Path) -> Iterator[list[dict[str, Any]]]:
    """Plan the rows of a model and its weights: for each of the settings a row per GPU."""
    weights = f"--quantization {QUANTIZATIONS[method]}" if method != FULL else ""
    trained = ON_HOST if method == FULL else ADAPTERS
    common = f"--model_name {folder} --dataset demo {weights} {trained} {ONE}"
    shared = SharedResults()
    hardware = [(CHECKPOINTED, 1, GPUS), (ALL, 1, GPUS), (f"{ALL} {SHARED}", RANKS, NODE)]
    for flags, ranks, gpus in hardware:
        config, _ = load(f"{common} {flags}".split(), paths=False)
        request = PlanRequest(config, folder, ranks, ranks, "cuda", shared=shared)
        found = Method(request, finetuning.RECIPE, flags.split())
        rooms = [Room(USABLE * device_bytes(gpu), math.inf) for gpu in gpus.values()]
        lengths = found.search(rooms)
        is_quadratic = ranks == 1 and found.is_quadratic()
        own = {"model": model, "method": method, "is_quadratic": is_quadratic}
        rows = list[dict[str, Any]]()
        for memory, room, tokens in zip(gpus, rooms, lengths, strict=True):
            row = found.describe(memory, tokens, room)
            row = row._replace(beyond=tokens > find_positions(request))
            rows.append(own | row._asdict())
        yield rows


def cell(row: dict[str, Any] | None) -> str:
    """Return a length as the tables show it."""
    if row is None:
        return ""
    if not row["tokens"]:
        return "–"
    return f"{row['tokens']:,}" + ("\\*" if row["beyond"] else "")


def name_of(model: str, rows: list[dict[str, Any]]) -> str:
    """Return a model's name as the tables show it."""
    is_quadratic = any(row["is_quadratic"] for row in rows if row["model"] == model)
    return f"{model} ²" if is_quadratic else model


def table(rows: list[dict[str, Any]]) -> str:
    """Return the long table: a line per model and method, a column per GPU."""
    columns = [*GPUS, *NODE]
    titles = ["model", "weights", "settings", *columns, "limited by", "host memory per GPU"]
    lines = [titles, ["---"] * 3 + ["--:"] * len(columns) + ["---", "--:"]]
    groups: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        kind = "checkpointing" if " ".join(row["flags"]) == CHECKPOINTED else "all"
        groups.setdefault((name_of(row["model"], rows), row["method"], kind), {})[row["gpu"]] = row
    for (model, method, kind), by_gpu in groups.items():
        limits = dict.fromkeys(
            limit for row in by_gpu.values() for limit in row["limits"] if row["tokens"]
        )
        host = max(row["host_bytes"] for row in by_gpu.values()) / 2**30
        cells = [cell(by_gpu.get(column)) for column in columns]
        lines.append([model, method, kind, *cells, ", ".join(limits), f"{host:,.0f} GiB"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def short_table(rows: list[dict[str, Any]]) -> str:
    """Return the table of README: all settings, QLoRA or weights as stored."""
    columns = [*GPUS, *NODE]
    lines = [["model", *columns], ["---", *["--:"] * len(columns)]]
    for model in MODELS:
        own = [
            row for row in rows if row["model"] == model and row["method"] == methods_of(model)[0]
        ]
        best = {row["gpu"]: row for row in own if " ".join(row["flags"]) != CHECKPOINTED}
        if best:
            name = name_of(model, rows)
            lines.append([name, *[cell(best.get(column)) for column in columns]])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(file: Path, text: str) -> None:
    """Replace the table of a file with the same first line."""
    first_line = text.partition("\n")[0]
    pattern = rf"^{re.escape(first_line)}\n(?:\|.*\n)*"
    page, count = re.subn(pattern, lambda _: f"{text}\n", file.read_text(), flags=re.MULTILINE)
    assert count == 1, f"{file}: {count} tables begin with {first_line!r}"
    file.write_text(page)


def replace_rows(new: list[dict[str, Any]]) -> None:
    """Replace the planned rows of these models, weights and settings, in the order of MODELS."""
    planned = {settings_of(row) for row in new}
    rows = read_json_lines(RESULTS) if RESULTS.exists() else []
    rows = [row for row in rows if settings_of(row) not in planned] + new
    order = [(model, method) for model in MODELS for method in methods_of(model)]
    columns = [*GPUS, *NODE]
    rows.sort(
        key=lambda row: (
            order.index((row["model"], row["method"])),
            len(row["flags"]),
            columns.index(row["gpu"]),
        )
    )
    write_json_lines(RESULTS, rows)


def settings_of(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the model, the weights and the settings of a row."""
    return (row["model"], row["method"], *row["flags"])


def report(planned: str) -> None:
    """Print what was planned."""
    seconds = time.process_time()
    print(f"{planned}: {seconds:,.0f} CPU seconds so far", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, help="plan this model, and replace its rows")
    parser.add_argument("--weights", choices=QUANTIZATIONS, help="plan these weights only")
    parser.add_argument("--write", action="store_true", help="write the tables")
    options = parser.parse_args()
    for model in MODELS:
        for method in methods_of(model):
            is_asked = options.model in (None, model) and options.weights in (None, method)
            if not is_asked or not (options.model or options.weights):
                continue
            with tempfile.TemporaryDirectory() as temporary:
                folder = write_config(Path(temporary) / "model", MODELS[model])
                for rows in plan_rows(model, method, folder):
                    replace_rows(rows)
                    report(f"{model}, {method}, {len(rows)} GPUs")
    if options.write:
        rows = read_json_lines(RESULTS)
        write(PAGE, table(rows))
        write(README, short_table(rows))


if __name__ == "__main__":
    main()
