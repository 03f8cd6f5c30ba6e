"""Choose which parts of a model for images and text are trained: its text part, its projector, its
towers.

    LLaVA    model.vision_tower, a tower       model.multi_modal_projector, a projector
    Qwen-VL  model.visual, a tower that contains its projectors: model.visual.merger
"""

from torch import nn

from llama_ft.config import ModelConfig
from llama_ft.errors import UserError
from llama_ft.models import trains_towers
from llama_ft.models.architecture.text_part import contains_model
from llama_ft.models.built import BuiltModel, is_in

MERGER = "merger"  # in the names of Qwen-VL's projectors


def choose_trained_parts(built: BuiltModel, model: ModelConfig) -> list[str]:
    """Freeze the parts for images that `train_vision` does not name, and with freeze_LLM_only the
    text part. Return the names of those that are trained. (LoRA freezes the rest of the text part,
    and trains copies of the projectors; see `inject_lora`.)

    Raises:
        UserError: the model has no projector of its own.
    """
    trained = list[str]()
    if model.train_vision == "projector":
        trained = find_projectors(built)
    elif trains_towers(model):  # llama-recipes' freeze_LLM_only trains all of them
        trained = built.towers
    for name, parameter in built.model.named_parameters():
        is_for_images = is_in(name, built.towers)
        if is_for_images and not is_in(name, trained):
            parameter.requires_grad_(False)
        if model.freeze_LLM_only and not is_for_images:
            parameter.requires_grad_(False)
    return trained


def find_projectors(built: BuiltModel) -> list[str]:
    """Return the names of modules and parameters that bring a tower's output into the text part:
    parts without a tower, and those of Qwen-VL within it.

    Raises:
        UserError: there are none.
    """
    modules = dict[str, nn.Module](built.model.named_modules())
    projectors = []
    for part in built.towers:
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
            f"--train_vision projector: {kind} has no projector apart from {', '.join(built.towers)}.\n"
            "Use --train_vision all."
        )
    return projectors
