"""Offline distillation: learn from the probabilities of a teacher's most likely tokens.

The teacher runs once over the samples, before the student is built, and its k most likely tokens
for each target are stored (training/objectives/teacher.py). Training holds no byte of the teacher:

    loss = (1 - w) cross-entropy + w KL(teacher || student)          w: distill_weight

    KL = sum_k p (log p - log q)  +  P (log P - log Q)               P, Q: probability of all other tokens

p and q are the probabilities of teacher and student at distill_temperature. With k = vocabulary it
is the full divergence, as in TRL's GKDTrainer with lmbda 0 and beta 0. Otherwise it is a lower
bound, because all other tokens are one bucket.

distill_divergence reverse is KL(student || teacher), with p and q, P and Q exchanged, as in TRL with
beta 1. It is for answers of the student itself: a directory of rollouts as the dataset.

Source: G. Hinton and others, Distilling the knowledge in a neural network, 2015, without its factor
of the squared temperature.
"""

from typing import Any, cast

import torch

from llama_ft.config import Config
from llama_ft.data import IGNORED, Batch, Encoder, one_example
from llama_ft.data.read.formats import Sample, SampleFormat
from llama_ft.data.tokenize.encoder import Example
from llama_ft.models import BuiltModel
from llama_ft.models.computing.chunked_loss import cross_entropy
from llama_ft.runtime import Ranks, sent
from llama_ft.training.objectives.base import (
    LossSum,
    Objective,
    shifted_labels,
    target_losses,
    with_token_sums,
)
from llama_ft.training.objectives.teacher import AnyTeacher, TeacherPass
from llama_ft.training.objectives.teacher_file import TeacherFile

# Of a teacher that masks tokens, whose log-probability is -inf: the reverse divergence would be
# infinite.
LEAST_LOG_PROBABILITY = -100.0
LEAST_REST = 2.0**-24  # of all other tokens: float32 has no smaller difference of 1 and their sum


def top_k_divergence(
    logits: torch.Tensor, token_ids: torch.Tensor, log_p: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return the KL divergence of the student from the teacher, float32 [targets]. It is
    differentiable once, and keeps one fp32 tensor of the size of the logits.

    Args:
        logits: the student's, [targets, vocab].
        token_ids: the teacher's most likely tokens, all different, int64 [targets, k].
        log_p: their log-probabilities at the temperature, float32 [targets, k].
        temperature: divides the logits.
    """
    return cast(torch.Tensor, TopKDivergence.apply(logits, token_ids, log_p, temperature))


class TopKDivergence(torch.autograd.Function):
    """See `top_k_divergence`. With M = sum_k p + P, which is 1 but for rounding, the gradient by
    the scaled logits is M q - p for the k tokens, and (M - P / Q) q for all others."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        token_ids: torch.Tensor,
        log_p: torch.Tensor,
        temperature: float,
    ) -> torch.Tensor:
        # One copy of the logits becomes the probabilities in place: it may take hundreds of MB.
        scaled = logits.to(torch.float32, copy=True).div_(temperature)
        top = scaled.gather(1, token_ids)
        largest = scaled.amax(-1, keepdim=True)
        probabilities = scaled.sub_(largest).exp_()  # [targets, vocab]; not normalized yet
        total = probabilities.sum(-1, keepdim=True)
        log_q = top - (largest + total.log())
        p = log_p.exp()
        # a teacher may mask tokens: their log-probability is -inf
        terms = torch.where(p > 0, p * (log_p - log_q), 0.0)
        divergence = terms.sum(-1)
        probabilities.div_(total)
        mass = p.sum(-1, keepdim=True)
        others = mass
        if token_ids.shape[1] < logits.shape[1]:
            # The sum of the others: 1 - sum_k q would lose all digits of a small one.
            probabilities.scatter_(1, token_ids, 0.0)
            smallest = torch.finfo(torch.float32).tiny
            rest_q = probabilities.sum(-1, keepdim=True).clamp(min=smallest)
            rest_p = (1 - mass).clamp(min=0)
            rest = torch.xlogy(rest_p, rest_p) - rest_p * rest_q.log()
            divergence = divergence + rest.squeeze(1)
            mass = mass + rest_p
            others = mass - rest_p / rest_q
        ctx.gradient = None
        if ctx.needs_input_grad[0]:
            gradient = probabilities.mul_(others)
            ctx.gradient = gradient.scatter_(1, token_ids, mass * log_q.exp() - p)
        ctx.dtype = logits.dtype
        ctx.temperature = temperature
        return divergence

    @staticmethod
    def backward(ctx: Any, factors: torch.Tensor) -> Any:
        gradient = ctx.gradient
        ctx.gradient = None
        gradient.mul_(factors.unsqueeze(1) / ctx.temperature)
        return gradient.to(ctx.dtype), None, None, None


