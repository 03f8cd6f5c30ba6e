"""A trained adapter merged into the model it was trained on, a block of rows at a time.

The merged model has the names, layout and dtypes of the original checkpoint; only tensors that the adapter changes
differ. W is such a weight [out, in], B A the adapter's product, m DoRA's magnitude:

    LoRA, rsLoRA      W + scaling * B A
    DoRA              m * V / |V| per row, where V = W + scaling * B A       https://arxiv.org/abs/2402.09353
    modules_to_save   the adapter's own tensor in place of W, as for trained biases
    new tokens        the adapter's own rows in place of theirs; embedding and head grow by what is missing

Whatever else peft can do, its merge_and_unload merges, with the whole model in memory.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import LoraLayer
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from llama_ft.checkpoint.export import (
    CARRIED_OVER,
    check_space,
    saved_dtypes,
    stop_at_turns,
    write_weights,
    written_aside,
)
from llama_ft.checkpoint.model_card import write_model_card
from llama_ft.config import ModelConfig
from llama_ft.config.messages import size_text
from llama_ft.config.output_dir import TOKENIZER_PATTERNS
from llama_ft.errors import UserError
from llama_ft.models import Adapter, NewTokens, build_on_meta, load_model_config, load_tokenizer, vocabulary_size
from llama_ft.models.conversion import ConvertedSource, SavedGroup
from llama_ft.models.load_weights import account_for
from llama_ft.models.lora import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    PEFT_PREFIX,
    check_saved_adapter,
    checkpoint_key,
    inject_adapter,
    is_adapter_weight,
    rows_trained,
    saved_config,
)
from llama_ft.models.new_tokens import TokenRows, grow
from llama_ft.models.source import SafetensorsSource, StoredTensor, WeightSource, blocks, open_weights
from llama_ft.runtime import log

# What an adapter_config.json may set. Anything else that is not left at its default is not merged here.
UNDERSTOOD = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout",
    "modules_to_save", "peft_type", "peft_version", "r", "rank_pattern", "revision", "runtime_config",
    "target_modules", "task_type", "trainable_token_indices", "use_dora", "use_rslora",
}  # fmt: skip
LEAVES_THE_BASE_ALONE = (True, False, None, "gaussian", "eva", "orthogonal")  # of init_lora_weights
USE_PEFT = "Merge it with merge_and_unload of peft, or use it with peft and its base model."


@dataclass(frozen=True)
class _Change:
    """What an adapter does to one tensor of the model: a tensor of the adapter replaces it; a LoRA layer of this name
    is around it; or a tensor of the adapter replaces these rows of it."""

    replaced_by: str | None = None
    layer: tuple[str, LoraLayer] | None = None
    new_rows: tuple[str, tuple[int, ...]] | None = None


@dataclass(frozen=True)
class _Merge:
    """Everything that is known before the first byte is written.

    Attributes:
        base: the original checkpoint.
        adapter: its tensors.
        keys: parameter of the adapted model -> tensor of the adapter.
        made_of: name written -> name in the base that it is made of, in order.
        changes: name written -> what the adapter does to it.
        is_untied: embedding and head were one and are two now.
        config: of the merged model.
    """

    base: WeightSource
    adapter: SafetensorsSource
    keys: dict[str, str]
    made_of: dict[str, str]
    changes: dict[str, _Change]
    is_untied: bool
    config: PretrainedConfig

    def rows(self, name: str, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """A tensor of the merged model, a block of rows at a time."""
        change = self.changes.get(name, _Change())
        source: WeightSource = self.base if change.replaced_by is None else self.adapter
        add_low_rank = self._low_rank(*change.layer) if change.layer else None
        new_rows, ids = (self.adapter.read(change.new_rows[0]), change.new_rows[1]) if change.new_rows else (None, ())
        start = 0
        for rows in blocks(source, change.replaced_by or self.made_of[name]):
            merged = (add_low_rank(rows.float(), start) if add_low_rank else rows).to(dtype)
            if new_rows is not None:
                merged = merged.clone()  # it may be the mapped file
                for place, id_ in enumerate(ids):
                    if start <= id_ < start + len(rows):
                        merged[id_ - start] = new_rows[place]
            yield merged
            start += rows.shape[0] if rows.dim() else 1

    def _low_rank(self, name: str, layer: LoraLayer) -> Callable[[torch.Tensor, int], torch.Tensor]:
        """How rows of a layer's weight, from a start on, become those of the merged model, in fp32."""

        def read(part: str) -> torch.Tensor:
            return self.adapter.read(self.keys[f"{name}.{part}"]).float()

        scaling, base, magnitude = layer.scaling["default"], layer.get_base_layer(), None
        if isinstance(base, nn.Embedding):  # its weight is [tokens, width], A [r, tokens]
            left, right = read("lora_embedding_A.default").T * scaling, read("lora_embedding_B.default").T
        else:
            left, right = read("lora_B.default.weight") * scaling, read("lora_A.default.weight")
            if isinstance(base, Conv1D):  # its weight is [in, out]
                left, right = right.T, left.T
        if f"{name}.lora_magnitude_vector.default.weight" in self.keys:
            magnitude = read("lora_magnitude_vector.default.weight")

        def merge(rows: torch.Tensor, start: int) -> torch.Tensor:
            merged = torch.addmm(rows, left[start : start + len(rows)], right)
            if magnitude is None:
                return merged
            norms = torch.linalg.vector_norm(merged, dim=1)
            return merged * (magnitude[start : start + len(rows)] / norms).unsqueeze(1)

        return merge


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
        adapter: directory as peft saves it.
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
    merge = _plan(adapter, base, trust_remote_code)
    stored = {name: merge.base.tensors[source] for name, source in merge.made_of.items()}
    tensors = {name: torch.empty(it.shape, dtype=it.dtype, device="meta") for name, it in stored.items()}
    dtypes = saved_dtypes(tensors, {}, save_dtype)
    needed = sum(tensor.numel() * dtypes[name].itemsize for name, tensor in tensors.items())
    check_space(folder, needed)
    log.info(f"Merging into {base}: {len(merge.changes)} of {len(tensors)} tensors change, {size_text(needed)}")
    if merge.is_untied:
        log.info("Embedding and head, which were one tensor, are two now: tie_word_embeddings becomes false.")
    with written_aside(folder, "Nothing is left of it.") as aside:
        groups = [SavedGroup([name], {name: tuple(tensor.shape)}) for name, tensor in tensors.items()]
        _write_settings(aside, base, adapter, save_dtype, merge)
        write_weights(aside, groups, tensors, dtypes, max_shard_bytes, merge.rows, enabled=True)
        write_model_card(aside, base_name, trainer)


