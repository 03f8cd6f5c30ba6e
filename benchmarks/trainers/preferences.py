"""Losses, rewards and margins of recipes/finetuning.py and of TRL's trainers: 10 steps in fp32 on
the same pairs.

    python benchmarks/trainers/preferences.py                                   # makes an environment with TRL
    python benchmarks/trainers/preferences.py --trl_python ~/trl/bin/python --only dpo,ipo --methods lora

The model is the demo's Llama of 6.6 M random parameters, and so is the teacher of distillation, with
other numbers. Prompts and chosen responses are the demo's chats, a rejected response is that of
another chat. Distillation and DFT learn from the prompts and chosen responses alone. One process
trains, on one thread: both sides see the same micro-batches in the same order, and have one
learning rate, AdamW, and gradient clipping at 1. Both adapters begin with the weights that
recipes/finetuning.py gives its own.

Printed per objective is the largest difference in any step, divided by the largest value that TRL
has in any step.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / folder) for folder in ("src", ".")]

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.shared.text_files import read_json_lines
from benchmarks.trainers.peers import PEERS, launch, make_environment
from llama_ft.data import Encoder, build_demo, cache_dir, one_example, two_examples
from llama_ft.data.batches.sampler import BatchLayout, BatchSampler

STEPS = 10
GLOBAL_BATCH = 4
LENGTH = 512
SEED = 42
RATES = {"full": 1e-3, "lora": 3e-3}
LORA = [
    "--use_peft",
    "--peft.r",
    "8",
    "--lora_alpha",
    "16",
    "--target_modules",
    "all-linear",
    "--lora_dropout",
    "0",
]
LIMIT = 1e-5  # of the differences
SECONDS = 600.0
Row = dict[str, Any]


def without_other(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a sample of KTO without the number of the completion that its KL uses."""
    return {name: value for name, value in sample.items() if name != "other"}


def without_prefix(metrics: dict[str, float]) -> dict[str, float]:
    """Return metrics by their names in TRL."""
    return {name.removeprefix("train/"): value for name, value in metrics.items()}


@dataclass(frozen=True)
class Case:
    """An objective on both sides.

    Attributes:
        flags: of recipes/finetuning.py.
        trainer: of TRL, by its name in trl_job.py.
        settings: of the trainer.
        micro_batch: pairs.
        methods: full, lora or both.
    """

    flags: str
    trainer: str
    settings: dict[str, Any]
    micro_batch: int = 2
    methods: tuple[str, ...] = ("full", "lora")


