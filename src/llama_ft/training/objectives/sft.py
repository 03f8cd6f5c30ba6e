"""Supervised fine-tuning: next-token prediction for the tokens in the loss."""

from functools import partial

import torch
from torch.nn import functional as F

from llama_ft.config import Config
from llama_ft.data import Batch, Encoder, one_example
from llama_ft.data.read.formats import Sample, SampleFormat
from llama_ft.data.tokenize.encoder import Example
from llama_ft.models import BuiltModel
from llama_ft.models.computing.chunked_loss import LossFunction, cross_entropy
from llama_ft.runtime import Ranks
from llama_ft.training.objectives.base import LossSum, Objective, target_losses, with_token_sums


def training_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the training loss of each token, float32 [targets]. To train with another loss, change
    this function.

    It gets a few hundred targets at a time. Any function that autograd can differentiate works. The
    validation loss remains the plain cross-entropy, so that it can be compared between runs.

    Args:
        logits: [targets, vocab], in the model's compute dtype.
        targets: int64 [targets], the tokens to predict.
    """
    return cross_entropy(logits, targets)


def smoothed_loss(logits: torch.Tensor, targets: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Return the cross-entropy with label_smoothing_factor. It takes the place of
    `training_loss`."""
    return F.cross_entropy(logits.float(), targets, reduction="none", label_smoothing=smoothing)


def dft_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss of Dynamic Fine-Tuning: the cross-entropy times the probability of the token,
    which has no gradient. It takes the place of `training_loss`. Source:
    https://arxiv.org/abs/2508.05629"""
    losses = cross_entropy(logits, targets)
    probabilities = losses.detach().neg().exp()
    return losses * probabilities


class SupervisedFineTuning(Objective):
    """Next-token prediction for the tokens in the loss, with the routers' auxiliary loss if it has
    a coefficient. See `Objective`."""

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        settings = self.config.train
        self._training_loss: LossFunction = training_loss
        if settings.loss_type == "dft":
            self._training_loss = dft_loss
        elif settings.label_smoothing_factor:
            smoothing = settings.label_smoothing_factor
            self._training_loss = partial(smoothed_loss, smoothing=smoothing)

    @staticmethod
    def examples(sample: Sample, sample_format: SampleFormat, encoder: Encoder) -> list[Example]:
        """See `Objective`. A sample is one example."""
        return one_example(sample, sample_format, encoder)

    def loss(self, built: BuiltModel, batch: Batch, ranks: Ranks) -> LossSum:
        """See `Objective`. It counts loss tokens."""
        loss_fn = self._training_loss if built.model.training else cross_entropy
        computed = target_losses(built, batch, ranks.device, loss_fn)
        return with_token_sums(LossSum(computed.losses, computed.targets), computed, built)
