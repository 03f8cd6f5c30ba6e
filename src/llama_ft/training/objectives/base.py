"""The objective: how a sample becomes examples, and a micro-batch becomes a loss. One plain class
per method.

`examples` turns a sample into tokens and loss masks; the examples of one sample stay together in a
micro-batch. `loss` turns a micro-batch into a `LossSum`. The training step, evaluation and the
planner use nothing else of a method.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from llama_ft.config import Config
from llama_ft.data import IGNORED, Batch, Encoder, StepBatches
from llama_ft.data.read.formats import Sample, SampleFormat
from llama_ft.data.tokenize.encoder import Example
from llama_ft.models import BuiltModel, packed_arguments
from llama_ft.models.architecture.routers import router_arguments, router_loss
from llama_ft.models.base.replaced_functions import marked
from llama_ft.models.computing.chunked_loss import (
    LossFunction,
    TokenLoss,
    cross_entropy,
    token_loss,
)
from llama_ft.models.packing.shared_sequences import OwnTokens
from llama_ft.runtime import Ranks, current_target, sent
from llama_ft.training.objectives.first_pass import FirstPass

if TYPE_CHECKING:
    from llama_ft.training.evaluation import LossSums

PAD_MULTIPLE = {"cuda": 1, "cpu": 64}  # tokens of a packed micro-batch are a multiple of these


@dataclass(frozen=True)
class LossSum:
    """The loss of a micro-batch of one rank, as a sum. Sums over all micro-batches and ranks are
    divided once by the count of the whole global batch, so that the loss does not depend on how
    samples are padded or packed."""

    # float32 scalar with gradient; 0 with gradients of 0 for a micro-batch without samples
    loss: torch.Tensor
    count: int  # how many losses it is the sum of: loss tokens, or pairs
    # Further sums by name, scalars without gradient; `logged_means` of them are logged.
    logged: dict[str, torch.Tensor] = field(default_factory=dict)
    # Further numbers, at least 0, of which the largest is logged. Every loss has the same names.
    largest: dict[str, torch.Tensor] = field(default_factory=dict)

    def detach(self) -> "LossSum":
        """Return it without gradient."""
        return replace(self, loss=self.loss.detach())


def logged_means(sums: Mapping[str, float], count: float) -> dict[str, float]:
    """Return the means of what `LossSum.logged` sums: of `rewards/chosen` over the sum
    `count/chosen` or `count/rewards` if there is one, else over `count`. A mean over nothing is left
    out, and so is the margin between such means."""
    counts = dict[str, float]()
    for name, value in sums.items():
        if name.startswith("count/"):
            counts[name.removeprefix("count/")] = value
    means = dict[str, float]()
    for name, value in sums.items():
        group, _, suffix = name.rpartition("/")
        divisor = counts.get(suffix, counts.get(group, count))
        if divisor and not name.startswith("count/"):
            means[name] = value / divisor
    if "chosen" in counts and {"rewards/chosen", "rewards/rejected"} <= means.keys():
        means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
    return means


class Objective(ABC):
    """What is trained, for tokenization, the training step, evaluation and the planner.

    Args:
        config: the settings of the run; None: all defaults.

    Attributes:
        examples_per_sample: number of examples per sample.
        counts_tokens: there is a loss per token; otherwise one per sample.
        measures_reward: an evaluation has rewards; its loss is minus their mean.
    """

    examples_per_sample = 1
    counts_tokens = True
    measures_reward = False

    def __init__(self, config: Config | None = None) -> None:
        self.config = Config() if config is None else config

    @staticmethod
    @abstractmethod
    def examples(sample: Sample, sample_format: SampleFormat, encoder: Encoder) -> list[Example]:
        """Turn a sample into tokens and loss masks of any length. Their number is fixed, such as
        the chosen and the rejected response of a pair. They are neighbors in one micro-batch: rows
        of a padded `batch.input_ids`, or lengths in `batch.example_lengths`. `encoder.tokenize` makes one
        example from a sample of any format."""

    def prepare_model(  # noqa: B027  # most need nothing
        self,
        model_config: PretrainedConfig,
        tokenizer: PreTrainedTokenizerBase,
        vocabulary: int | None,
    ) -> None:
        """Change the config of the model, before it is built, and the tokenizer. `vocabulary`: rows
        of its embeddings; None: unknown."""

    def first_pass(self, config: Config) -> FirstPass | None:
        """Return the pass of a model over all samples that the run needs before training, or None.
        `config`: the settings with kernels and activation checkpointing as they were chosen."""
        return None

    def batches(self, planned: StepBatches, built: BuiltModel, ranks: Ranks) -> StepBatches:
        """Return what an optimizer step trains on: as planned, unless the objective makes its own
        batches with the weights before the step, such as answers of the model. All ranks call it
        together. The losses are divided by the counts of what is returned, over all ranks."""
        return planned

    def validation(self, name: str, built: BuiltModel) -> "LossSums | None":
        """Return the sums over a validation set, for an objective that measures something else than
        `loss`. All ranks call it together. `name`: of the set, see `TokenizedData.validations`."""
        return None

    @abstractmethod
    def loss(self, built: BuiltModel, batch: Batch, ranks: Ranks) -> LossSum:
        """Compute the loss of a micro-batch by `built.model`. All ranks call it together and equally often, so it
        may exchange numbers (`ranks.mean_over_ranks`)."""


@dataclass(frozen=True)
class TargetLosses:
    """What `target_losses` computes. Ranks that share sequences have all losses per token, but only
    the sums of their own targets."""

    losses: torch.Tensor  # float32 [all targets], or the sum of this rank's own
    targets: int  # that this rank has computed
    all_targets: int  # of the micro-batch
    # the routers' auxiliary loss without its coefficient, as a sum over targets; 0.0 if there is none
    router_loss: torch.Tensor | float
    sums: dict[str, torch.Tensor]  # of `token_numbers`, over targets


def token_numbers(logits: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return numbers of each token by name, float32 [targets]. Their means are logged in training,
    as `train/<name>`, with every objective that has logits. To log another number, add it here, such
    as `{"token_accuracy": (logits.argmax(-1) == targets).float()}`.

    Args:
        logits: [targets, vocab], in the model's compute dtype; a few hundred targets at a time.
        targets: int64 [targets], the tokens to predict.
    """
    return {}


