"""Attention over rows packed into one sequence: each token sees its own row only, and no mask of tokens x tokens is
made.

transformers knows packed rows by position_ids that restart, and then builds a dense block mask for sdpa and eager. The
attention functions here take the rows' lengths instead: on CUDA torch's variable-length kernel, elsewhere the model's
own attention row by row, which costs what the rows cost alone. They are registered beside transformers' own, and calls
without packed rows (padded batches, generation) go on to those.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.modeling_utils import PreTrainedModel

from llama_ft.errors import UserError
from llama_ft.models.build import function_beside
from llama_ft.models.torch_2_11 import shared_heads
from llama_ft.runtime.devices import sent

ATEN = torch.ops.aten
Attention = tuple[torch.Tensor, torch.Tensor | None]
ROW_WISE_LAYERS = {"full_attention", "sliding_attention"}  # others (Mamba's, chunks) carry something over row ends
LARGEST_KERNEL_HEAD = 256  # flash attention's
# The CPU's backward pass in 16 bits compiles kernels for every length of a row, on every thread, and keeps them: 11 MiB
# each on 4 threads of an AMD Zen 4. Tokens beyond a row's end have no gradient, and no token before them sees them.
KERNEL_ROWS = 32
FIRST_KERNEL_CAPABILITY = (8, 0)  # Ampere; older GPUs (T4, V100), which precision fp16 is for, have no flash attention


@dataclass(frozen=True)
class PackedRows:
    """Where the rows of a sequence begin and end.

    Attributes:
        lengths: tokens of each row, on the host: reading them must not wait for the device.
        offsets: int32 [rows + 1], on the device: 0 and the end of each row.
        longest: tokens of the longest row. Compiled layers read this one number: of `lengths` each would be a guard.
    """

    lengths: tuple[int, ...]
    offsets: torch.Tensor
    longest: int


def use_packed_attention(model: PreTrainedModel, flag: str = "--batching_strategy packing") -> None:
    """Have a model keep packed rows apart. Its config says so; what is saved of the config does not.

    Raises:
        UserError: this architecture cannot: its attention is not called through transformers' interface, or some of
            its layers carry a state from token to token.
    """
    kinds = set(getattr(model.config, "layer_types", None) or ()) - ROW_WISE_LAYERS
    if kinds or not model._supports_attention_backend:
        why = f"it has layers of {', '.join(sorted(kinds))}" if kinds else "its attention has no interface for it"
        raise UserError(f"{flag}: {type(model).__name__} cannot keep the rows of a pack apart: {why}.\n{USE_PADDING}")
    for name, attention, mask in (
        ("packed_sdpa", _packed_sdpa, sdpa_mask),
        ("packed_eager", _packed_eager, eager_mask),
    ):
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, _mask_where_given(mask))
    chosen = model.config._attn_implementation
    if chosen in ("sdpa", "eager"):
        model.config._attn_implementation = f"packed_{chosen}"
    for module in model.modules():
        if "longrope" in str(getattr(module, "rope_type", "")):
            module.forward = partial(_rotary_row_by_row, module.forward)


def _rotary_row_by_row(
    rotary: Callable[..., tuple[torch.Tensor, ...]], x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kw: Any
) -> tuple[torch.Tensor, ...]:
    """Cosine and sine [1, tokens, head_dim] with the factors of each row's own length: longrope has others beyond the
    original length, and takes those of the longest row for all."""
    if len(position_ids) > 1:  # padded rows, as in transformers
        return rotary(x, position_ids, *args, **kw)
    begins = (position_ids[0] == 0).nonzero().squeeze(1)[1:].tolist()
    parts = [rotary(x, row, *args, **kw) for row in position_ids.tensor_split(begins, dim=1)]
    return tuple(torch.cat(part, dim=1) for part in zip(*parts, strict=True))


USE_PADDING = "Use --batching_strategy padding."


def packed_arguments(model: PreTrainedModel, lengths: list[int], device: torch.device) -> dict[str, Any]:
    """What a model is called with, besides input_ids, for rows of these lengths one after another.

    Args:
        model: prepared by `use_packed_attention`.
        lengths: tokens of each row.
        device: where the model computes.
    """
    ends = torch.tensor([0, *lengths]).cumsum(0)
    positions = torch.arange(int(ends[-1])) - torch.repeat_interleave(ends[:-1], torch.tensor(lengths))
    offsets = sent(ends.to(torch.int32), device)
    arguments: dict[str, Any] = {"position_ids": sent(positions.unsqueeze(0), device), "attention_mask": None}
    if model.config._attn_implementation in ("packed_sdpa", "packed_eager"):
        return arguments | {"packed_rows": PackedRows(tuple(lengths), offsets, max(lengths))}
    # flash_attention_2 and 3, as transformers hands them on
    return arguments | {
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def _mask_where_given(make_mask: Callable[..., torch.Tensor | None]) -> Callable[..., torch.Tensor | None]:
    """No mask for packed rows, which come without one and without a cache; else transformers' own."""

    def mask(
        *, attention_mask: torch.Tensor | None = None, q_length: int, kv_length: int, **arguments: Any
    ) -> torch.Tensor | None:
        if attention_mask is None and q_length == kv_length:
            return None
        return make_mask(attention_mask=attention_mask, q_length=q_length, kv_length=kv_length, **arguments)

    return mask


