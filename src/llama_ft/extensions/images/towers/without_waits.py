"""Let models compute features of images without waiting for the GPU, see `image_numbers`."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import PreTrainedModel

from llama_ft.extensions.images.towers.image_numbers import (
    NUMBERS,
    ImageNumbers,
    Segments,
    taking_numbers,
)
from llama_ft.libraries.evidence import (
    ENCODER_OUTPUTS,
    GRID_TOWERS,
    IMAGE_FEATURES,
    PADDED_IMAGES,
    PIXELS,
    SIZES_FOR_TOWERS,
    TAKES_SIZES,
    parameters_of,
)
from llama_ft.libraries.transformers_private import private
from llama_ft.models.base import attention_kernels
from llama_ft.models.base.layers import architecture_of
from llama_ft.models.base.replaced import replace_method
from llama_ft.runtime.devices import sent
from llama_ft.runtime.target import current_target

# Transformers calls a function whose name has "flash" once per layer, with the ends of all images, and
# others once per image.
PER_IMAGE = "flash_per_image"


def encode_without_waits(model: PreTrainedModel) -> None:
    """Let a model use `ImageNumbers`, an argument in training. Without it, such as in `generate`, it
    computes as before. Models that are not known to wait are not changed."""
    inner: Any = model.base_model
    architecture = architecture_of(inner)
    if architecture not in GRID_TOWERS | TAKES_SIZES | PADDED_IMAGES:
        return
    names = set(parameters_of(getattr(type(inner), IMAGE_FEATURES)))
    taking_numbers.add(inner)
    inner.register_forward_pre_hook(partial(_encode_first, names), with_kwargs=True)
    for tower in inner.children():
        if not set(SIZES_FOR_TOWERS).isdisjoint(parameters_of(type(tower).forward)):
            tower.register_forward_pre_hook(_send_sizes, with_kwargs=True)
    if architecture not in GRID_TOWERS:
        return
    AttentionInterface.register(PER_IMAGE, _attend_per_image)
    config = inner.visual.config
    if private(config, "_attn_implementation") == "sdpa":
        config._attn_implementation = PER_IMAGE
    decoder = model.get_decoder()
    if hasattr(decoder, "_deepstack_process"):  # Qwen3-VL's
        replace_method(decoder, "_deepstack_process", _add_features)


def _encode_first(
    names: set[str], inner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...] | None:
    """Compute features of images before the forward pass, which takes them in place of pixels. `names`:
    arguments of `get_image_features`."""
    numbers: ImageNumbers | None = kwargs.get(NUMBERS)
    if numbers is None:
        return None
    others = {name: value for name, value in kwargs.items() if name not in names}
    del others[NUMBERS]
    # the model around it passes None for those that it does not get
    arguments = {}
    for name in names & kwargs.keys() - numbers.replaced:
        if kwargs[name] is not None:
            arguments[name] = kwargs[name]
    return args, others | {ENCODER_OUTPUTS: {"image": numbers.features(inner, arguments)}}


def _send_sizes(tower: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Send the sizes of images to a tower's device: `get_image_features` reads them on the host."""
    pixels: torch.Tensor = args[0] if args else kwargs[PIXELS]
    for name in SIZES_FOR_TOWERS:
        sizes = kwargs.get(name)
        if sizes is not None and sizes.device != pixels.device:
            kwargs = kwargs | {name: sent(sizes, pixels.device)}
    return args, kwargs


def _attend_per_image(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Attention within images, or windows of them: query, key and value [1, heads, patches, head_dim] ->
    [1, patches, heads, head_dim]. The arguments are those of flash attention, and the segments."""
    tensors = (query, key, value)
    offsets: torch.Tensor = arguments["cu_seq_lens_q"]
    how = {"dropout": arguments.get("dropout", 0.0), "scaling": arguments.get("scaling")}
    widths = (query.shape[-1], value.shape[-1])
    capability = current_target().capability
    kernel = attention_kernels.choose_kernel(capability, query.dtype, widths, False)
    if kernel == "varlen" and not how["dropout"]:
        by_patch = [tensor[0].transpose(0, 1) for tensor in tensors]
        longest: int = arguments["max_length_q"]
        ends = (offsets, offsets, longest, longest)
        attend: Any = varlen_attn
        whole: torch.Tensor = attend(*by_patch, *ends, scale=how["scaling"])
        return whole.unsqueeze(0), None
    segments: tuple[Segments, ...] = arguments.get("segments", ())
    known = [each.lengths for each in segments if each.offsets is offsets]
    # only in `generate` the host has to ask for them
    lengths = list(known[0]) if known else offsets.diff().tolist()
    outputs = []
    attend_one: Any = partial(sdpa_attention_forward, module)
    for image in zip(*(tensor.split(lengths, dim=2) for tensor in tensors), strict=True):
        output, _ = attend_one(*image, None, is_causal=False, **how)
        outputs.append(output)
    return torch.cat(outputs, dim=1), None


def _add_features(
    hidden_states: torch.Tensor,  # [samples, tokens, width]
    visual_pos_masks: torch.Tensor,  # bool [samples, tokens]
    visual_embeds: torch.Tensor,  # [tokens of images, width]
) -> torch.Tensor:
    """Add features to the tokens of images. Transformers' own method indexes with the mask, which waits
    for the number of tokens; that is known here."""
    is_image = visual_pos_masks.flatten()
    places = is_image.nonzero_static(size=visual_embeds.shape[0]).squeeze(1)
    added = hidden_states.flatten(0, 1).index_add(0, places, visual_embeds.to(hidden_states))
    return added.view_as(hidden_states)
