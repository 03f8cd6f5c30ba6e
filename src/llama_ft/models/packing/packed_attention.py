"""Attention for packed sequences: each token sees only its own sample, without a mask of tokens x
tokens.

Transformers finds packed samples by position_ids that restart, and builds a dense block mask for
sdpa and eager. The attention functions here use the samples' lengths: in a kernel that supports
them, or in one kernel call per sample, which costs as much as the samples alone. `choose_kernel`
decides. They are registered next to Transformers' functions, and pass on calls without packed
sequences (padded batches, generation) to those.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import Any, cast

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.modeling_utils import PreTrainedModel

from llama_ft.cpu import block_attention
from llama_ft.errors import UserError
from llama_ft.libraries.evidence import EAGER_ATTENTION, FLASH_ATTENTION_ARGUMENTS, SINKS
from llama_ft.libraries.transformers_private import private
from llama_ft.models.base import attention_kernels
from llama_ft.models.base.layers import function_of_file
from llama_ft.models.base.replaced_functions import marked
from llama_ft.models.base.torch_2_11 import shared_heads
from llama_ft.models.built import BuiltModel
from llama_ft.models.packing.kernels import (
    AttentionCall,
    cpu_backward,
    cpu_forward,
    efficient_backward,
    efficient_forward,
    sample_mask,
    varlen_window,
)
from llama_ft.models.packing.packed_samples import (
    PackedSamples,
    TokenMixers,
    current_samples,
    own_part_of_merged,
    set_samples,
)
from llama_ft.models.packing.shared_sequences import (
    NOT_SHARED,
    attend_over_heads,
    check_can_share,
)
from llama_ft.models.packing.sinks import attend_with_sinks
from llama_ft.models.packing.without_waits import avoid_waits
from llama_ft.runtime import Ranks
from llama_ft.runtime.console import log
from llama_ft.runtime.devices import sent
from llama_ft.runtime.target import current_target

ATTENTION_IN_BLOCKS = torch.ops.llama_ft.attention_in_blocks
GRADIENTS_IN_BLOCKS = torch.ops.llama_ft.attention_in_blocks_backward
Attention = tuple[torch.Tensor, torch.Tensor | None]


def use_packed_attention(built: BuiltModel, ranks: Ranks | None = None) -> TokenMixers:
    """Make a model keep packed samples apart: attention by the functions here (set in its config,
    but not in a saved one), other token mixers sample by sample. `check_packing` tests the
    result. If the model is already prepared, only its config is set.

    Args:
        built: the model.
        ranks: they may share packed sequences; None: the model is not computed, or by one rank.

    Raises:
        UserError: its attention cannot be divided among the ranks that share a sequence.
    """
    model = built.model
    mixers = built.mixers
    sequence = ranks.sequence if ranks is not None else None
    if sequence is not None:
        check_can_share(model.config.get_text_config(), type(model).__name__, sequence)
    if mixers is None:
        mixers = TokenMixers(model, has_towers=bool(built.towers))
        avoid_waits(model)
        for tower in built.tower_modules:
            tower.register_forward_pre_hook(_without_samples, with_kwargs=True)
        model.register_forward_pre_hook(partial(_begin, mixers), with_kwargs=True)
        model.register_forward_hook(_end, always_call=True)
        mixers.sequence = sequence
        if sequence is not None and built.towers:
            model.get_decoder().register_forward_pre_hook(own_part_of_merged, with_kwargs=True)
    if sequence is not None and mixers.gets_masks:
        raise UserError(
            f"{NOT_SHARED}: the attention of {type(model).__name__} needs masks of all pairs of tokens, which "
            "ranks cannot share. Leave it out."
        )
    if mixers.per_sample:
        log.info(f"Packed samples are computed one after another by {mixers.names()}.")
    if not mixers.attention:
        return mixers
    for name, attention, mask in (
        ("sdpa", _packed_sdpa, sdpa_mask),
        ("eager", _packed_eager, eager_mask),
    ):
        AttentionInterface.register(f"packed_{name}", attention)
        AttentionMaskInterface.register(f"packed_{name}", partial(_mask_if_given, mask))
    attends = private(mixers.config, "_attn_implementation")
    if attends in ("sdpa", "eager"):
        mixers.config._attn_implementation = f"packed_{attends}"
    if attends == "sdpa":
        attention_kernels.activate_flash_attention_3(mixers.config)
    if attends == "eager" and any(
        getattr(mixer, SINKS, None) is None for mixer in mixers.attention
    ):
        log.info(
            f"Packed attention: {type(model).__name__}'s own code runs per sample and needs memory quadratic in "
            "the sample's length."
        )
    return mixers


def packed_arguments(
    built: BuiltModel,
    lengths: list[int],
    device: torch.device,
    has_media: bool = False,
) -> dict[str, Any]:
    """Return the arguments of a model prepared by `use_packed_attention`, in addition to input_ids,
    for packed samples of `lengths` tokens. `device`: where the model computes. Ranks that share the
    sequence get the positions of their own tokens, or of all with media, see `own_part_of_merged`;
    the number of tokens is a multiple of the ranks."""
    model = built.model
    mixers = built.mixers
    assert mixers is not None
    samples = PackedSamples.of(lengths, device)
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    if mixers.sequence is not None and not has_media:
        positions = mixers.sequence.part(positions, 1)
    position_ids = marked(sent(positions, device), needs_no_mask=True)
    arguments: dict[str, Any] = {"position_ids": position_ids, "attention_mask": None}
    if mixers.needs_scope:  # for some models, such as Mamba, forward takes neither
        parameters = inspect.signature(model.base_model.forward).parameters
        arguments = {name: value for name, value in arguments.items() if name in parameters}
    repeats_often = samples.longest % attention_kernels.CUDNN_LENGTHS == 0
    equal_length = repeats_often and len(set(lengths)) == 1
    indices = None
    if mixers.with_kernels:
        numbers = torch.arange(len(lengths), dtype=torch.int32)
        per_token = torch.repeat_interleave(numbers, torch.tensor(lengths))
        indices = sent(per_token.unsqueeze(0), device)
    arguments["packed_samples"] = replace(
        samples, equal_length=equal_length, indices=indices, sequence=mixers.sequence
    )
    # as Transformers passes them on
    if "flash" in (private(mixers.config, "_attn_implementation") or ""):
        arguments |= {"cu_seq_lens_q": samples.offsets, "cu_seq_lens_k": samples.offsets}
        arguments |= {"max_length_q": samples.longest, "max_length_k": samples.longest}
    return arguments


def _begin(
    mixers: TokenMixers,
    model: PreTrainedModel,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, ...]:
    """Set the samples for token mixers. Only the attention functions here get them as an
    argument."""
    set_samples(kwargs.get("packed_samples"))
    is_argument = (private(mixers.config, "_attn_implementation") or "").startswith("packed_")
    if mixers.needs_scope or not is_argument:
        kwargs = {name: value for name, value in kwargs.items() if name != "packed_samples"}
    return args, kwargs


def _without_samples(
    tower: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Leave out the arguments on packed samples, which models pass on to their towers, too."""
    dropped = {"packed_samples", "use_cache"} | FLASH_ATTENTION_ARGUMENTS
    return args, {name: value for name, value in kwargs.items() if name not in dropped}


