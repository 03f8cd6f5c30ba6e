"""Rewards of answers to held-out prompts: what --validation measures with --objective grpo."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from llama_ft.config import Config
from llama_ft.config.rules import as_fraction
from llama_ft.errors import UserError
from llama_ft.extensions.rollouts.prompts import PromptTokens, read_dataset
from llama_ft.extensions.rollouts.rewards.pool import RewardPool, Scored
from llama_ft.extensions.rollouts.rounds import Answer, Prompt
from llama_ft.run import RunInputs
from llama_ft.training.evaluation import LossSums

STEP = 0  # for the seeds of the answers: rounds are counted from 1


def held_out_prompts(
    inputs: RunInputs, tokens: PromptTokens, trained: Mapping[str, Prompt]
) -> dict[str, list[Prompt]]:
    """Return the prompts of each validation set by its name.

    Args:
        inputs: the tokenized sets, which say which samples are theirs.
        tokens: makes the tokens of prompts.
        trained: the prompts of the dataset by place, also those that a fraction keeps out.
    """
    config = inputs.config
    sets = dict[str, list[Prompt]]()
    for name, samples in inputs.dataset.validations.items():
        by_place = trained
        if as_fraction(config.data.validation) is None:
            data = config.data.validation
            own = data[name] if isinstance(data, dict) else data
            by_place = read_dataset(config.data, tokens, own, "validation").by_place
        places = samples["source"]
        prompts = [by_place[place] for place in places if place in by_place]
        sets[name] = prompts[: _most(config) or None]
    return sets


def _most(config: Config) -> int:
    """Return how many prompts --max_eval_step allows; 0: all."""
    return config.train.max_eval_step * config.train.val_batch_size


def reward_sums(
    pool: RewardPool,
    prompts: Sequence[Prompt],
    answers: Sequence[Sequence[Answer]],
    look: Callable[[], None],
) -> LossSums:
    """Score answers, and return the sums of their rewards. The loss is minus the reward. `look`: see
    `RewardPool.score`.

    Raises:
        UserError: no answer has a reward.
    """
    calls = []
    for prompt, group in zip(prompts, answers, strict=True):
        calls += [(prompt.text, answer.text, prompt.sample) for answer in group]
    scored = pool.score(calls, look)
    with_reward = [one for one in scored if one.total is not None]
    if not with_reward:
        raise UserError(
            f"--reward: no answer to a held-out prompt has a reward.\n{pool.describe(scored, 1)}"
        )
    return LossSums(_sums(with_reward), len(with_reward))


def _sums(with_reward: Sequence[Scored]) -> dict[str, float]:
    sums = Counter[str]()
    for one in with_reward:
        total = one.total or 0.0
        sums["loss"] -= total  # type: ignore[assignment]
        sums["reward"] += total  # type: ignore[assignment]
        for name, value in one.values.items():
            sums[f"reward/{name}"] += value or 0.0  # type: ignore[assignment]
    return dict(sums)
