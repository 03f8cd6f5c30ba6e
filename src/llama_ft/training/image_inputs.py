"""Arguments of a model for a micro-batch with images: what the processor made, and positions.

Qwen-VL numbers tokens in three dimensions: those of an image by row and column. The rule is the
model's own method `get_rope_index`. It runs here, on the host, on the examples as a padded batch, so
that a packed sequence gets the positions that its samples have alone. Other models count from 0.
"""

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers.modeling_utils import PreTrainedModel

from llama_ft.config import Config
from llama_ft.data import Batch, Images
from llama_ft.data.images.image_prompts import ImagePrompt, prompt_tensors
from llama_ft.errors import UserError
from llama_ft.models import BuiltModel
from llama_ft.runtime.devices import sent


def check_image_settings(config: Config, images: Images) -> None:
    """Raise a UserError for settings that are not supported with images."""
    if config.model.compile or config.model.use_liger is True:
        raise UserError(
            "--compile and --use_liger: not supported if samples have images. Set both to false."
        )
    if images.by_cross_attention and config.data.batching_strategy == "packing":
        raise UserError(
            "--batching_strategy packing: this model sees images by cross attention, and its samples "
            "cannot be packed.\nUse --batching_strategy padding."
        )
    if config.fsdp.enable_fsdp and config.fsdp.fsdp_wrap_policy == "size":
        raise UserError(
            "--fsdp_wrap_policy size: not supported if samples have images. Use hybrid."
        )


def image_arguments(
    built: BuiltModel, batch: Batch, lengths: list[int], device: torch.device
) -> dict[str, Any]:
    """Return the further arguments of a model, on the device.

    Args:
        built: a model with its parts for images.
        batch: a micro-batch with `images`.
        lengths: tokens of each example. A packed sequence may have one example more than the batch,
            which is text.
        device: where the model computes.
    """
    images = batch.images
    assert images is not None
    per_token = images.per_token
    if batch.is_packed:
        added = sum(lengths) - batch.input_ids.shape[1]
        per_token = {
            name: nn.functional.pad(values, (0, added)) for name, values in per_token.items()
        }
    taken = _taken(built.model)
    arguments = {}
    for name, values in (per_token | images.others).items():
        if name in taken:
            arguments[name] = sent(values, device)
    rule = _position_rule(built.model)
    if rule is not None:
        positions = _positions(rule, batch, per_token, images.others, lengths)
        arguments["position_ids"] = sent(positions, device)
    return arguments


def prompt_arguments(
    model: PreTrainedModel,
    prompts: list[list[int]],
    images: Images | None,
    device: torch.device,
) -> dict[str, Any]:
    """Return the arguments of `generate` for prompts in one batch, on a device: tokens with padding on
    the left, their mask, and what the processor makes of images.

    With several ranks and `images` there may be one more prompt at the end: ranks whose prompts have
    no image run the parts for images, too. Its answer is not needed.
    """
    made = {}
    has_images = any(isinstance(prompt, ImagePrompt) for prompt in prompts)
    if images is not None and (has_images or dist.get_world_size() > 1):
        taken = _taken(model)
        prompts, tensors = prompt_tensors(images, prompts)
        made = {name: values for name, values in tensors.items() if name in taken}
    width = max(len(prompt) for prompt in prompts)
    padded = []
    masks = []
    for prompt in prompts:
        padding = width - len(prompt)
        # It is masked. The prompt's first token, so that the repetition penalty sees no token that is
        # not in the prompt.
        padded.append(list(prompt[:1]) * padding + list(prompt))
        masks.append([0] * padding + [1] * len(prompt))
    made |= {"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(masks)}
    # FSDP2 moves inputs to the GPU, generate() does not
    return {name: values.to(device) for name, values in made.items()}


def _taken(model: PreTrainedModel) -> set[str]:
    """Return the names of the arguments of the model and of what it calls first."""
    names = set(inspect.signature(model.forward).parameters)
    return names | set(inspect.signature(model.base_model.forward).parameters)


def _position_rule(model: nn.Module) -> Any:
    """Return the model's method that numbers tokens in several dimensions; None without one."""
    for module in model.modules():
        rule = getattr(module, "get_rope_index", None)
        if rule is not None:
            return rule
    return None


def _positions(
    rule: Any,
    batch: Batch,
    per_token: dict[str, torch.Tensor],
    others: dict[str, torch.Tensor],
    lengths: list[int],
) -> torch.Tensor:
    """Return position ids, int64 [dimensions, samples, length], or [dimensions, 1, tokens] of a
    packed sequence."""
    padded = dict(per_token)
    input_ids = batch.input_ids
    if batch.is_packed:
        filled = nn.functional.pad(input_ids, (0, sum(lengths) - input_ids.shape[1]))
        input_ids = _padded(filled, lengths)
        padded = {name: _padded(values, lengths) for name, values in per_token.items()}
    counts = torch.tensor(lengths).unsqueeze(1)
    mask = (torch.arange(input_ids.shape[1]) < counts).long()
    known = inspect.signature(rule).parameters
    arguments = {name: value for name, value in (padded | others).items() if name in known}
    positions: torch.Tensor = rule(input_ids=input_ids, attention_mask=mask, **arguments)[0]
    if not batch.is_packed:
        return positions
    rows = [positions[:, number, :length] for number, length in enumerate(lengths)]
    return torch.cat(rows, dim=1).unsqueeze(1)


def _padded(sequence: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Return the examples of a packed sequence [1, tokens] as a padded batch [examples, length]."""
    return pad_sequence(list(sequence[0].split(lengths)), batch_first=True)
