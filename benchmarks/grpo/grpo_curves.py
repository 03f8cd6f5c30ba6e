"""Teach SmolLM2-135M-Instruct the orders of examples/orders.py by rewards, with recipes/finetuning.py
and with TRL's GRPOTrainer: the same start, prompts, settings and seeds.

    python benchmarks/grpo/grpo_curves.py FOLDER      # about 25 minutes on two cores

The start is a few steps of fine-tuning on right answers, merged. Printed per run are the rewards of its
steps, the share of held-out orders that it answers exactly before and after (greedy, by
recipes/evaluate.py for both), tokens of answers per second and peak memory. A run that is complete
in FOLDER is not repeated.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / folder) for folder in ("src", ".")]

from benchmarks.shared.text_files import print_columns, read_json, read_json_lines
from benchmarks.trainers.peers import PEERS, make_environment
from benchmarks.trl_comparison.comparison_measures import machine
from llama_ft.data.smollm2 import quickstart_model

THEIRS = Path(__file__).with_name("grpo_curves_trl.py")
EXAMPLE = REPOSITORY / "examples" / "orders.py"
SEEDS = (0, 1, 2)
STEPS = 8
PROMPTS = 8  # per step
ANSWERS = 8  # per prompt
LONGEST = 16  # tokens of an answer
MICRO_BATCH = 16  # answers
LR = 2e-4
THREADS = 2
GIB = 2**30
START = (
    "--lr 5e-4 --max_train_step 8 --batch_size_training 8 --context_length 256 --sample_tokens 0"
)
TRAINED = (
    f"--objective grpo --prompts_per_step {PROMPTS} --num_generations {ANSWERS} "
    f"--max_completion_length {LONGEST} --generate_batch_size {PROMPTS * ANSWERS} "
    f"--batch_size_training {MICRO_BATCH} --lr {LR} --eval_steps 4"
)


def run(command: list[str], log: Path, environment: dict[str, str] | None = None) -> int:
    """Run a command and return its peak memory in bytes. Exits if it fails."""
    threads = {"OMP_NUM_THREADS": str(THREADS), "CUDA_VISIBLE_DEVICES": ""}
    with open(log, "w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **threads, **(environment or {})},
        )
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(log.read_text()[-3000:])
    return usage.ru_maxrss * 1024


def recipe(name: str, *arguments: object) -> list[str]:
    return [sys.executable, str(REPOSITORY / "recipes" / name), *map(str, arguments)]


def make_start(folder: Path) -> None:
    """Write the orders, and the model after a few steps of fine-tuning on right answers."""
    if (folder / "student").exists():
        return
    run([sys.executable, str(EXAMPLE), str(folder / "orders")], folder / "orders.log")
    flags = f"--use_peft --precision fp32 --output_dir {folder}/start --overwrite {START}".split()
    files = ["--model_name", quickstart_model()[0], "--dataset", folder / "orders/train.jsonl"]
    run(recipe("finetuning.py", *files, *flags), folder / "start.log")
    run(recipe("export.py", folder / "start", folder / "student", "--merge"), folder / "merge.log")


def train_ours(folder: Path, seed: int, steps: int) -> dict[str, Any]:
    output = folder / f"ours-{seed}"
    orders = folder / "orders"
    files = f"--model_name {folder}/student --dataset {orders}/train.jsonl"
    files += f" --validation {orders}/validation.jsonl --reward {EXAMPLE}:reward"
    flags = f"--use_peft --precision fp32 --seed {seed} --max_train_step {steps} {TRAINED}"
    flags += f" --output_dir {output} --overwrite"
    peak = run(recipe("finetuning.py", *files.split(), *flags.split()), output.with_suffix(".log"))
    lines = [line for line in read_json_lines(output / "metrics.jsonl") if line["step"]]
    return {
        "rewards": [line["train/reward"] for line in lines],
        "tokens": sum(line["train/rollout/tokens"] for line in lines),
        "seconds": sum(line["perf/step_seconds"] for line in lines),
        "peak_bytes": peak,
    }


def their_job(folder: Path, output: Path, **settings: Any) -> Path:
    """Write the file of a run of TRL, and return it."""
    output.mkdir(exist_ok=True)
    job = {
        "model": str(folder / "student"),
        "prompts": str(folder / "orders" / "train.jsonl"),
        "reward": str(EXAMPLE),
        "output": str(output),
        "lr": LR,
        "answers": PROMPTS * ANSWERS,
        "num_generations": ANSWERS,
        "micro_batch": MICRO_BATCH,
        "longest": LONGEST,
        "threads": THREADS,
        "save_steps": 0,
        "resume": False,
    }
    file = output / "job.json"
    file.write_text(json.dumps(job | settings))
    return file


def train_theirs(folder: Path, seed: int, steps: int, python: str) -> dict[str, Any]:
    output = folder / f"theirs-{seed}"
    job = their_job(folder, output, seed=seed, steps=steps)
    command = [python, str(THEIRS), str(job)]
    peak = run(command, output.with_suffix(".log"), {"TRL_EXPERIMENTAL_SILENCE": "1"})
    found: dict[str, Any] = read_json(output / "result.json")
    return {**found, "peak_bytes": peak}


def exact_share(folder: Path, model: Path) -> float:
    """Return the share of held-out orders that a model answers exactly, always with the likeliest
    token."""
    written = folder / f"{model.parent.name}-{model.name}.json"
    written.unlink(missing_ok=True)
    data = ["--dataset", folder / "orders/train.jsonl"]
    data += ["--validation", folder / "orders/validation.jsonl"]
    score = f"--score exact --score_tokens {LONGEST} --precision fp32 --output {written}".split()
    run(recipe("evaluate.py", model, *data, *score), folder / "evaluate.log")
    (result,) = read_json(written)["models"]
    return float(result["held_out"]["score"])


def table(results: dict[str, Any]) -> list[list[str]]:
    """Return the figures of all runs."""
    steps = max(len(one["rewards"]) for one in results["runs"].values())
    quarter = steps // 4
    heads = [f"steps {1 + n * quarter} to {(n + 1) * quarter}" for n in range(4)]
    rows = [["run", *heads, "exact before", "after", "tokens/s", "peak GiB"]]
    for name, one in results["runs"].items():
        parts = [one["rewards"][n * quarter : (n + 1) * quarter] for n in range(4)]
        means = [f"{statistics.mean(part):.2f}" for part in parts]
        exact = [f"{share:.0%}" for share in (results["exact_before"], one["exact"])]
        speed = f"{one['tokens'] / one['seconds']:.1f}"
        rows.append([name, *means, *exact, speed, f"{one['peak_bytes'] / GIB:.2f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of all runs; new, or of an earlier call")
    parser.add_argument("--steps", type=int, default=STEPS, help="at least 4")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument(
        "--sides", nargs="+", choices=("ours", "theirs"), default=("ours", "theirs")
    )
    parser.add_argument("--trl_python", help="an interpreter that has TRL; default: one is made")
    asked = parser.parse_args()
    folder = asked.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    python = asked.trl_python
    if python is None and "theirs" in asked.sides:
        cache = Path(os.environ.get("LLAMA_FT_CACHE", Path.home() / ".cache" / "llama_ft"))
        python = str(make_environment(PEERS["trl"], cache))
    make_start(folder)
    kept = folder / "results.json"
    results = read_json(kept) if kept.exists() else {"machine": machine(), "runs": {}}
    if "exact_before" not in results:
        results["exact_before"] = exact_share(folder, folder / "student")
    for side in asked.sides:
        for seed in asked.seeds:
            name = f"{side}-{seed}"
            if name in results["runs"]:
                continue
            if side == "ours":
                one = train_ours(folder, seed, asked.steps)
            else:
                one = train_theirs(folder, seed, asked.steps, python)
            one["exact"] = exact_share(folder, folder / name / "model")
            results["runs"][name] = one
            kept.write_text(json.dumps(results, indent=1) + "\n")
    print_columns(table(results))


if __name__ == "__main__":
    main()