CASES = {
    "dpo": Case("--objective dpo --beta 0.3", "dpo", {"beta": 0.3}),
    # With one pair there is nothing to sort, and the loss "aot" is DPO's with label smoothing.
    "smoothed dpo": Case(
        "--objective dpo --beta 0.3 --dpo_label_smoothing 0.1",
        "dpo",
        {"beta": 0.3, "loss_type": ["aot"], "label_smoothing": 0.1},
        micro_batch=1,
    ),
    "ipo": Case("--objective ipo --beta 0.3", "dpo", {"beta": 0.3, "loss_type": ["ipo"]}),
    "simpo": Case(
        "--objective simpo --beta 2 --simpo_gamma 1",
        "simpo",
        {"beta": 2.0, "simpo_gamma": 1.0, "loss_type": "simpo", "cpo_alpha": 0.0},
    ),
    # TRL's loss of the chosen responses is a mean over the tokens of a micro-batch; ours is one
    # over those of a pair.
    "orpo": Case("--objective orpo --beta 0.4", "orpo", {"beta": 0.4}, micro_batch=1),
    # One micro-batch per step: the KL divergence is estimated in each by itself.
    "kto": Case(
        "--objective kto --beta 0.3 --undesirable_weight 1.2",
        "kto",
        {"beta": 0.3, "undesirable_weight": 1.2},
        micro_batch=GLOBAL_BATCH,
    ),
    # TRL has no rpo_alpha any more. Its loss "sft" is the same for single pairs; for several it is a
    # mean over the tokens of a micro-batch.
    "rpo": Case(
        "--objective dpo --beta 0.3 --rpo_alpha 0.5",
        "dpo",
        {"beta": 0.3, "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
        micro_batch=1,
    ),
    "dft": Case("--loss_type dft", "sft", {"loss_type": "dft"}),
    # all tokens of the vocabulary, and no cross-entropy
    "distill": Case(
        "--objective distill --distill_weight 1 --teacher_model @teacher --distill_top_k @vocabulary",
        "gkd",
        {"lmbda": 0.0, "beta": 0.0},
        methods=("full",),
    ),
}


def pairs() -> list[Row]:
    """As many as the steps take."""
    lines = build_demo(cache_dir()).train_file.read_text(encoding="utf-8").splitlines()
    samples = [sample for sample in map(json.loads, lines) if 20 < len(sample["output"]) < 80]
    rows = []
    for number in range(STEPS * GLOBAL_BATCH):
        own = samples[number * 7]
        other = samples[number * 7 + 3]
        question = "\n".join(own[name] for name in ("instruction", "input") if own.get(name))
        rows.append(
            {
                "prompt": [{"role": "user", "content": question}],
                "chosen": [{"role": "assistant", "content": own["output"]}],
                "rejected": [{"role": "assistant", "content": other["output"]}],
            }
        )
    return rows


def as_chat(pair: Row) -> Row:
    """Return the prompt and the chosen response of a pair as a chat."""
    return {"messages": pair["prompt"] + pair["chosen"]}


def as_completion(pair: Row) -> Row:
    """Return the same as TRL's SFTTrainer needs it to have the response alone in its loss."""
    return {"prompt": pair["prompt"], "completion": pair["chosen"]}


def completions(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Samples of KTO: the chosen or the rejected response of each pair. And pairs of each with the
    completion by which its KL divergence is estimated: ours is half of all samples further."""
    labels = [number % 3 > 0 for number in range(len(rows))]
    found = [
        row["chosen" if label else "rejected"] for row, label in zip(rows, labels, strict=True)
    ]
    samples = [
        {
            "prompt": row["prompt"],
            "completion": completion,
            "label": label,
            "other": (number + len(rows) // 2) % len(rows),
        }
        for number, (row, completion, label) in enumerate(zip(rows, found, labels, strict=True))
    ]
    return samples, [
        {
            "prompt": sample["prompt"],
            "chosen": sample["completion"],
            "rejected": found[sample["other"]],
        }
        for sample in samples
    ]


def our_order(rows: list[Row], tokenizer: Any, is_kto: bool = False) -> list[int]:
    """Numbers of the pairs in the order of our steps. KTO counts another completion as no shorter
    than the own one."""
    encoder = Encoder(tokenizer, LENGTH)
    lengths = []
    for row in rows:
        lengths += [len(ids) for ids, _ in two_examples(row, "preference", encoder)]
    if is_kto:
        own = lengths[::2]
        others = lengths[1::2]
        lengths[1::2] = map(max, own, others)
    return order_of(lengths, examples_per_sample=2)


def order_of(lengths: list[int], examples_per_sample: int) -> list[int]:
    """Numbers of the samples, whose examples have these lengths, in the order of our steps."""
    size = examples_per_sample
    layout = BatchLayout(data_size=1, data_rank=0, micro_batch=GLOBAL_BATCH)
    plan = BatchSampler(
        lengths,
        lengths,
        layout,
        global_batch=GLOBAL_BATCH,
        seed=SEED,
        examples_per_sample=size,
    )
    steps = [plan.step(0, step) for step in range(plan.steps_per_epoch)]
    return [example // size for step in steps for share in step for example in share[::size]]


def write_teacher(model: Path, folder: Path) -> Path:
    """Write a model of the same shape and tokenizer with other random numbers, more decided than
    a new one."""
    torch.manual_seed(SEED)
    config = AutoConfig.from_pretrained(model)
    config.initializer_range = 0.1
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def write(file: Path, rows: list[Row]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


class Bench:
    """Runs both sides, in directories below `folder`.

    Args:
        folder: for rows and runs.
        python: an interpreter that has TRL.
    """

    def __init__(self, folder: Path, python: Path) -> None:
        self.folder = folder
        self.python = python
        self.model = build_demo(cache_dir()).model_dir
        rows = pairs()
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        samples, with_others = completions(rows)
        self.rows = {"ours": write(folder / "pairs.jsonl", rows)}
        self.rows["trl"] = write(
            folder / "trl-pairs.jsonl", [rows[at] for at in our_order(rows, tokenizer)]
        )
        without = [without_other(row) for row in samples]
        self.rows["ours kto"] = write(folder / "samples.jsonl", without)
        order = our_order(with_others, tokenizer, is_kto=True)
        ordered = []
        for at in order:
            sample = samples[at]
            ordered.append({**sample, "other": order.index(sample["other"])})
        self.rows["trl kto"] = write(folder / "trl-samples.jsonl", ordered)
        chats = [as_chat(row) for row in rows]
        encoder = Encoder(tokenizer, LENGTH)
        lengths = [len(one_example(chat, "messages", encoder)[0][0]) for chat in chats]
        order = order_of(lengths, examples_per_sample=1)
        self.rows["ours gkd"] = write(folder / "chats.jsonl", chats)
        self.rows["trl gkd"] = write(folder / "trl-chats.jsonl", [chats[at] for at in order])
        self.rows["ours sft"] = self.rows["ours gkd"]
        completed = [as_completion(rows[at]) for at in order]
        self.rows["trl sft"] = write(folder / "trl-completions.jsonl", completed)
        self.teacher = write_teacher(self.model, folder / "teacher")
        self.adapter = folder / "start" / "model"
        self.ours(CASES["dpo"], "lora", folder / "start", ["--max_train_step", "1"])
        # In the first step B is zero, so that A gets no gradient: it is as it was made.
        file = self.adapter / "adapter_model.safetensors"
        weights = load_file(file)
        for name, weight in weights.items():
            if "lora_A" not in name:
                weights[name] = weight * 0
        save_file(weights, file, metadata={"format": "pt"})

    def rows_of(self, side: str, case: Case) -> Path:
        """The file of a side, `ours` or `trl`, for a case."""
        return self.rows.get(f"{side} {case.trainer}", self.rows[side])

    def flags(self, case: Case) -> list[str]:
        """The flags of a case."""
        size = AutoConfig.from_pretrained(self.model).vocab_size
        values = {"@teacher": str(self.teacher), "@vocabulary": str(size)}
        return [values.get(word, word) for word in case.flags.split()]

    def ours(
        self, case: Case, method: str, output: Path, more: list[str]
    ) -> list[dict[str, float]]:
        """A run of recipes/finetuning.py: what it logged of each step."""
        flags: list[Any] = [
            *self.flags(case),
            *(LORA if method == "lora" else []),
            *more,
            "--seed",
            SEED,
        ]
        flags += [
            "--model_name",
            self.model,
            "--dataset",
            self.rows_of("ours", case),
        ]
        flags += ["--output_dir", output, "--run_validation", False]
        flags += [
            "--batching_strategy",
            "padding",
            "--batch_size_training",
            case.micro_batch,
            "--num_epochs",
            1,
        ]
        flags += [
            "--gradient_accumulation_steps",
            GLOBAL_BATCH // case.micro_batch,
            "--context_length",
            LENGTH,
        ]
        flags += [
            "--precision",
            "fp32",
            "--device",
            "cpu",
            "--lr",
            RATES[method],
            "--lr_scheduler",
            "constant",
        ]
        flags += ["--gradient_clipping", "--no_plan"]
        environment = {"PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1"}
        recipe = REPOSITORY / "recipes" / "finetuning.py"
        log = Path(f"{output}.txt")
        words = list(map(str, flags))
        launch(Path(sys.executable), recipe, words, 1, log, SECONDS, environment)
        records = read_json_lines(output / "metrics.jsonl")
        logged = [record for record in records if "train/loss" in record]
        return [without_prefix(each) for each in logged]

    def trl(self, case: Case, method: str, output: Path) -> list[dict[str, float]]:
        """The same of a run of TRL."""
        output.mkdir()
        job = {
            "model": str(self.model),
            "rows": str(self.rows_of("trl", case)),
            "teacher": str(self.teacher),
            "output": str(output),
            "check": None,
            "method": method,
            "adapter": str(self.adapter) if method == "lora" else None,
            "way": "ddp",
            "trainer": case.trainer,
            "settings": case.settings,
            "layout": "padding",
            "length": LENGTH,
            "micro_batch": case.micro_batch,
            "accumulation": GLOBAL_BATCH // case.micro_batch,
            "steps": STEPS,
            "lr": RATES[method],
            "precision": "fp32",
            "device": "cpu",
            "checkpointing": False,
        }
        (output / "job.json").write_text(json.dumps(job))
        environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        script = PEERS["trl"].job
        arguments = [str(output / "job.json")]
        log = output / "log.txt"
        launch(self.python, script, arguments, 1, log, SECONDS, environment)
        return list(json.loads((output / "rank-0.json").read_text())["logs"])


def differences(
    ours: list[dict[str, float]], theirs: list[dict[str, float]]
) -> dict[str, tuple[float, float]]:
    """The largest difference of each number that both have logged, and the largest value of
    TRL's."""
    assert len(ours) == len(theirs) == STEPS
    found = {}
    for name in (
        "loss",
        "rewards/chosen",
        "rewards/rejected",
        "rewards/margins",
        "rewards/accuracies",
        "logps/chosen",
        "kl",
    ):
        both = [
            (own[name], its[name])
            for own, its in zip(ours, theirs, strict=True)
            if name in own and name in its
        ]
        # the first rewards are 0, but for rounding errors
        both = both[name == "rewards/accuracies" :]
        if both:
            difference = max(abs(own - its) for own, its in both)
            largest = max(abs(its) for _, its in both)
            found[name] = (difference, largest)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trl_python", type=Path, help="an interpreter that has TRL, instead of making one"
    )
    parser.add_argument("--only", default=",".join(CASES), help="only these objectives")
    parser.add_argument("--methods", default="full,lora")
    parser.add_argument(
        "--folder", type=Path, help="for rows, runs and logs; a temporary one by default"
    )
    asked = parser.parse_args()
    python = asked.trl_python or make_environment(PEERS["trl"], cache_dir())
    folder = Path(tempfile.mkdtemp(prefix="preferences-", dir=asked.folder))
    bench = Bench(folder, python)
    worst = 0.0
    for name in asked.only.split(","):
        for method in asked.methods.split(","):
            if method not in CASES[name].methods:
                continue
            run = folder / f"{name.replace(' ', '-')}-{method}"
            theirs = bench.trl(CASES[name], method, Path(f"{run}-trl"))
            ours = bench.ours(CASES[name], method, run, [])
            found = differences(ours, theirs)
            relative = {
                each: difference / (most or 1) for each, (difference, most) in found.items()
            }
            worst = max(worst, *relative.values())
            print(
                f"{name}, {method}: loss {theirs[0]['loss']:.4f} to {theirs[-1]['loss']:.4f};",
                end=" ",
            )
            print(
                ", ".join(
                    f"{each} {value:.1e} of {found[each][1]:.3g}"
                    for each, value in relative.items()
                ),
                flush=True,
            )
    print(f"\nThe largest relative difference is {worst:.1e}; the limit is {LIMIT:g}")
    sys.exit(int(worst > LIMIT))


if __name__ == "__main__":
    main()
