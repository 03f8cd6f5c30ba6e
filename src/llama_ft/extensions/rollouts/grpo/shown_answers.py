"""The best and the worst answer of each step, for the report: of the first step and of the latest ones.
All answers are in the rounds."""

from typing import Any

from llama_ft.extensions.rollouts.rounds import Answer, Prompt, Round
from llama_ft.observe.run_metadata import read_facts
from llama_ft.run import TrainingRun

FACT = "rollouts"  # in facts.json
STEPS = 20  # after the first one
CHARACTERS = 500  # of a prompt or an answer


def keep_for_report(run: TrainingRun, step: int, rollouts: Round, earlier: list[Any]) -> list[Any]:
    """Write the best and the worst answer of a step into facts.json, and return what is kept there.

    Args:
        run: the run; only its rank 0 writes.
        step: the first one on the round.
        rollouts: its round.
        earlier: what is kept of the steps before.
    """
    known = list[tuple[float, Prompt, Answer]]()
    for prompt, group in zip(rollouts.prompts, rollouts.answers, strict=True):
        known += [(answer.total, prompt, answer) for answer in group if answer.total is not None]
    by_reward = sorted(known, key=lambda one: one[0])
    shown = []
    for reward, prompt, answer in (by_reward[-1], by_reward[0]):
        question = _question(prompt)[:CHARACTERS]
        text = answer.text[:CHARACTERS]
        shown.append({"reward": reward, "question": question, "answer": text})
    when = f"step {step}"
    others = [one for one in earlier if one.get("when") != when]  # of a step that is repeated
    steps = [*others[:1], *others[1:][1 - STEPS :], {"when": when, "answers": shown}]
    run.facts.add(**{FACT: steps})
    return steps


def kept_for_report(run: TrainingRun) -> list[Any]:
    """Return what is kept of the steps of a resumed run."""
    facts = read_facts(run.facts.path) if run.facts.path.exists() else {}
    return list(facts.get(FACT, []))


def _question(prompt: Prompt) -> str:
    """Return the last message of a prompt."""
    if isinstance(prompt.content, str):
        return prompt.content
    content = prompt.content[-1].get("content")
    return content if isinstance(content, str) else prompt.text