def with_token_sums(result: LossSum, computed: TargetLosses, built: BuiltModel) -> LossSum:
    """Add to the loss of a micro-batch the routers' auxiliary loss, and to what is logged the sums
    over its tokens. `result` may count this rank's tokens or the micro-batch's samples."""
    counts_samples = result.count != computed.targets
    balance = computed.router_loss
    if counts_samples:  # from a sum over tokens to one over samples
        balance = balance * (result.count / max(1, computed.all_targets))
        result = counted_once(result, built)
    logged = dict(result.logged)
    for name, value in computed.sums.items():
        _, _, suffix = name.rpartition("/")  # see `logged_means`
        logged |= {name: value, f"count/{suffix}": value.new_full((), computed.targets)}
    return with_router_loss(replace(result, logged=logged), balance, built)


def counted_once(result: LossSum, built: BuiltModel) -> LossSum:
    """Return the loss of whole samples so that ranks that share sequences, which all have it, count
    it once: the first of them. The gradients of the others stay, because each rank's reach its own
    tokens only."""
    sequence = None if built.mixers is None else built.mixers.sequence
    if sequence is None or sequence.rank == 0:
        return result
    logged = {name: torch.zeros_like(value) for name, value in result.logged.items()}
    return replace(result, loss=result.loss - result.loss.detach(), count=0, logged=logged)


def with_router_loss(result: LossSum, balance: torch.Tensor | float, built: BuiltModel) -> LossSum:
    """Add the routers' auxiliary loss, times its coefficient, to the loss of a micro-batch.
    `balance` is its sum over `result.count`, a scalar tensor; a float if the model has no such
    loss."""
    if not isinstance(balance, torch.Tensor):
        return result
    logged = {**result.logged, "router_aux_loss": balance.detach()}
    return LossSum(result.loss + built.router_coefficient * balance, result.count, logged)


