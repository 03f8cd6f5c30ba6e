"""Attention and token mixers of packed sequences that several ranks share, each with an equal part
of the tokens (--sequence_parallel_size). Norms, MLPs, experts, the LM head and the loss compute a
rank's own tokens.

    2 ranks        rank 0     rank 1
    tokens         0 1 2 3    4 5 6 7        of a sequence of 8
    attention      heads 0 1  heads 2 3      of all 8 tokens, so kernels and masks are those of one rank
    delta nets     heads 0 1  heads 2 3      of all 8 tokens (shared_heads.py)
    other mixers   all        all            of all 8 tokens; each rank keeps its part of the output

One all-to-all brings queries, keys and values from a part of the tokens to a part of the heads, and
another one brings the output back. Labels are shifted before they are divided, so no token in the
loss is lost where a sequence is cut. Losses and gradients are sums over ranks and need no factor.

Source of the all-to-all: DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from llama_ft.errors import UserError
from llama_ft.runtime.devices import sent
from llama_ft.runtime.sequence import SequenceRank

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # query, key, value
Attention = tuple[torch.Tensor, torch.Tensor | None]
NOT_SHARED = "--sequence_parallel_size"  # begins each message on what ranks cannot share


def check_can_share(config: Any, name: str, sequence: SequenceRank) -> None:
    """Raise a UserError unless the attention heads of a model can be divided among the ranks that
    share a sequence.

    Args:
        config: of the text model.
        name: of the model's class.
        sequence: the ranks.
    """
    heads = getattr(config, "num_attention_heads", None)
    numbers = heads if isinstance(heads, list) else [heads]
    for number in numbers:
        if isinstance(number, int) and number % sequence.size:
            possible = [size for size in range(1, number + 1) if number % size == 0]
            raise UserError(
                f"{NOT_SHARED} {sequence.size}: does not divide the {number} attention heads of "
                f"{name}. Choose one of {', '.join(map(str, possible))}."
            )


def attend_over_heads(
    attend: Callable[..., Attention],
    module: nn.Module,
    tensors: Tensors,
    sequence: SequenceRank,
    arguments: dict[str, Any],
) -> Attention:
    """Call an attention function with all tokens and this rank's part of the heads.

    Args:
        attend: module, query, key, value, None and arguments -> output [1, tokens, heads, width].
        module: the attention layer.
        tensors: query [1, heads, own tokens, width]; key and value, perhaps with fewer heads.
        sequence: the ranks that share the sequence.
        arguments: of the attention function, by name.

    Returns:
        [1, own tokens, heads, width], and no attention weights.
    """
    query, key, value = tensors
    heads = query.shape[1]
    if heads % sequence.size:
        raise UserError(
            f"{NOT_SHARED} {sequence.size}: does not divide {heads} attention heads. Choose a divisor."
        )
    repeats = _repeats(heads, key.shape[1], sequence.size)
    shared = [
        part.repeat_interleave(repeats, dim=1) if repeats > 1 else part for part in (key, value)
    ]
    groups = heads // (key.shape[1] * repeats)
    exchanged = [Exchange.apply(part, sequence, True) for part in (query, *shared)]
    view = _with_own_heads(module, sequence, groups)
    own = dict(arguments)
    if own.get("position_bias") is not None:
        raise UserError(
            f"{NOT_SHARED}: attention with a position bias is not supported. Leave it out."
        )
    if own.get("s_aux") is not None:  # the sinks
        own["s_aux"] = sequence.part(own["s_aux"], 0)
    output, _ = attend(view, *exchanged, None, **own)
    by_head = output.transpose(1, 2)
    by_token = cast(torch.Tensor, Exchange.apply(by_head, sequence, False))
    return by_token.transpose(1, 2).contiguous(), None


def _repeats(heads: int, shared_heads: int, size: int) -> int:
    """Return how often each key head is repeated, so that every rank has those of its query
    heads."""
    if shared_heads % size == 0:
        return 1
    if size % shared_heads == 0:
        return size // shared_heads
    return heads // shared_heads


def _with_own_heads(module: nn.Module, sequence: SequenceRank, groups: int) -> nn.Module:
    """Return a view of an attention layer with what attention functions read from it: sinks of this
    rank's heads, and the number of query heads per key head. It is a copy of the object, not of
    parameters: functions find the model's own code by its class."""
    view = object.__new__(type(module))
    parameters = dict(module._parameters)
    sinks = parameters.get("sinks")
    if sinks is not None:
        parameters["sinks"] = cast(nn.Parameter, sequence.part(sinks, 0))
    view.__dict__ = {**vars(module), "_parameters": parameters, "num_key_value_groups": groups}
    return view


