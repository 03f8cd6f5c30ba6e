"""Measure tiled MLPs on the CPU: the peak of a training step of 16,384 tokens, and the time of a step of
8,192 tokens, against those without tiles.

    python benchmarks/planner/tiled_mlp.py
    python benchmarks/planner/tiled_mlp.py --memory_only    # as its slow test

Memory: two steps of recipes/finetuning.py in fp32 with activation checkpointing, counted as in
benchmarks/planner/plan.py. The Llama's MLPs are 3.5 times as wide as its hidden states, as in Llama
3.1 8B, and take most of its memory. Samples have 512 tokens. Time: forward and backward pass of such a
Llama in fp32, in alternation with tiles and without, in CPU seconds.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / folder) for folder in (".", "src", "recipes")]

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.planner.long_context import Case, measured, planned, write_inputs
from benchmarks.planner.plan import launch
from benchmarks.shared.text_files import print_columns
from llama_ft.config import TrainConfig
from llama_ft.models import use_tiled_mlp

MIB = 2**20
SAMPLE = 512  # tokens
TOKENS = 16_384
TILE = 2048
MEMORY_LIMIT = 0.7  # of the peak without tiles
TURNS = 5
TIMED_SAMPLES = 16  # of 512 tokens


def measure_memory(folder: Path) -> tuple[list[int], list[int]]:
    """Return the planned and the measured peak, without tiles and with them."""
    write_inputs(folder, {TOKENS: TOKENS // SAMPLE}, hidden_size=128, intermediate_size=448)
    plans = []
    peaks = []
    for tile in ("off", TILE):
        case = Case(1, TOKENS, f"--activation_checkpointing full --tiled_mlp {tile}")
        plans.append(planned(case, folder, "cpu").peak.bytes)
        launch([case], folder, "cpu", dump=False)  # type: ignore[list-item]
        peaks.append(measured(case, folder))
    return plans, peaks


def measure_time(is_checkpointed: bool) -> float:
    """Return the CPU time of a step with tiles over one without, the median of several turns."""
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=896,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=512,
    )
    ids = torch.randint(0, 512, (TIMED_SAMPLES, SAMPLE))
    models = []
    for tile in ("off", TILE):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).train()
        use_tiled_mlp(model, TrainConfig(tiled_mlp=tile))  # type: ignore[arg-type]
        if is_checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        models.append(model)
    ratios = []
    for turn in range(TURNS + 1):
        whole, tiled = (seconds_of(model, ids) for model in models)
        if turn:  # the first warms up
            ratios.append(tiled / whole)
    return median(ratios)


def seconds_of(model: LlamaForCausalLM, ids: torch.Tensor) -> float:
    """Return the CPU time of a forward and a backward pass."""
    start = time.process_time()
    model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--memory_only", action="store_true", help="do not measure time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tiled-") as temporary:
        plans, peaks = measure_memory(Path(temporary))
    table = [["tiled_mlp", "planned MiB", "measured MiB", "plan / measured", "of off"]]
    for name, plan, peak in zip(("off", f"{TILE}"), plans, peaks, strict=True):
        sizes = [f"{size / MIB:,.1f}" for size in (plan, peak)]
        table.append([name, *sizes, f"{plan / peak:.3f}", f"{peak / peaks[0]:.3f}"])
    print_columns(table)
    if not options.memory_only:
        tokens = f"{TIMED_SAMPLES * SAMPLE:,} tokens"
        print(f"\nCPU time of a step of {tokens}: {measure_time(False):.3f} of off")
        print(f"with activation checkpointing: {measure_time(True):.3f} of off")
    sys.exit(int(peaks[1] > MEMORY_LIMIT * peaks[0]))


if __name__ == "__main__":
    main()
