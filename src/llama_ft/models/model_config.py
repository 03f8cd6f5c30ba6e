"""Read a model's config.json, and correct it if its files do not have the tied weights that it
names."""

from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping

from llama_ft.config import ModelConfig
from llama_ft.errors import UserError, reason
from llama_ft.models.adapters.names import index_names
from llama_ft.models.architecture.text_part import auto_class
from llama_ft.models.base.source import (
    BLOCK_ELEMENTS,
    StoredTensor,
    WeightSource,
    row_blocks,
    weight_files,
)
from llama_ft.models.build import make_skeleton
from llama_ft.models.built import BuiltModel
from llama_ft.models.published.quantization_config import (
    check_quantization_config,
    remove_quantization_config,
)
from llama_ft.models.published.sources import open_dequantized
from llama_ft.models.weights.conversion import ConvertedSource
from llama_ft.runtime.console import log

MOST_LAYERS = 10_000  # the meta device takes about a millisecond per layer
# model_type -> that of the same architecture in Transformers. Kimi K2 has a name of its own so that
# servers can tell it from DeepSeek V3 (its deployment guide); its code is for older Transformers.
SAME_ARCHITECTURE = {"kimi_k2": "deepseek_v3"}


def load_model_config(folder: Path, trust_remote_code: bool) -> PretrainedConfig:
    """Return the model's config.json, untied if its files have an LM head of their own. Raises
    UserError if it is missing or malformed, if the architecture is unknown or has no text decoder,
    if its code needs a missing package, or if tied weights differ in its files."""
    check_quantization_config(folder)  # Transformers' error would not say what is wrong with it
    try:
        config = _read_config(folder, trust_remote_code)
    # Transformers raises many classes here, with one meaning for the user
    except Exception as error:
        raise UserError(f"{folder}: its config.json cannot be used ({reason(error)}).") from error
    _check_numbers(config, folder)
    auto_class(config, trust_remote_code)
    _untie_different(config, folder, trust_remote_code)
    return config


def _read_config(folder: Path, trust_remote_code: bool) -> PretrainedConfig:
    settings, _ = PretrainedConfig.get_config_dict(folder)
    model_type = SAME_ARCHITECTURE.get(str(settings.get("model_type")))
    if model_type is None:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code
        )
        return config
    settings["model_type"] = model_type
    settings.pop("auto_map", None)
    config = CONFIG_MAPPING[model_type].from_dict(settings)
    config.name_or_path = str(folder)  # as from_pretrained does; PEFT's adapters name it
    return config


def _check_numbers(config: PretrainedConfig, folder: Path) -> None:
    """Raise a UserError for numbers that would fail only at the first step, or never end."""
    # Any: a config.json may have anything in its place
    text_config: Any = config.get_text_config()
    if not isinstance(text_config, PretrainedConfig):
        shown = str(text_config)[:100]
        raise UserError(
            f"{folder}: its config.json cannot be used (text_config is {shown}; expected settings by name)."
        )
    names = config.architectures or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(
            f"{folder}: its config.json cannot be used (architectures is {names}; expected a list of names)."
        )
    settings = text_config.to_dict()
    layers = getattr(text_config, "num_hidden_layers", None)
    wrong = [
        f"{name} is {value}; expected 0 to 1"
        for name, value in settings.items()
        if "dropout" in name and isinstance(value, int | float) and not 0 <= value <= 1
    ]
    if isinstance(layers, int) and layers > MOST_LAYERS:
        wrong.append(f"num_hidden_layers is {layers:,}; expected at most {MOST_LAYERS:,}")
    if wrong:
        raise UserError(f"{folder}: its config.json cannot be used ({'; '.join(wrong)}).")


def untie(config: PretrainedConfig) -> None:
    """Have a config, and its parts, say that embedding and LM head are not tied."""
    if getattr(config, "tie_word_embeddings", False):
        config.tie_word_embeddings = False
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PretrainedConfig):
            untie(part)


def _untie_different(config: PretrainedConfig, folder: Path, trust_remote_code: bool) -> None:
    """Untie embedding and LM head if the files have two matrices that differ, as Transformers does
    at loading (PreTrainedModel.tie_weights). Older versions of PEFT merged into such files.

    Raises:
        UserError: other tied weights of the files differ.
    """
    parts = (config, config.get_text_config())
    if not any(getattr(part, "tie_word_embeddings", False) for part in parts):
        return
    stats = [file.stat() for file in weight_files(folder) if file.exists()]
    state = tuple((stat.st_size, stat.st_mtime_ns) for stat in stats)
    # a config.json that differs may tie other weights
    described = str(config.to_dict())
    if state and _has_different_ties(folder, trust_remote_code, state, described):
        untie(config)


@lru_cache(maxsize=8)
def _has_different_ties(
    folder: Path, trust_remote_code: bool, state: tuple[tuple[int, int], ...], described: str
) -> bool:
    """Whether the stored values of tied weights differ. Equal ones must be read as a whole, so the
    answer is kept while files (`state`) and config (`described`) stay as they are. Raises the error
    of `_untie_different`."""
    model = ModelConfig(model_name=str(folder), trust_remote_code=trust_remote_code)
    config = _read_config(folder, trust_remote_code)
    remove_quantization_config(config)
    try:
        skeleton = make_skeleton(deepcopy(config), model)
        conversions = get_model_conversion_mapping(skeleton)
        built = BuiltModel(skeleton, folder, conversions)
        source = ConvertedSource(open_dequantized(folder), built, index_names(skeleton))
    except UserError:  # building or loading the model reports it
        return False
    ties = skeleton.all_tied_weights_keys
    different = {
        target: tied
        for target, tied in ties.items()
        if {target, tied} <= source.tensors.keys() and not _are_equal(source, target, tied)
    }
    if not different:
        return False
    target, tied = next(iter(different.items()))
    untie(config)
    left = make_skeleton(config, model).all_tied_weights_keys
    if left != {name: other for name, other in ties.items() if name not in different}:
        raise UserError(
            f"{folder}: config.json ties {target} to {tied}, but their values differ ({_place(source, target)} and "
            f"{_place(source, tied)}).\nOnly an LM head can be loaded without its tie. Download the model again."
        )
    log.warning(
        f"{folder}: config.json ties {target} to {tied}, but their values differ.\nBoth are loaded, as in "
        "Transformers, and the result has tie_word_embeddings false."
    )
    return True


def _place(source: WeightSource, name: str) -> str:
    return source.tensors[name].file.name


def _are_equal(source: WeightSource, first: str, second: str) -> bool:
    """Whether two stored tensors have the same shape and values."""
    headers: list[StoredTensor] = [source.tensors[first], source.tensors[second]]
    shape = headers[0].shape
    if shape != headers[1].shape:
        return False
    is_same_dtype = headers[0].dtype == headers[1].dtype
    for start, stop in row_blocks(shape or (1,), 0, (shape or (1,))[0], BLOCK_ELEMENTS):
        rows = [source.read_rows(name, start, stop) for name in (first, second)]
        if not is_same_dtype:
            rows = [block.float() for block in rows]
        if not torch.equal(*rows):
            return False
    return True