class Exchange(torch.autograd.Function):
    """[1, heads, tokens / n, width] -> [1, heads / n, tokens, width] if `to_heads`, or back. The
    backward pass exchanges in the other direction."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, sequence: SequenceRank, to_heads: bool) -> torch.Tensor:
        ctx.sequence = sequence
        ctx.to_heads = to_heads
        return _exchange(tensor, sequence, to_heads)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _exchange(gradient, ctx.sequence, not ctx.to_heads), None, None


def _exchange(tensor: torch.Tensor, sequence: SequenceRank, to_heads: bool) -> torch.Tensor:
    size = sequence.size
    _, heads, tokens, width = tensor.shape
    if to_heads:
        sent = tensor[0].reshape(size, heads // size, tokens, width)
    else:
        sent = tensor[0].reshape(heads, size, tokens // size, width).transpose(0, 1)
    sent = sent.contiguous()
    received = torch.empty_like(sent)  # [ranks, heads / n, tokens / n, width]
    dist.all_to_all_single(received, sent, group=sequence.group)
    if to_heads:
        return received.transpose(0, 1).reshape(1, heads // size, size * tokens, width)
    return received.reshape(1, size * heads, tokens // size, width)


@dataclass(frozen=True)
class AllTokens:
    """The arguments of a token mixer with all tokens of a sequence, and its output with this rank's
    part of them.

    Attributes:
        sequence: the ranks that share the sequence.
        own_tokens: of this rank's part.
    """

    sequence: SequenceRank
    own_tokens: int

    def gathered(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the parts of all ranks, along the dimension of the tokens."""
        return cast(torch.Tensor, _Gather.apply(tensor, dim, self.sequence))

    @property
    def count(self) -> int:
        """Number of tokens of all ranks."""
        return self.own_tokens * self.sequence.size

    def own(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part."""
        return self.sequence.part(tensor, dim)


class _Gather(torch.autograd.Function):
    """The parts of all ranks, joined along a dimension. Every rank computes with all tokens, so the
    backward pass adds up the gradients of all ranks for each part."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, dim: int, sequence: SequenceRank) -> torch.Tensor:
        ctx.dim = dim
        ctx.sequence = sequence
        own = tensor.movedim(dim, 0).contiguous()
        whole = own.new_empty(sequence.size * own.shape[0], *own.shape[1:])
        dist.all_gather(list(whole.chunk(sequence.size)), own, group=sequence.group)
        return whole.movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        sequence = ctx.sequence
        # in fp32: one rounding, whatever the number of ranks
        whole = gradient.movedim(ctx.dim, 0).float().contiguous()
        dist.all_reduce(whole, group=sequence.group)
        own = sequence.part(whole, 0).to(gradient.dtype)
        return own.movedim(0, ctx.dim), None, None


@dataclass(frozen=True)
class OwnPositions:
    """Positions of a micro-batch at which a model's output is needed, and which of them are among
    the tokens of this rank.

    Attributes:
        positions: those of this rank, in its own tokens, int64 [own], on the device.
        numbers: which of all positions they are, int64 [own], on the device.
        count: number of all positions.
        sequence: the ranks that share the sequence; None: this rank has all positions.
    """

    positions: torch.Tensor
    numbers: torch.Tensor
    count: int
    sequence: SequenceRank | None

    def __len__(self) -> int:
        return len(self.positions)

    def own(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values at this rank's positions, from those at all, [count, ...]."""
        return values if self.sequence is None else values[self.numbers]

    def all(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values at all positions, [count, ...], from those at this rank's, [own, ...].
        Gradients reach this rank's values from this rank's result."""
        if self.sequence is None:
            return values
        return cast(torch.Tensor, _Whole.apply(values, self.numbers, self.count, self.sequence))

    def summed(self, sums: torch.Tensor) -> torch.Tensor:
        """Return sums over all positions, from those over this rank's. Without gradient."""
        if self.sequence is not None:
            dist.all_reduce(sums, group=self.sequence.group)
        return sums


@dataclass(frozen=True)
class OwnTokens:
    """Which tokens of a micro-batch this rank computes: all of them, or an equal part of a packed
    sequence that ranks share. Nobody else asks which of the two it is.

    Attributes:
        sequence: the ranks that share the sequence; None: this rank has all tokens.
        count: tokens of this rank.
    """

    sequence: SequenceRank | None
    count: int

    @classmethod
    def of(cls, sequence: SequenceRank | None, whole: torch.Tensor) -> "OwnTokens":
        """Create it for tokens [samples, tokens], whose number is a multiple of the ranks."""
        ranks = 1 if sequence is None else sequence.size
        return cls(sequence, whole.shape[1] // ranks)

    def unsupported(self, problem: str) -> UserError:
        """Return the error for a model that cannot be trained on packed samples, or on parts of
        them."""
        if self.sequence is not None:
            return UserError(f"{NOT_SHARED}: {problem}.\nLeave it out.")
        return UserError(
            f"--batching_strategy packing: {problem}.\nUse --batching_strategy padding."
        )

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of values of each token, [samples, tokens]: a view."""
        return whole if self.sequence is None else self.sequence.part(whole, 1)

    def find(self, positions: torch.Tensor, device: torch.device) -> OwnPositions:
        """Return which of some positions are this rank's.

        Args:
            positions: in the flattened micro-batch, int64, on the host.
            device: where the model computes.
        """
        if self.sequence is None:
            numbers = torch.arange(len(positions), device=device)
            return OwnPositions(sent(positions, device), numbers, len(positions), None)
        in_part = positions - self.sequence.rank * self.count
        own = ((in_part >= 0) & (in_part < self.count)).nonzero().squeeze(1)
        own_positions = sent(in_part[own], device)
        return OwnPositions(own_positions, sent(own, device), len(positions), self.sequence)

    def mask(self, tokens: int, device: torch.device) -> torch.Tensor | None:
        """Return which of this rank's tokens are among the first `tokens` of the sequence, bool [1,
        own], on the device; None if the sequence is not shared."""
        if self.sequence is None:
            return None
        positions = torch.arange(self.count) + self.sequence.rank * self.count
        return sent((positions < tokens).unsqueeze(0), device)


class _Whole(torch.autograd.Function):
    """See `OwnPositions.all`."""

    @staticmethod
    def forward(
        ctx: Any, values: Any, numbers: torch.Tensor, count: int, sequence: SequenceRank
    ) -> torch.Tensor:
        ctx.save_for_backward(numbers)
        whole: torch.Tensor = values.new_zeros(count, *values.shape[1:])
        whole[numbers] = values
        dist.all_reduce(whole, group=sequence.group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (numbers,) = ctx.saved_tensors
        return gradient[numbers], None, None, None
