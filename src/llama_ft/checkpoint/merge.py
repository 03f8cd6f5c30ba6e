"""A trained adapter merged into the model it was trained on, a block of rows at a time.

The merged model has the names, layout and dtypes of the original checkpoint; only tensors that the adapter changes
differ. W is such a weight [out, in], B A the adapter's product, m DoRA's magnitude:

    LoRA, rsLoRA      W + scaling * B A
    DoRA              m * V / |V| per row, where V = W + scaling * B A       https://arxiv.org/abs/2402.09353
    modules_to_save   the adapter's own tensor in place of W, as for trained biases
    new tokens        the adapter's own rows in place of theirs; embedding and head grow by what is missing

Whatever else PEFT can do, its merge_and_unload merges, with the whole model in memory.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import LoraLayer
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from llama_ft.checkpoint.export import SavedWeights
from llama_ft.errors import UserError
from llama_ft.models import NewTokens, lora, vocabulary_size
from llama_ft.models.conversion import ConvertedSource
from llama_ft.models.load_weights import account_for
from llama_ft.models.new_tokens import TokenRows, grow
from llama_ft.models.source import WeightSource, blocks, open_weights
from llama_ft.runtime import log

# What an adapter_config.json may set. Anything else that is not left at its default is not merged here.
UNDERSTOOD = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout",
    "modules_to_save", "peft_type", "peft_version", "r", "rank_pattern", "revision", "runtime_config",
    "target_modules", "task_type", "trainable_token_indices", "use_dora", "use_rslora",
}  # fmt: skip
LEAVES_THE_BASE_ALONE = (True, False, None, "gaussian", "eva", "orthogonal")  # of init_lora_weights
USE_PEFT = "merge_and_unload of PEFT merges it, with the whole model in memory."
Change = Callable[[torch.Tensor, int], torch.Tensor]  # rows of the base, number of the first -> the merged model's


def merged_weights(
    model: PreTrainedModel, changes: Mapping[str, Change], base: Path, save_dtype: torch.dtype | None
) -> SavedWeights:
    """Return the merged model's weights; writing them takes a few blocks of rows of memory and the mapped files.

    Args:
        model: skeleton with the adapter; its config is changed if embedding and head are one tensor no longer.
        changes: what the adapter does; see adapter_changes.
        base: directory of the model as it was before quantization.
        save_dtype: of floating tensors; None: what each has in the base.

    Raises:
        UserError: the base is quantized, its weights are not those of its config.json, or in another layout.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        raise UserError(f"{base}: quantized. --base_model names the unquantized model that it was made from.")
    stored = open_weights(base)
    converted = ConvertedSource(stored, model)
    account_for(model, grow(converted, model).tensors, base)
    ties = defaultdict[int, list[str]](list)  # names of each parameter of the base: a tied one has several
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not lora.is_adapter_weight(name) and ".modules_to_save." not in name:
            ties[id(parameter)].append(lora.checkpoint_key(name))

    written: dict[str, tuple[str, Change | None]] = {name: (name, None) for name in stored.tensors}
    for tie in ties.values():
        does, held = {name: changes.get(name) for name in tie}, {name: converted.renamed.get(name) for name in tie}
        source, is_one = next(filter(None, held.values()), None), len(set(does.values())) == 1
        if source is None and any(does.values()):
            raise UserError(f"{tie[0]}: {base} stores it in another layout.\n{USE_PEFT}")
        for name, change in does.items():
            if source and (target := held[name] or ("" if is_one else name)):  # else it is still one tensor
                written[target] = held[name] or source, change
    grown = grow(stored, model, converted.renamed.get)

    def rows(name: str, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        (source, change), start = written[name], 0
        for block in blocks(grown, source):
            yield (change(block, start) if change else block).to(dtype)
            start += len(block) if block.dim() else 1

    log.info(f"Merging into {base}: {len(changes)} of {len(written)} tensors change")
    if len(written) > len(stored.tensors):
        model.config.tie_word_embeddings = False
        log.info("Embedding and head, which were one tensor, are two now: tie_word_embeddings becomes false.")
    return SavedWeights({name: grown.tensors[source] for name, (source, _) in written.items()}, rows, save_dtype)


def understood_adapter(adapter: Path) -> LoraConfig:
    """Return a saved adapter's settings. Raises as check_settings."""
    config: LoraConfig = lora.saved_config(adapter)
    check_settings(json.loads((adapter / lora.ADAPTER_CONFIG).read_text()), str(adapter))
    return config


def check_settings(settings: Mapping[str, Any], place: str) -> None:
    """Raise a UserError unless all settings of an adapter are understood here, so that the result is its model."""
    defaults = LoraConfig()
    others = [
        f"{name} = {value}"
        for name, value in settings.items()
        if (name not in UNDERSTOOD and value and value != getattr(defaults, name, None))
        or (name == "init_lora_weights" and value not in LEAVES_THE_BASE_ALONE)
        or (name == "task_type" and value not in (None, "CAUSAL_LM"))
        or (name == "peft_type" and value != "LORA")
    ]
    if others:
        raise UserError(f"{place}: an adapter with {', '.join(others)} is not supported here.\n{USE_PEFT}")


def tokens_added(adapter: LoraConfig, model_config: PretrainedConfig) -> NewTokens | None:
    """Return the tokens whose rows a saved adapter trains, if there are any."""
    ids, stored_rows = sorted(lora.rows_trained(adapter)), vocabulary_size(model_config) or 0
    return NewTokens(ids, stored_rows, max(stored_rows, ids[-1] + 1)) if ids else None


def adapter_changes(model: PreTrainedModel, keys: Mapping[str, str], source: WeightSource) -> dict[str, Change]:
    """Say what an adapter does to the parameters of its base, the same object if it does the same to two.

    Args:
        model: skeleton with the adapter.
        keys: trained parameter of the model -> its name in `source`.
        source: the adapter's weights.

    Raises:
        UserError: a layer is of a kind that is not merged here.
    """
    key_of = {id(parameter): keys[name] for name, parameter in model.named_parameters() if name in keys}

    @cache
    def replaced(key: str) -> Change:
        return lambda block, start: source.read_rows(key, start, start + len(block))

    @cache
    def with_rows(key: str, ids: tuple[int, ...]) -> Change:
        def change(block: torch.Tensor, start: int) -> torch.Tensor:
            merged = block.to(torch.float32, copy=True)  # the block may be the mapped file
            for place, id_ in enumerate(ids):
                if start <= id_ < start + len(block):
                    merged[id_ - start] = source.read_rows(key, place, place + 1)[0]
            return merged

        return change

    changes = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in key_of and not lora.is_adapter_weight(name):
            changes[lora.checkpoint_key(name)] = replaced(key_of[id(parameter)])
    for name, module in model.named_modules():
        target = lora.checkpoint_key(f"{name}.base_layer.weight")
        if isinstance(module, LoraLayer):
            changes[target] = _low_rank(name, module, keys, source)
        elif isinstance(module, TokenRows):
            key, ids = key_of[id(module.trainable_tokens_delta["default"])], tuple(module.token_indices["default"])
            changes[target] = with_rows(key, ids)
    return changes


def _low_rank(name: str, layer: LoraLayer, keys: Mapping[str, str], source: WeightSource) -> Change:
    """Add B A, in fp32, and with DoRA scale the rows."""
    base, scaling = layer.get_base_layer(), layer.scaling["default"]
    if not isinstance(base, (nn.Linear, Conv1D)):
        raise UserError(f"{name} is a {type(base).__name__}, which is not merged here.\n{USE_PEFT}")

    def read(part: str) -> torch.Tensor:
        return source.read(keys[f"{name}.{part}"]).float()

    def change(block: torch.Tensor, start: int) -> torch.Tensor:
        rows = slice(start, start + len(block))
        left, right = read("lora_B.default.weight"), read("lora_A.default.weight")
        if isinstance(base, Conv1D):  # its weight is [in, out]
            left, right = right.T, left.T
        merged = torch.addmm(block.float(), left[rows] * scaling, right)
        if f"{name}.lora_magnitude_vector.default.weight" in keys:
            magnitude = read("lora_magnitude_vector.default.weight")[rows]
            merged *= (magnitude / torch.linalg.vector_norm(merged, dim=1)).unsqueeze(1)
        return merged

    return change