def _end(*_: Any) -> None:
    set_samples(None)


def _mask_if_given(
    make_mask: Callable[..., torch.Tensor | None], **arguments: Any
) -> torch.Tensor | None:
    """Return no mask for packed sequences, else Transformers' own, which may be chunked. A mask that
    is more than causal is lost, such as that of Gemma 3, in which tokens of an image see each other:
    `check_packing` notices it, and lets attention compute each sample with its part of Transformers'
    mask."""
    return None if current_samples() is not None else make_mask(**arguments)


def _over_shared_heads(attend: Callable[..., Attention]) -> Callable[..., Attention]:
    """Make an attention function for packed sequences compute this rank's part of the heads, if
    several ranks share the sequence."""

    @wraps(attend)
    def forward(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,  # AFMoE passes it by name
        packed_samples: PackedSamples | None = None,
        **arguments: Any,
    ) -> Attention:
        samples = packed_samples
        if samples is None and not torch.compiler.is_compiling():
            samples = current_samples()
        if samples is None or samples.sequence is None:
            return attend(module, query, key, value, attention_mask, packed_samples, **arguments)
        if attention_mask is not None:
            raise UserError(
                f"{NOT_SHARED}: {type(module).__name__} has a mask of its own. Leave it out."
            )
        tensors = (query, key, value)
        return _attend_with_other_ranks(attend, module, tensors, samples, arguments)

    return forward


