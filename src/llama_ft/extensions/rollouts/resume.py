"""Resume: the rounds in a directory are verified, and must have been made as the missing ones will
be."""

import fcntl
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from llama_ft.errors import UserError, reason
from llama_ft.extensions.rollouts.rewards.pool import RewardFunction
from llama_ft.extensions.rollouts.rounds import (
    NAME,
    Prompt,
    Round,
    RoundFacts,
    list_rounds,
    read_round,
    rollouts_of,
    unscored_folder_of,
)

LOCK = ".lock"
# fields of RoundFacts -> their values that must be equal, and what they are
COMPARED = {
    "policy": {"checksum": "model", "compute": "precision", "quantization": "quantization"},
    "source": {"kind": "source of answers", "model": "served model", "root": "served model"},
    "data": {"sha256": "data"},
}
CHECKSUM_SHOWN = 12  # digits
SCORE_AGAIN = "If only the rewards differ, --score_again scores its answers again."


@contextmanager
def locked(output_dir: Path) -> Iterator[None]:
    """Keep other processes from writing rounds into a directory, and remove it afterwards if it
    is new and empty. Raises UserError if one does."""
    folder = rollouts_of(output_dir)
    new_directories = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("w")
    except OSError as error:
        raise UserError(f"--output_dir {folder}: cannot be written ({reason(error)}).") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"--output_dir {folder}: another process writes rounds there."
            ) from None
        except OSError:  # the file system has no locks
            pass
        try:
            yield
        finally:
            with suppress(OSError):  # it has rounds
                if [path.name for path in folder.iterdir()] == [LOCK]:
                    (folder / LOCK).unlink()
                for path in new_directories:
                    path.rmdir()


class RoundsOnDisk(NamedTuple):
    """The rounds that need not be generated.

    Attributes:
        finished: the numbers of the complete ones.
        unscored: by number, those whose answers are still to be scored.
    """

    finished: set[int]
    unscored: dict[int, Round]


def find_rounds(
    output_dir: Path,
    facts: RoundFacts,
    functions: Sequence[RewardFunction],
    rounds: Sequence[Sequence[Prompt]],
    scores_again: bool = False,
) -> RoundsOnDisk:
    """Return the rounds on disk.

    Args:
        output_dir: their directory.
        facts: how the missing rounds will be made; `step` and `rewards` are not used.
        functions: the rewards of the missing rounds.
        rounds: the prompts of all rounds.
        scores_again: complete rounds with other rewards are still to be scored.

    Raises:
        UserError: a round is corrupted, or was made in another way.
    """
    on_disk = RoundsOnDisk(set(), {})
    for folder in list_rounds(output_dir):
        earlier = read_round(folder)
        step = earlier.facts.step
        has_others = scores_again and bool(other_rewards(earlier.facts, functions))
        expected = None if has_others else functions
        check_round(folder, earlier, facts, expected, _prompts_at(rounds, step))
        if has_others:
            shutil.rmtree(unscored_folder_of(output_dir, step), ignore_errors=True)
            folder.rename(unscored_folder_of(output_dir, step))
        else:
            on_disk.finished.add(step)
    for step in range(1, len(rounds) + 1):
        folder = unscored_folder_of(output_dir, step)
        if step in on_disk.finished:
            shutil.rmtree(folder, ignore_errors=True)  # a kill has left it
        elif folder.is_dir():
            earlier = read_round(folder)
            check_round(folder, earlier, facts, None, _prompts_at(rounds, earlier.facts.step))
            on_disk.unscored[step] = earlier
    return on_disk


def _prompts_at(rounds: Sequence[Sequence[Prompt]], step: int) -> Sequence[Prompt]:
    return rounds[step - 1] if 0 < step <= len(rounds) else []


def check_round(
    folder: Path,
    earlier: Round,
    facts: RoundFacts,
    functions: Sequence[RewardFunction] | None,
    prompts: Sequence[Prompt] | None,
    advice: str = SCORE_AGAIN,
) -> None:
    """Raise a UserError if a round was made in another way than it would be made now.

    Args:
        folder: of the round.
        earlier: the round on disk.
        facts: how it would be made; `step` and `rewards` are not used.
        functions: its rewards; None: they are not compared.
        prompts: its prompts; None: they are not known.
        advice: what to do about other rewards.
    """
    others = _differences(earlier.facts, facts)
    if NAME.fullmatch(folder.name) and earlier.facts.step != int(folder.name):
        others.append(f"the number of round {earlier.facts.step}")
    rewards = [] if functions is None else other_rewards(earlier.facts, functions)
    others += rewards
    if not others and prompts is not None and _text(earlier.prompts) != _text(prompts):
        others = ["other prompts: the tokenizer, its chat template or --skip_bad_rows differs"]
    if others:
        raise UserError(
            "\n".join([f"{folder}: was made with", *(f"  {other}" for other in others)])
            + f"\nSet another --output_dir, or delete {folder.parent} to generate all rounds again."
            + (f"\n{advice}" if rewards else "")
        )


def _text(prompts: Sequence[Prompt]) -> str:
    """Return prompts as JSON, to compare them: NaN, a missing number of a table, equals itself there."""
    return json.dumps([vars(prompt) for prompt in prompts], default=str)


def _differences(earlier: RoundFacts, facts: RoundFacts) -> list[str]:
    """Return what differs between a round on disk and those that are missing, as lines. Rewards are
    not compared."""
    lines = []
    for name in ("seed", "num_generations"):
        lines += _line(f"--{name}", getattr(earlier, name), getattr(facts, name))
    for name in facts.sampling:
        shown = "tokens that end an answer" if name == "stop_ids" else f"--{name}"
        lines += _line(shown, earlier.sampling.get(name), facts.sampling[name])
    for field, names in COMPARED.items():
        before = getattr(earlier, field)
        now = getattr(facts, field)
        for name, shown in names.items():
            lines += _line(f"another {shown}:", before.get(name), now.get(name))
    return list(dict.fromkeys(lines))


def _line(name: str, earlier: Any, now: Any) -> list[str]:
    return [] if earlier == now else [f"{name} {_shown(earlier)}, not {_shown(now)}"]


def _shown(value: Any) -> str:
    is_checksum = isinstance(value, str) and len(value) == 64
    return f"{value[:CHECKSUM_SHOWN]}..." if is_checksum else str(value)


def other_rewards(earlier: RoundFacts, functions: Sequence[RewardFunction]) -> list[str]:
    """Return how the rewards of a round differ from --reward."""
    # a function that returns numbers by name has several entries in the round
    stored = {(one.file, one.function): one for one in earlier.rewards}
    now = {(one.file, one.function): one for one in functions}
    lines = [
        f"--reward {file}:{function}" for file, function in stored if (file, function) not in now
    ]
    for (file, function), one in now.items():
        before = stored.get((file, function))
        if before is None:
            lines.append(f"no --reward {file}:{function}")
        elif before.sha256 != one.sha256:
            lines.append(f"another file {file}: {_shown(before.sha256)}, not {_shown(one.sha256)}")
        elif before.weight != one.weight:
            lines.append(f"--reward {file}:{function}={before.weight:g}, not {one.weight:g}")
    return lines
