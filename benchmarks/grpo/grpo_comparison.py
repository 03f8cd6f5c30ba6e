"""Compare losses and gradients of --objective grpo with those of TRL's GRPOTrainer, on the same rounds.

    python benchmarks/grpo/grpo_comparison.py

A tiny random Llama with a LoRA adapter takes two steps of SGD in fp32 on the answers that it has
sampled. TRL takes the same two steps from the same adapter on the stored answers: for each loss,
with and without the KL divergence, with two steps on one round, and with log-probabilities of the
sampler that are changed, so that importance weights matter. Losses and gradients of both steps must
be equal within 1e-6, or the exit code is 1.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / folder) for folder in ("src", ".")]

import numpy
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.shared.text_files import print_columns, write_json_lines
from benchmarks.trainers.peers import PEERS, make_environment
from llama_ft.extensions.rollouts.rounds import Round, folder_of, read_round, write_round

LETTERS = "abcdefghijklmnopqrstuvwxyz .?"
PROMPTS = 3
ANSWERS = 4
LONGEST = 16
MICRO_BATCH = 6
LR = 0.5
NOISE = 0.3  # of changed log-probabilities
LIMIT = 1e-6


class Variant(NamedTuple):
    """A loss: flags of both sides, and those with other names.

    Attributes:
        settings: of both.
        ours, theirs: further ones.
        is_noisy: the sampler's log-probabilities are changed.
    """

    settings: dict[str, Any]
    ours: dict[str, Any] = {}  # noqa: RUF012
    theirs: dict[str, Any] = {}  # noqa: RUF012
    is_noisy: bool = False

    @property
    def updates(self) -> int:
        """Steps on each round."""
        return int(self.settings.get("num_iterations", 1))


def corrected(kind: str) -> Variant:
    """Return a variant whose importance weights matter."""
    settings = {"loss_type": "dapo"}
    theirs = {"vllm_importance_sampling_mode": kind}
    return Variant(settings, {"importance_weights": kind}, theirs, is_noisy=True)


CLIPPED = {"num_iterations": 2, "epsilon": 0.001, "epsilon_high": 0.002}
VARIANTS = {
    "dapo": Variant({"loss_type": "dapo"}),
    "dapo, KL": Variant({"loss_type": "dapo", "temperature": 0.7}, {"kl_beta": 0.1}, {"beta": 0.1}),
    "dapo, scaled by the round": Variant({"loss_type": "dapo", "scale_rewards": "batch"}),
    "dapo, truncated masked": Variant({"loss_type": "dapo", "mask_truncated_completions": True}),
    "grpo": Variant({"loss_type": "grpo"}),
    "dr_grpo": Variant({"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "gspo": Variant({"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    "dapo, clipped": Variant({"loss_type": "dapo", **CLIPPED}),
    "dapo, clipped, KL": Variant({"loss_type": "dapo", **CLIPPED}, {"kl_beta": 0.1}, {"beta": 0.1}),
    "dr_grpo, clipped": Variant({"loss_type": "dr_grpo", "scale_rewards": "none", **CLIPPED}),
    "gspo, clipped": Variant(
        {"loss_type": "grpo", "importance_sampling_level": "sequence", **CLIPPED}
    ),
    **{
        f"dapo, {kind}": corrected(kind)
        for kind in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    },
}
REWARD = """
def score(prompt, answer, sample):
    return sum(letter in "aeiou" for letter in answer) / 8 + (len(answer) % 3) / 4
"""


def write_inputs(folder: Path) -> None:
    """A random Llama, a tokenizer of single letters, prompts and a reward."""
    torch.manual_seed(0)
    special = {"eos_token": "<end>", "pad_token": "<pad>"}
    tokens = {token: number for number, token in enumerate([*LETTERS, *special.values()])}
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(tokens),
        max_position_embeddings=64,
        eos_token_id=tokens["<end>"],
        pad_token_id=tokens["<pad>"],
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)  # so that tokens are not equally likely
    model.save_pretrained(folder / "model")
    tokenizer = Tokenizer(BPE(vocab=tokens, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.save_pretrained(folder / "model")
    prompts = [{"prompt": f"what is {letter}?"} for letter in LETTERS[: 2 * PROMPTS]]
    write_json_lines(folder / "prompts.jsonl", prompts)
    (folder / "reward.py").write_text(REWARD)


class Ours:
    """Runs of the recipe in one process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        script = REPOSITORY / "recipes" / "finetuning.py"
        spec = importlib.util.spec_from_file_location("finetuning", script)
        assert spec is not None and spec.loader is not None
        self._recipe = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self._recipe)

    def run(self, name: str, steps: int, settings: dict[str, Any]) -> Path:
        """Train, and return the directory of the run."""
        output = self.folder / name
        flags = {
            "objective": "grpo",
            "model_name": self.folder / "model",
            "dataset": self.folder / "prompts.jsonl",
            "reward": f"{self.folder}/reward.py:score",
            "output_dir": output,
            "num_generations": ANSWERS,
            "prompts_per_step": PROMPTS,
            "max_completion_length": LONGEST,
            "batch_size_training": MICRO_BATCH,
            "max_train_step": steps,
            "use_peft": True,
            "optimizer": "SGD",
            "lr": LR,
            "lr_scheduler": "constant",
            "precision": "fp32",
            "device": "cpu",
            "plan_memory": False,
        }
        texts = {key: str(value) for key, value in {**flags, **settings}.items()}
        self._recipe.main(**texts)
        return output


