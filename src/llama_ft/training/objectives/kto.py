"""Learning from completions with a label, desirable or undesirable: KTO.

r is the log-probability of a completion minus that of the reference. z is an estimate of the KL
divergence:

    desirable      desirable_weight (1 - sigmoid(beta (r - z)))
    undesirable    undesirable_weight (1 - sigmoid(beta (z - r)))

z is the mean of r over all ranks for the same prompts with completions of other samples. It is at
least 0 and has no gradient. `data.tokenize.mismatch` chooses the other completion when the data are
prepared.

Source: https://arxiv.org/abs/2402.01306; names and logged numbers as in TRL's KTOTrainer, which
takes the completion of the sample before in the micro-batch.
"""

import torch

from llama_ft.config import Config
from llama_ft.data import Batch, unpaired_examples
from llama_ft.models import BuiltModel
from llama_ft.runtime import Ranks, sent
from llama_ft.training.objectives.base import (
    LossSum,
    Objective,
    example_log_probabilities,
    target_losses,
    with_token_sums,
)
from llama_ft.training.objectives.first_pass import FirstPass
from llama_ft.training.objectives.reference import (
    build_reference,
    reference_pass,
    score_examples,
)


class Kto(Objective):
    """Makes desirable completions likelier and undesirable ones less likely than the reference
    does. See `Objective`."""

    examples_per_sample = 2
    counts_tokens = False
    examples = staticmethod(unpaired_examples)

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        self.reference = build_reference(self.config)

    def first_pass(self, config: Config) -> FirstPass | None:
        """See `Objective`."""
        return reference_pass(config, self.reference)

    def loss(self, built: BuiltModel, batch: Batch, ranks: Ranks) -> LossSum:
        """See `Objective`; counts samples. Examples of even number are samples, each followed by
        its prompt with another completion."""
        settings = self.config.preference
        count = len(batch.locations) // 2  # 0 on a rank without samples, whose batch is a filler
        own = every_second(batch, 0)
        others = every_second(batch, 1)
        # To save memory: one half after the other, before the forward pass that keeps activations.
        reference = self.reference.log_probabilities(built, own, ranks)[:count]
        of_others = self.reference.log_probabilities(built, others, ranks)[:count]
        kl = score_examples(built, others, ranks)[:count] - of_others  # [samples]
        # Ranks may have different numbers of samples, or none, so both sums are divided by the
        # number of ranks first, and then by each other.
        sums = torch.stack([kl.sum(), kl.new_full((), count)])
        sums = ranks.mean_over_ranks(sums)
        kl_sum, samples = sums.unbind()
        least = 1 / ranks.data.size  # at least one sample over all ranks
        divergence = (kl_sum / samples.clamp(min=least)).clamp(min=0)
        computed = target_losses(built, own, ranks.device, per_token=True)
        scores = example_log_probabilities(computed.losses, own)[:count]  # [samples]
        ratios = scores - reference
        chosen = sent(torch.tensor(own.desirable, dtype=torch.float32), ranks.device)  # 1 or 0
        weights = settings.desirable_weight * chosen + settings.undesirable_weight * (1 - chosen)
        signs = 2 * chosen - 1
        sample_losses = torch.sigmoid(settings.beta * (divergence - ratios) * signs)
        loss = (weights * sample_losses).sum()
        rewards = settings.beta * ratios.detach()
        scores = scores.detach()
        logged = {"kl": divergence * count}
        for name, which in {"chosen": chosen, "rejected": 1 - chosen}.items():
            numbers = {"rewards": rewards * which, "logps": scores * which, "count": which}
            logged |= {f"{number}/{name}": values.sum() for number, values in numbers.items()}
        return with_token_sums(LossSum(loss, count, logged), computed, built)


def every_second(batch: Batch, first: int) -> Batch:
    """Return every second example of a micro-batch, beginning with `first`; all of them if the rank
    has no samples."""
    if not batch.locations:
        return batch
    lengths = batch.example_lengths[first::2]

    def chosen(values: torch.Tensor) -> torch.Tensor:
        if batch.is_packed:
            parts = values.split(batch.example_lengths, dim=1)
            return torch.cat(parts[first::2], dim=1)
        return values[first::2, : max(lengths)]

    return Batch(
        input_ids=chosen(batch.input_ids),
        labels=chosen(batch.labels),
        example_lengths=lengths,
        is_packed=batch.is_packed,
        locations=batch.locations[first::2],
        desirable=batch.desirable[first::2],
    )
