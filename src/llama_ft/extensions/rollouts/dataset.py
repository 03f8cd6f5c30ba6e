"""Rounds of rollouts as samples to train on. Their token ids are those that were sampled: no text is
tokenized again.

    --objective sft              the best answer to each prompt, or all of them
    --objective distill          the same
    --objective dpo, ...         the best and the worst answer to each prompt, as a pair
    --objective kto              each answer with a label
"""

import functools
import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from llama_ft.config.home import expanded
from llama_ft.config.objectives import PREFERENCE, UNPAIRED
from llama_ft.config.settings.data_settings import DataConfig
from llama_ft.data.read.files import Samples
from llama_ft.data.read.sources import Source
from llama_ft.data.tokenize.encoder import IGNORED
from llama_ft.errors import UserError, plural
from llama_ft.extensions.rollouts.rounds import (
    FACTS,
    Answer,
    Prompt,
    Round,
    has_group,
    list_rounds,
    read_round,
    sha256_of,
)
from llama_ft.runtime.console import log

PROMPTS_COMPARED = 8  # with the texts that the tokenizer makes of their token ids
Sample = dict[str, Any]
# Why answers are not trained on.
NO_REWARDS = "prompt with fewer than two rewards"
EQUAL_REWARDS = "prompt with equal rewards"
BELOW = "answer below --reward_threshold"
NO_REWARD = "answer without a reward"


class Selection(NamedTuple):
    """What is made of rounds.

    Attributes:
        dataset_format: preference, unpaired_preference, or any other one for single answers.
        which: best or all, of single answers.
        threshold: --reward_threshold.
    """

    dataset_format: str
    which: str
    threshold: float | None


