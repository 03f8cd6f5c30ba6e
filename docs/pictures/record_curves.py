"""Train the three runs of curves.svg and write their losses into curves.json:

    python docs/pictures/record_curves.py FOLDER

SmolLM2-135M-Instruct, the quickstart's model, is fine-tuned on support tickets of the repository,
in FOLDER. A run that is already complete there is not repeated. `python docs/generate.py` draws the
picture.
"""

import json
import subprocess
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

PICTURES = Path(__file__).resolve().parent
REPOSITORY = PICTURES.parents[1]
sys.path[:0] = [str(REPOSITORY / folder) for folder in (".", "src")]

from benchmarks.trl_comparison.comparison_measures import commit, machine  # noqa: E402
from llama_ft.data.smollm2 import HUB_NAME, quickstart_model  # noqa: E402

PACKAGES = ("torch", "transformers", "peft")
TICKETS = REPOSITORY / "examples" / "data" / "support_tickets.jsonl"
TRAINED_ON = 48  # the first tickets; the other 12 are the validation set of every run
STEPS = 110
COMMAND = (
    "python recipes/finetuning.py --dataset training.jsonl --validation validation.jsonl "
    "--context_length 256 --batch_size_training 1 --use_peft --peft.r 16 --lora_alpha 32 --precision fp32 "
    f"--num_epochs 100 --max_train_step {STEPS} --warmup_steps 4 --eval_steps 10 --save_model false "
    "--plan_memory false"
)
# The name of a run -> what it adds to COMMAND.
RUNS = {
    "good": "--lr 3e-4",
    "learning rate too high": "--lr 2e-2",
    "overfitting": "--lr 1e-3",
}


def losses(metrics: Path, key: str) -> list[list[float]]:
    """Return the steps and values of a metric."""
    points = []
    for line in metrics.read_text().splitlines():
        record = json.loads(line)
        if key in record:
            points.append([record["step"], round(record[key], 4)])
    return points


def train(name: str, model: str, folder: Path) -> dict[str, Any]:
    """Train one run unless it is complete, and return its losses."""
    output_dir = folder / name.replace(" ", "-")
    status = output_dir / "status.json"
    is_complete = status.exists() and json.loads(status.read_text())["state"] == "finished"
    if not is_complete:
        _, script, *flags = f"{COMMAND} {RUNS[name]} --overwrite".split()
        place = ["--model_name", model, "--output_dir", str(output_dir)]
        words = [sys.executable, str(REPOSITORY / script), *flags, *place]
        subprocess.run(words, cwd=folder, check=True)
    metrics = output_dir / "metrics.jsonl"
    [*_, last] = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {
        "name": name,
        "flags": RUNS[name],
        "epochs": round(last["epoch"], 1),
        "training": losses(metrics, "train/loss"),
        "validation": losses(metrics, "eval/loss"),
    }


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("error: expected record_curves.py FOLDER")
    folder = Path(sys.argv[1]).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    lines = TICKETS.read_text().splitlines(keepends=True)
    (folder / "training.jsonl").write_text("".join(lines[:TRAINED_ON]))
    (folder / "validation.jsonl").write_text("".join(lines[TRAINED_ON:]))
    model, about = quickstart_model()
    if not model:
        raise SystemExit(f"error: {about}")
    head = {
        "date": date.today().isoformat(),
        "commit": commit(),
        "machine": machine(),
        "versions": {name: version(name) for name in PACKAGES},
        "command": f"{COMMAND} --model_name {HUB_NAME}",
    }
    runs = [json.dumps(train(name, model, folder)) for name in RUNS]
    beginning = json.dumps(head, indent=1).removesuffix("\n}")
    text = ",\n".join(runs)
    (PICTURES / "curves.json").write_text(f'{beginning},\n "runs": [\n{text}\n]}}\n')


if __name__ == "__main__":
    main()
