"""From a model's name to the model without its weights: parameters and buffers on the meta device, without storage."""

import inspect
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import GatedRepoError, HFValidationError, HTTPError
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import PreTrainedModel

from llama_ft.config import ModelConfig
from llama_ft.config.paths import TO_SAFETENSORS
from llama_ft.errors import UserError, counted, reason
from llama_ft.models.new_tokens import NewTokens, note_growth
from llama_ft.models.quantized import QuantizedStacks
from llama_ft.models.score_head import add_score
from llama_ft.models.source import listed
from llama_ft.models.text_part import auto_class, keep_text_part, names_score, takes_more_than_text
from llama_ft.models.transformers_private import private
from llama_ft.runtime.console import log
from llama_ft.runtime.devices import Precision

NEEDED_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.py"]
DUPLICATES = ["consolidated*", "original/*"]  # where Mistral and Meta put the same weights a second time


def local_folder(name: str, flag: str, ask_hub: bool = True, weights: bool = True) -> Path:
    """The folder of a model or tokenizer: `name` itself if it is a folder, else the hub's files in its cache, also if
    the hub cannot be reached. A UserError if there is none, or no safetensors in it, or no access to it.

    Args:
        name: a local folder or a hub name (owner/model).
        flag: the setting `name` came from, for messages.
        ask_hub: False if another process of this node has just done so: the hub's cache then has it.
        weights: whether the weights are needed, which are safetensors.
    """
    if (folder := Path(name).expanduser()).is_dir():
        return folder
    patterns = NEEDED_FILES + (["*.safetensors"] if weights else [])
    try:
        found = snapshot_download(
            name, allow_patterns=patterns, ignore_patterns=DUPLICATES, local_files_only=not ask_hub
        )
    except (HFValidationError, HTTPError, OSError) as error:
        gated = f"Ask for access at {constants.ENDPOINT}/{name}" if isinstance(error, GatedRepoError) else None
        raise UserError(
            f"{flag} {name}: no such directory, and {constants.ENDPOINT} does not provide it ({reason(error)}).\n"
            f"{gated or 'Use a local directory, or owner/model'}; `hf auth login` logs in (or set HF_TOKEN)."
        ) from error
    if weights and not any(Path(found).glob("*.safetensors")):
        raise UserError(f"{flag} {name}: the Hugging Face Hub has no safetensors of it. {TO_SAFETENSORS}")
    return Path(found)


def portable_name(name: str, folder: Path) -> str:
    """What to call a model in files that outlive the run: its hub name, or its folder's absolute path."""
    return str(folder.resolve()) if name == "demo" or Path(name).expanduser().is_dir() else name


