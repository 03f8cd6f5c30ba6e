"""Gated delta nets of packed sequences that ranks share: each rank computes all tokens for a part of
the heads.

    projections                           own tokens, all heads
    all-to-all
    convolution, delta rule, gated norm   all tokens, own heads
    all-to-all
    output projection                     own tokens, all heads

The layer's own code computes what is between the exchanges, as a layer with fewer heads. Layers whose
heads depend on each other cannot be divided like that, such as Mamba's.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn

from llama_ft.libraries.evidence import (
    CONVOLUTION,
    DELTA_NETS,
    HEAD_SIZES,
    HEADS,
    JOINED,
    NOT_PROJECTIONS,
    OUTPUT_PROJECTIONS,
    PER_HEAD,
)
from llama_ft.models.packing.shared_sequences import Exchange
from llama_ft.runtime.sequence import SequenceRank


def can_divide_heads(mixer: nn.Module, sequence: SequenceRank) -> bool:
    """Return whether a token mixer is a gated delta net whose heads the ranks divide evenly."""
    parameters = {name for name, _ in mixer.named_parameters(recurse=False)}
    if frozenset(_projections(mixer)) not in DELTA_NETS or parameters != PER_HEAD:
        return False
    return all(getattr(mixer, heads) % sequence.size == 0 for heads in HEADS)


def compute_own_heads(
    mixer: nn.Module,
    states: torch.Tensor,
    sequence: SequenceRank,
    compute: Callable[[nn.Module, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Compute a gated delta net with all tokens and this rank's part of the heads.

    Args:
        mixer: it can be divided, see `can_divide_heads`.
        states: its input, [1, own tokens, width].
        sequence: the ranks that share the sequence.
        compute: calls the layer's code, of a view of the layer and its input [1, tokens, width].

    Returns:
        Its output, [1, own tokens, width].
    """
    names = _projections(mixer)
    sections = list[torch.Tensor]()
    columns = dict[str, nn.Module]()
    start = 0
    for name in names:
        projected = getattr(mixer, name)(states)
        width = projected.shape[-1] // sequence.size
        columns[name] = _Columns(start, width)
        start += width
        sections += projected.split(_widths(mixer, name, projected.shape[-1]), dim=-1)
    view = _with_own_heads(mixer, columns, sequence)
    output = compute(view, _to_heads(sections, sequence))
    by_token = _to_tokens(output, sequence)
    return cast(torch.Tensor, _output_projection(mixer)(by_token))


def _projections(mixer: nn.Module) -> list[str]:
    names = [name for name, _ in mixer.named_children()]
    return [name for name in names if name not in NOT_PROJECTIONS]


def _output_projection(mixer: nn.Module) -> nn.Module:
    return next(child for name, child in mixer.named_children() if name in OUTPUT_PROJECTIONS)


def _widths(mixer: nn.Module, name: str, total: int) -> list[int]:
    """Return the widths of the sections of a child's channels, each of which is divided into heads."""
    attributes = JOINED.get(name)
    return [total] if attributes is None else [getattr(mixer, width) for width in attributes]


class _Columns(nn.Module):
    """Stands for a projection that is computed already: its output is a part of the input."""

    def __init__(self, start: int, width: int) -> None:
        super().__init__()
        self._start = start
        self._width = width

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states.narrow(-1, self._start, self._width)


def _with_own_heads(
    mixer: nn.Module, columns: dict[str, nn.Module], sequence: SequenceRank
) -> nn.Module:
    """Return a view of the layer with this rank's heads, which returns them without the output
    projection. It is a copy of the object, not of parameters."""
    convolution = getattr(mixer, CONVOLUTION)
    own_channels = convolution.in_channels // sequence.size
    tensors = {}
    for name, parameter in convolution._parameters.items():
        if parameter is not None:
            sections = parameter.split(_widths(mixer, CONVOLUTION, len(parameter)))
            tensors[name] = torch.cat([sequence.part(section, 0) for section in sections])
    sizes = dict.fromkeys(("in_channels", "out_channels", "groups"), own_channels)
    children = {**mixer._modules, **columns, CONVOLUTION: _view(convolution, tensors, sizes)}
    for name in OUTPUT_PROJECTIONS & children.keys():
        children[name] = nn.Identity()
    per_head = {name: sequence.part(getattr(mixer, name), 0) for name in PER_HEAD}
    of_heads = {name: getattr(mixer, name) // sequence.size for name in HEAD_SIZES}
    return _view(mixer, per_head, {**of_heads, "_modules": children})


def _view(
    module: nn.Module, parameters: dict[str, torch.Tensor], attributes: dict[str, Any]
) -> nn.Module:
    view: nn.Module = object.__new__(type(module))
    replaced = {**module._parameters, **parameters}
    view.__dict__ = {**vars(module), **attributes, "_parameters": replaced}
    return view


def _to_heads(sections: Sequence[torch.Tensor], sequence: SequenceRank) -> torch.Tensor:
    """Return all tokens of this rank's part of each section, [1, tokens, widths / n], from this rank's
    tokens, [1, tokens / n, width]."""
    by_rank = [section.unflatten(-1, (sequence.size, -1)) for section in sections]
    sent = torch.cat(by_rank, dim=-1).transpose(1, 2)  # [1, n, tokens / n, widths / n]
    return cast(torch.Tensor, Exchange.apply(sent, sequence, True))[:, 0]


def _to_tokens(output: torch.Tensor, sequence: SequenceRank) -> torch.Tensor:
    """Return this rank's tokens with all heads, [1, tokens / n, width], from [1, tokens, width / n]."""
    received = cast(torch.Tensor, Exchange.apply(output.unsqueeze(1), sequence, False))
    return received.transpose(1, 2).flatten(2)