def _packed_sdpa(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    packed_rows: PackedRows | None = None,
    **arguments: Any,
) -> Attention:
    """sdpa on packed rows. Shapes as transformers has them: [1, heads, tokens, head_dim] in, [1, tokens, heads,
    head_dim] out."""
    if attention_mask is not None or query.shape[2] != key.shape[2]:  # padded rows, or with a cache
        return sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)
    if packed_rows is not None and _kernel_takes(query, value, arguments):
        window = arguments.get("sliding_window")
        output = varlen_attn(
            query[0].transpose(0, 1),  # [tokens, heads, head_dim]
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            packed_rows.offsets,
            packed_rows.offsets,
            packed_rows.longest,
            packed_rows.longest,
            scale=arguments.get("scaling"),
            window_size=(-1, 0) if window is None else (window - 1, 0),
            **shared_heads(query, key),
        )
        assert isinstance(output, torch.Tensor)
        return output.unsqueeze(0), None
    if packed_rows is not None and _cpu_kernel_takes(query, value, arguments):
        window = arguments.get("sliding_window")
        output = _CpuAttention.apply(query, key, value, packed_rows.lengths, arguments.get("scaling"), window)
        return output.transpose(1, 2), None
    return _row_by_row(sdpa_attention_forward, module, query, key, value, packed_rows, arguments)


def _packed_eager(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    packed_rows: PackedRows | None = None,
    **arguments: Any,
) -> Attention:
    """The model's own eager attention, with its soft caps and sinks, on packed rows."""
    eager = function_beside(module, "eager_attention_forward")
    if attention_mask is not None or query.shape[2] != key.shape[2]:
        output: Attention = eager(module, query, key, value, attention_mask, **arguments)
        return output
    return _row_by_row(eager, module, query, key, value, packed_rows, arguments)


def _kernel_takes(query: torch.Tensor, value: torch.Tensor, arguments: dict[str, Any]) -> bool:
    """Whether torch's variable-length kernel computes this: 16 bits on CUDA, nothing but scale and window."""
    return (
        query.is_cuda
        and torch.cuda.get_device_capability(query.device) >= FIRST_KERNEL_CAPABILITY
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] <= LARGEST_KERNEL_HEAD
        and query.shape[-1] % 8 == 0  # sdpa pads other heads itself
        and _is_plain(query, value, arguments)
    )


def _cpu_kernel_takes(query: torch.Tensor, value: torch.Tensor, arguments: dict[str, Any]) -> bool:
    """Whether torch's flash attention for CPUs computes this: one sequence, nothing but scale and window."""
    return query.device.type == "cpu" and len(query) == 1 and _is_plain(query, value, arguments)


def _is_plain(query: torch.Tensor, value: torch.Tensor, arguments: dict[str, Any]) -> bool:
    extras = [
        arguments.get("dropout") or None,
        *(arguments.get(name) for name in ("softcap", "s_aux", "position_bias")),
    ]
    return query.shape[-1] == value.shape[-1] and all(extra is None for extra in extras)