@torch.compiler.disable(reason="ranks exchange tokens between two graphs of a layer")
def _attend_with_other_ranks(
    attend: Callable[..., Attention],
    module: nn.Module,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],  # query, key, value
    samples: PackedSamples,
    arguments: dict[str, Any],
) -> Attention:
    assert samples.sequence is not None
    own = partial(attend, packed_samples=replace(samples, sequence=None))
    return attend_over_heads(own, module, tensors, samples.sequence, arguments)


@_over_shared_heads
def _packed_sdpa(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # AFMoE passes it by name
    packed_samples: PackedSamples | None = None,
    **arguments: Any,
) -> Attention:
    """sdpa for packed sequences: query, key and value [1, heads, tokens, head_dim] and a mask or
    None -> [1, tokens, heads, head_dim]."""
    samples = _samples_of(module, packed_samples)
    window = arguments.get("sliding_window")
    tensors = (query, key, value)
    attend = partial(sdpa_attention_forward, module, **arguments)
    has_extras = _has_extras(arguments) or arguments.get("s_aux") is not None
    if samples is None or attention_mask is not None or has_extras:
        return _sample_by_sample(attend, tensors, attention_mask, samples, window)
    equal_length = samples.equal_length and (window or samples.longest) >= samples.longest
    capability = current_target().capability
    widths = (query.shape[-1], value.shape[-1])
    kernel = attention_kernels.choose_kernel(capability, query.dtype, widths, equal_length)
    if kernel == "cudnn":
        # As a batch: [1, heads, tokens, width] -> [samples, heads, tokens of a sample, width].
        batches = []
        for sequence in tensors:
            by_sample = sequence[0].unflatten(1, (-1, samples.longest))
            batches.append(by_sample.transpose(0, 1))
        # cuDNN is disabled for all other calls. Flash attention is for shapes that cuDNN does not
        # support.
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]):
            output = cast(Any, attend)(*batches, None)[0]
        return output.flatten(0, 1).unsqueeze(0), None
    if kernel == "varlen":
        output = varlen_attn(
            query[0].transpose(0, 1),  # [tokens, heads, head_dim]
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            samples.offsets,
            samples.offsets,
            samples.longest,
            samples.longest,
            scale=arguments.get("scaling"),
            window_size=varlen_window(window),
            **shared_heads(query, key),
        )
        return cast(torch.Tensor, output).unsqueeze(0), None
    has_cache = query.shape[2] != key.shape[2]
    if kernel == "own" or has_cache:
        return _sample_by_sample(attend, tensors, None, samples, window)
    is_efficient = kernel == "efficient"
    scale = arguments.get("scaling")
    return _call_kernel_per_sample(tensors, samples, scale, window, is_efficient)


@_over_shared_heads
def _packed_eager(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    packed_samples: PackedSamples | None = None,
    **arguments: Any,
) -> Attention:
    """The model's own eager attention, with its soft caps, for packed sequences. Sinks are computed with a
    kernel."""
    tensors = (query, key, value)
    samples = _samples_of(module, packed_samples)
    window = arguments.get("sliding_window")
    sinks = arguments.get("s_aux")
    has_cache = query.shape[2] != key.shape[2]
    if sinks is not None and samples is not None and attention_mask is None and not has_cache:
        capability = current_target().capability
        widths = (query.shape[-1], value.shape[-1])
        kernel = attention_kernels.choose_kernel(capability, query.dtype, widths, False)
        if kernel != "own" and not _has_extras(arguments):
            scale = arguments.get("scaling")
            return attend_with_sinks(tensors, sinks, samples, kernel, scale, window), None
    eager = function_of_file(module, EAGER_ATTENTION)
    attend = partial(eager, module, **arguments)
    return _sample_by_sample(attend, tensors, attention_mask, samples, window)