def _plan(adapter: Path, base: Path, trust_remote_code: bool) -> _Merge:
    lora = understood_adapter(adapter)
    model_config = load_model_config(base, trust_remote_code)
    if (note := getattr(model_config, "quantization_config", None)) is not None:
        method = (note if isinstance(note, dict) else note.to_dict()).get("quant_method", "bitsandbytes")
        raise UserError(
            f"{base}: quantized with {method}, and an adapter is merged into the original weights.\n--base_model names "
            "the unquantized model that it was made from."
        )
    new = tokens_added(lora, model_config)
    model = build_on_meta(model_config, ModelConfig(model_name=str(base), trust_remote_code=trust_remote_code), new)
    ties = _ties(model)
    stored: WeightSource = open_weights(base)
    converted = ConvertedSource(stored, model)
    account_for(model, grow(converted, model).tensors, base)
    weights = SafetensorsSource([adapter / ADAPTER_WEIGHTS])
    try:
        injected = inject_adapter(model, lora)
    except UserError as error:
        reason = "\n".join(error.messages).replace("--peft.", "")
        raise UserError(f"{adapter}: cannot be put into {base}.\n{reason}") from error
    changes = _changes(model, injected, weights.tensors, adapter / ADAPTER_WEIGHTS, base)

    names = {name: converted.stored_name(name) for name in {*converted.tensors, *changes}}
    made_of = {name: name for name in stored.tensors}
    is_untied = False
    for tie in ties:
        absent = [name for name in tie if not names.get(name)]
        if len({changes.get(name) for name in tie}) == 1:
            changes = {name: change for name, change in changes.items() if name not in absent}
        else:  # what was one tensor is no longer the same everywhere
            is_untied = True
            source = next(stored_name for name in tie if (stored_name := names.get(name)))
            made_of |= dict.fromkeys(absent, source)
            names |= {name: name for name in absent}
    for name in changes:
        if not names[name]:
            raise UserError(
                f"{adapter}: changes {name}, which {base} stores in several tensors or joined with others.\n{USE_PEFT}"
            )
    by_stored_name = {str(names[name]): change for name, change in changes.items()}
    grown = grow(stored, model, converted.stored_name)
    return _Merge(grown, weights, injected.keys, made_of, by_stored_name, is_untied, model_config)


