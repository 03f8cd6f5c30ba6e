"""Compare what padded batches learn with TRL's SFTTrainer, if responses have very different lengths.

    python benchmarks/trainers/padding_trl.py --folder output/padding_trl
    python benchmarks/trainers/padding_trl.py --folder output/padding_trl --seeds 6 --settings 60

Responses have 1, 3, 20, 60 or 150 characters, and each character is a token. A model of 0.8 M weights
is trained from scratch, with the same weights, tokens, labels and schedule on both sides; each seed
draws other batches. The loss is the mean over the tokens of held-out responses, computed by
Transformers, one sample at a time. TRL is installed into the folder.

The exit code is 1 if the mean over seeds differs by more than three standard errors.
"""

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "src")]

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    set_seed,
)

from benchmarks.trainers.trl_package import TRL, install
from llama_ft import data

RESPONSE_LENGTHS = (1, 3, 20, 60, 150)
CONTEXT_LENGTH = 192
MICRO_BATCH = 4
LR = 2e-3
END = "<|end|>"
IGNORED = -100
LIMIT = 3.0  # standard errors
Row = dict[str, list[int]]


@dataclass(frozen=True)
class Setting:
    """Steps of training, and the number of training chats: 4.4 epochs each."""

    steps: int
    chats: int


SETTINGS = {"60": Setting(60, 55), "300": Setting(300, 275)}
HELD_OUT = 20


def make_model(folder: Path) -> PreTrainedTokenizerFast:
    """Save a model with random weights and a tokenizer of bytes. Return the tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=END)
    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_LENGTH,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_rows(tokenizer: PreTrainedTokenizerFast, count: int, first: int) -> list[Row]:
    """Return tokenized chats, whose responses are pieces of the demo's text. The chat with number
    `first` is the first one."""
    lines = data.build_demo(data.cache_dir()).train_file.read_text().splitlines()
    text = " ".join(json.loads(line)["output"] for line in lines)
    rows = []
    for number in range(first, first + count):
        length = RESPONSE_LENGTHS[number % len(RESPONSE_LENGTHS)]
        start = number * 2 * max(RESPONSE_LENGTHS)
        prompt = tokenizer(f"Text {number}, {length}:")["input_ids"]
        response = tokenizer(text[start : start + length])["input_ids"][:length]
        response.append(tokenizer.eos_token_id)
        labels = [IGNORED] * len(prompt) + response
        rows.append({"input_ids": prompt + response, "labels": labels})
    return rows


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, rows: list[Row]) -> float:
    """Return the mean loss over the tokens of all responses."""
    model.eval()
    total = 0.0
    count = 0
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        targets = torch.tensor(row["labels"][1:])
        logits = model(input_ids=ids).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
        count += int((targets != IGNORED).sum())
    return total / count


def train_with_trl(model: Path, rows: list[Row], setting: Setting, seed: int) -> LlamaForCausalLM:
    from trl import SFTConfig, SFTTrainer

    settings = SFTConfig(
        output_dir=str(model.parent / "trl_output"),
        max_steps=setting.steps,
        per_device_train_batch_size=MICRO_BATCH,
        learning_rate=LR,
        lr_scheduler_type="cosine",
        warmup_steps=0,
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_length=None,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=seed,
    )
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=PreTrainedTokenizerFast.from_pretrained(model),
    )
    trainer.train()
    return trainer.model


def train_with_llama_ft(
    model: Path, file: Path, setting: Setting, seed: int, strategy: str
) -> LlamaForCausalLM:
    output = model.parent / "llama_ft_output"
    flags = (
        f"--device cpu --precision fp32 --dataset_format tokenized --batching_strategy {strategy} "
        f"--max_train_step {setting.steps} --num_epochs 100 --context_length {CONTEXT_LENGTH} "
        f"--lr {LR} --lr_scheduler cosine --weight_decay 0 --gradient_clipping --seed {seed} "
        "--plan_memory false --save_steps 0 --sample_tokens 0 --overwrite"
    )
    # With packing a step is one sequence, which holds about as many samples as a padded step.
    micro_batch = MICRO_BATCH if strategy == "padding" else 1
    flags += f" --batch_size_training {micro_batch}"
    paths = ["--model_name", str(model), "--dataset", str(file), "--output_dir", str(output)]
    command = [sys.executable, str(REPOSITORY / "recipes" / "finetuning.py"), *flags.split()]
    ended = subprocess.run([*command, *paths], capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(ended.stdout + ended.stderr)
    return AutoModelForCausalLM.from_pretrained(output / "model", dtype=torch.float32)


def compare(folder: Path, name: str, seeds: int) -> bool:
    """Print the table of a setting. Return whether padding learns as TRL."""
    setting = SETTINGS[name]
    model = folder / "model"
    tokenizer = make_model(model)
    rows = make_rows(tokenizer, setting.chats, first=HELD_OUT)
    held_out = make_rows(tokenizer, HELD_OUT, first=0)
    file = folder / f"train-{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = held_out_loss(AutoModelForCausalLM.from_pretrained(model), held_out)
    losses = dict[str, list[float]]()
    for seed in range(1, seeds + 1):
        trained = {
            "TRL, padded": train_with_trl(model, rows, setting, seed),
            "llama_ft, padding": train_with_llama_ft(model, file, setting, seed, "padding"),
            "llama_ft, packing": train_with_llama_ft(model, file, setting, seed, "packing"),
        }
        for way, one in trained.items():
            losses.setdefault(way, []).append(held_out_loss(one, held_out))
    print(f"\n{setting.steps} steps, {setting.chats} chats; held-out loss before: {before:.3f}\n")
    print("| | held-out loss per seed | mean |\n|---|---|---|")
    for way, values in losses.items():
        shown = " ".join(f"{value:.3f}" for value in values)
        print(f"| {way} | {shown} | {statistics.mean(values):.3f} |", flush=True)
    ours = losses["llama_ft, padding"]
    theirs = losses["TRL, padded"]
    difference = statistics.mean(ours) - statistics.mean(theirs)
    variance = statistics.variance(ours) / seeds + statistics.variance(theirs) / seeds
    print(f"\nDifference of padding and TRL: {difference:.3f}, standard error {variance**0.5:.3f}")
    return abs(difference) <= LIMIT * variance**0.5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("output/padding_trl"))
    parser.add_argument("--settings", default="60,300", help="steps, separated by commas")
    parser.add_argument("--seeds", type=int, default=6)
    asked = parser.parse_args()
    folder = asked.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    install(folder / "packages")
    print(f"trl {TRL.partition('==')[2]}, torch {torch.__version__}")
    as_trl = [compare(folder, name, asked.seeds) for name in asked.settings.split(",")]
    if not all(as_trl):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
