"""Probes: a few prompts with the log-probabilities that a fine-tuned model and its base model give
them. A run writes them into `model/probes.json`, and `check --server` compares a server with them.

    token_ids       8   51   17    9      a prompt, and its log-probability from the second token on
    fine_tuned        -2.1 -0.3 -4.0
    base              -2.8 -0.9 -4.1
    weaker            -2.2 -0.4 -4.0      with nine tenths of the adapter
    next            the most likely tokens after the prompt, with both log-probabilities
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from llama_ft.config.home import expanded
from llama_ft.config.paths import PROBES_FILE, missing_run
from llama_ft.errors import UserError, reason
from llama_ft.processes import replace_text

VERSION = 2  # 1 has no `weaker`
DIGITS = 5  # of a log-probability: its error in bf16 is 1e-3 at best


@dataclass(frozen=True)
class ProbeScores:
    """Log-probabilities of a fine-tuned model. Of its base model, and of the base model with a weaker
    adapter, if the run could compute them: see inference/verdict.py."""

    fine_tuned: Sequence[float]
    base: Sequence[float] | None = None
    weaker: Sequence[float] | None = None

    def are_numbers_of(self, count: int) -> bool:
        """Return whether there are that many numbers of each model."""
        known = [
            scores for scores in (self.fine_tuned, self.base, self.weaker) if scores is not None
        ]
        return all(len(scores) == count and all(map(math.isfinite, scores)) for scores in known)

    def by_token(self) -> list[tuple[float, float | None, float | None]]:
        """Return fine_tuned, base and weaker of each token."""
        unknown = [None] * len(self.fine_tuned)
        return list(zip(self.fine_tuned, self.base or unknown, self.weaker or unknown, strict=True))


@dataclass(frozen=True)
class Probe:
    """A prompt.

    Attributes:
        token_ids: of the prompt.
        text: what has these tokens, for servers that take no token ids; None if there is none.
        scores: of the prompt's tokens but the first.
        next_ids: the tokens that are most likely to follow.
        next_texts: the same as text.
        next_scores: of `next_ids`.
    """

    token_ids: Sequence[int]
    text: str | None
    scores: ProbeScores
    next_ids: Sequence[int]
    next_texts: Sequence[str]
    next_scores: ProbeScores

    @property
    def is_complete(self) -> bool:
        """Whether each token that needs a log-probability has one."""
        following = len(self.next_ids)
        is_named = len(self.next_texts) == following
        of_prompt = self.scores.are_numbers_of(len(self.token_ids) - 1)
        return is_named and of_prompt and self.next_scores.are_numbers_of(following)


@dataclass(frozen=True)
class ChatProbe:
    """A chat, and what the chat template of the fine-tuning makes of it, up to the answer."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] | None
    token_ids: Sequence[int]


@dataclass(frozen=True)
class Probes:
    """All probes of a run.

    Attributes:
        is_adapter: the run has trained an adapter, otherwise a whole model.
        dtype: of the computation, such as bf16.
        quantization: of the base model in the run, such as 4bit; None without.
        probes: the prompts.
        chat: a chat; None if the run has none.
    """

    is_adapter: bool
    dtype: str
    quantization: str | None
    probes: Sequence[Probe]
    chat: ChatProbe | None = None

    def save(self, file: Path) -> None:
        """Write the file."""
        content = {"version": VERSION, **asdict(self)}
        replace_text(file, json.dumps(content, separators=(",", ":")))

    @classmethod
    def load(cls, file: Path) -> "Probes":
        """Read what `save` wrote. Raises OSError or ValueError."""
        content = json.loads(file.read_text())
        version = content.pop("version", None) if isinstance(content, dict) else None
        if not isinstance(version, int):
            raise ValueError("its content is not that of probes")
        if version > VERSION:
            raise ValueError("a newer version of llama_ft has written it")
        try:
            probes = TypeAdapter(cls).validate_python(content)
        except ValidationError as error:
            place = ".".join(str(part) for part in error.errors()[0]["loc"])
            raise ValueError(f"{place} has another form") from error
        if not probes.probes or not all(probe.is_complete for probe in probes.probes):
            raise ValueError("log-probabilities are missing")
        return probes


def find_probes(name: str) -> tuple[Path, Probes]:
    """Return the file and the probes of a run, or of its `model` directory.

    Raises:
        UserError: there are none, or they cannot be read.
    """
    folder = expanded(name)
    if not folder.exists():
        raise UserError(f"{name}: {missing_run(folder)}")
    if not folder.is_dir():
        raise UserError(f"{name}: is a file; expected the directory of a run.")
    for file in (folder / "model" / PROBES_FILE, folder / PROBES_FILE):
        if file.is_file():
            try:
                return file, Probes.load(file)
            except (OSError, ValueError, RecursionError) as error:
                raise UserError(f"{file}: cannot be read ({reason(error)}).") from error
    raise UserError(
        f"{name}: has no model/{PROBES_FILE}, with which a server is compared.\n"
        "A run writes it with its final model: not a run with --save_model no, of a reward model, of samples "
        "that all have images, or of an earlier version."
    )
