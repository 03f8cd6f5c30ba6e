"""Make a round: the model or servers answer its prompts, rewards score the answers, and it is
written."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llama_ft.errors import UserError, plural
from llama_ft.extensions.rollouts.rewards.pool import RewardPool, Scored
from llama_ft.extensions.rollouts.rounds import (
    Answer,
    Prompt,
    Round,
    RoundFacts,
    write_begun,
    write_round,
    write_unscored,
)
from llama_ft.extensions.rollouts.sampling import Sampler, Sampling, SamplingStopped
from llama_ft.runtime import Ranks, log
from llama_ft.runtime.rank0 import on_rank0


@dataclass(frozen=True)
class RoundMaker:
    """Makes rounds.

    Attributes:
        sampler: answers the prompts.
        pool: scores the answers, on rank 0; None: they have no rewards.
        output_dir: where rounds are written.
        ranks: the ranks.
        is_training: the round needs a prompt with two rewards, and is logged only if rewards are missing.
    """

    sampler: Sampler
    pool: RewardPool | None
    output_dir: Path
    ranks: Ranks
    is_training: bool = False

    def make(
        self,
        facts: RoundFacts,
        prompts: list[Prompt],
        unscored: Round | None,
        begun: Sequence[list[Answer]] = (),
    ) -> Round | None:
        """Make a round and write it. All ranks call it; rank 0 returns the round, others None.

        Args:
            facts: of this round; its rewards are not known yet.
            prompts: of the round.
            unscored: the answers, if they are on disk already. Then they are only scored.
            begun: answers to the first prompts.

        Raises:
            UserError: rewards are missing, see `score`, or the round cannot be written.
            Stopped: a signal has asked to stop. The answers so far are written.
        """
        rollouts = unscored
        if rollouts is None:
            with kept_if_stopped(facts, prompts, self.output_dir, self.ranks):
                answers = self.sampler.sample(prompts, facts.step, begun)
            rollouts = Round(facts, prompts, answers)
            if self.ranks.is_main and self.pool is not None:
                write_unscored(self.output_dir, rollouts)
        else:
            log.info(f"round {facts.step}: its answers are on disk, and are only scored")
        whole = rollouts

        def finish(look: Callable[[], None]) -> bool:
            nonlocal whole
            whole = score(whole, self.pool, self.is_training, look)
            write_round(self.output_dir, whole)
            return True

        on_rank0(self.ranks, finish)
        return whole if self.ranks.is_main else None


@contextmanager
def kept_if_stopped(
    facts: RoundFacts, prompts: list[Prompt], output_dir: Path, ranks: Ranks
) -> Iterator[None]:
    """Write the answers that a signal has interrupted in the block."""
    try:
        yield
    except SamplingStopped as stopped:
        if ranks.is_main and stopped.answers:
            known = len(stopped.answers)
            write_begun(output_dir, Round(facts, prompts[:known], stopped.answers))
            log.info(f"round {facts.step}: the answers to {plural(known, 'prompt')} are kept")
        raise


def score(
    rollouts: Round,
    pool: RewardPool | None,
    is_training: bool = False,
    look: Callable[[], None] = lambda: None,
) -> Round:
    """Return a round with the rewards of its answers. `is_training`: see `RoundMaker`. `look`: see
    `RewardPool.score`.

    Raises:
        UserError: no answer has a reward, or, for training, no prompt has two of them.
    """
    if pool is None:
        return rollouts
    calls = []
    for prompt, answers in zip(rollouts.prompts, rollouts.answers, strict=True):
        calls += [(prompt.text, answer.text, prompt.sample) for answer in answers]
    scored = pool.score(calls, look)
    count = rollouts.facts.num_generations
    is_complete = not any(one.failures for one in scored)
    log_line = log.debug if is_training and is_complete else log.info
    log_line(pool.describe(scored, count))
    remaining = iter(scored)
    groups = [
        [_with_reward(answer, next(remaining)) for answer in group] for group in rollouts.answers
    ]
    facts = replace(rollouts.facts, rewards=pool.rewards(scored))
    whole = Round(facts, rollouts.prompts, groups)
    if all(one.total is None for one in scored):
        missing = f"no answer of round {facts.step} has a reward"
    elif is_training and not whole.groups():
        missing = f"no prompt of round {facts.step} has two answers with a reward to compare"
    else:
        return whole
    flags = "--resume auto --resume_allow_changes reward" if is_training else "--score_again"
    raise UserError(
        f"--reward: {missing}; the lines above say why.\n"
        f"Its answers are kept. Correct the function; the same command with {flags} only scores them."
    )


def _with_reward(answer: Answer, scored: Scored) -> Answer:
    return replace(answer, rewards=scored.values, total=scored.total)


def sampling_facts(sampling: Sampling, prompts_per_step: int) -> dict[str, Any]:
    """Return what round.json says about the sampling. The seed and the number of answers have fields
    of their own there."""
    settings = {**vars(sampling), "prompts_per_step": prompts_per_step}
    return {name: settings[name] for name in settings if name not in ("seed", "num_generations")}


def describe(rollouts: Round) -> str:
    """Return the numbers of a round, for the log."""
    answers = [answer for group in rollouts.answers for answer in group]
    truncated = sum(not answer.has_ended for answer in answers)
    text = f"{plural(len(answers), 'answer')}, {rollouts.tokens:,} tokens"
    if truncated:
        text += f", {truncated:,} truncated at --max_completion_length"
    skipped = len(rollouts.prompts) - len(rollouts.groups())
    if skipped and rollouts.facts.rewards and rollouts.facts.num_generations > 1:
        text += f", {plural(skipped, 'prompt')} with fewer than two rewards"
    return text
