"""One run of TRL for benchmarks/trl_comparison/comparison.py, in TRL's environment, started by torchrun.

Its rows are tokenized already and in the order of the steps. It writes result-<rank>.json: losses,
evaluations, the tokens and labels of every micro-batch, and versions.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `import benchmarks`

import torch
from datasets import Dataset
from peft import set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoTokenizer, TrainerCallback

from benchmarks.shared.text_files import read_json_lines
from benchmarks.trainers.trl_job import (
    TRAINERS,
    Clock,
    load_model,
    mean_loss,
    new_adapter,
    settings_of,
    sharded,
    what_it_is,
    write_and_exit,
)

PACKAGES = ("trl", "torch", "transformers", "accelerate", "peft")
EVALUATED = ("eval_loss", "eval_rewards/margins", "eval_rewards/accuracies")


def read_rows(file: str) -> Dataset:
    return Dataset.from_list(read_json_lines(file))


class Evaluation(TrainerCallback):
    """The validation loss before the first step and at every `every`-th: the mean over target
    tokens. Trainer.evaluate would weight batches, not tokens.

    Args:
        rows: tokenized samples.
        every: steps.
    """

    def __init__(self, rows: Dataset, every: int) -> None:
        self.rows = rows
        self.every = every
        self.trainer: Any = None
        self.losses = dict[int, float]()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.evaluate(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            self.evaluate(state.global_step)

    def evaluate(self, step: int) -> None:
        self.losses[step] = mean_loss(self.trainer, self.rows)
        self.trainer.model.train()


class EvaluateAtTheEnd(TrainerCallback):
    """The recipe evaluates after the last step, too."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == state.max_steps:
            control.should_evaluate = True


class RecordingCollator:
    """A collator that keeps what it returns.

    Args:
        collate: the trainer's own.
        batches: gets tokens and labels of each example of each micro-batch.
    """

    def __init__(self, collate: Any, batches: list[Any]) -> None:
        self.collate = collate
        self.batches = batches

    def __call__(self, samples: list[Any]) -> Any:
        batch = self.collate(samples)
        if "labels" in batch:
            all_labels = batch["labels"]
        else:  # preference pairs: the chosen responses, then the rejected ones
            not_in_loss = batch["completion_mask"] == 0
            all_labels = batch["input_ids"].masked_fill(not_in_loss, -100)
        lengths = batch["attention_mask"].sum(1).tolist()
        examples = []
        for ids, labels, length in zip(batch["input_ids"], all_labels, lengths, strict=True):
            examples.append((ids[:length].tolist(), labels[:length].tolist()))
        self.batches.append(examples)
        return batch


def build_trainer(job: dict[str, Any], callbacks: list[Any], batches: list[Any]) -> Any:
    kind, _ = TRAINERS[job["trainer"]]

    class WithRows(sharded(kind, job)):  # type: ignore[misc]
        """Takes tokenized pairs as they are."""

        def _prepare_dataset(self, dataset: Any, *arguments: Any, **settings: Any) -> Any:
            if job["trainer"] == "dpo":
                return dataset
            return super()._prepare_dataset(dataset, *arguments, **settings)

        def get_train_dataloader(self) -> Any:
            collate = self.data_collator
            self.data_collator = RecordingCollator(collate, batches)
            loader = super().get_train_dataloader()
            self.data_collator = collate
            return loader

    evaluates_itself = job["trainer"] == "dpo" and job["validation"]
    return WithRows(
        load_model(job),
        args=settings_of(job),
        train_dataset=read_rows(job["rows"]),
        eval_dataset=read_rows(job["validation"]) if evaluates_itself else None,
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        peft_config=new_adapter(job),
        callbacks=callbacks,
    )


def evaluations_of(trainer: Any) -> list[dict[str, float]]:
    """What the trainer's own evaluations found. For pairs in batches of one size it is the mean
    over pairs."""
    found = []
    for entry in trainer.state.log_history:
        if "eval_loss" in entry:
            values = {name: float(entry[name]) for name in EVALUATED if name in entry}
            found.append({"step": entry["step"], **values})
    return found


def main(job: dict[str, Any]) -> None:
    clock = Clock(job["device"])
    callbacks: list[Any] = [clock]
    evaluation = None
    if job["trainer"] == "sft" and job["validation"]:
        evaluation = Evaluation(read_rows(job["validation"]), job["eval_steps"])
        callbacks.append(evaluation)
    batches = list[Any]()
    if job["trainer"] == "dpo" and job["validation"]:
        callbacks.append(EvaluateAtTheEnd())
    trainer = build_trainer(job, callbacks, batches)
    if job["adapter"]:
        weights = load_file(job["adapter"])
        unwrapped = trainer.accelerator.unwrap_model(trainer.model)
        loaded = set_peft_model_state_dict(unwrapped, weights)
        assert not loaded.unexpected_keys, loaded.unexpected_keys
    if evaluation is not None:
        evaluation.trainer = trainer
    trainer.train()
    if evaluation is None:
        evaluations = evaluations_of(trainer)
    else:
        losses = evaluation.losses.items()
        evaluations = [{"step": step, "eval_loss": loss} for step, loss in losses]
    if job["save"]:
        trainer.save_model(str(Path(job["output"], "model")))
    result = {
        "is": what_it_is(trainer.model_wrapped),
        "ends": clock.ends,
        "losses": clock.losses,
        "evaluations": evaluations,
        "batches": batches,
        "versions": {name: version(name) for name in PACKAGES},
        "device_peak": torch.cuda.max_memory_allocated() if job["device"] == "cuda" else 0,
    }
    write_and_exit(job, "result", result)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