def reverse_divergence(
    logits: torch.Tensor, token_ids: torch.Tensor, log_p: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return the KL divergence of the teacher from the student, float32 [targets]. For the rest see
    `top_k_divergence`."""
    return cast(torch.Tensor, ReverseDivergence.apply(logits, token_ids, log_p, temperature))


class ReverseDivergence(torch.autograd.Function):
    """See `reverse_divergence`. The gradient by the scaled logit of a token is q (r - D): q is the
    student's probability of the token, D the divergence, and r = log q - log p of the token's
    bucket, which is the token itself or all others."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        token_ids: torch.Tensor,
        log_p: torch.Tensor,
        temperature: float,
    ) -> torch.Tensor:
        scaled = logits.to(torch.float32, copy=True).div_(temperature)
        log_q = scaled.log_softmax(-1)  # [targets, vocab]
        del scaled
        top_q = log_q.gather(1, token_ids)
        ratios = top_q - log_p.clamp(min=LEAST_LOG_PROBABILITY)
        divergence = (top_q.exp() * ratios).sum(-1, keepdim=True)
        q = log_q.exp_()
        rest_ratio = torch.zeros_like(divergence)
        if token_ids.shape[1] < logits.shape[1]:
            q.scatter_(1, token_ids, 0.0)
            rest_q = q.sum(-1, keepdim=True)
            rest_p = (1 - log_p.exp().sum(-1, keepdim=True)).clamp(min=LEAST_REST)
            rest_ratio = rest_q.clamp(min=torch.finfo(torch.float32).tiny).log() - rest_p.log()
            divergence = divergence + rest_q * rest_ratio
        ctx.gradient = None
        if ctx.needs_input_grad[0]:
            gradient = q.mul_(rest_ratio - divergence)
            top_gradient = top_q.exp() * (ratios - divergence)
            ctx.gradient = gradient.scatter_(1, token_ids, top_gradient)
        ctx.dtype = logits.dtype
        ctx.temperature = temperature
        return divergence.squeeze(1)

    @staticmethod
    def backward(ctx: Any, factors: torch.Tensor) -> Any:
        return TopKDivergence.backward(ctx, factors)


DIVERGENCES = {"forward": top_k_divergence, "reverse": reverse_divergence}


class Distillation(Objective):
    """Next-token prediction mixed with the divergence from a teacher's stored probabilities. The
    validation loss is the plain cross-entropy. See `Objective`.

    Attributes:
        teacher: the stored probabilities; None until `TeacherPass` has them.
    """

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        settings = self.config.preference
        self.teacher: TeacherFile | AnyTeacher | None = None
        self._weight = settings.distill_weight
        self._temperature = settings.distill_temperature
        self._divergence = DIVERGENCES[settings.distill_divergence]

    @staticmethod
    def examples(sample: Sample, sample_format: SampleFormat, encoder: Encoder) -> list[Example]:
        """See `Objective`. A sample is one example."""
        return one_example(sample, sample_format, encoder)

    def first_pass(self, config: Config) -> TeacherPass:
        """See `Objective`."""
        return TeacherPass(config, self)

    def loss(self, built: BuiltModel, batch: Batch, ranks: Ranks) -> LossSum:
        """See `Objective`. It counts loss tokens."""
        if not built.model.training:
            computed = target_losses(built, batch, ranks.device)
            return with_token_sums(LossSum(computed.losses, computed.targets), computed, built)
        labels = shifted_labels(batch)
        host_targets = labels[labels != IGNORED]
        assert self.teacher is not None  # filled by `first_pass`
        host_ids, host_log_p = self.teacher.of(batch)
        targets = sent(host_targets, ranks.device)
        token_ids = sent(host_ids, ranks.device)
        log_p = sent(host_log_p, ranks.device)

        def mixed_loss(logits: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            """Return the losses of the targets with these numbers in the micro-batch."""
            divergence = self._divergence(
                logits, token_ids[numbers], log_p[numbers], self._temperature
            )
            if self._weight == 1:
                return divergence
            plain = cross_entropy(logits, targets[numbers])
            return self._weight * divergence + (1 - self._weight) * plain

        computed = target_losses(built, batch, ranks.device, mixed_loss, is_numbered=True)
        return with_token_sums(LossSum(computed.losses, computed.targets), computed, built)