def target_losses(
    built: BuiltModel,
    batch: Batch,
    device: torch.device,
    loss_fn: LossFunction = cross_entropy,
    per_token: bool = False,
    is_numbered: bool = False,
) -> TargetLosses:
    """Run the model on a micro-batch. Return the losses of the tokens to predict.

    Args:
        built: causal language model; position t predicts token t + 1. With a chunked loss it makes
            logits of a few hundred positions at a time; otherwise those of all positions with a
            target. Of a shared sequence, each rank computes the targets of its own tokens.
        batch: labels are not shifted; IGNORED positions are not targets.
        device: where the model computes.
        loss_fn: logits [n, vocab] and targets [n] -> losses [n], perhaps as a `TokenLoss`.
        per_token: return float32 [targets], in the order of `target_examples(batch)`, instead of their
            sum. Minus the cross-entropy of a token is its log-probability.
        is_numbered: give `loss_fn` the number of each target in the micro-batch, not its token.
    """
    labels = shifted_labels(batch)
    # On the host: nonzero() on the device would wait for its result, to know its size.
    host_positions = (labels != IGNORED).nonzero().squeeze(1)  # [targets]
    tokens = sent(labels[host_positions], device)
    call = model_call(built, batch, device)
    # labels were shifted before: the target of a part's last token is in the next part
    at = call.own.find(host_positions, device)
    targets = at.numbers if is_numbered else at.own(tokens)
    if built.model.training:
        loss_fn = _with_token_numbers(loss_fn, tokens if is_numbered else None)
    if built.has_chunked_loss:  # then the forward method is ours: models/computing/chunked_loss.py
        losses, router_logits, sums = built.model(
            **call.inputs,
            positions=at.positions,
            targets=targets,
            loss_fn=loss_fn,
            per_token=per_token,
        )
    else:
        output = built.model(**call.inputs)
        predicting = output.logits.flatten(0, 1).index_select(0, at.positions)  # [targets, vocab]
        result = token_loss(loss_fn(predicting, targets))
        losses = result.losses if per_token else result.losses.sum()
        sums = {name: values.detach().sum() for name, values in result.numbers.items()}
        router_logits = getattr(output, "router_logits", None)
    balance = router_loss(built, router_logits, call.mask, len(at))
    if per_token:
        losses = at.all(losses)
    return TargetLosses(losses, len(at), at.count, balance, sums)


def _with_token_numbers(loss_fn: LossFunction, tokens: torch.Tensor | None) -> LossFunction:
    """Return a loss function that also returns `token_numbers`. `tokens`: of all targets, if
    `loss_fn` gets their numbers."""

    def with_numbers(logits: torch.Tensor, targets: torch.Tensor) -> TokenLoss:
        losses, numbers = token_loss(loss_fn(logits, targets))
        with torch.no_grad():
            own = token_numbers(logits, targets if tokens is None else tokens[targets])
        return TokenLoss(losses, {**numbers, **own})

    return with_numbers


@dataclass(frozen=True)
class ModelCall:
    """What a model is called with for a micro-batch on this rank.

    Attributes:
        inputs: its arguments, on the device: tokens, and which examples they belong to.
        own: which tokens of the micro-batch these are. Ranks may share a packed sequence.
        mask: which of them are those of samples, bool [samples, tokens] on the device; None: all.
    """

    inputs: dict[str, Any]
    own: OwnTokens
    mask: torch.Tensor | None


def model_call(built: BuiltModel, batch: Batch, device: torch.device) -> ModelCall:
    """Return what a model is called with for a micro-batch. `device`: where it computes."""
    input_ids = batch.input_ids
    lengths = batch.example_lengths
    own = OwnTokens.of(None, input_ids)
    mask: torch.Tensor | None = None
    has_media = batch.media is not None
    if batch.is_packed:
        input_ids, lengths = _filled_up(built, batch)
        layout = packed_arguments(built, lengths, device, has_media)
        own = OwnTokens.of(layout["packed_samples"].sequence, input_ids)
        mask = own.mask(batch.input_ids.shape[1], device)
    else:
        host_mask = batch.attention_mask.bool()
        is_full = bool(host_mask.all())  # asked on the host, where it does not wait for the device
        mask = marked(sent(host_mask, device), needs_no_mask=is_full)
        layout = {"attention_mask": mask}
    if batch.media is not None:
        layout |= batch.media.arguments(built.model, batch, lengths, device)
    # the model merges media with all tokens of a sequence: see `own_part_of_merged`
    own_ids = input_ids if has_media else own.part(input_ids)
    inputs = {
        "input_ids": sent(own_ids, device),
        "use_cache": False,
        **layout,
        **router_arguments(built),
    }
    return ModelCall(inputs, own, mask)


def with_prepared_media(
    steps: Generator[StepBatches, None, None], built: BuiltModel, device: torch.device
) -> Generator[StepBatches, None, None]:
    """Yield steps after what `model_call` needs of their media was made: in the thread that makes
    batches, while the model computes."""
    with closing(steps):
        for step in steps:
            for batch in step.batches:
                if batch.media is not None:
                    lengths = batch.example_lengths
                    if batch.is_packed:
                        _, lengths = _filled_up(built, batch)
                    batch.media.prepare(built.model, batch, lengths, device)
            yield step


