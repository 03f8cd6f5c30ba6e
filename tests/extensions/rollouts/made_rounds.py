"""Rounds for tests: answers of random tokens, with the rewards that a test wants."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
from transformers import AutoTokenizer

from llama_ft.extensions.rollouts.rounds import (
    Answer,
    Prompt,
    Reward,
    Round,
    RoundFacts,
    write_round,
)

Totals = Sequence[Sequence[float | None]]  # of the answers to each prompt


def make_round(totals: Totals, tokenizer: Any, step: int = 1) -> Round:
    """A round of answers with these rewards. No two have the same tokens."""
    generator = numpy.random.default_rng(step)
    prompts = []
    answers = []
    for number, group in enumerate(totals):
        ids = [1, *generator.integers(3, 260, 2 + number % 3).tolist()]
        text = str(tokenizer.decode(ids, skip_special_tokens=True)).strip()
        prompts.append(Prompt(number, {"prompt": text}, text, text, ids))
        answers.append([_answer(generator, tokenizer, total) for total in group])
    facts = RoundFacts(
        step=step,
        num_generations=len(totals[0]),
        policy={"model": "org/tiny", "checksum": "1f"},
        source={"kind": "own generation"},
        sampling={"temperature": 1.0},
        seed=42,
        rewards=[Reward("score", 1.0, "rewards.py", "score", "ab")],
        data={"dataset": "prompts.jsonl", "sha256": "cd"},
    )
    return Round(facts, prompts, answers)


def _answer(generator: numpy.random.Generator, tokenizer: Any, total: float | None) -> Answer:
    ids = generator.integers(3, 260, generator.integers(2, 9)).astype(numpy.int32)
    text = str(tokenizer.decode(ids, skip_special_tokens=True)).strip()
    logprobs = numpy.full(len(ids), -1.5, numpy.float32)
    return Answer(text, ids, logprobs, 7, True, {"score": total}, total)


def write_rounds(folder: Path, model: Path, *rounds: Totals) -> list[Round]:
    """Write rounds with the tokenizer of a model into `folder`/rollouts."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    made = [make_round(totals, tokenizer, step) for step, totals in enumerate(rounds, start=1)]
    for one in made:
        write_round(folder, one)
    return made
