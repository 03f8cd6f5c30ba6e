"""The text part of a model that also takes images or sound: its class, and the modules that are
removed.

    Gemma3ForConditionalGeneration
      model                      calls its language model alone
        vision_tower             left out: None, and a list of its tensors' names
        multi_modal_projector    left out
        language_model           the text decoder
      lm_head

Removed modules are never loaded. Sharding, quantization and adapters see only the text part, under
the names of the checkpoint's own class. An export copies the other tensors from the base model's
files.
"""

import inspect
import json
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from llama_ft.config.objectives import why_no_media
from llama_ft.errors import UserError
from llama_ft.models.base.layers import takes_more_than_text
from llama_ft.models.base.replaced import replace_method
from llama_ft.models.built import LeftOut

CLASSES: dict[Any, Any] = {
    AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    AutoModelForMultimodalLM: MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
}


class TextOutput(SimpleNamespace):
    """The output of a text decoder. Fields about other parts, for which a caller may ask, are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else ()


def stop_ids(folder: Path, config: PretrainedConfig) -> list[int]:
    """Return the tokens that end generation: eos_token_id of generation_config.json, else of
    config.json.

    Args:
        folder: of the model.
        config: the model's config.
    """
    known = getattr(config.get_text_config(), "eos_token_id", None)
    with suppress(OSError, ValueError, RecursionError):
        settings = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
        if isinstance(settings, dict) and settings.get("eos_token_id") is not None:
            known = settings["eos_token_id"]
    ids = known if isinstance(known, list) else [known]
    return [token for token in ids if isinstance(token, int)]


def why_text_only(config: PretrainedConfig, objective: str | None = None) -> str:
    """Return why samples must be text; empty if they need not. `objective`: of a run."""
    if not takes_more_than_text(config):
        return f"a {config.model_type} model takes text only"
    return "" if objective is None else why_no_media(objective)


def names_score(config: PretrainedConfig) -> bool:
    """Whether a config is of a model with a head that scores or classifies text in place of the
    LM head."""
    scored = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type)
    return scored is not None and (config.architectures or [""])[0] == scored


def auto_class(config: PretrainedConfig, trust_remote_code: bool = False) -> Any:
    """Return the class of Transformers whose `from_pretrained` makes the checkpoint's class.
    AutoModelForCausalLM makes only the text part of some (Qwen3.5), and does not know others
    (Llava).

    Raises:
        UserError: the class has no text decoder.
    """
    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return AutoModelForCausalLM
    if names_score(config) and not config.is_encoder_decoder:
        return AutoModelForSequenceClassification
    named = (config.architectures or [config.model_type])[0]
    possible = []  # classes that know this model_type
    exact = []  # those among them that make the named class
    for auto, by_model_type in CLASSES.items():
        if config.model_type not in by_model_type:
            continue
        classes = by_model_type[config.model_type]
        possible.append(auto)
        if named in (classes if isinstance(classes, tuple) else (classes,)):
            exact.append(auto)
    candidates = exact or possible or [None]
    # AutoModelForMultimodalLM is the last of CLASSES.
    chosen = candidates[-1] if takes_more_than_text(config) else candidates[0]
    if chosen is None or (chosen is AutoModelForMultimodalLM and config.is_encoder_decoder):
        supported = " or ".join(auto.__name__ for auto in CLASSES)
        why = "no text decoder"
        if chosen is not None:
            why = "no text decoder that works without its encoder"
        raise UserError(
            f"--model_name: {named} (model_type {config.model_type}) has {why}.\n"
            f"Supported are models that Transformers loads with {supported}."
        )
    return chosen


def keep_text_part(model: PreTrainedModel) -> LeftOut:
    """Remove everything but the text decoder and its LM head from a model on the meta device;
    forward calls them. Return what was removed.

    Raises:
        UserError: it has none, or does not write one token after another.
    """
    head = model.get_output_embeddings()
    if head is None or not model.can_generate():
        raise UserError(
            f"--model_name: {type(model).__name__} has no text decoder with an LM head."
        )
    decoder = model.get_decoder()
    embedding = model.get_input_embeddings()
    names = {module: name for name, module in model.named_modules()}
    before = model.state_dict()
    removed_modules = list[str]()

    def take_out(owner: nn.Module, name: str) -> None:
        removed_modules.append(f"{names[owner]}.{name}".lstrip("."))
        is_module = name in owner._modules
        delattr(owner, name)
        # Transformers' initialization writes into it
        setattr(owner, name, None if is_module else torch.empty(0))

    def take_out_towers(owner: nn.Module) -> None:
        for name, child in list(owner.named_children()):
            parts = [part for part in child.children() if contains_model(part)]
            holds_text = _holds(child, embedding) or _holds(child, head)
            holds_several_models = len(parts) > 1 and not _is_model(child)
            if holds_text or holds_several_models:
                take_out_towers(child)
            # with the projector that belongs to one tower (Phi-4-multimodal)
            elif parts or _is_model(child):
                take_out(owner, name)

    around = [module for module in names if module is not decoder and _holds(module, decoder)]
    for owner in around if _holds(decoder, embedding) else []:
        # else its own forward calls decoder and head
        if not _holds(owner, head) or _holds(decoder, head):
            inner = next(child for child in owner.children() if _holds(child, decoder))
            forward = _text_forward(owner, inner, lacks_head=not _holds(decoder, head))
            replace_method(owner, "forward", forward)
            siblings = [name for name, child in owner.named_children() if child is not inner]
            for name in [*siblings, *owner._parameters, *owner._buffers]:
                take_out(owner, name)
    take_out_towers(model)
    text_names = model.state_dict().keys()
    tensors = dict[str, int]()
    for name, tensor in before.items():
        if name not in text_names:
            tensors[name] = tensor.numel()
    makes_logits = _holds(decoder, embedding) and _holds(decoder, head)
    causal = names[decoder] if makes_logits else ""
    return LeftOut(removed_modules, tensors, causal)


def _holds(module: nn.Module, part: nn.Module) -> bool:
    return any(each is part for each in module.modules())


def _is_model(module: nn.Module) -> bool:
    return isinstance(module, PreTrainedModel)


def contains_model(module: nn.Module) -> bool:
    """Return whether a module is, or contains, a model of Transformers, such as a tower."""
    return any(_is_model(part) for part in module.modules())


def _text_forward(
    owner: nn.Module,
    inner: nn.Module,
    lacks_head: bool,
) -> Callable[..., Any]:
    """Return a forward of `owner` that passes its arguments on to `inner`, except those of
    other parts."""
    own = list(inspect.signature(owner.forward).parameters)
    taken = list(inspect.signature(inner.forward).parameters)
    others = {name for name in own if name not in taken and not name.startswith("output_")}

    @wraps(owner.forward)  # generate() inspects the names of its parameters
    def forward(*args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(own, args, strict=False)) | kwargs
        for_inner = {name: value for name, value in arguments.items() if name not in others}
        output = inner(**for_inner)
        return TextOutput(**output) if lacks_head else output

    return forward
