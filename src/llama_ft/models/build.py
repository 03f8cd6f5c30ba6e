"""The model without its weights: every parameter and buffer on the meta device, shapes and no storage."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from llama_ft.config import ModelConfig
from llama_ft.errors import UserError, reason
from llama_ft.models.conversion import note_conversions
from llama_ft.models.new_tokens import NewTokens, note_growth
from llama_ft.models.source import listed
from llama_ft.runtime.console import log
from llama_ft.runtime.devices import Precision


def load_tokenizer(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder; a UserError if there is none, or it cannot be read."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        # For some models (Qwen, Gemma), transformers makes up a tokenizer of special tokens when the files are missing.
        if len(tokenizer) == len(tokenizer.get_added_vocab()):
            files = dict.fromkeys(["tokenizer.json", *tokenizer.vocab_files_names.values()])
            absent = ", ".join(file for file in files if not (folder / file).exists())
            raise ValueError(f"it has only special tokens; missing: {absent}")
        return tokenizer
    except Exception as error:  # transformers raises half a dozen types here, all meaning the same to the user
        raise UserError(f"{folder}: no usable tokenizer ({reason(error)}). --tokenizer_name names another.") from error


def load_model_config(folder: Path, trust_remote_code: bool) -> PretrainedConfig:
    """The model's config.json; a UserError if it is missing, malformed or of an unknown architecture."""
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # as above
        raise UserError(f"{folder}: its config.json cannot be used ({reason(error)}).") from error


def build_on_meta(config: PretrainedConfig, model: ModelConfig, new: NewTokens | None = None) -> PreTrainedModel:
    """The causal language model of `config` on the meta device, tied weights tied, with rows for new tokens. A
    UserError if transformers has none, it also takes images or sound, or its attention is not available here."""
    # AutoModelForCausalLM builds the whole model for some of these (gemma3) and only its decoder for others (qwen3_5),
    # whose export would lack the vision tower. Phi-4-multimodal has no text_config.
    if any(key.startswith(("vision", "audio")) for key in config.sub_configs) or config.get_text_config() is not config:
        problem = f"models of model_type {config.model_type} also take images or sound"
        raise UserError(f"--model_name {model.model_name}: {problem}; only text models are supported.")
    if new is not None:
        config.get_text_config().vocab_size = new.rows
    try:
        with torch.device("meta"):
            skeleton: PreTrainedModel = AutoModelForCausalLM.from_config(
                config,
                dtype=torch.float32,
                attn_implementation=None if model.attn_implementation == "auto" else model.attn_implementation,
                trust_remote_code=model.trust_remote_code,
            )
    except Exception as error:  # as above: KeyError of a name it does not know, RuntimeError of a negative size
        raise UserError(
            f"--model_name {model.model_name}: transformers cannot build a causal language model of model_type "
            f"{config.model_type} ({type(error).__name__}: {reason(error)})."
        ) from error
    skeleton.tie_weights()
    note_conversions(skeleton)
    if new is not None and new.rows > new.stored_rows:
        note_growth(skeleton, new)
    return skeleton


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The model's decoder layers from input to output, of the classes that transformers names in `_no_split_modules`;
    of those within one another (Mamba's) the outermost. fully_shard derives a class of its own from theirs."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    modules = dict(model.named_modules())
    found = {name: m for name, m in modules.items() if not kinds.isdisjoint(kind.__name__ for kind in type(m).__mro__)}
    return [m for name, m in found.items() if not any(name.startswith(f"{outer}.") for outer in found)]


def function_beside(module: nn.Module, name: str) -> Callable[..., Any]:
    """A function of the file that a module's class is written in; fully_shard derives a class of its own from that."""
    files = [sys.modules[kind.__module__] for kind in type(module).__mro__]
    found: Callable[..., Any] = next(getattr(file, name) for file in files if hasattr(file, name))
    return found


def router_loss(model: PreTrainedModel, output: Any, attention_mask: torch.Tensor | None) -> torch.Tensor | float:
    """The auxiliary loss of a mixture of experts: the model's own load balancing loss of the tokens of its `output`,
    times its own coefficient; 0 in evaluation, and unless config.json asks for it by output_router_logits."""
    if not model.training or not getattr(output, "router_logits", None):
        return 0.0
    balance = function_beside(model, "load_balancing_loss_func")
    experts: dict[str, Any] = {"num_experts": model.num_experts, "top_k": model.num_experts_per_tok}
    loss: torch.Tensor = balance(output.router_logits, **experts, attention_mask=attention_mask)
    return loss * cast(float, model.router_aux_loss_coef)


def freeze_first_layers(model: PreTrainedModel, count: int) -> None:
    """Keep the first `count` decoder layers as they are in training; a UserError if the model has no more than that."""
    layers = decoder_layers(model)
    if count >= len(layers):
        raise UserError(f"--num_freeze_layers {count}: this model has {len(layers)} decoder layers; freeze fewer.")
    for layer in layers[:count]:
        layer.requires_grad_(False)


def set_storage_dtypes(model: nn.Module, precision: Precision) -> None:
    """Give each (meta) parameter the dtype it is stored in: trained ones and frozen ones may differ."""
    for parameter in model.parameters():
        if parameter.is_floating_point():  # quantized weights keep theirs
            parameter.data = parameter.data.to(precision.trained if parameter.requires_grad else precision.frozen)


def vocabulary_size(config: PretrainedConfig) -> int | None:
    """Rows of the model's embedding: token ids lie below. None where config.json does not say."""
    return getattr(config.get_text_config(), "vocab_size", None)


def find_new_tokens(
    tokenizer: PreTrainedTokenizerBase, folder: Path, model_config: PretrainedConfig, model: ModelConfig
) -> NewTokens | None:
    """What the run's tokenizer has and the model does not know: ids without a row, and tokens that the tokenizer in the
    model's folder lacks or has under another id. Logs them. None without --resize_embeddings, or if there are none."""
    if not model.resize_embeddings:
        return None
    stored: int = model_config.get_text_config().vocab_size
    names = {id_: token for token, id_ in tokenizer.get_vocab().items()}
    try:
        known = load_tokenizer(folder, model.trust_remote_code).get_vocab()
    except UserError:  # it has none, and --tokenizer_name names another
        known = tokenizer.get_vocab()
    ids = sorted(id_ for id_, token in names.items() if id_ >= stored or known.get(token) != id_)
    new = NewTokens(ids, stored, max([stored, *(id_ + 1 for id_ in ids)]))
    log.info(
        f"--resize_embeddings: {len(ids):,} tokens are new to the model ({listed([names[i] for i in ids])}); the "
        f"embedding has {new.rows:,} rows, {new.rows - stored:,} of them new, which begin as the mean of the others."
    )
    return new if ids else None


def resolve_context_length(asked: int | None, config: PretrainedConfig) -> int:
    """Longest sample in tokens: what was asked for, else the model's maximum but at most 4096. A UserError if more was
    asked for than the model has positions."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if asked is None:
        return min(longest or 4096, 4096)
    if longest is not None and asked > longest:
        raise UserError(f"--context_length {asked}: this model has {longest} positions; use {longest} or less.")
    return asked