def _has_extras(arguments: dict[str, Any]) -> bool:
    """Return whether attention has dropout, or something else that no kernel here supports."""
    extras = [arguments.get(name) for name in ("softcap", "position_bias")]
    return bool(arguments.get("dropout")) or any(extra is not None for extra in extras)


def _samples_of(module: nn.Module, samples: PackedSamples | None) -> PackedSamples | None:
    """Return the samples that a layer keeps apart. For chunked attention these are chunks of
    samples."""
    if samples is None and not torch.compiler.is_compiling():
        samples = current_samples()
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    chunk = getattr(config, "attention_chunk_size", None)
    if (
        samples is None
        or not chunk
        or not kinds
        or kinds[cast(int, module.layer_idx)] != "chunked_attention"
    ):
        return samples
    return samples.cut(chunk)


def _divide_into_calls(samples: PackedSamples, together: bool) -> list[AttentionCall]:
    """Divide samples into kernel calls: each its own, or `together` as many neighbors as take no
    more workspace than one sample as long as the packed sequence. The memory-efficient kernel's
    workspace grows with the number of samples times the longest one."""
    lengths = samples.lengths
    limit = sum(lengths) if together else 0
    calls = []
    first = 0
    longest = 0
    for index, length in enumerate(lengths):
        longest = max(longest, length)
        if index > first and longest * (index + 1 - first) > limit:
            calls.append(_call_for(samples, first, index))
            first = index
            longest = length
    return [*calls, _call_for(samples, first, len(lengths))]


def _call_for(samples: PackedSamples, first: int, end: int) -> AttentionCall:
    """Return the call for the samples [first, end)."""
    lengths = samples.lengths[first:end]
    offsets = None
    if len(lengths) > 1:
        offsets = samples.offsets[first : end + 1]
        if first:
            offsets = offsets - offsets[:1]
    return AttentionCall(sum(lengths), max(lengths), offsets)