def adapter_of(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "adapter_model.safetensors")


def losses_of(run: Path) -> list[float]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["train/loss"] for line in lines]


def noisy(rollouts: Round) -> Round:
    """Return a round with other log-probabilities of the sampler."""
    generator = numpy.random.default_rng(rollouts.facts.step)
    groups = []
    for group in rollouts.answers:
        changed = []
        for answer in group:
            noise = generator.normal(0, NOISE, len(answer.logprobs)).astype(numpy.float32)
            changed.append(dataclasses.replace(answer, logprobs=answer.logprobs + noise))
        groups.append(changed)
    return dataclasses.replace(rollouts, answers=groups)


def as_rollout(rollouts: Round) -> dict[str, list[Any]]:
    """Return a round as TRL expects what a sampler returns."""
    found: dict[str, list[Any]] = {
        name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "total")
    }
    for prompt, group in zip(rollouts.prompts, rollouts.answers, strict=True):
        for answer in group:
            found["prompt_ids"].append(prompt.token_ids)
            found["completion_ids"].append(answer.token_ids.tolist())
            found["logprobs"].append(answer.logprobs.tolist())
            found["total"].append(answer.total)
    return found


def run_theirs(
    python: str, folder: Path, name: str, variant: Variant, rounds: list[Round]
) -> dict[str, torch.Tensor]:
    """Return the losses and gradients of TRL's two steps."""
    output = folder / f"trl {name}"
    output.mkdir()
    job = {
        "model": str(folder / "model"),
        "adapter": str(folder / "start" / "model"),
        "output": str(output),
        "rounds": [as_rollout(one) for one in rounds],
        "micro_batch": MICRO_BATCH,
        "accumulation": PROMPTS * ANSWERS // MICRO_BATCH,
        "num_generations": ANSWERS,
        "longest": LONGEST,
        "steps": 2,
        "lr": LR,
        "settings": variant.settings | variant.theirs,
    }
    (output / "job.json").write_text(json.dumps(job))
    script = Path(__file__).with_name("grpo_trl.py")
    with open(output / "output.txt", "w") as log:
        command = [python, str(script), str(output / "job.json")]
        environment = {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1", "CUDA_VISIBLE_DEVICES": ""}
        ended = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    if ended.returncode:
        sys.exit((output / "output.txt").read_text()[-3000:])
    return load_file(output / "result.safetensors")


def compare(ours: Ours, name: str, variant: Variant, python: str) -> list[str]:
    """Return a line of the table."""
    folder = ours.folder
    settings = variant.settings | variant.ours
    runs = []
    for steps in (1, 2):
        run_name = f"{name}-{steps}"
        if variant.is_noisy:
            sampled = read_round(folder_of(folder / "dapo-2", 1))
            write_round(folder / run_name, noisy(sampled))
            # as a run that was killed before its first checkpoint
            (folder / run_name / ".llama_ft-run").touch()
            settings = settings | {"resume": "auto"}
        runs.append(ours.run(run_name, steps, settings))
    numbers = range(1, 1 + 2 // variant.updates)
    rounds = [read_round(folder_of(runs[1], number)) for number in numbers]
    theirs = run_theirs(python, folder, name, variant, rounds)
    states = [adapter_of(run) for run in (folder / "start", *runs)]
    loss_difference = 0.0
    difference = 0.0
    largest = 0.0
    for step, loss in enumerate(losses_of(runs[1])):
        loss_difference = max(loss_difference, abs(loss - float(theirs["losses"][step])))
        for key, before in states[step].items():
            gradient = (before - states[step + 1][key]) / LR
            other = theirs[f"{step + 1} {key}"]
            difference = max(difference, float((gradient - other).abs().max()))
            largest = max(largest, float(other.abs().max()))
    is_equal = loss_difference <= LIMIT and difference <= LIMIT
    figures = [f"{value:.1e}" for value in (loss_difference, difference, largest)]
    return [name, *figures, "" if is_equal else "outside"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="keep everything there; it must not exist")
    parser.add_argument("--only", default="", help="only variants with this in their name")
    parser.add_argument("--trl_python", help="an interpreter that has TRL; default: one is made")
    asked = parser.parse_args()
    cache = Path(os.environ.get("LLAMA_FT_CACHE", Path.home() / ".cache" / "llama_ft"))
    python = asked.trl_python or str(make_environment(PEERS["trl"], cache))
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=asked.folder is None)
        write_inputs(folder)
        ours = Ours(folder)
        ours.run("start", 1, {"lr": 1e-20})  # its adapter is the first one of all runs
        table = [["loss", "losses differ by", "gradients differ by", "largest gradient", ""]]
        for name, variant in VARIANTS.items():
            if asked.only in name or name == "dapo":
                table.append(compare(ours, name, variant, python))
    print_columns(table)
    if any(line[-1] for line in table[1:]):
        sys.exit(1)


if __name__ == "__main__":
    main()
