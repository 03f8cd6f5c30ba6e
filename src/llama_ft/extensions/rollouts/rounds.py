"""Rounds of rollouts on disk: the answers to some prompts, with all that is needed to train on them or
to repeat them.

    OUTPUT_DIR/rollouts/000001/  (or OUTPUT_DIR/000001/ if its own name is rollouts)
        prompts.jsonl          the prompts, their token ids, and the texts of their answers
        samples.safetensors    numbers of all answers, first those to the first prompt:
            tokens     int32   [tokens]          token ids of all answers, one after another
            offsets    int64   [answers + 1]     where each answer begins, and the end of the last one
            logprobs   float32 [tokens]          log-probabilities in the distribution that was sampled
            rewards    float32 [answers, names]  NaN: the answer has no such reward
            totals     float32 [answers]         weighted sums of the rewards; NaN: there is none
            seeds      int64   [answers]
            has_ended  uint8   [answers]         0: truncated at the limit of tokens
        round.json             how they were made, and the checksums
    OUTPUT_DIR/rollouts/unscored-000002/
        the same files without rewards: answers that are still to be scored
    OUTPUT_DIR/rollouts/begun-000002/
        the same for the first prompts of a round, when a signal has ended a run with --objective grpo

A round appears under its name when it is complete. Neither times nor directories of the machine are
in it, so that the same command writes the same bytes.
"""

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy
from safetensors import SafetensorError
from safetensors.numpy import load, save

from llama_ft.errors import UserError, reason
from llama_ft.processes import flush_directory

FORMAT = 1
FOLDER = "rollouts"
PROMPTS = "prompts.jsonl"
SAMPLES = "samples.safetensors"
FACTS = "round.json"
NAME = re.compile(r"\d{6,}")  # of a complete round
UNSCORED = "unscored-"
BEGUN = "begun-"
ENCODING = ("utf-8", "surrogatepass")  # texts of datasets and models may have lone surrogates
DTYPES = {
    "tokens": numpy.int32,
    "offsets": numpy.int64,
    "logprobs": numpy.float32,
    "rewards": numpy.float32,
    "totals": numpy.float32,
    "seeds": numpy.int64,
    "has_ended": numpy.uint8,
}
FEWEST_REWARDS = 2  # in a group: a single reward cannot be compared


@dataclass(frozen=True)
class Prompt:
    """A prompt.

    Attributes:
        index: in the dataset, from 0.
        sample: as it is in the dataset.
        content: the prompt of the sample: a text, or messages that end with the user's.
        text: for rewards: `token_ids` as a text without special tokens.
        token_ids: what the model gets.
    """

    index: int
    sample: dict[str, Any]
    content: str | list[dict[str, Any]]
    text: str
    token_ids: list[int]


@dataclass(frozen=True)
class Answer:
    """A sampled answer.

    Attributes:
        text: for rewards: `token_ids` as a text without special tokens.
        token_ids: int32, with the token that ends the answer, if it has ended.
        logprobs: float32, of the tokens in the distribution from which they were sampled.
        seed: of its random numbers.
        has_ended: False if it was truncated at the limit of tokens.
        rewards: by name; None for one that could not be computed.
        total: the weighted sum of the rewards; None if one of them is.
    """

    text: str
    token_ids: numpy.ndarray
    logprobs: numpy.ndarray
    seed: int
    has_ended: bool
    rewards: dict[str, float | None] = field(default_factory=dict)
    total: float | None = None


@dataclass(frozen=True)
class Reward:
    """A name of rewards, its weight in the total, and the function that returns it."""

    name: str
    weight: float
    file: str
    function: str
    sha256: str  # of the file


@dataclass(frozen=True)
class RoundFacts:
    """How a round was made.

    Attributes:
        step: its number, from 1.
        num_generations: answers per prompt.
        policy: the model that answers, by name and checksum.
        source: the model itself, or a server with its version.
        sampling: temperature and others, and the tokens that end an answer.
        seed: from which those of the answers are made.
        rewards: in the order of the columns of `rewards`.
        data: the dataset, by name and checksum.
    """

    step: int
    num_generations: int
    policy: dict[str, Any]
    source: dict[str, Any]
    sampling: dict[str, Any]
    seed: int
    rewards: list[Reward]
    data: dict[str, Any]


@dataclass(frozen=True)
class Round:
    """A round: prompts, and of each one its `num_generations` answers."""

    facts: RoundFacts
    prompts: list[Prompt]
    answers: list[list[Answer]]

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(answer.token_ids) for group in self.answers for answer in group)

    def groups(self) -> list[int]:
        """Return the indices of the prompts with at least two answers that have a reward."""
        return [index for index, group in enumerate(self.answers) if has_group(group)]


def has_group(answers: Sequence[Answer]) -> bool:
    """Return whether the answers to a prompt can be compared: at least two have a reward."""
    return sum(answer.total is not None for answer in answers) >= FEWEST_REWARDS


