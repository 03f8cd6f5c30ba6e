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

from llama_ft.checkpoint.export import SavedWeights, write_model_settings, written_aside
from llama_ft.checkpoint.model_card import write_model_card
from llama_ft.config import ModelConfig
from llama_ft.errors import UserError
from llama_ft.models import Adapter, NewTokens, build_on_meta, load_model_config, load_tokenizer, lora, vocabulary_size
from llama_ft.models.conversion import ConvertedSource
from llama_ft.models.load_weights import account_for
from llama_ft.models.new_tokens import TokenRows, grow
from llama_ft.models.source import SafetensorsSource, blocks, open_weights
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


def merge_adapter(
    adapter: Path,
    base: Path,
    folder: Path,
    save_dtype: torch.dtype | None,
    max_shard_bytes: int,
    trust_remote_code: bool,
    base_name: str,
    trainer: Mapping[str, Any] | None = None,
) -> None:
    """Write the merged model. In addition to the mapped files, only a few blocks of rows are in memory.

    Args:
        adapter: directory as PEFT saves it.
        base: directory of the model as it was before quantization.
        folder: where to; complete or absent. What is there is replaced.
        save_dtype: of floating tensors; None: what each has in the base.
        max_shard_bytes: largest file.
        trust_remote_code: whether the base may bring code of its own.
        base_name: what the model card calls the base.
        trainer: what it tells of the run, as a checkpoint's trainer.json holds it.

    Raises:
        UserError: the adapter is of a kind that cannot be merged, or does not fit the base; the base is quantized.
        RunFailure: the disk is full.
    """
    settings, config = understood_adapter(adapter), load_model_config(base, trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(f"{base}: quantized. --base_model names the unquantized model that it was made from.")
    wanted = ModelConfig(model_name=str(base), trust_remote_code=trust_remote_code)
    model = build_on_meta(config, wanted, tokens_added(settings, config))
    aliases: dict[int, list[str]] = {}  # names of parameters that are one tensor
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    stored = open_weights(base)
    converted = ConvertedSource(stored, model)
    account_for(model, grow(converted, model).tensors, base)
    changes = _changes(adapter, base, model, settings)

    stored_names = {name: converted.stored_name(name) for name in {*converted.tensors, *changes}}
    made_of = {name: name for name in stored.tensors}  # name written -> name in the base
    is_untied = False
    for tie in aliases.values():
        absent = [name for name in tie if not stored_names.get(name)]
        if len({changes.get(name) for name in tie}) == 1:
            changes = {name: change for name, change in changes.items() if len(tie) == 1 or name not in absent}
        else:  # what was one tensor is no longer the same everywhere
            is_untied = True
            source = next(stored_name for name in tie if (stored_name := stored_names.get(name)))
            made_of |= dict.fromkeys(absent, source)
            stored_names |= {name: name for name in absent}
    for name in changes:
        if not stored_names[name]:
            raise UserError(f"{adapter}: changes {name}, which {base} stores in another layout.\n{USE_PEFT}")
    by_stored_name = {str(stored_names[name]): change for name, change in changes.items()}
    grown = grow(stored, model, converted.stored_name)

    def rows(name: str, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        change, start = by_stored_name.get(name), 0
        for block in blocks(grown, made_of[name]):
            yield (change(block, start) if change else block).to(dtype)
            start += len(block) if block.dim() else 1

    tensors = {name: grown.tensors[source] for name, source in made_of.items()}
    weights = SavedWeights(tensors, rows, save_dtype)
    log.info(f"Merging into {base}: {len(changes)} of {len(tensors)} tensors change")
    if is_untied:
        config.tie_word_embeddings = False
        log.info("Embedding and head, which were one tensor, are two now: tie_word_embeddings becomes false.")
    with written_aside(folder, needed=weights.nbytes) as aside:
        tokenizer = load_tokenizer(adapter if any(adapter.glob("tokenizer*")) else base, trust_remote_code)
        write_model_settings(aside, config, weights.main_dtype(), tokenizer, base)
        weights.write(aside, max_shard_bytes)
        write_model_card(aside, base_name, trainer)


def understood_adapter(adapter: Path) -> LoraConfig:
    """Return a saved adapter's settings.

    Raises:
        UserError: not all of them are understood here, so that the result would be another model.
    """
    config, defaults = lora.saved_config(adapter), LoraConfig()
    settings = json.loads((adapter / lora.ADAPTER_CONFIG).read_text())
    others = [
        f"{name} = {value}"
        for name, value in settings.items()
        if (name not in UNDERSTOOD and value and value != getattr(defaults, name, None))
        or (name == "init_lora_weights" and value not in LEAVES_THE_BASE_ALONE)
        or (name == "task_type" and value not in (None, "CAUSAL_LM"))
    ]
    if others:
        raise UserError(f"{adapter / lora.ADAPTER_CONFIG}: {', '.join(others)} is not supported here.\n{USE_PEFT}")
    return config


def tokens_added(adapter: LoraConfig, model_config: PretrainedConfig) -> NewTokens | None:
    """Return the tokens whose rows a saved adapter trains, if there are any."""
    ids, stored_rows = sorted(lora.rows_trained(adapter)), vocabulary_size(model_config) or 0
    return NewTokens(ids, stored_rows, max(stored_rows, ids[-1] + 1)) if ids else None


def _changes(folder: Path, base: Path, model: PreTrainedModel, settings: LoraConfig) -> dict[str, Change]:
    """Name of a parameter of the model -> what the adapter does to it, the same object if it does the same to two;
    every tensor of the adapter is accounted for. The adapter is injected into the model."""
    source = SafetensorsSource([folder / lora.ADAPTER_WEIGHTS])
    adapter = lora.inject_adapter(model, settings)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    token_rows = {name: layer for name, layer in model.named_modules() if isinstance(layer, TokenRows)}
    own = {id(p): adapter.keys[name] for name, p in model.named_parameters() if name in adapter.keys}
    # PEFT also saves the weight of an embedding that has an adapter and, with a resized embedding, the trained rows of
    # a tied head a second time.
    weights = {f"{lora.PEFT_PREFIX}{name}": p for name, p in parameters.items() if id(p) not in own}
    saved_too = {k: p for k, p in weights.items() if k in source.tensors and source.tensors[k].shape == tuple(p.shape)}
    copies = {f"{lora.PEFT_PREFIX}{name}.trainable_tokens_delta" for name, it in token_rows.items() if it.tied_adapter}
    headers = {key: header for key, header in source.tensors.items() if key not in copies | saved_too.keys()}
    lora.check_saved_adapter(headers, model, adapter, folder / lora.ADAPTER_WEIGHTS, str(base))
    replacing = own | {id(p): key for key, p in saved_too.items()}

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
    for name, parameter in parameters.items():
        if id(parameter) in replacing and not lora.is_adapter_weight(name):
            changes[lora.checkpoint_key(name)] = replaced(replacing[id(parameter)])
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            changes[lora.checkpoint_key(f"{name}.base_layer.weight")] = _low_rank(name, module, source, adapter)
    for name, layer in token_rows.items():
        rows = with_rows(own[id(layer.trainable_tokens_delta["default"])], tuple(layer.token_indices["default"]))
        changes[lora.checkpoint_key(f"{name}.base_layer.weight")] = rows
    return changes


def _low_rank(name: str, layer: LoraLayer, source: SafetensorsSource, adapter: Adapter) -> Change:
    """Add B A, in fp32, and with DoRA scale the rows."""
    base = layer.get_base_layer()
    if not isinstance(base, (nn.Linear, Conv1D, nn.Embedding)):
        raise UserError(f"{name} is a {type(base).__name__}, which is not merged here.\n{USE_PEFT}")

    def read(part: str) -> torch.Tensor:
        return source.read(adapter.keys[f"{name}.{part}"]).float()

    def change(block: torch.Tensor, start: int) -> torch.Tensor:
        scaling, stop = layer.scaling["default"], start + len(block)
        if isinstance(base, nn.Embedding):  # its weight is [tokens, width], A [r, tokens]
            left, right = read("lora_embedding_A.default").T, read("lora_embedding_B.default").T
        else:
            left, right = read("lora_B.default.weight"), read("lora_A.default.weight")
            if isinstance(base, Conv1D):  # its weight is [in, out]
                left, right = right.T, left.T
        merged = torch.addmm(block.float(), left[start:stop] * scaling, right)
        if f"{name}.lora_magnitude_vector.default.weight" in adapter.keys:
            magnitude = read("lora_magnitude_vector.default.weight")[start:stop]
            merged *= (magnitude / torch.linalg.vector_norm(merged, dim=1)).unsqueeze(1)
        return merged

    return change