class _SampleAttention(torch.autograd.Function):
    """Causal attention within each sample: [1, heads, tokens, head_dim] in and out. The CPU kernel
    lets query heads share keys and values; for the memory-efficient kernel they are repeated, for
    one call at a time."""

    @staticmethod
    def forward(
        ctx: Any, query: Any, key: Any, value: Any, samples: PackedSamples, *how: Any
    ) -> torch.Tensor:
        scale, window, is_efficient = how
        ctx.calls = _divide_into_calls(samples, together=is_efficient)
        ctx.how = (scale, window)
        ctx.is_efficient = is_efficient
        ctx.query_heads_per_key = query.shape[1] // key.shape[1] if is_efficient else 1
        is_short = samples.longest <= min(
            block_attention.LONGEST, window or block_attention.LONGEST
        )
        has_choice = is_short and not is_efficient
        ctx.in_blocks = has_choice and block_attention.is_faster(query.dtype)
        if ctx.in_blocks and block_attention.is_faster_forward(query.dtype):
            ctx.save_for_backward(query, key, value)
            return ATTENTION_IN_BLOCKS(query, key, value, *_block_how(ctx, query))
        # The memory layout that the memory-efficient kernel's backward pass assumes for any
        # strides: [1, tokens, heads, head_dim].
        _, heads, tokens, _ = query.shape
        memory = query.new_empty(1, tokens, heads, value.shape[3])
        output = memory.transpose(1, 2)
        compute = efficient_forward if is_efficient else cpu_forward
        sums = []
        tokens_of_calls = tuple(call.tokens for call in ctx.calls)
        parts = _samples(tokens_of_calls, query, key, value, output)
        for call, (sample, *shared, sample_output) in zip(ctx.calls, parts, strict=True):
            repeated = [repeat_kv(part, ctx.query_heads_per_key) for part in shared]
            call_output, log_sums = compute([sample, *repeated], call, *ctx.how)
            sample_output.copy_(call_output)
            sums.append(log_sums)
        if ctx.in_blocks:
            ctx.save_for_backward(query, key, value)
        else:
            ctx.save_for_backward(query, key, value, output, *sums)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.in_blocks:
            return _block_backward(ctx, gradient)
        query, key, value, output, *sums = ctx.saved_tensors
        gradients = [torch.empty_like(whole) for whole in (query, key, value)]
        tokens_of_calls = tuple(call.tokens for call in ctx.calls)
        samples = _samples(tokens_of_calls, gradient, query, key, value, output)
        targets = _samples(tokens_of_calls, *gradients)
        compute = efficient_backward if ctx.is_efficient else cpu_backward
        for sample, call, log_sums, of_call in zip(samples, ctx.calls, sums, targets, strict=True):
            # the keys and values among [gradient, query, key, value, output]
            sample[2:4] = [repeat_kv(part, ctx.query_heads_per_key) for part in sample[2:4]]
            parts = compute(sample, call, log_sums, *ctx.how)
            for target, part in zip(of_call, parts, strict=True):
                if part.shape != target.shape:
                    # the sum over the query heads that share a key head
                    part = part.unflatten(1, (-1, ctx.query_heads_per_key)).sum(2)
                target.copy_(part)
        # none for samples, scale, window and is_efficient
        return *gradients, None, None, None, None


def _block_backward(ctx: Any, gradient: torch.Tensor) -> Any:
    query, key, value = ctx.saved_tensors
    how = _block_how(ctx, query)
    gradients = GRADIENTS_IN_BLOCKS(gradient, query, key, value, *how)
    return *gradients, None, None, None, None


def _block_how(ctx: Any, query: torch.Tensor) -> tuple[tuple[int, ...], float]:
    """Return the lengths of the samples, and the factor of the scores."""
    lengths = tuple(call.tokens for call in ctx.calls)  # a call per sample
    scale, _ = ctx.how
    return lengths, query.shape[3] ** -0.5 if scale is None else scale


def _samples(
    lengths: tuple[int, ...],
    *sequences: torch.Tensor,
) -> list[list[torch.Tensor]]:
    """Return views of each sample of sequences [1, heads, tokens, width]."""
    views = [whole.split(lengths, dim=2) for whole in sequences]  # by sequence, then by sample
    return [list(sample) for sample in zip(*views, strict=True)]


@torch.compiler.disable(reason="a graph would hold for one tuple of lengths")
def _call_kernel_per_sample(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],  # query, key, value
    samples: PackedSamples,
    scale: float | None,
    window: int | None,
    is_efficient: bool,
) -> Attention:
    """Call the memory-efficient kernel, or that of the CPU, for each sample or several ones."""
    how = (scale, window, is_efficient)
    output = _SampleAttention.apply(*tensors, samples, *how)
    return output.transpose(1, 2), None


@torch.compiler.disable(reason="a graph would hold for one tuple of lengths")
def _sample_by_sample(
    attend: "partial[Attention]",  # takes query, key, value and a mask
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None,
    packed_samples: PackedSamples | None,
    window: int | None,
) -> Attention:
    """Call an attention function for each sample."""
    query, key, _ = tensors
    if attention_mask is not None or query.shape[2] != key.shape[2]:  # padded samples, or a cache
        return attend(*tensors, attention_mask)
    lengths = packed_samples.lengths if packed_samples is not None else (query.shape[2],)
    makes_causal = attend.func is sdpa_attention_forward
    outputs = []
    for sample in _samples(lengths, *tensors):
        sample_query = sample[0]
        mask = sample_mask(sample_query.shape[2], window, sample_query, makes_causal)
        outputs.append(attend(*sample, mask)[0])
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
    return output, None
