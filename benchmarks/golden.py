"""Compare two checkouts bit for bit: losses and gradient norms of every step, and the hash of every
final model.

    python benchmarks/golden.py ../before .              # exit code 1 if a number differs
    python benchmarks/golden.py ../before . --turns 5    # step time and peak memory, in alternating runs

Both checkouts run recipes/finetuning.py with the same flags on the same small models and data, on
this machine. Numbers of other machines or of other versions of torch are never compared. The
validation loss is compared, too.
"""

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COMMON = (
    "--no_plan --device cpu --lr 1e-2 --num_epochs 2 --max_train_step 12 --context_length 128 "
    "--save_steps 6"
).split()
FSDP, SCATTERED = ["--enable_fsdp"], ["--enable_fsdp", "--low_cpu_fsdp"]
LORA = "--use_peft --target_modules all-linear --lora_dropout 0.1 --peft.r 4".split()
CASES: dict[str, tuple[int, list[str]]] = {  # name -> ranks (0: no torchrun), flags
    "full": (0, ["--optimizer", "AdamW", "--validation", "0.1"]),
    "full, fp32, clipped": (
        0,
        "--precision fp32 --gradient_clipping --gradient_clipping_threshold 0.1".split(),
    ),
    "full, 2 ranks, padding": (
        2,
        [*SCATTERED, "--batching_strategy", "padding", "--gradient_accumulation_steps", "2"],
    ),
    "anyprecision, bf16_pure, 2 ranks": (
        2,
        [*FSDP, *"--precision bf16_pure --optimizer anyprecision".split()],
    ),
    "AdamW8bit, 2 ranks": (2, [*SCATTERED, "--optimizer", "AdamW8bit"]),
    "SGD, checkpointing": (
        0,
        "--optimizer SGD --momentum 0.9 --activation_checkpointing full".split(),
    ),
    "Adafactor, 2 ranks": (2, [*FSDP, "--optimizer", "Adafactor", "--weight_decay", "0.1"]),
    "LoRA": (0, LORA),
    "LoRA, 2 ranks, padding": (
        2,
        [*SCATTERED, *LORA, "--batching_strategy", "padding", "--validation", "0.1"],
    ),
    "8 bit, 2 ranks": (2, [*SCATTERED, *LORA, "--quantization", "8bit"]),
    "4 bit": (0, [*LORA, "--quantization", "4bit"]),
    "4 bit, 2 ranks": (
        2,
        [*FSDP, *LORA, "--quantization", "4bit", "--gradient_accumulation_steps", "2"],
    ),
    "chats": (
        0,
        [
            "--dataset",
            "chats.jsonl",
            "--chat_template",
            "chatml",
            "--resize_embeddings",
            "--warmup_steps",
            "3",
        ],
    ),
}
# once more, from the checkpoint after step 6
RESUMED = ("full, 2 ranks, padding", "LoRA", "4 bit, 2 ranks")
COMPARED = ("train/loss", "train/grad_norm", "train/lr", "eval/loss", "tokens")


def write_inputs(folder: Path) -> None:
    """Write a small Llama with a tokenizer of single bytes, tokenized samples of uneven length, and
    chats."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    LlamaForCausalLM(LlamaConfig(**shape, vocab_size=260)).save_pretrained(folder / "model")
    vocabulary = {
        token: number for number, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / "model")
    generator = random.Random(0)
    with open(folder / "samples.jsonl", "w") as file:
        for number in range(150):
            ids = [generator.randrange(256) for _ in range(8 + number % 90)]
            labels = [-100] * (number % 5) + ids[number % 5 :]
            file.write(json.dumps({"input_ids": ids, "labels": labels}) + "\n")
    with open(folder / "chats.jsonl", "w") as file:
        for number in range(120):
            turns = [
                ("user", f"What is {number} + {n}?", f"{number + n}, I think.")
                for n in range(1 + number % 3)
            ]
            messages = [
                m for role, q, a in turns for m in ({"role": role, "content": q}, _assistant(a))
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def train(checkout: Path, inputs: Path, run: Path, ranks: int, flags: list[str]) -> None:
    """Run the recipe of a checkout."""
    command = [sys.executable]
    if ranks:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    words = ["--model_name", "model", "--dataset", "samples.jsonl", *COMMON]
    common = [word for flag, value in _pairs(words) if flag not in flags for word in (flag, *value)]
    command += [str(checkout / "recipes" / "finetuning.py"), "--output_dir", str(run), *common]
    known = {
        "PYTHONPATH": str(checkout / "src"),
        "OMP_NUM_THREADS": "1",
        "LLAMA_FT_CACHE": str(run.parent / "cache"),
    }
    done = subprocess.run(
        [*command, *flags],
        cwd=inputs,
        env={**os.environ, **known},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{checkout}: {' '.join(flags)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def _pairs(words: list[str]) -> list[tuple[str, list[str]]]:
    """Each flag with the words that follow it."""
    starts = [number for number, word in enumerate(words) if word.startswith("--")]
    return [
        (words[start], words[start + 1 : stop])
        for start, stop in zip(starts, [*starts[1:], None], strict=True)
    ]


def outcome(run: Path) -> dict[str, Any]:
    """Return what has to be equal: the numbers of each step, and a hash of the tensors in
    model/."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    numbers = {
        f"{name} of step {line['step']}": line[name]
        for line in lines
        for name in COMPARED
        if name in line
    }
    files = sorted((run / "model").glob("*.safetensors"))
    return {
        **numbers,
        **{file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files},
    }