def open_rounds(name: str, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Source:
    """Return the samples of a directory of rounds.

    Args:
        name: the directory of rounds, see `list_rounds`, or of a single one.
        config: selects the samples.
        tokenizer: of the model to be trained.

    Raises:
        UserError: a round is corrupted, the token ids are of another tokenizer, or nothing is left to
            train on.
    """
    folders = _folders(name)
    if not folders:
        raise UserError(f"{name}: has no complete round of rollouts. llama-ft rollout makes them.")
    dataset_format = config.dataset_format
    if dataset_format not in (PREFERENCE, UNPAIRED):
        dataset_format = "auto"
    selection = Selection(dataset_format, config.rollouts, config.reward_threshold)
    _check_tokenizer(name, read_round(folders[0]), tokenizer)
    sums = " ".join(sha256_of(folder / FACTS) for folder in folders)
    log.info(_description(name, sums, selection))
    identity = hashlib.sha256(f"{sums} {selection}".encode()).hexdigest()

    def read() -> Samples:
        for folder in folders:
            for place, sample in samples_of_round(read_round(folder), selection):
                if not isinstance(sample, str):
                    yield f"{folder} {place}", sample

    return Source(name, identity, read)


def _folders(name: str) -> list[Path]:
    """Return the directories of the complete rounds."""
    path = expanded(name)
    return [path] if (path / FACTS).is_file() else list_rounds(path)


def samples_of_round(one: Round, selection: Selection) -> Iterator[tuple[str, Sample | str]]:
    """Yield, for each sample of a round, its place and its columns; or why there is none."""
    for number, (prompt, answers) in enumerate(zip(one.prompts, one.answers, strict=True), start=1):
        place = f"prompt {number}"
        if selection.dataset_format == UNPAIRED or selection.which == "all":
            for count, answer in enumerate(answers, start=1):
                yield f"{place} answer {count}", _single(prompt, answer, selection)
            continue
        if not has_group(answers):
            yield place, NO_REWARDS
            continue
        with_rewards = [answer for answer in answers if answer.total is not None]
        # the first one of equal rewards
        best = max(with_rewards, key=_total)
        worst = min(with_rewards, key=_total)
        if selection.dataset_format != PREFERENCE:
            yield place, _single(prompt, best, selection)
        elif _total(best) == _total(worst):
            yield place, EQUAL_REWARDS
        else:
            yield (
                place,
                {
                    "prompt": prompt.token_ids,
                    "chosen": best.token_ids.tolist(),
                    "rejected": worst.token_ids.tolist(),
                },
            )


def _single(prompt: Prompt, answer: Answer, selection: Selection) -> Sample | str:
    """Return the sample of one answer, or why there is none."""
    threshold = selection.threshold
    token_ids = answer.token_ids.tolist()
    if selection.dataset_format == UNPAIRED:
        if answer.total is None:
            return NO_REWARD
        is_desirable = threshold is not None and answer.total >= threshold
        return {"prompt": prompt.token_ids, "completion": token_ids, "label": is_desirable}
    if threshold is not None:
        if answer.total is None:
            return NO_REWARD
        if answer.total < threshold:
            return BELOW
    return {
        "input_ids": [*prompt.token_ids, *token_ids],
        "labels": [*[IGNORED] * len(prompt.token_ids), *token_ids],
    }


def _total(answer: Answer) -> float:
    assert answer.total is not None
    return answer.total


@functools.cache  # also so that each line comes once
def _description(name: str, sums: str, selection: Selection) -> str:
    """Return what is trained on, for the log. `sums`: of the rounds. Raises UserError if it is
    nothing, or if all labels are the same."""
    counts = Counter[str]()
    totals = list[float]()
    folders = _folders(name)
    for folder in folders:
        one = read_round(folder)
        totals += [
            answer.total for group in one.answers for answer in group if answer.total is not None
        ]
        for _, sample in samples_of_round(one, selection):
            kind = sample if isinstance(sample, str) else f"label {sample.get('label')}"
            counts[kind] += 1
    rewards = "no answer has a reward"
    if totals:
        rewards = f"rewards are from {min(totals):.4g} to {max(totals):.4g}"
    labels = {label: counts.pop(f"label {label}", 0) for label in (True, False, None)}
    if selection.dataset_format == UNPAIRED:
        if selection.threshold is None:
            raise UserError(
                f"{name}: labels of answers need --reward_threshold: those with at least this reward are "
                f"desirable ({rewards})."
            )
        if not labels[True] or not labels[False]:
            what = "desirable" if labels[True] else "undesirable"
            raise UserError(
                f"--reward_threshold {selection.threshold:g}: all answers of {name} are {what}; {rewards}. "
                "Training needs both."
            )
    used = sum(labels.values())
    left_out = list[str]()
    for why, count in sorted(counts.items()):
        noun, _, what = why.partition(" ")
        left_out.append(f"{plural(count, noun)} {what}")
    if not used:
        raise UserError(f"{name}: nothing to train on: {', '.join(left_out)}; {rewards}.")
    text = f"{name}: {plural(len(folders), 'round')} of rollouts, {plural(used, _noun(selection))}"
    if totals and min(totals) == max(totals):
        text += f"; all rewards are {min(totals):.4g}"
    if left_out:
        text += f"; left out: {', '.join(left_out)}"
    return text


def _noun(selection: Selection) -> str:
    if selection.dataset_format == PREFERENCE:
        return "pair"
    is_each = selection.dataset_format == UNPAIRED or selection.which == "all"
    return "answer" if is_each else "best answer"


def _check_tokenizer(name: str, one: Round, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a UserError if the tokenizer makes other texts of the token ids than they had."""
    for prompt in one.prompts[:PROMPTS_COMPARED]:
        text = str(tokenizer.decode(prompt.token_ids, skip_special_tokens=True)).strip()
        if text != prompt.text:
            model = one.facts.policy.get("model", "another model")
            raise UserError(
                f"{name}: its token ids are of the tokenizer of {model}: a prompt was {prompt.text!r:.60}, and "
                f"would be {text!r:.60}.\nTrain that model, or generate rollouts with this one."
            )
