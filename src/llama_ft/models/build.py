"""Find a model's files, and build it without weights: parameters and buffers on the meta device,
without storage."""

import math
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import GatedRepoError, HFValidationError, HTTPError
from transformers import (
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import PreTrainedModel

from llama_ft import door
from llama_ft.config import ModelConfig
from llama_ft.config.home import expanded
from llama_ft.config.paths import (
    ADAPTER_FILES,
    TO_SAFETENSORS,
    folder_problem,
    looks_local,
    special_file,
)
from llama_ft.errors import UserError, plural, reason
from llama_ft.libraries.evidence import CAUSAL_MASK, IS_CAUSAL, MASK_OF_ENCODERS
from llama_ft.models.architecture.new_tokens import find_growth
from llama_ft.models.architecture.score_head import add_score
from llama_ft.models.architecture.text_part import auto_class, keep_text_part, names_score, stop_ids
from llama_ft.models.base.layers import takes_more_than_text
from llama_ft.models.base.replaced import replace_method
from llama_ft.models.base.replaced_functions import replace_functions
from llama_ft.models.base.source import listed
from llama_ft.models.built import BuiltModel, LeftOut, NewTokens
from llama_ft.models.packing.rope import use_rope_per_sample
from llama_ft.runtime.console import log

# README.md: the header of a model card says how the model is asked
NEEDED_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.py", "README.md"]
# Mistral and Meta store the same weights there a second time
DUPLICATES = ["consolidated*", "original/*"]
# first byte of a SentencePiece file (field 1 of protobuf); tiktoken's files are lines of base64
SENTENCEPIECE_BYTE = b"\n"


def local_folder(
    name: str,
    flag: str,
    ask_hub: bool = True,
    weights: bool = True,
) -> Path:
    """Return the directory of a model or tokenizer: `name` itself if it is a directory, else the
    Hub's cache, also if the Hub cannot be reached. Raises UserError if it does not exist, has no
    safetensors, or access is denied.

    Args:
        name: a local directory or a Hub name (owner/model).
        flag: the setting of `name`, for messages.
        ask_hub: False if another process of this node has already asked the Hub: the cache then has
            the files.
        weights: the weights (safetensors) are needed, too.
    """
    folder = expanded(name)
    if folder.is_dir():
        problem = special_file(folder)
        if problem:
            raise UserError(f"{flag} {name}: {problem}")
        return folder
    if looks_local(name):
        raise UserError(f"{flag} {name}: {folder_problem(folder, 'a directory')}")
    patterns = NEEDED_FILES + (["*.safetensors"] if weights else [])
    try:
        snapshot = snapshot_download(
            name, allow_patterns=patterns, ignore_patterns=DUPLICATES, local_files_only=not ask_hub
        )
    except (HFValidationError, HTTPError, OSError) as error:
        advice = "Use a local directory, or owner/model"
        if not weights and flag == "--model_name":  # of a plan
            advice = "A plan needs only config.json: name a directory that holds this file, or owner/model"
        if isinstance(error, GatedRepoError):
            advice = f"Ask for access at {constants.ENDPOINT}/{name}"
        raise UserError(
            f"{flag} {name}: no such directory, and {constants.ENDPOINT} does not provide it ({reason(error)}).\n"
            f"{advice}; `hf auth login` logs in (or set HF_TOKEN)."
        ) from error
    if weights and not any(Path(snapshot).glob("*.safetensors")):
        raise UserError(
            f"{flag} {name}: the repository has no safetensors weights. {TO_SAFETENSORS}"
        )
    return Path(snapshot)


def check_no_adapter(folder: Path, flag: str, continued: str | None = None) -> None:
    """Raise UserError if a model's directory also holds an adapter, which Transformers applies when
    it loads the model, unless that adapter is `continued`."""
    is_continued = continued and expanded(continued).resolve() == folder.resolve()
    if (folder / ADAPTER_FILES[0]).is_file() and not is_continued:
        raise UserError(
            f"{flag} {folder}: holds a model and an adapter ({ADAPTER_FILES[0]}), and Transformers would apply it. "
            f"Merge it:\npython recipes/export.py {folder} OUT --base_model {folder}"
        )


def portable_name(name: str, folder: Path) -> str:
    """Return the model's name for files that outlive the run: its Hub name, or its directory's
    absolute path."""
    is_local = name == "demo" or expanded(name).is_dir()
    return str(folder.resolve()) if is_local else name


def load_tokenizer(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a directory. Raises UserError if it is missing or cannot be read."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        # For some models (Qwen, Gemma) without tokenizer files, Transformers makes a tokenizer of
        # special tokens only.
        if len(tokenizer) == len(tokenizer.get_added_vocab()):
            raise ValueError("it has only special tokens: files such as tokenizer.json are missing")
        return tokenizer
    # Transformers raises many classes here, with one meaning for the user
    except Exception as error:
        if _needs_sentencepiece(folder):
            raise UserError(
                f"{folder}: its tokenizer is a SentencePiece file, and a package that reads it is missing.\n"
                "Install it: pip install sentencepiece protobuf"
            ) from error
        raise UserError(
            f"{folder}: no usable tokenizer ({reason(error)}). Set --tokenizer_name."
        ) from error


def _needs_sentencepiece(folder: Path) -> bool:
    """Whether a tokenizer is only a SentencePiece file and cannot be read. Without the package,
    Transformers takes such a file for tiktoken's."""
    if (folder / "tokenizer.json").exists() or find_spec("sentencepiece") is not None:
        return False
    for file in folder.glob("*.model"):
        if file.is_file():
            with open(file, "rb") as opened:
                if opened.read(1) == SENTENCEPIECE_BYTE:
                    return True
    return False


def build_on_meta(
    config: PretrainedConfig,
    model: ModelConfig,
    new: NewTokens | None = None,
    folder: Path = Path(),
    with_towers: bool = False,
) -> BuiltModel:
    """Build a causal language model on the meta device, with tied weights. Of a model for images or
    sound, build the text part only, unless samples have media.

    Args:
        config: the model's config. Its vocab_size is set if there are new tokens.
        model: settings: attention implementation, trust_remote_code.
        new: tokens for which embedding and LM head get further rows.
        folder: the directory of its weights, which are not read here.
        with_towers: build the towers, too.

    Raises:
        UserError: Transformers does not have the model, it has no text decoder, it takes no images,
            or a package for its code or its attention is missing.
    """
    replace_functions()
    if new is not None:
        config.get_text_config().vocab_size = new.rows
    skeleton = make_skeleton(config, model)
    skeleton.tie_weights()
    if skeleton.can_generate() and folder != Path():
        # Sample answers and scores end where those of the final model do.
        skeleton.generation_config.eos_token_id = stop_ids(folder, config) or None
    has_score = names_score(config)
    if has_score:
        add_score(skeleton)
    # By class names, which fully_shard changes.
    conversions = get_model_conversion_mapping(skeleton)
    left_out = LeftOut([], {})
    # Chameleon's config does not say that it takes images, but its class does.
    takes_images = "image" in skeleton.input_modalities
    is_multimodal = takes_more_than_text(skeleton.config) or takes_images
    towers = list[str]()
    if with_towers and not takes_images:
        raise UserError(
            f"--model_name {model.model_name}: {type(skeleton).__name__} takes no images. "
            "Choose a model that does."
        )
    if with_towers:
        towers = keep_text_part(make_skeleton(config, model)).modules
        door.media_reader().prepare_towers(skeleton)
    elif is_multimodal:
        left_out = keep_text_part(skeleton)
    if _is_encoder(skeleton, config, is_multimodal):
        raise UserError(
            f"--model_name {model.model_name}: {type(skeleton).__name__} is an encoder here "
            "(config.json: is_decoder), and only decoders can be fine-tuned."
        )
    use_rope_per_sample(skeleton)
    _never_rescale(skeleton)
    return BuiltModel(
        skeleton,
        folder,
        conversions,
        left_out,
        towers=towers,
        grown=find_growth(skeleton, new),
        has_score=has_score,
    )


def _never_rescale(model: PreTrainedModel) -> None:
    """Leave the weights of RWKV as they are. In eval mode it divides them in place, and hidden states
    by as much: against overflows of fp16. Quantized weights cannot be divided, and an export would
    have divided ones."""
    for module in model.modules():
        if hasattr(module, "_rescale_layers"):
            replace_method(module, "_rescale_layers", _keep_layers)


def make_skeleton(config: PretrainedConfig, model: ModelConfig) -> PreTrainedModel:
    """Let Transformers build the checkpoint's class without weights. Raises the errors of
    `build_on_meta`."""
    auto = auto_class(config, model.trust_remote_code)
    attention = None if model.attn_implementation == "auto" else model.attn_implementation
    try:
        # Parameters and buffers get shapes and dtypes only, and Transformers initializes nothing.
        with torch.device("meta"):
            skeleton: PreTrainedModel = auto.from_config(
                config,
                dtype=torch.float32,
                attn_implementation=attention,
                trust_remote_code=model.trust_remote_code,
            )
    # many classes: KeyError of a name it does not know, RuntimeError of a negative size
    except Exception as error:
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
    return skeleton


def _is_encoder(skeleton: PreTrainedModel, config: PretrainedConfig, is_multimodal: bool) -> bool:
    """Return whether tokens see the next ones, so that the loss would fall to 0. Transformers builds
    BERT and similar encoders with a warning only. PaliGemma's text part is such an encoder, too, but
    its config does not say so."""
    modules = [module for module in skeleton.modules() if hasattr(module, IS_CAUSAL)]
    are_causal = [getattr(module, IS_CAUSAL) for module in modules]
    if any(are_causal):
        return False
    functions = set[str]()
    for kind in type(skeleton).__mro__:
        functions.update(vars(sys.modules[kind.__module__]))
    # GPT-NeoX Japanese
    is_always_causal = CAUSAL_MASK in functions and MASK_OF_ENCODERS not in functions
    is_decoder = getattr(config, "is_decoder", True) or is_always_causal
    has_attention = bool(are_causal)
    return not is_decoder or (is_multimodal and has_attention)


def _keep_layers() -> None:
    """Take the place of RWKV's own method and leave the weights as they are."""


def vocabulary_size(config: PretrainedConfig) -> int | None:
    """Return the number of rows of the model's embedding; None if config.json does not say."""
    text = config.get_text_config()
    size: int | None = getattr(text, "vocab_size", None)
    if size is not None and text.model_type == "mllama_text_model":
        return size + 8  # for <|image|>, which the LM head cannot write
    return size


def find_new_tokens(
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    model_config: PretrainedConfig,
    model: ModelConfig,
) -> NewTokens | None:
    """Find and log the tokens of the run's tokenizer that the model does not know.

    Args:
        tokenizer: the run's tokenizer, with the tokens of its chat template.
        folder: the model's directory; its own tokenizer is compared.
        model_config: has the number of rows of the embedding.
        model: settings: resize_embeddings, trust_remote_code.

    Returns:
        Ids without a row, and ids of tokens that the model's own tokenizer lacks or has at another
        id. None without --resize_embeddings, or if there are none.
    """
    if not model.resize_embeddings:
        return None
    stored: int = model_config.get_text_config().vocab_size
    tokens = {id_: token for token, id_ in tokenizer.get_vocab().items()}
    models_own = load_tokenizer(folder, model.trust_remote_code).get_vocab()
    ids = []
    for id_, token in sorted(tokens.items()):
        if id_ >= stored or models_own.get(token) != id_:
            ids.append(id_)
    last = max(ids, default=-1)
    new = NewTokens(ids, stored, rows=max(stored, last + 1))
    names = listed([tokens[id_] for id_ in ids])
    log.info(
        f"--resize_embeddings: {plural(len(ids), 'new token')} ({names}). The embedding has "
        f"{new.rows:,} rows. The {new.rows - stored:,} new ones start as the mean of the others."
    )
    return new if ids else None


def resolve_context_length(setting: int | None, config: PretrainedConfig) -> int:
    """Return the maximum tokens of a sample: the setting, else the model's maximum, but at most
    4096. Raises UserError if the setting exceeds the model's positions."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if setting is not None and longest is not None and setting > longest:
        raise UserError(
            f"--context_length {setting}: this model has {longest} positions; use {longest} or less."
            f"{_how_to_scale(config.get_text_config(), setting, longest)}"
        )
    return setting or min(longest or 4096, 4096)


def _how_to_scale(config: PretrainedConfig, tokens: int, longest: int) -> str:
    """Return how to give a model with rotary embeddings `tokens` positions, on a line of its own; ""
    for other models, and for longrope, whose factors its authors have searched."""
    name = "rope_parameters"
    rope = getattr(config, name, None) or {}
    if "full_attention" in rope:  # parameters per kind of layer
        name = f"{name}.full_attention"
        rope = rope["full_attention"]
    kind = rope.get("rope_type", "longrope")
    if kind == "longrope":
        return ""
    scaled = rope.get("factor") or 1.0
    original = rope.get("original_max_position_embeddings") or round(longest / scaled)
    factor = max(math.ceil(tokens / original), math.ceil(scaled))
    changes = f'"factor": {factor}.0'
    if kind in ("default", "dynamic"):
        changes = f'"rope_type": "yarn", {changes}, "original_max_position_embeddings": {original}'
    return (
        f"\nFor longer samples, scale RoPE in a copy of the model: in its config.json set max_position_embeddings to "
        f"{factor * original}, and in {name} {changes}. Then train on samples of that length: without training, "
        "a scaled model answers worse."
    )