def target_examples(batch: Batch) -> torch.Tensor:
    """Return the index of each target's example in the micro-batch, int64 [targets] on the host."""
    examples = torch.arange(len(batch.example_lengths))
    if batch.is_packed:
        lengths = torch.tensor(batch.example_lengths)
        examples_of_tokens = examples.repeat_interleave(lengths)
    else:
        examples_of_tokens = examples.repeat_interleave(batch.input_ids.shape[1])
    return examples_of_tokens[shifted_labels(batch) != IGNORED]


def example_log_probabilities(
    losses: torch.Tensor, counted: Batch, computed: Batch | None = None
) -> torch.Tensor:
    """Return the log-probability of the targets of each example, float32 [examples]. The order of
    summation is fixed, so that every run has the same result.

    Args:
        losses: float32 [targets], those of `computed`, as `target_losses` returns them with
            `per_token`.
        counted: the micro-batch; its labels tell which tokens are summed.
        computed: the same examples with labels on more tokens; None: `counted`.
    """
    if computed is None:
        computed = counted
    is_computed = shifted_labels(computed) != IGNORED
    is_counted = (shifted_labels(counted) != IGNORED)[is_computed]  # [targets]
    log_probabilities = -losses
    if not bool(is_counted.all()):
        log_probabilities = log_probabilities * sent(is_counted.float(), losses.device)
    sizes = _count_targets(computed).tolist()
    # On a GPU index_add_ would add in any order. Rows with zeros at their end have a fixed one.
    per_example = pad_sequence(list(log_probabilities.split(sizes)), batch_first=True)
    return per_example.sum(1)


def targets_per_example(batch: Batch) -> torch.Tensor:
    """Return the number of targets of each example, int64 [examples] on the host; at least 1, to
    divide sums by it."""
    return _count_targets(batch).clamp(min=1)


def _count_targets(batch: Batch) -> torch.Tensor:
    return torch.bincount(target_examples(batch), minlength=len(batch.example_lengths))


def _filled_up(built: BuiltModel, batch: Batch) -> tuple[torch.Tensor, list[int]]:
    """Return the tokens of a packed micro-batch and the lengths of its examples, with an additional
    example without loss. Lengths of packed sequences vary by a few tokens, and oneDNN compiles and
    keeps kernels for each new shape. (Not with the routers' auxiliary loss, which would count that
    example.)"""
    input_ids = batch.input_ids
    lengths = batch.example_lengths
    sequence = None if built.mixers is None else built.mixers.sequence
    if sequence is not None:
        return _divisible(batch, sequence.size)
    missing = -input_ids.shape[1] % PAD_MULTIPLE[current_target().device]
    # The new example must not have more positions than the longest one.
    is_too_long = missing > max(lengths)
    if missing == 0 or is_too_long or built.router_coefficient:
        return input_ids, lengths
    filled = torch.cat([input_ids, _added_tokens(batch, 0, missing)], dim=1)
    return filled, [*lengths, missing]


def _added_tokens(batch: Batch, start: int, count: int) -> torch.Tensor:
    """Return tokens for an additional example, [1, count]: those from `start` on. With media any text
    will do: tokens of media, which are never in the loss, would lack their tensors."""
    if batch.media is None:
        return batch.input_ids[:, start : start + count]
    text = batch.input_ids[batch.labels != IGNORED]
    if not len(text):  # the filler, which ends with text
        text = batch.input_ids[0]
    return text[-1:].expand(1, count)


def _divisible(batch: Batch, ranks: int) -> tuple[torch.Tensor, list[int]]:
    """Return the tokens and lengths with additional examples, so that all ranks that share the
    sequence have equally many tokens. Each example is a copy of the first tokens of the longest one,
    so that none has more positions than that. See `_filled_up`."""
    input_ids = batch.input_ids
    lengths = batch.example_lengths
    multiple = ranks * PAD_MULTIPLE[current_target().device]
    if input_ids.shape[1] < 2 * multiple:
        multiple = ranks  # otherwise the last ranks would have none but added tokens
    missing = -input_ids.shape[1] % multiple
    longest = max(lengths)
    start = sum(lengths[: lengths.index(longest)])
    tokens = [input_ids]
    added = []
    while missing:
        length = min(missing, longest)
        tokens.append(_added_tokens(batch, start, length))
        added.append(length)
        missing -= length
    return torch.cat(tokens, dim=1), [*lengths, *added]


def shifted_labels(batch: Batch) -> torch.Tensor:
    """Return the token that each position of the flattened micro-batch predicts, int64 [positions],
    or IGNORED."""
    next_labels = batch.labels[:, 1:]
    return F.pad(next_labels, (0, 1), value=IGNORED).flatten()