class _CpuAttention(torch.autograd.Function):
    """Causal attention within each row of a sequence: [1, heads, tokens, head_dim] in and out.

    Autograd's own way through slices makes a gradient of the whole sequence for every row of it, mostly zeros, and adds
    them up. Here each row's gradient is written to its place. Heads that share keys and values do so in the kernel.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lengths: tuple[int, ...],
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        ctx.lengths, ctx.scale, ctx.window = lengths, scale, window
        output, sums = torch.empty_like(query), []
        for rows in _rows_at(lengths):
            parts = [_rows_of(whole, rows) for whole in (query, key, value)]
            mask = _window_mask(rows[1], window, parts[0])
            row, log_sums = ATEN._scaled_dot_product_flash_attention_for_cpu(
                *parts, 0.0, mask is None, attn_mask=mask, scale=scale
            )
            _rows_of(output, rows).copy_(row)
            sums.append(log_sums)
        ctx.save_for_backward(query, key, value, output, *sums)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        query, key, value, output, *sums = ctx.saved_tensors
        gradients = [torch.empty_like(whole) for whole in (query, key, value)]
        for rows, log_sums in zip(_rows_at(ctx.lengths), sums, strict=True):
            parts = [_rows_of(whole, rows) for whole in (gradient, query, key, value, output)]
            length = rows[1]
            if parts[0].itemsize == 2 and (more := -length % KERNEL_ROWS):
                parts = [functional.pad(part, (0, 0, 0, more)) for part in parts]
                log_sums = functional.pad(log_sums, (0, more))
            mask = _window_mask(length, ctx.window, parts[0])
            found = ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
                *parts, log_sums, 0.0, mask is None, attn_mask=mask, scale=ctx.scale
            )
            for whole, part in zip(gradients, found, strict=True):
                _rows_of(whole, rows).copy_(part[:, :, :length])
        return *gradients, None, None, None


def _rows_at(lengths: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Start, length and number of neighbouring rows that the kernel takes at once: those of one length."""
    groups, start = [], 0
    for length, group in itertools.groupby(lengths):
        count = len(list(group))
        groups.append((start, length, count))
        start += length * count
    return groups


def _rows_of(whole: torch.Tensor, rows: tuple[int, int, int]) -> torch.Tensor:
    """[1, heads, tokens, width] -> a view of some rows [rows, heads, length, width]."""
    start, length, count = rows
    return whole[0, :, start : start + length * count].unflatten(1, (count, length)).transpose(0, 1)


def _window_mask(length: int, window: int | None, query: torch.Tensor) -> torch.Tensor | None:
    """What is added to the scores [tokens, tokens] of a row that is longer than the window; None: it is causal only.
    `query` may have tokens beyond its length."""
    if window is None or length <= window:
        return None
    tokens = query.shape[2]
    allowed = torch.ones(tokens, tokens, dtype=torch.bool).tril().triu(1 - window)
    return torch.zeros(tokens, tokens, dtype=query.dtype).masked_fill(~allowed, -torch.inf)


@torch.compiler.disable(reason="a graph would hold for one tuple of lengths")
def _row_by_row(
    attention: Callable[..., Attention],
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed_rows: PackedRows | None,
    arguments: dict[str, Any],
) -> Attention:
    lengths = packed_rows.lengths if packed_rows is not None else (query.shape[2],)
    if len(lengths) == 1:  # nothing to cut, and no copy of the output
        mask = _row_mask(attention, lengths[0], arguments.get("sliding_window"), query)
        return attention(module, query, key, value, mask, **arguments)[0], None
    outputs, start = [], 0
    for length in lengths:
        row = (part[:, :, start : start + length] for part in (query, key, value))
        mask = _row_mask(attention, length, arguments.get("sliding_window"), query)
        outputs.append(attention(module, *row, mask, **arguments)[0])
        start += length
    return torch.cat(outputs, dim=1), None


def _row_mask(
    attention: Callable[..., Attention], length: int, window: int | None, query: torch.Tensor
) -> torch.Tensor | None:
    """The mask within one row [1, 1, length, length]: none where sdpa's own causal one does."""
    if attention is sdpa_attention_forward and (window is None or length <= window):
        return None
    allowed = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    if window is not None:
        allowed = allowed.triu(1 - window)
    if attention is sdpa_attention_forward:
        return allowed[None, None]
    mask = torch.zeros(length, length, dtype=query.dtype, device=query.device)
    return mask.masked_fill(~allowed, torch.finfo(query.dtype).min)[None, None]