def rollouts_of(output_dir: Path) -> Path:
    """Return the directory of the rounds of an output directory, which may be that one itself."""
    return output_dir if output_dir.name == FOLDER else output_dir / FOLDER


def folder_of(output_dir: Path, step: int) -> Path:
    """Return the directory of a round."""
    return rollouts_of(output_dir) / f"{step:06}"


def unscored_folder_of(output_dir: Path, step: int) -> Path:
    """Return the directory of the answers of a round that are still to be scored."""
    return rollouts_of(output_dir) / f"{UNSCORED}{step:06}"


def begun_folder_of(output_dir: Path, step: int) -> Path:
    """Return the directory of the answers to the first prompts of a round."""
    return rollouts_of(output_dir) / f"{BEGUN}{step:06}"


def list_rounds(output_dir: Path) -> list[Path]:
    """Return the directories of the complete rounds, in order."""
    folder = rollouts_of(output_dir)
    if not folder.is_dir():
        return []
    rounds = [path for path in folder.iterdir() if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(rounds, key=lambda path: int(path.name))


def sha256_of(file: Path) -> str:
    """Return the checksum of a file, in hexadecimal digits. Raises OSError."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def write_round(output_dir: Path, rollouts: Round) -> Path:
    """Write a round, and return its directory. Its answers without rewards are deleted, and a part of
    one, which a kill has left, is replaced.

    Raises:
        UserError: the round exists already, or the directory cannot be written.
    """
    step = rollouts.facts.step
    folder = _write(folder_of(output_dir, step), rollouts)
    shutil.rmtree(unscored_folder_of(output_dir, step), ignore_errors=True)
    return folder


def write_unscored(output_dir: Path, rollouts: Round) -> Path:
    """Write the answers of a round before they are scored, so that neither a reward that fails nor a
    kill loses them. Raises UserError as `write_round` does."""
    step = rollouts.facts.step
    folder = _write(unscored_folder_of(output_dir, step), rollouts)
    shutil.rmtree(begun_folder_of(output_dir, step), ignore_errors=True)
    return folder


def write_begun(output_dir: Path, rollouts: Round) -> Path:
    """Write the answers to the first prompts of a round. Raises UserError if that is not possible."""
    folder = begun_folder_of(output_dir, rollouts.facts.step)
    shutil.rmtree(folder, ignore_errors=True)  # fewer of them
    return _write(folder, rollouts)


def _write(folder: Path, rollouts: Round) -> Path:
    """Write a round into a directory, and return it."""
    aside = folder.with_name(f".{folder.name}.tmp")
    contents = {PROMPTS: _prompts_text(rollouts), SAMPLES: save(_arrays(rollouts))}
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    contents[FACTS] = _facts_text(rollouts.facts, sums)
    try:
        if os.path.lexists(folder):
            raise FileExistsError("the round exists already")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        for name, content in contents.items():
            with (aside / name).open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        flush_directory(aside)
        aside.rename(folder)
        flush_directory(folder.parent)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({reason(error)}).") from error
    return folder


def read_round(folder: Path) -> Round:
    """Return a round whose checksums are right.

    Raises:
        UserError: a file of it is missing or corrupted. The message names it.
    """
    facts, sums = _read_facts(folder / FACTS)
    name = FACTS
    try:
        contents = {}
        for name in (PROMPTS, SAMPLES):
            contents[name] = (folder / name).read_bytes()
            if hashlib.sha256(contents[name]).hexdigest() != sums.get(name):
                raise ValueError("its checksum differs from the one in round.json")
        name = SAMPLES
        arrays = load(contents[SAMPLES])
        answers = _answers(arrays, facts)
        name = PROMPTS
        prompts, texts = _parse_prompts(contents[PROMPTS])
        grouped = _with_texts(answers, texts, facts.num_generations)
    except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
        raise _corrupted(folder / name, error) from error
    return Round(facts, prompts, grouped)


def _corrupted(file: Path, error: Exception) -> UserError:
    return UserError(
        f"{file}: is missing or corrupted ({reason(error)}).\n"
        f"Delete {file.parent} to generate this round again."
    )


def _prompts_text(rollouts: Round) -> bytes:
    lines = []
    for prompt, answers in zip(rollouts.prompts, rollouts.answers, strict=True):
        content = {**vars(prompt), "answers": [answer.text for answer in answers]}
        lines.append(json.dumps(content, ensure_ascii=False, default=str) + "\n")
    return "".join(lines).encode(*ENCODING)


def _parse_prompts(content: bytes) -> tuple[list[Prompt], list[list[str]]]:
    """Return the prompts and the texts of their answers."""
    prompts = []
    texts = []
    for line in content.decode(*ENCODING).split("\n")[:-1]:
        fields = json.loads(line)
        texts.append(fields.pop("answers"))
        prompts.append(Prompt(**fields))
    return prompts, texts


def _arrays(rollouts: Round) -> dict[str, numpy.ndarray]:
    """Return the tensors of samples.safetensors. Raises ValueError for numbers that do not fit
    together."""
    count = rollouts.facts.num_generations
    if any(len(group) != count for group in rollouts.answers):
        raise ValueError(f"expected {count} answers to each prompt")
    answers = [answer for group in rollouts.answers for answer in group]
    if any(len(answer.token_ids) != len(answer.logprobs) for answer in answers):
        raise ValueError("expected one log-probability per token")
    names = [reward.name for reward in rollouts.facts.rewards]
    lengths = [len(answer.token_ids) for answer in answers]
    rewards = [[_number(answer.rewards.get(name)) for name in names] for answer in answers]
    no_tokens = numpy.zeros(0)
    values: dict[str, Any] = {
        "tokens": numpy.concatenate([no_tokens, *(answer.token_ids for answer in answers)]),
        "offsets": numpy.cumsum([0, *lengths]),
        "logprobs": numpy.concatenate([no_tokens, *(answer.logprobs for answer in answers)]),
        "rewards": numpy.array(rewards).reshape(len(answers), len(names)),
        "totals": [_number(answer.total) for answer in answers],
        "seeds": [answer.seed for answer in answers],
        "has_ended": [answer.has_ended for answer in answers],
    }
    return {name: numpy.asarray(values[name], dtype) for name, dtype in DTYPES.items()}


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _value(number: float) -> float | None:
    """Return a number of a float32 tensor: the shortest one that is rounded to it, so that a reward of
    0.7, which is 0.699999988 in float32, is at least 0.7."""
    return None if math.isnan(number) else float(str(numpy.float32(number)))


def _answers(arrays: dict[str, numpy.ndarray], facts: RoundFacts) -> list[Answer]:
    """Return the answers without their texts. Raises ValueError for tensors of other shapes."""
    for name, dtype in DTYPES.items():
        if arrays[name].dtype != dtype:
            raise ValueError(f"{name} has dtype {arrays[name].dtype}")
    offsets = arrays["offsets"].tolist()
    count = len(offsets) - 1
    tokens = len(arrays["tokens"])
    shapes = {
        "offsets": (count + 1,),
        "logprobs": (tokens,),
        "rewards": (count, len(facts.rewards)),
        **dict.fromkeys(("totals", "seeds", "has_ended"), (count,)),
    }
    wrong = [name for name, shape in shapes.items() if arrays[name].shape != shape]
    if wrong or offsets[0] != 0 or offsets[-1] != tokens or offsets != sorted(offsets):
        raise ValueError(f"the shapes do not fit together: {', '.join(wrong) or 'offsets'}")
    names = [reward.name for reward in facts.rewards]
    answers = []
    for index in range(count):
        part = slice(offsets[index], offsets[index + 1])
        rewards = [_value(number) for number in arrays["rewards"][index].tolist()]
        answer = Answer(
            text="",
            token_ids=arrays["tokens"][part],
            logprobs=arrays["logprobs"][part],
            seed=int(arrays["seeds"][index]),
            has_ended=bool(arrays["has_ended"][index]),
            rewards=dict(zip(names, rewards, strict=True)),
            total=_value(float(arrays["totals"][index])),
        )
        answers.append(answer)
    return answers


def _with_texts(answers: list[Answer], texts: list[list[str]], count: int) -> list[list[Answer]]:
    """Return the answers with their texts, by prompt."""
    flat = [text for group in texts for text in group]
    if len(flat) != len(answers) or any(len(group) != count for group in texts):
        raise ValueError(f"expected {count} answers to each prompt, {len(answers)} in all")
    read = []
    for answer, text in zip(answers, flat, strict=True):
        read.append(Answer(**{**vars(answer), "text": text}))
    return [read[start : start + count] for start in range(0, len(read), count)]


def _facts_text(facts: RoundFacts, sums: dict[str, str]) -> bytes:
    content = {"format": FORMAT, **asdict(facts), "files": sums}
    content["sha256"] = _sum_of_facts(content)
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode(*ENCODING)


def _sum_of_facts(content: dict[str, Any]) -> str:
    """Return the checksum of round.json without its field `sha256`."""
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _read_facts(file: Path) -> tuple[RoundFacts, dict[str, str]]:
    """Return round.json, and the checksums of the other files."""
    try:
        content = json.loads(file.read_bytes().decode(*ENCODING))
        checksum = content.pop("sha256")
        if content.get("format", FORMAT) > FORMAT:
            raise ValueError(f"format {content['format']} of a newer llama_ft")
        if checksum != _sum_of_facts(content):
            raise ValueError("its checksum differs")
        sums = content.pop("files")
        del content["format"]
        rewards = [Reward(**reward) for reward in content.pop("rewards")]
        return RoundFacts(**content, rewards=rewards), sums
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise _corrupted(file, error) from error