def understood_adapter(adapter: Path) -> LoraConfig:
    """Return a saved adapter's settings.

    Raises:
        UserError: not all of them are understood here, so that the result would be another model.
    """
    lora, defaults = saved_config(adapter), LoraConfig()
    settings = json.loads((adapter / ADAPTER_CONFIG).read_text())
    others = {
        name: value
        for name, value in settings.items()
        if (name not in UNDERSTOOD and value and value != getattr(defaults, name, None))
        or (name == "init_lora_weights" and value not in LEAVES_THE_BASE_ALONE)
        or (name == "task_type" and value not in (None, "CAUSAL_LM"))
    }
    if others:
        named = ", ".join(f"{name} = {value}" for name, value in others.items())
        raise UserError(f"{adapter / ADAPTER_CONFIG}: adapters with {named} are not read here.\n{USE_PEFT}")
    return lora


def tokens_added(lora: LoraConfig, model_config: PretrainedConfig) -> NewTokens | None:
    """Return the tokens whose rows a saved adapter trains, if there are any."""
    ids, stored_rows = sorted(rows_trained(lora)), vocabulary_size(model_config) or 0
    return NewTokens(ids, stored_rows, max(stored_rows, ids[-1] + 1)) if ids else None


def _ties(model: PreTrainedModel) -> list[list[str]]:
    """Names of parameters that are one tensor."""
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    return [names for names in aliases.values() if len(names) > 1]


def _changes(
    model: PreTrainedModel, adapter: Adapter, headers: dict[str, StoredTensor], file: Path, base: Path
) -> dict[str, _Change]:
    """Name of a tensor of the model -> what the adapter does to it; every tensor of the adapter is accounted for."""
    own = {id(p): adapter.keys[name] for name, p in model.named_parameters() if name in adapter.keys}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    # peft also saves the weight of an embedding that has an adapter.
    base_weights = {f"{PEFT_PREFIX}{name}": p for name, p in parameters.items() if id(p) not in own}
    saved_too = {key: p for key, p in base_weights.items() if key in headers and headers[key].shape == tuple(p.shape)}
    # And, beside a resized embedding, the trained rows of a tied head a second time.
    rows = {name: layer for name, layer in model.named_modules() if isinstance(layer, TokenRows)}
    copies = {f"{PEFT_PREFIX}{name}.trainable_tokens_delta" for name, layer in rows.items() if layer.tied_adapter}
    own_headers = {key: header for key, header in headers.items() if key not in copies | saved_too.keys()}
    check_saved_adapter(own_headers, model, adapter, file, str(base))
    replacing = own | {id(p): key for key, p in saved_too.items()}
    replaced = {
        checkpoint_key(name): replacing[id(p)]
        for name, p in parameters.items()
        if id(p) in replacing and not is_adapter_weight(name)
    }
    new_rows = {
        checkpoint_key(f"{name}.base_layer.weight"): (
            own[id(layer.trainable_tokens_delta["default"])],
            tuple(layer.token_indices["default"]),
        )
        for name, layer in rows.items()
    }
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            layer = module.get_base_layer()
            if not isinstance(layer, (nn.Linear, Conv1D, nn.Embedding)):
                raise UserError(f"{file}: {name} is a {type(layer).__name__}, not merged here.\n{USE_PEFT}")
            layers[checkpoint_key(f"{name}.base_layer.weight")] = (name, module)
    every = {**replaced, **layers, **new_rows}
    return {name: _Change(replaced.get(name), layers.get(name), new_rows.get(name)) for name in every}


def _write_settings(folder: Path, base: Path, adapter: Path, save_dtype: torch.dtype | None, merge: _Merge) -> None:
    """config.json as the base has it, with what is new; the tokenizer trained with, or else the base's."""
    settings = json.loads((base / "config.json").read_text())
    if save_dtype is not None:
        for key in {"dtype", "torch_dtype"} & settings.keys() or {"dtype"}:
            settings[key] = str(save_dtype).removeprefix("torch.")
    if "vocab_size" in settings:
        settings["vocab_size"] = vocabulary_size(merge.config)
    if merge.is_untied:
        settings["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    tokenizer = adapter if any(adapter.glob("tokenizer*")) else base
    for source, patterns in ((base, CARRIED_OVER), (tokenizer, TOKENIZER_PATTERNS)):
        for pattern in patterns:
            for file in source.glob(pattern):
                target = folder / file.relative_to(source)
                target.parent.mkdir(exist_ok=True)
                shutil.copy(file, target)
    if any(folder.glob("tokenizer*")):
        stop_at_turns(folder, load_tokenizer(folder, trust_remote_code=False), base)
