"""Distillation into SmolLM2-135M-Instruct with every second layer removed, against training that
student on the same text alone.

    make quickstart                                        # builds the model once
    python benchmarks/trainers/distillation.py                      # two runs per seed, in output/distillation
    python benchmarks/trainers/distillation.py --print              # only the commands, one per line
    python benchmarks/trainers/distillation.py --share output/student   # the share of the k most likely tokens

Both runs of a seed see the same batches in the same order. The first run with a teacher stores its
64 most likely tokens, and the others read them. A run that has finished is not repeated. Printed is
the validation loss, the plain cross-entropy, before and after, per seed.

--share prints the KL divergence from the teacher to a student over the k most likely tokens and the
bucket of all others, and its share of torch's kl_div over the whole vocabulary in float64. The
positions are those of the responses of chats of the demo.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / folder) for folder in ("src", "examples")]

import torch
from every_second_layer import main as write_student
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from llama_ft.data import build_demo, cache_dir
from llama_ft.data.smollm2 import build_smollm2
from llama_ft.training.objectives.distill import top_k_divergence
from llama_ft.training.objectives.teacher import most_likely

FLAGS = (
    "--dataset demo --max_samples 600 --validation 0.1 --context_length 256 --batch_size_training 4 "
    "--max_train_step 24 --eval_steps 24 --val_batch_size 4 --lr 1e-3 --warmup_ratio 0.1 "
    "--gradient_clipping --precision bf16_mixed --save_model False --save_steps 0 --no_plan"
)
DISTILL = "--objective distill --distill_weight 0.5"
SIZES = (1, 8, 64, 256)  # k of --share
CHATS = 20


def commands(folder: Path, teacher: Path, seeds: list[int]) -> dict[str, list[str]]:
    """Return name -> command of each run."""
    recipe = [sys.executable, str(REPOSITORY / "recipes" / "finetuning.py"), *FLAGS.split()]
    recipe += ["--model_name", str(folder / "student")]
    stored = ["--teacher_model", str(teacher), "--teacher_file", f"{folder}/teacher.safetensors"]
    found = {}
    for seed in seeds:
        for name, more in (("text", []), ("distill", [*DISTILL.split(), *stored])):
            run = folder / f"{name}-{seed}"
            own = ["--seed", str(seed), "--output_dir", str(run), "--overwrite"]
            found[run.name] = [*recipe, *more, *own]
    return found


def validation_losses(run: Path) -> list[float]:
    """Return the validation losses of a run, in order; none if it has not finished."""
    status = run / "status.json"
    if not status.exists() or json.loads(status.read_text())["state"] != "finished":
        return []
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["eval/loss"] for line in lines if "eval/loss" in line]


def response_logits(folder: Path) -> list[torch.Tensor]:
    """Return what a model says at the positions of the responses of some chats of the demo, one
    tensor of [tokens, vocab] per chat."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lines = build_demo(cache_dir()).train_file.read_text(encoding="utf-8").splitlines()
    found = []
    for line in lines[-CHATS:]:
        sample = json.loads(line)
        question = {"role": "user", "content": sample["instruction"]}
        answer = {"role": "assistant", "content": sample["output"]}
        ids = tokenizer.apply_chat_template([question, answer], return_dict=False)
        prompt = tokenizer.apply_chat_template(
            [question], add_generation_prompt=True, return_dict=False
        )
        with torch.no_grad():
            found.append(model(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1])
    return found


def print_shares(teacher: Path, student: Path) -> None:
    """Print the divergence of each of SIZES in nats per token, and its share of the full one."""
    full = 0.0
    tokens = 0
    sums = dict.fromkeys(SIZES, 0.0)
    for theirs, ours in zip(response_logits(teacher), response_logits(student), strict=True):
        logs = [logits.double().log_softmax(-1) for logits in (ours, theirs)]
        full += F.kl_div(*logs, log_target=True, reduction="sum").item()
        tokens += len(ours)
        for size in SIZES:
            stored = most_likely(theirs, size, 1.0)
            sums[size] += top_k_divergence(ours, *stored, 1.0).double().sum().item()
    print(f"{tokens} tokens in {CHATS} responses; full divergence {full / tokens:.4f}")
    print("| k | nats per token | share |")
    print("|---|---|---|")
    for size, value in sums.items():
        print(f"| {size} | {value / tokens:.4f} | {value / full:.2%} |")


def main() -> None:
    """Run what has not finished, and print a table."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("output/distillation"))
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--print", action="store_true", help="print the commands, and run none")
    parser.add_argument("--share", type=Path, help="a student, whose divergence is compared")
    asked = parser.parse_args()
    if asked.share:
        print_shares(build_smollm2(cache_dir()), asked.share)
        return
    asked.folder = asked.folder.resolve()
    seeds = [int(seed) for seed in asked.seeds.split(",")]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    teacher = build_smollm2(cache_dir())
    if not (asked.folder / "student" / "config.json").exists():
        write_student(str(teacher), str(asked.folder / "student"))
    for name, command in commands(asked.folder, teacher, seeds).items():
        if asked.print:
            print(shlex.join(command))
        elif not validation_losses(asked.folder / name):
            subprocess.run(command, check=True, cwd=REPOSITORY, env=environment)
    print("| seed | before | on the text alone | distilled | difference |")
    print("|---|---|---|---|---|")
    for seed in seeds:
        before, text = (validation_losses(asked.folder / f"text-{seed}") or [0.0, 0.0])[:2]
        *_, distilled = validation_losses(asked.folder / f"distill-{seed}") or [0.0]
        print(f"| {seed} | {before:.3f} | {text:.3f} | {distilled:.3f} | {distilled - text:+.3f} |")


if __name__ == "__main__":
    main()
