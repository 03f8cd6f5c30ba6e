"""The model that answers, which reinforcement learning calls the policy: what identifies it in
round.json."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from llama_ft import data, models
from llama_ft.config import base_model_of
from llama_ft.config.paths import recorded_prompt_format
from llama_ft.data.tokenize.prompt_tokens import PromptFormat
from llama_ft.errors import UserError
from llama_ft.export import find_valid
from llama_ft.extensions.rollouts.prompts import PromptTokens
from llama_ft.extensions.rollouts.rounds import sha256_of
from llama_ft.extensions.rollouts.sampling import positions
from llama_ft.inference.flags import ModelFlags, find_result, settings_of_run
from llama_ft.inference.load import LoadedModel
from llama_ft.models import BuiltModel
from llama_ft.runtime import Ranks

# files of a model, an adapter or a checkpoint that determine its answers
PATTERNS = (
    "*.safetensors",
    "config.json",
    "adapter_config.json",
    "tokenizer*",
    "*.jinja",
    "checksums.txt",  # of a checkpoint; it has the checksums of the weights
)
HUB_CHECKSUM_LENGTH = 64  # hex digits: the Hub's cache names large files by their SHA-256
# Of weights that are copied from a device at once. On the CPU nothing is copied.
BLOCK_BYTES = {"cuda": 64 * 2**20, "cpu": 0}


class PolicyFiles(NamedTuple):
    """Directories of a policy: the trained weights, and those of its base model, which may be the
    same."""

    held: Path
    base: Path


def find_policy(place: str, flags: ModelFlags, weights: bool = True) -> PolicyFiles:
    """Return where a model is. Raises UserError if it is not there. `weights`: they are needed, too."""
    if place == "demo":
        local = data.build_demo(data.cache_dir()).model_dir
    else:
        local = models.local_folder(place, "MODEL", weights=weights)
    kind, held = find_result(local) or ("model", local)
    base = flags.base_model
    if kind in ("checkpoint", "run"):
        held = find_valid(held).folder
        run = settings_of_run("checkpoint", held)
        base = base or (run.model.model_name if run is not None else None)
    elif kind == "adapter":
        base = base or base_model_of(str(held))
    if base is None or kind == "model":
        return PolicyFiles(held, held)
    return PolicyFiles(held, models.local_folder(base, "--base_model", weights=weights))


def checksum_of(files: PolicyFiles) -> str:
    """Return the checksum of a policy: of all files that determine its answers."""
    digest = hashlib.sha256()
    for folder in dict.fromkeys(files):
        paths = {path for pattern in PATTERNS for path in folder.glob(pattern)}
        if folder / "checksums.txt" in paths:
            paths = {path for path in paths if path.suffix != ".safetensors"}
        for path in sorted(paths):
            digest.update(f"{path.name} {_checksum_of_file(path)}\n".encode())
    return digest.hexdigest()


def trained_checksum(built: BuiltModel, ranks: Ranks, base: str = "") -> str:
    """Return the checksum of the trained weights and of a base model, on rank 0. All ranks call it:
    sharded weights are gathered one after another. The host waits for the device once per block."""
    digest = hashlib.sha256(base.encode())
    for block in _blocks(built, BLOCK_BYTES[ranks.device.type]):
        for name, value in _on_host(block, ranks).items():
            digest.update(name.encode())
            digest.update(value.numpy().data)
    return digest.hexdigest()


def _blocks(built: BuiltModel, most_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the trained parameters by name, in blocks of at most so many bytes. A larger parameter is
    alone."""
    block = dict[str, torch.Tensor]()
    size = 0
    for name, parameter in built.model.named_parameters():
        if not parameter.requires_grad:
            continue
        own = parameter.numel() * parameter.element_size()
        if block and size + own > most_bytes:
            yield block
            block = {}
            size = 0
        block[name] = parameter.detach()
        size += own
    if block:
        yield block


def _on_host(block: dict[str, torch.Tensor], ranks: Ranks) -> dict[str, torch.Tensor]:
    """Return the bytes of parameters, uint8, with one copy from the device; none on other ranks than
    0, which all must help to gather sharded ones."""
    values = []
    for value in block.values():
        values.append(value.full_tensor() if isinstance(value, DTensor) else value)
    if not ranks.is_main:
        return {}
    parts = [value.contiguous().flatten().view(torch.uint8) for value in values]
    joined = torch.cat(parts) if len(parts) > 1 else parts[0]
    on_host = joined.cpu().split([len(part) for part in parts])
    return dict(zip(block, on_host, strict=True))


def _checksum_of_file(path: Path) -> str:
    """Return the SHA-256 of a file. Of a large file in the Hub's cache it is the name."""
    blob = path.resolve()
    is_named = blob.parent.name == "blobs" and len(blob.name) == HUB_CHECKSUM_LENGTH
    return blob.name if is_named else sha256_of(path)


class ServedPolicy(NamedTuple):
    """What a server's policy needs on this machine.

    Attributes:
        tokenizer: with the chat template of the fine-tuning.
        stop_ids: the tokens that end an answer.
        tokens: makes the tokens of prompts.
    """

    tokenizer: PreTrainedTokenizerBase
    stop_ids: list[int]
    tokens: PromptTokens


def open_served(place: str, flags: ModelFlags, form: PromptFormat | None) -> ServedPolicy:
    """Load the tokenizer of a model that a server has. `form`: of prompts of text; None: as in the
    fine-tuning."""
    files = find_policy(place, flags, weights=False)
    if (files.held / "checksums.txt").is_file():
        raise UserError(
            f"{place}: a checkpoint, which no server loads. Name a final model or adapter, or a model of the Hub."
        )
    trust = flags.trust_remote_code
    folder = files.base
    if any(files.held.glob("tokenizer*")):
        folder = files.held
    if flags.tokenizer_name:
        folder = models.local_folder(flags.tokenizer_name, "--tokenizer_name", weights=False)
    tokenizer = models.load_tokenizer(folder, trust)
    config = models.load_model_config(files.base, trust)
    known = models.stop_ids(files.base, config)
    recorded: PromptFormat = "text" if recorded_prompt_format(files.held) == "text" else "chat"
    tokens = PromptTokens(
        tokenizer, form or recorded, models.vocabulary_size(config), positions(config)
    )
    return ServedPolicy(tokenizer, data.stop_token_ids(tokenizer, known), tokens)


def tokens_of(opened: LoadedModel, form: PromptFormat | None) -> PromptTokens:
    """Return what makes the tokens of prompts for a loaded model. `form`: as in `open_served`."""
    config = opened.model.config
    return PromptTokens(
        opened.tokenizer,
        form or opened.prompt_format,
        models.vocabulary_size(config),
        positions(config),
    )
