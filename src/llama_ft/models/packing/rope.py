"""Rotary embeddings whose factors depend on the length of the sample: longrope (Phi-3, Phi-4).

Transformers chooses the short or the long factors once for all samples of a call, by the longest.
Here each sample gets the factors that it has alone:

    samples  a a a b b b b b b    original_max_position_embeddings 4
    factors  short long
"""

import inspect
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from llama_ft.libraries.evidence import ROPE_TYPE
from llama_ft.models.packing.packed_samples import PackedSamples, current_samples

Rotary = tuple[torch.Tensor, ...]  # cosine and sine


class _SampleLengths:
    """The lengths of the samples in the current call of a model."""

    def __init__(self) -> None:
        self._mask: torch.Tensor | None = None

    def begin(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Keep the mask of a padded batch, [samples, tokens]. A hook before the forward pass."""
        mask = kwargs.get("attention_mask")
        is_padding_mask = isinstance(mask, torch.Tensor) and mask.ndim == 2
        self._mask = mask if is_padding_mask else None

    def end(self, *_: Any) -> None:
        """Forget the mask. A hook after the forward pass."""
        self._mask = None

    def per_token(self) -> torch.Tensor | None:
        """Return the length of each token's sample, on the device: [1, tokens] of a packed
        sequence, [samples, 1] of a padded batch. None for other calls."""
        samples: PackedSamples | None = current_samples()
        if samples is not None:
            lengths = samples.offsets.diff()
            total = sum(samples.lengths)
            by_token = torch.repeat_interleave(lengths, lengths, output_size=total).unsqueeze(0)
            return samples.own(by_token)
        return None if self._mask is None else self._mask.sum(dim=1, keepdim=True)


def use_rope_per_sample(model: nn.Module) -> None:
    """Make each sample of a packed sequence or a padded batch have the longrope factors of its own
    length. Models without longrope are not changed."""
    lengths = _SampleLengths()
    rotaries = [module for module in model.modules() if has_longrope(module)]
    for rotary in rotaries:
        rotary.register_forward_hook(partial(_choose_factors, lengths), with_kwargs=True)
    if rotaries:
        model.register_forward_pre_hook(lengths.begin, with_kwargs=True)
        model.register_forward_hook(lengths.end, always_call=True)


def has_longrope(module: nn.Module) -> bool:
    """Return whether a module is a rotary embedding with longrope."""
    kinds = getattr(module, ROPE_TYPE, None)
    return "longrope" in (kinds.values() if isinstance(kinds, dict) else [kinds])


def longrope_lengths(model: nn.Module) -> list[int]:
    """Return the numbers of tokens up to which the rotary embeddings have their short factors; none
    without longrope."""
    lengths = set[int]()
    for rotary in model.modules():
        if has_longrope(rotary):
            kinds = rotary.rope_type
            layer_types = list(kinds) if isinstance(kinds, dict) else [None]
            numbers = [_original_positions(rotary, layer_type) for layer_type in layer_types]
            lengths |= {length for length in numbers if length is not None}
    return sorted(lengths)


def _original_positions(rotary: nn.Module, layer_type: str | None) -> int | None:
    """Return the number of tokens up to which a rotary embedding has its short factors; None if
    this type of layer has no longrope."""
    kinds: Any = rotary.rope_type
    parameters: Any = cast(Any, rotary.config).rope_parameters
    if layer_type is not None:
        kinds = kinds[layer_type]
        parameters = parameters[layer_type]
    return parameters["original_max_position_embeddings"] if kinds == "longrope" else None


def _choose_factors(
    lengths: _SampleLengths,
    rotary: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Rotary,
) -> Rotary:
    """Return cosine and sine, [samples, tokens, head_dim], of each sample's own factors. A hook
    after the forward pass. `output` has the long factors if any sample is long, because Transformers
    chooses by the largest of the position_ids."""
    call = inspect.signature(rotary.forward).bind(*args, **kwargs)
    position_ids = call.arguments["position_ids"]
    original = _original_positions(rotary, call.arguments.get("layer_type"))
    sample_lengths = lengths.per_token()
    if original is None or sample_lengths is None:
        return output
    # Not a call of the module, which would call this hook again.
    call.arguments["position_ids"] = position_ids.clamp(max=original - 1)
    short = rotary.forward(*call.args, **call.kwargs)
    samples = current_samples()
    if samples is not None and samples.longest > original:
        # this rank may have only the first tokens of a long sample: one more position tells
        added = functional.pad(position_ids, (0, 1), value=samples.longest - 1)
        call.arguments["position_ids"] = added
        output = tuple(part[:, :-1] for part in rotary.forward(*call.args, **call.kwargs))
    # Then only long samples use the long factors.
    is_long = (sample_lengths > original).unsqueeze(-1)
    pairs = zip(output, short, strict=True)
    return tuple(torch.where(is_long, of_long, of_short) for of_long, of_short in pairs)
