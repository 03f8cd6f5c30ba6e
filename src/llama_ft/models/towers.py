"""Towers of a model that takes more than text: whether they are built, in addition to its text part.

An extension brings what else is done with them, such as which of them are trained.
"""

from copy import deepcopy
from pathlib import Path

from llama_ft import door
from llama_ft.config import ModelConfig
from llama_ft.models.adapters.adapter_config import saved_config
from llama_ft.models.base.layers import takes_more_than_text
from llama_ft.models.build import build_on_meta
from llama_ft.models.built import BuiltModel, ModelRequest, is_in


def build_requested(request: ModelRequest) -> BuiltModel:
    """Build a requested model on the meta device, see `build_on_meta`: with its towers if they are
    needed. Choose which of them are trained."""
    config = request.config
    needs_them = needs_towers(request)
    built = build_on_meta(
        request.model_config, config.model, request.new_tokens, request.folder, needs_them
    )
    if needs_them:
        built.trained_towers = door.media_reader().choose_trained(built, config.model)
    return built


def trains_towers(model: ModelConfig) -> bool:
    """Return whether the settings ask for training of towers."""
    return model.train_vision != "none" or model.freeze_LLM_only


def needs_towers(request: ModelRequest) -> bool:
    """Return whether towers are built: samples or prompts have media, or an adapter or a checkpoint
    that is read has weights of them."""
    config = request.config
    if request.with_towers or trains_towers(config.model):
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


def describe_towers(built: BuiltModel) -> str:
    """Return lines for the log on towers that are trained, frozen or not loaded; "" for a model that
    takes text only."""
    trained = built.trained_towers
    frozen = []
    for part in built.towers:
        if any(name.startswith(f"{part}.") for name in trained):
            frozen.append(f"the rest of {part}")
        elif part not in trained:
            frozen.append(part)
    lines = []
    if trained:
        lines.append(f"Fully trained, not quantized: {', '.join(trained)}")
    if frozen:
        lines.append(f"Frozen, not quantized, without adapters: {', '.join(frozen)}")
    if left_out := ", ".join(built.left_out.modules):
        lines.append(f"Only the text part is loaded and fine-tuned. Copied unchanged: {left_out}")
    return "\n".join(lines)