def compare(name: str, old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Print a line of the table; return whether both are equal."""
    different = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    verdict = "equal" if not different else f"{len(different)} differ: {different[0]}: "
    if different:
        verdict += f"{old.get(different[0])} before, {new.get(different[0])} after"
    print(f"{name:36} {len(old):4} numbers  {verdict}", flush=True)
    return not different


def cases(only: str | None) -> Iterator[tuple[str, int, list[str]]]:
    """Yield name, ranks and flags of the cases asked for."""
    for name, (ranks, flags) in CASES.items():
        if only is None or any(part in name for part in only.split(";")):
            yield name, ranks, flags


def equal_everywhere(checkouts: list[Path], inputs: Path, folder: Path, only: str | None) -> bool:
    """Run every case in both checkouts and compare."""
    equal = True
    for number, (name, ranks, flags) in enumerate(cases(only)):
        runs = [folder / side / f"run-{number}" for side in ("old", "new")]
        for checkout, run in zip(checkouts, runs, strict=True):
            train(checkout, inputs, run, ranks, flags)
        equal &= compare(name, *map(outcome, runs))
        if name in RESUMED:
            for checkout, run in zip(checkouts, runs, strict=True):
                train(
                    checkout,
                    inputs,
                    run.with_name(f"{run.name}-on"),
                    ranks,
                    [*flags, "--resume", str(run / "checkpoints" / "step-000006")],
                )
            equal &= compare(
                f"{name}, resumed", *(outcome(run.with_name(f"{run.name}-on")) for run in runs)
            )
    return equal


def cost(checkouts: list[Path], inputs: Path, folder: Path, turns: int) -> None:
    """Print medians of step time, run time and peak memory of alternating runs."""
    flags = "--dataset demo --context_length 512 --batch_size_training 2 --max_train_step 20 --save_steps 0".split()
    for name, ranks, method in (
        ("full", 0, []),
        ("full, 2 ranks", 2, SCATTERED),
        ("LoRA, 2 ranks", 2, [*FSDP, *LORA]),
    ):
        seen: dict[str, list[tuple[float, float]]] = {"old": [], "new": []}
        for turn in range(turns):
            for checkout, side in zip(checkouts, seen, strict=True):
                run = folder / side / f"{name.replace(', ', '-').replace(' ', '')}-{turn}"
                train(checkout, inputs, run, ranks, [*method, "--model_name", "demo", *flags])
                lines = [
                    json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
                ]
                seconds = statistics.median(
                    line["perf/step_seconds"] for line in lines[3:] if "train/loss" in line
                )
                peak = max(
                    peak for line in lines for peak in line.get("memory/host_peak_bytes", [0])
                )
                seen[side].append((seconds, peak / 2**20))
        for column, what in enumerate(("s per step", "MiB of host memory, peak")):
            old, new = (
                statistics.median(values[column] for values in seen[side])
                for side in ("old", "new")
            )
            print(
                f"{name:16} {what:26} {old:9.3f} before {new:9.3f} after  {new / old:5.3f}x",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, help="a checkout of the version before")
    parser.add_argument("new", type=Path, help="a checkout of the version after")
    parser.add_argument("--only", help="parts of cases' names, separated by ;")
    parser.add_argument(
        "--turns", type=int, default=0, help="compare time and memory over so many alternating runs"
    )
    arguments = parser.parse_args()
    checkouts = [arguments.old.resolve(), arguments.new.resolve()]
    with tempfile.TemporaryDirectory(prefix="golden-") as directory:
        folder = Path(directory)
        inputs = folder / "inputs"
        inputs.mkdir()
        write_inputs(inputs)
        if arguments.turns:
            cost(checkouts, inputs, folder, arguments.turns)
        elif not equal_everywhere(checkouts, inputs, folder, arguments.only):
            sys.exit(1)


if __name__ == "__main__":
    main()
