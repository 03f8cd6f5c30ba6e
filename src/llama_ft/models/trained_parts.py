"""Choose which parts of a model for images and text are trained: its text part, its projector, its
towers.

    LLaVA    model.vision_tower, a tower       model.multi_modal_projector, a projector
    Qwen-VL  model.visual, a tower that contains its projectors: model.visual.merger
"""

from copy import deepcopy
from pathlib import Path

from torch import nn

from llama_ft.config import ModelConfig
from llama_ft.errors import UserError
from llama_ft.models.adapters.adapter_config import saved_config
from llama_ft.models.architecture.text_part import contains_model
from llama_ft.models.base.layers import takes_more_than_text
from llama_ft.models.build import build_on_meta
from llama_ft.models.built import BuiltModel, ModelRequest, is_in

MERGER = "merger"  # in the names of Qwen-VL's projectors


def trains_images(model: ModelConfig) -> bool:
    """Return whether the settings ask for training of parts for images."""
    return model.train_vision != "none" or model.freeze_LLM_only


def needs_image_parts(request: ModelRequest) -> bool:
    """Return whether the parts for images are built: samples or prompts have images, or an adapter or
    a checkpoint that is read has weights of them."""
    config = request.config
    if request.with_images or trains_images(config.model):
        return True
    names = list(config.peft.modules_to_save or ())
    if config.peft.from_peft_checkpoint:
        saved = saved_config(Path(config.peft.from_peft_checkpoint))
        names += saved.modules_to_save or ()
    if request.trained is not None:
        names += request.trained.tensors
    if request.purpose != "read" or not names or not takes_more_than_text(request.model_config):
        return False
    text_part = build_on_meta(deepcopy(request.model_config), config.model, folder=request.folder)
    parts = text_part.left_out.modules
    return any(is_in(name, parts) or _ends_one(parts, name) for name in names)


def _ends_one(parts: list[str], name: str) -> bool:
    """Return whether `name` is the last part of a name, as PEFT takes names of modules."""
    return any(part.endswith(f".{name}") for part in parts)


def choose_trained_parts(built: BuiltModel, model: ModelConfig) -> str:
    """Freeze the parts for images that `train_vision` does not name, and with freeze_LLM_only the
    text part. Return lines for the log. (LoRA freezes the rest of the text part, and trains copies
    of the projectors; see `inject_lora`.)

    Raises:
        UserError: the model has no projector of its own.
    """
    trained = list[str]()
    if model.train_vision == "projector":
        trained = find_projectors(built)
    elif trains_images(model):  # llama-recipes' freeze_LLM_only trains all of them
        trained = built.image_parts
    for name, parameter in built.model.named_parameters():
        is_for_images = is_in(name, built.image_parts)
        if is_for_images and not is_in(name, trained):
            parameter.requires_grad_(False)
        if model.freeze_LLM_only and not is_for_images:
            parameter.requires_grad_(False)
    built.trained_image_parts = trained
    frozen = []
    for part in built.image_parts:
        if any(name.startswith(f"{part}.") for name in trained):
            frozen.append(f"the rest of {part}")
        elif part not in trained:
            frozen.append(part)
    lines = []
    if trained:
        lines.append(f"Fully trained, not quantized: {', '.join(trained)}")
    if frozen:
        lines.append(f"Frozen, not quantized, without adapters: {', '.join(frozen)}")
    return "\n".join(lines)


def find_projectors(built: BuiltModel) -> list[str]:
    """Return the names of modules and parameters that bring a tower's output into the text part:
    parts without a tower, and those of Qwen-VL within it.

    Raises:
        UserError: there are none.
    """
    modules = dict[str, nn.Module](built.model.named_modules())
    projectors = []
    for part in built.image_parts:
        module = modules.get(part)
        if module is None or not contains_model(module):
            projectors.append(part)
            continue
        for name, child in module.named_children():
            if MERGER not in name:
                continue
            if isinstance(child, nn.ModuleList):
                projectors += [f"{part}.{name}.{number}" for number in range(len(child))]
            else:
                projectors.append(f"{part}.{name}")
    if not projectors:
        kind = type(built.model).__name__
        raise UserError(
            f"--train_vision projector: {kind} has no projector apart from {', '.join(built.image_parts)}.\n"
            "Use --train_vision all."
        )
    return projectors
