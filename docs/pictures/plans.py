"""Renew the figures of the pictures. `python docs/generate.py` draws them.

    python docs/pictures/plans.py           # runs the planner: memory.json and recording.txt
    python docs/pictures/plans.py FILE      # planned.json, from what benchmarks/planner/plan.py --json wrote

The models' config.json comes from tests/model_shapes.py, as if it had been downloaded: it needs no
GPU, no weights and no network.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
REPOSITORY = FOLDER.parents[1]
sys.path[:0] = [str(REPOSITORY / folder) for folder in ("src", "tests")]

from model_shapes import CONFIGS, write_config  # noqa: E402

REVISION = "0" * 40
LLAMA_FT = [sys.executable, "-c", "from llama_ft.commands import main; main()"]
# Bars of memory.svg, from the largest to the smallest: what each adds to MEMORY_COMMAND.
MEMORY_COMMAND = "llama-ft plan --config configs/llama3.1_8b_lora_24gb.yaml --quick --json"
METHODS = {
    "Full fine-tuning": "--use_peft false",
    "LoRA": "",
    "LoRA, 8-bit base": "--quantization 8bit",
    "QLoRA": "--quantization 4bit",
}
RECORDED = "llama-ft plan --config alpaca_lora --context_length 16384"
RECORDING = [
    f"{RECORDED} --fit rtx4090",
    f"{RECORDED} --activation_offload --fit rtx4090",
]
FITS = (0, 3, 4)  # exit codes with which a plan ends


def fill_hub_cache(cache: Path) -> None:
    """Write the models' config.json where the Hugging Face Hub's client keeps its downloads."""
    for name in CONFIGS:
        repository = cache / f"models--{name.replace('/', '--')}"
        write_config(repository / "snapshots" / REVISION, name)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(REVISION)


def run_plan(command: str, cache: Path) -> str:
    """Run a command of `llama-ft` and return what it prints."""
    words = [*LLAMA_FT, *command.split()[1:]]
    own = {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment = {**os.environ, **own, "PYTHONPATH": str(REPOSITORY / "src")}
    finished = subprocess.run(
        words, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY, env=environment
    )
    if finished.returncode not in FITS:
        raise SystemExit(f"{command}: exit code {finished.returncode}")
    return finished.stdout


def plan_methods(cache: Path) -> list[dict[str, Any]]:
    """Return the bars of memory.svg: MiB per category at the peak, and what a GPU needs."""
    bars = []
    for method, flags in METHODS.items():
        command = f"{MEMORY_COMMAND} {flags}".strip()
        plan = json.loads(run_plan(command, cache))["plan"]
        peak = max(plan["peaks"], key=lambda peak: peak["bytes"])
        holders = {name: nbytes for name, nbytes in peak["holders"].items() if nbytes}
        bar = {
            "method": method,
            "command": command,
            "phase": peak["phase"],
            "bytes": holders,
            "allocator_bytes": plan["reserved_bytes"] - peak["bytes"],
            "cuda_bytes": plan["outside_bytes"],
            "gpu_bytes": plan["reserved_bytes"] + plan["outside_bytes"],
        }
        bars.append(bar)
    return bars


def record(cache: Path) -> str:
    """Return the commands of the recording, each with what it prints."""
    parts = [f"$ {command}\n{run_plan(command, cache)}" for command in RECORDING]
    return "\n".join(parts)


def keep_peaks(benchmark: Path) -> str:
    """Return the cases of a benchmark with their planned and measured peaks, a case per line."""
    lines = []
    for case in json.loads(benchmark.read_text()):
        planned = max(peak["bytes"] for peak in case["plan"]["peaks"])
        measured = max(
            max(steps.values())
            for rank in case["ranks_measured"]
            for steps in rank["peaks"].values()
        )
        peaks = {"name": case["name"], "planned_bytes": planned, "measured_bytes": measured}
        lines.append(json.dumps({"method": case["method"]} | peaks))
    return "[\n" + ",\n".join(lines) + "\n]\n"


def main() -> None:
    if len(sys.argv) > 1:
        (FOLDER / "planned.json").write_text(keep_peaks(Path(sys.argv[1])))
        return
    with tempfile.TemporaryDirectory() as temporary:
        cache = Path(temporary)
        fill_hub_cache(cache)
        (FOLDER / "recording.txt").write_text(record(cache))
        (FOLDER / "memory.json").write_text(json.dumps(plan_methods(cache), indent=2) + "\n")


if __name__ == "__main__":
    main()
