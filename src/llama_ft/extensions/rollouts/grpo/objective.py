"""Reinforcement learning from rounds of the model's own answers: GRPO and its relatives.

Each optimizer step has a round: answers that the model with its weights before the step has sampled,
and their rewards. With --num_iterations several steps, one after another, have the same round.
training_rounds.py samples a round, or finds it on disk; batches.py makes micro-batches of it;
losses.py has the losses.
"""

from typing import TYPE_CHECKING

import torch

from llama_ft.config import Config
from llama_ft.data import Batch, Encoder, StepBatches, one_example
from llama_ft.data.read.formats import Sample, SampleFormat
from llama_ft.data.tokenize.encoder import Example
from llama_ft.extensions.rollouts.grpo.batches import (
    AnswerNumbers,
    AnswerSelection,
    RoundBatch,
    make_step,
    select,
)
from llama_ft.extensions.rollouts.grpo.losses import (
    COUNTS_TOKENS,
    LossType,
    PolicyLoss,
    Tokens,
    policy_losses,
    ratios,
    reference_divergence,
    sampler_weights,
    token_weights,
)
from llama_ft.extensions.rollouts.grpo.mismatch import largest_weight, mismatch_sums
from llama_ft.extensions.rollouts.grpo.settings import GrpoConfig
from llama_ft.models import BuiltModel
from llama_ft.models.adapters.lora import adapter_off
from llama_ft.models.computing.chunked_loss import cross_entropy
from llama_ft.runtime import Ranks, log, sent
from llama_ft.training import Objective
from llama_ft.training.objectives.base import (
    LossSum,
    target_examples,
    target_losses,
    with_token_sums,
)

if TYPE_CHECKING:
    from llama_ft.extensions.rollouts.grpo.training_rounds import TrainingRounds
    from llama_ft.training.evaluation import LossSums


class Grpo(Objective):
    """Makes answers with a high reward likelier, compared with other answers to the same prompt. See
    `Objective`.

    Attributes:
        rounds: has the round of each step; None in a plan.
    """

    measures_reward = True

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        settings = self.config.section(GrpoConfig)
        self._settings = settings
        self._loss_type: LossType = loss_type_of(self.config)
        self._policy_loss = PolicyLoss(
            loss_type=self._loss_type,
            importance_sampling_level=settings.importance_sampling_level,
            epsilon=settings.epsilon,
            epsilon_high=settings.epsilon_high or settings.epsilon,
            beta=settings.kl_beta,
        )
        self.counts_tokens = COUNTS_TOKENS[self._loss_type]
        self.rounds: TrainingRounds | None = None
        self._has_warned = False

    @staticmethod
    def examples(sample: Sample, sample_format: SampleFormat, encoder: Encoder) -> list[Example]:
        """See `Objective`. The example is the prompt, for the order of the prompts; `batches` makes
        what is trained on."""
        return one_example(sample, sample_format, encoder)

    def batches(self, planned: StepBatches, built: BuiltModel, ranks: Ranks) -> StepBatches:
        """See `Objective`. The planned batches say which prompts the step has."""
        if self.rounds is None:
            return planned
        rollouts = self.rounds.round_of(planned, built)
        settings = self._settings
        how = AnswerSelection(
            scale=settings.scale_rewards,
            drops_equal=settings.equal_groups == "drop",
            masks_truncated=settings.mask_truncated_completions,
        )
        old = self.rounds.old.by_location
        chosen = select(rollouts, how)
        if chosen.equal_groups == len(rollouts.groups()) and not self._has_warned:
            log.warning(
                f"step {planned.step}: all answers to a prompt have equal rewards, so the step teaches nothing. "
                "Fine-tune on good answers first, or use more --num_generations."
            )
            self._has_warned = True
        return make_step(chosen, planned, self.rounds.layout, rollouts, old)

    def validation(self, name: str, built: BuiltModel) -> "LossSums | None":
        """See `Objective`. The rewards of answers to held-out prompts."""
        return None if self.rounds is None else self.rounds.validate(name, built)

    def loss(self, built: BuiltModel, batch: Batch, ranks: Ranks) -> LossSum:
        """See `Objective`. It counts loss tokens or answers, see `token_weights`."""
        host = numbers_of(batch)
        tokens = Tokens(*(sent(values, ranks.device) for values in host.tokens))
        advantage = sent(host.advantages, ranks.device)
        sampler = sent(host.sampler_logprobs, ranks.device)
        stored = host.old_logprobs
        reference = self._reference(built, batch, ranks) if stored is None else None
        computed = target_losses(built, batch, ranks.device, self._cross_entropy, per_token=True)
        new = -computed.losses
        settings = self._policy_loss
        if stored is not None:
            old = sent(stored[0], ranks.device)
            reference = sent(stored[1], ranks.device) if settings.beta else None
        else:  # no step on the round was taken yet
            old = new.detach()
            if self.rounds is not None:
                known = torch.stack([old] if reference is None else [old, reference])
                self.rounds.old.add(batch.locations, host.tokens.lengths, known)
        ratio = ratios(new, old, tokens, settings)
        losses, clipped = policy_losses(ratio, advantage, tokens, settings)
        weights = sampler_weights(
            old,
            sampler,
            tokens,
            self._settings.importance_weights,
            self._settings.importance_clip_max,
        )
        losses = losses * weights.weights
        logged = {"policy/clipped": clipped.float().sum(), **mismatch_sums(old, sampler, weights)}
        if reference is not None:
            divergence = reference_divergence(new, reference, ratio)
            losses = losses + settings.beta * divergence
            logged["policy/reference_kl"] = divergence.detach().sum()
        logged |= dict.fromkeys(("count/policy", "count/sampler"), new.new_full((), len(new)))
        longest = self._settings.max_completion_length
        factors = token_weights(tokens.lengths, self._loss_type, longest)[tokens.answers]
        count = computed.targets if self.counts_tokens else len(host.tokens.lengths)
        result = LossSum((losses * factors).sum(), count, logged, largest_weight(weights))
        return with_token_sums(result, computed, built)

    @torch.no_grad()
    def _reference(self, built: BuiltModel, batch: Batch, ranks: Ranks) -> torch.Tensor | None:
        """Return the log-probabilities of the tokens with the adapter off, float32 [tokens]; None if
        the loss needs none."""
        if not self._policy_loss.beta:
            return None
        model = built.model
        is_training = model.training
        model.eval()  # without dropout; before the forward pass that keeps activations
        with adapter_off(model):
            computed = target_losses(
                built, batch, ranks.device, self._cross_entropy, per_token=True
            )
        model.train(is_training)
        return -computed.losses

    def _cross_entropy(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return minus the log-probabilities in the distribution from which answers are sampled."""
        return cross_entropy(logits.float() / self._settings.temperature, targets)


def loss_type_of(config: Config) -> LossType:
    """Return the loss: the first one of the objective, if loss_type is another objective's default."""
    known = config.preference.entry.loss_types
    named = config.train.loss_type
    return named if named in known else known[0]  # type: ignore[return-value]


def numbers_of(batch: Batch) -> AnswerNumbers:
    """Return the numbers of a micro-batch; any, if it is one of a plan."""
    if isinstance(batch, RoundBatch) and batch.numbers is not None:
        return batch.numbers
    answers = target_examples(batch)
    lengths = torch.bincount(answers, minlength=len(batch.example_lengths))
    return AnswerNumbers(
        Tokens(answers, lengths), torch.zeros(len(lengths)), torch.zeros(len(answers))
    )
