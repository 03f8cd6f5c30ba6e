"""Settings of --objective grpo; TRL's names."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from llama_ft.config.value_types import STRICT, Count, CountOrZero
from llama_ft.extensions.rollouts.hand_over.flags import PolicyServerFlags
from llama_ft.extensions.rollouts.rewards.flags import MOST_GENERATIONS, RewardFlags


@dataclass(config=STRICT, kw_only=True)
class GrpoConfig(RewardFlags, PolicyServerFlags):
    """Reinforcement learning from the model's own answers."""

    num_generations: Annotated[int, Field(ge=2, le=MOST_GENERATIONS)] = 8
    """grpo: answers per prompt, which are compared with each other."""

    num_generations_eval: Annotated[int, Field(ge=1, le=MOST_GENERATIONS)] = 1
    """grpo: answers per held-out prompt, for the reward of an evaluation."""

    prompts_per_step: Count = 8
    """grpo: prompts per optimizer step, all ranks together."""

    num_iterations: Count = 1
    """grpo: optimizer steps on the same answers, one after another."""

    max_completion_length: Count = 256
    """grpo: maximum tokens of an answer."""

    temperature: Annotated[float, Field(gt=0, le=100)] = 1.0
    """grpo: sampling temperature. The loss is of the same distribution."""

    max_generated_tokens: CountOrZero = 0
    """grpo: end the run, with its final model, after the step in which the answers of all steps reach
    this many tokens; 0: no limit."""

    generate_batch_size: Count = 32
    """grpo: answers generated at once, per rank."""

    epsilon: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """grpo: with num_iterations above 1: ratios of probabilities are clipped at 1 - epsilon."""

    epsilon_high: Annotated[float, Field(gt=0)] | None = None
    """grpo: they are clipped at 1 + epsilon_high; if not given, at 1 + epsilon. DAPO: 0.28."""

    importance_sampling_level: Literal["token", "sequence"] = "token"
    """grpo: ratios of tokens, or of whole answers (GSPO)."""

    kl_beta: Annotated[float, Field(ge=0)] = 0.0
    """grpo: weight of the KL divergence from the model with its adapter off (TRL's beta)."""

    scale_rewards: Literal["group", "batch", "none"] = "group"
    """grpo: a reward minus the mean of its group is divided by the standard deviation of the group,
    of all answers of the step, or not (Dr. GRPO)."""

    equal_groups: Literal["keep", "drop"] = "keep"
    """grpo: prompts whose answers have equal rewards teach nothing. keep: their answers count in the
    mean of the loss, as in TRL. drop: they do not."""

    mask_truncated_completions: bool = False
    """grpo: answers that were truncated at max_completion_length are not in the loss."""

    importance_weights: Literal[
        "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = "sequence_mask"
    """grpo: the probability of a token, or of an answer, in training over that in sampling is a
    weight of its loss. Weights above importance_clip_max become that, or 0 (mask)."""

    importance_clip_max: Annotated[float, Field(gt=1)] = 3.0
    """grpo: largest such weight."""