def load_tokenizer(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder; a UserError if there is none, or it cannot be read."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        # For some models (Qwen, Gemma), transformers makes up a tokenizer of special tokens when the files are missing.
        if len(tokenizer) == len(tokenizer.get_added_vocab()):
            raise ValueError("it has only special tokens: files such as tokenizer.json are missing")
        return tokenizer
    except Exception as error:  # transformers raises half a dozen types here, all meaning the same to the user
        raise UserError(f"{folder}: no usable tokenizer ({reason(error)}). Set --tokenizer_name.") from error


def load_model_config(folder: Path, trust_remote_code: bool) -> PretrainedConfig:
    """The model's config.json; a UserError if it is missing, malformed or of an unknown architecture, if the model has
    no text decoder, or its code needs a package that is missing."""
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # as above
        raise UserError(f"{folder}: its config.json cannot be used ({reason(error)}).") from error
    auto_class(config, trust_remote_code)
    return config


def build_on_meta(config: PretrainedConfig, model: ModelConfig, new: NewTokens | None = None) -> PreTrainedModel:
    """Build a causal language model on the meta device, tied weights tied; of one that also takes images or sound, its
    text part.

    Args:
        config: of the model; not changed.
        model: settings: attention implementation, trust_remote_code.
        new: tokens for which embedding and head get further rows.

    Raises:
        UserError: transformers has no such model, it has no text decoder, or a package for its code or its attention is
            missing.
    """
    auto = auto_class(config, model.trust_remote_code)
    if new is not None:
        config.get_text_config().vocab_size = new.rows
    try:
        with torch.device("meta"):
            skeleton: PreTrainedModel = auto.from_config(
                config,
                dtype=torch.float32,
                attn_implementation=None if model.attn_implementation == "auto" else model.attn_implementation,
                trust_remote_code=model.trust_remote_code,
            )
    except Exception as error:  # as above: KeyError of a name it does not know, RuntimeError of a negative size
        if isinstance(error, ImportError) and model.attn_implementation.startswith("flash"):
            problem = f"--attn_implementation {model.attn_implementation}: {reason(error)}."
            raise UserError(f"{problem}\nInstall it, or use --attn_implementation sdpa.") from error
        if isinstance(error, ImportError):
            raise UserError(
                f"--model_name {model.model_name}: the code of model_type {config.model_type} needs a package that is "
                f"missing ({reason(error)})."
            ) from error
        raise UserError(
            f"--model_name {model.model_name}: transformers cannot build a causal language model of model_type "
            f"{config.model_type} ({type(error).__name__}: {reason(error)})."
        ) from error
    skeleton.tie_weights()
    if names_score(config):
        add_score(skeleton)
    # By class names, which fully_shard changes.
    skeleton._weight_conversions = get_model_conversion_mapping(skeleton)  # type: ignore[assignment]
    # Chameleon's config does not tell, its class does.
    if is_multimodal := takes_more_than_text(skeleton.config) or "image" in skeleton.input_modalities:
        keep_text_part(skeleton)
    # transformers builds BERT and its kin with a warning; there each token sees the next one, and the loss falls to 0.
    # PaliGemma's text part is another, whose config says nothing.
    are_causal = [module.is_causal for module in skeleton.modules() if hasattr(module, "is_causal")]
    masks = {name for kind in type(skeleton).__mro__ for name in vars(sys.modules[kind.__module__]) if "_mask" in name}
    is_always_causal = "create_causal_mask" in masks and "create_bidirectional_mask" not in masks  # GPT-NeoX Japanese
    is_encoder = not (getattr(config, "is_decoder", True) or is_always_causal) or (is_multimodal and bool(are_causal))
    if is_encoder and not any(are_causal):
        raise UserError(
            f"--model_name {model.model_name}: {type(skeleton).__name__} is an encoder here, not a decoder."
        )
    if new is not None and new.rows > new.stored_rows:
        note_growth(skeleton, new)
    return skeleton


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The model's decoder layers from input to output: of the classes that transformers names in `_no_split_modules`,
    of those within one another (Mamba's) the outermost. If it names none, the items of the list with the most
    parameters. fully_shard derives a class of its own from theirs."""
    kinds = set(private(model, "_no_split_modules") or ())
    modules = dict(model.named_modules())
    found = {name: m for name, m in modules.items() if not kinds.isdisjoint(kind.__name__ for kind in type(m).__mro__)}
    for name in [name for name, m in found.items() if any(isinstance(it, nn.Embedding) for it in m.children())]:
        del found[name]  # BERT's embeddings, which device_map must not split either
    layers = [m for name, m in found.items() if not any(name.startswith(f"{outer}.") for outer in found)]
    lists = [] if layers else [list(module) for module in modules.values() if isinstance(module, nn.ModuleList)]
    return max(lists, key=lambda items: sum(p.numel() for item in items for p in item.parameters()), default=layers)


def read_linears(model: nn.Module) -> set[nn.Module]:
    """Linear layers whose weight the module around them reads, in one of its ways to compute, instead of calling them:
    Mamba's kernels take out_proj's, LongCat's router its classifier's. An adapter would have no effect there."""
    found = set[nn.Module]()
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                reads = re.compile(rf"self\.{name}\.weight\b(?!\.(dtype|device|shape)|\[|, torch)")
                classes: list[Any] = [kind for kind in type(module).__mro__ if issubclass(kind, nn.Module)]
                sources = (_source_of(kind) for kind in classes)
                found |= {child} if any(reads.search(source) for source in sources) else set()
    return found


@cache
def _source_of(kind: Any) -> str:
    """The source of a class of a model's code; nothing of torch's, or of one that has no file."""
    with suppress(OSError, TypeError):
        return "" if kind.__module__.startswith("torch.") else inspect.getsource(kind)
    return ""


def function_beside(module: nn.Module, name: str) -> Callable[..., Any]:
    """A function of the file that a module's class is written in; fully_shard derives a class of its own from that."""
    files = [sys.modules[kind.__module__] for kind in type(module).__mro__]
    return cast(Callable[..., Any], next(getattr(file, name) for file in files if hasattr(file, name)))


def freeze_first_layers(model: PreTrainedModel, count: int) -> None:
    """Keep the first `count` decoder layers as they are in training."""
    if count >= len(layers := decoder_layers(model)):
        raise UserError(f"--num_freeze_layers {count}: this model has {len(layers)} decoder layers; freeze fewer.")
    for layer in layers[:count]:
        layer.requires_grad_(False)


def set_storage_dtypes(model: nn.Module, precision: Precision) -> None:
    """Give each (meta) parameter the dtype it is stored in: trained ones and frozen ones may differ. Quantized stacks
    are dequantized to the dtype of computing."""
    for module in model.modules():
        if isinstance(module, QuantizedStacks):
            module.dtype = precision.compute
    for parameter in model.parameters():
        if parameter.is_floating_point():  # quantized weights keep theirs
            parameter.data = parameter.data.to(precision.trained if parameter.requires_grad else precision.frozen)


def vocabulary_size(config: PretrainedConfig) -> int | None:
    """Rows of the model's embedding: token ids lie below. None where config.json does not say."""
    return getattr(config.get_text_config(), "vocab_size", None)


def find_new_tokens(
    tokenizer: PreTrainedTokenizerBase, folder: Path, model_config: PretrainedConfig, model: ModelConfig
) -> NewTokens | None:
    """Find and log the tokens that the run's tokenizer has and the model does not know.

    Args:
        tokenizer: of the run, with its chat template's tokens.
        folder: of the model; its own tokenizer is compared.
        model_config: says how many rows the embedding has.
        model: settings: resize_embeddings, trust_remote_code.

    Returns:
        Ids without a row, and ids of tokens that the model's own tokenizer lacks or has elsewhere. None without
        --resize_embeddings, or if there are none.
    """
    if not model.resize_embeddings:
        return None
    stored: int = model_config.get_text_config().vocab_size
    names = {id_: token for token, id_ in tokenizer.get_vocab().items()}
    known = load_tokenizer(folder, model.trust_remote_code).get_vocab()
    ids = sorted(id_ for id_, token in names.items() if id_ >= stored or known.get(token) != id_)
    new = NewTokens(ids, stored, max([stored, *(id_ + 1 for id_ in ids)]))
    log.info(
        f"--resize_embeddings: {counted(len(ids), 'new token')} ({listed([names[i] for i in ids])}). The embedding has "
        f"{new.rows:,} rows. The {new.rows - stored:,} new ones start as the mean of the others."
    )
    return new if ids else None


def resolve_context_length(asked: int | None, config: PretrainedConfig) -> int:
    """Longest sample in tokens: what was asked for, else the model's maximum but at most 4096. A UserError if more was
    asked for than the model has positions."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if asked is not None and longest is not None and asked > longest:
        raise UserError(f"--context_length {asked}: this model has {longest} positions; use {longest} or less.")
    return asked or min(longest or 4096, 4096)
