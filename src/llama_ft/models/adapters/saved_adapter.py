"""Whether a saved adapter fits the model: its tensors, and the base model that it names."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from llama_ft.config.home import expanded
from llama_ft.errors import UserError
from llama_ft.models.adapters.adapter_config import ADAPTER_CONFIG
from llama_ft.models.adapters.names import PEFT_PREFIX, ModelNames, checkpoint_key
from llama_ft.models.base.source import (
    SafetensorsSource,
    StoredTensor,
    WeightSource,
    blocks,
    fingerprint,
    listed,
)
from llama_ft.models.built import BuiltModel

HUB_CACHE = re.compile(r"models--([^/]+)--([^/]+)")  # the directory of a repository


def check_saved_adapter(
    headers: Mapping[str, StoredTensor],
    built: BuiltModel,
    names: ModelNames,
    file: Path,
    base: str = "--model_name",
) -> dict[str, str]:
    """Check that a saved adapter's tensors are those that the model's adapter needs. `names`: of the
    model.

    Returns:
        Weights of the base model that the file holds, too: name in the file -> name of the
        parameter. PEFT writes embedding and LM head if save_embedding_layers is set, or if it
        finds that the vocabulary was resized.

    Raises:
        UserError: other tensors are missing or unexpected, or a shape differs.
    """
    assert built.adapter is not None
    adapter_keys = built.adapter.keys
    needed = {
        adapter_keys[name]: tuple(parameter.shape)
        for name, parameter in built.model.named_parameters()
        if name in adapter_keys
    }
    stored = {key: header.shape for key, header in headers.items()}
    copies = dict[str, str]()
    for key in stored.keys() - needed.keys():
        name = checkpoint_key(key.removeprefix(PEFT_PREFIX))
        if name in names.aliases:
            copies[key] = name
    keys = sorted((needed.keys() | stored.keys()) - copies.keys())
    wrong = [
        f"{key} {stored.get(key)} for {needed.get(key)}"
        for key in keys
        if needed.get(key) != stored.get(key)
    ]
    if wrong:
        raise UserError(
            f"{file}: does not fit {base}; was it trained on another model?\nIt has {listed(wrong)}."
        )
    return dict(sorted(copies.items()))


def differing_copies(
    file: Path, copies: Mapping[str, str], names: ModelNames, base: WeightSource
) -> str | None:
    """Compare weights of the base model that a saved adapter holds, too, with the base's own.

    Args:
        file: of the adapter.
        copies: from check_saved_adapter.
        names: of the model.
        base: the weights of the base model, by the model's names.

    Returns:
        An error message if they differ, or None.
    """
    source = SafetensorsSource([file])
    different = []
    for key, name in copies.items():
        aliases = names.aliases[name]  # a tied weight may have either name
        stored_name = next((alias for alias in aliases if alias in base.tensors), name)
        shape = source.tensors[key].shape
        own_shape = base.tensors[stored_name].shape
        if shape != own_shape:
            different.append(f"{name} {list(shape)} for {list(own_shape)}")
        elif not _are_equal(source, key, base, stored_name):
            different.append(f"{name}, with other values")
    if not different:
        return None
    return (
        f"{file}: in addition to the adapter, it holds weights that differ from the base model's: "
        f"{listed(different)}. They were resized or trained, and PEFT puts them into the base model.\n"
        "Merge the adapter with merge_and_unload of PEFT, or name the base model that they belong to."
    )


def left_out(file: Path, copies: Mapping[str, str]) -> str:
    """Return a log line about weights of the base model that a saved adapter holds, too."""
    return f"{file}: left out {listed(list(copies.values()))}, equal to the base model's own."


def _are_equal(source: WeightSource, key: str, base: WeightSource, name: str) -> bool:
    pairs = zip(blocks(source, key), blocks(base, name), strict=True)
    return all(torch.equal(saved, own.to(saved.dtype)) for saved, own in pairs)


def other_base(adapter: Path, given: str, folder: Path) -> str | None:
    """Return a warning if a saved adapter names another base model than the one it is put on, or
    None. Models of the same architecture have equal shapes, so no tensor shows it.

    Args:
        adapter: its directory.
        given: Hub name or directory of the base model.
        folder: the directory of the base model.
    """
    try:
        named = json.loads((adapter / ADAPTER_CONFIG).read_text())["base_model_name_or_path"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    if not named or not isinstance(named, str) or _is_same_model(adapter, named, given, folder):
        return None
    return (
        f"{adapter}: {ADAPTER_CONFIG} names the base model {named}, but {given} is used. "
        "An adapter is worthless on another model than the one it was trained on, or its unquantized form."
    )


def other_content(checkpoint: Path, recorded: str | None, given: str, folder: Path) -> str | None:
    """Return a warning if the content of a base model is not the one that a run has recorded."""
    if recorded is None or recorded == fingerprint(folder):
        return None
    return (
        f"{checkpoint}: its run had another base model than {given}: config.json or weights differ. "
        "The result is worthless unless it is the same model in another format."
    )


def _is_same_model(adapter: Path, named: str, given: str, folder: Path) -> bool:
    named_name = _portable(named)
    given_name = _portable(given)
    if named_name == given_name:
        return True
    recorded = _recorded_fingerprint(adapter)
    if recorded is not None:
        return recorded == fingerprint(folder)
    place = expanded(named)
    if (place / "config.json").is_file():
        is_same: bool = place.samefile(folder) or fingerprint(place) == fingerprint(folder)
        return is_same
    # A directory may have moved, or be a download: only its name is left.
    on_hub = [
        name.count("/") == 1 and not name.startswith(("/", ".", "~"))
        for name in (named_name, given_name)
    ]
    return not all(on_hub) and Path(named_name).name.lower() == Path(given_name).name.lower()


def _portable(name: str) -> str:
    """Return the Hub name of a directory in the Hub's cache; other names unchanged."""
    match = HUB_CACHE.search(name)
    return f"{match[1]}/{match[2]}" if match else name.rstrip("/")


def _recorded_fingerprint(adapter: Path) -> str | None:
    """Return the fingerprint of the base model that a run recorded for its adapter, RUN/model."""
    for file in sorted(adapter.parent.glob("checkpoints/step-*/trainer.json"), reverse=True):
        try:
            recorded: str = json.loads(file.read_text())["contents"]["model_name"]
        except (OSError, ValueError, LookupError, TypeError):
            continue
        return recorded
    return None
