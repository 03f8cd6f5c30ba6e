"""Settings about rewards, for recipes/rollout.py and training."""

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from llama_ft.config.value_types import STRICT, CountOrZero, Size

MOST_GENERATIONS = (
    100_000  # answers per prompt; more are a typing error, which would fill the memory
)


@dataclass(config=STRICT, kw_only=True)
class RewardFlags:
    """Rewards of answers."""

    reward: list[str] = Field(default_factory=list)
    """Score each answer with path/to/file.py:function, called as score(prompt, answer, sample). It
    returns a number, numbers by name, or None for no reward. Several with weights:
    a.py:exact,b.py:format=0.5."""

    reward_timeout: Annotated[float, Field(gt=0, le=86_400)] = 10.0
    """Longest time of a call, in seconds, and its CPU time. A call that takes longer gives no
    reward."""

    reward_memory: Size | None = "4GB"
    """Address space of each process that calls rewards, such as 16GB; null: no limit."""

    reward_processes: CountOrZero = 0
    """Processes that call rewards; 0: one per core, at most 8."""
