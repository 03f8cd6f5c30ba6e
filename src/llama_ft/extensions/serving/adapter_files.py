"""What an inference server reads of an adapter and of its base model: settings, names and shapes of
tensors."""

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from llama_ft.errors import UserError, reason
from llama_ft.models.adapters.adapter_config import ADAPTER_CONFIG
from llama_ft.models.adapters.names import ADAPTER_WEIGHTS, PEFT_PREFIX
from llama_ft.models.base.source import INDEX_FILE

Shape = tuple[int, ...]
PARTS = re.compile(r"\.lora_(?:A|B|embedding_A|embedding_B|magnitude_vector)(?:\.weight)?$")
# Of what is not packed, as weights in 4 bits are
PLAIN_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
NOT_TEXT = ("vision", "visual", "image", "audio")


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter as PEFT saves it.

    Attributes:
        settings: of adapter_config.json.
        shapes: name of a tensor -> its shape.
    """

    settings: Mapping[str, Any]
    shapes: Mapping[str, Shape]

    @property
    def modules(self) -> list[str]:
        """The names of its layers, without PEFT's prefix."""
        names = dict[str, None]()
        for name in self.shapes:
            if PARTS.search(name):
                names[PARTS.sub("", name).removeprefix(PEFT_PREFIX)] = None
        return list(names)

    @property
    def other_tensors(self) -> list[str]:
        """The names of tensors that are not LoRA's."""
        return [name for name in self.shapes if not PARTS.search(name)]

    @property
    def rank(self) -> int:
        """The highest rank of its layers."""
        patterns = (self.settings.get("rank_pattern") or {}).values()
        return max(int(self.settings.get("r") or 1), *map(int, patterns), 1)

    def setting_of(self, module: str, name: str, pattern_name: str) -> Any:
        """The value of a setting for a layer: of the first pattern that fits its name, if one does.
        Source: get_pattern_key of PEFT."""
        patterns: Mapping[str, Any] = self.settings.get(pattern_name) or {}
        for pattern, value in patterns.items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        return self.settings.get(name)

    def shape(self, module: str, part: str) -> Shape | None:
        """The shape of lora_A or lora_B of a layer."""
        return self.shapes.get(f"{PEFT_PREFIX}{module}.lora_{part}.weight")


@dataclass(frozen=True)
class BaseFiles:
    """The base model of an adapter.

    Attributes:
        name: for commands: its Hub name, or its directory.
        config: of config.json.
        names: of the tensors in its files; empty without weights.
        template: its own chat template.
        stops: the tokens at which it ends.
        shapes: name -> shape, of the tensors whose file is here and which are not packed.
    """

    name: str
    config: Mapping[str, Any]
    names: frozenset[str]
    template: Any = None
    stops: Any = None
    shapes: Mapping[str, Shape] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        """The class of the model, by which servers choose theirs."""
        return str((self.config.get("architectures") or ["?"])[0])

    @property
    def text(self) -> Mapping[str, Any]:
        """The settings of the part that reads text."""
        text: Mapping[str, Any] = self.config.get("text_config") or self.config
        return text

    @property
    def dtype(self) -> str:
        """The precision in which a merged model is written."""
        named = [
            part.get(key) for part in (self.config, self.text) for key in ("dtype", "torch_dtype")
        ]
        name = next((name for name in named if name), "bfloat16")
        return str(name) if name in ("bfloat16", "float16") else "bfloat16"

    @property
    def modules(self) -> set[str]:
        """The names of the layers that have tensors."""
        return {name.rpartition(".")[0] for name in self.names}

    def matrices(self) -> dict[str, list[Shape]]:
        """The shapes of the linear layers of the text part: the end of a name, from its last number
        on -> shapes. The beginning depends on who has saved the model."""
        matrices = dict[str, list[Shape]]()
        for name, shape in self.shapes.items():
            is_linear = name.endswith(".weight") and len(shape) == 2
            if is_linear and not any(word in name for word in NOT_TEXT):
                matrices.setdefault(numbered_end(name.removesuffix(".weight")), []).append(shape)
        return matrices


def read_adapter(folder: Path, place: str = "") -> SavedAdapter:
    """Read the settings and the names of a saved adapter.

    Args:
        folder: of the adapter.
        place: for messages; "": the directory.

    Raises:
        UserError: they cannot be read, or do not fit.
    """
    place = place or str(folder)
    try:
        settings = json.loads((folder / ADAPTER_CONFIG).read_text())
        _check_settings(settings)
        with safe_open(folder / ADAPTER_WEIGHTS, "pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
        adapter = SavedAdapter(settings, shapes)
        _check_tensors(adapter)
    except (OSError, ValueError, re.error, SafetensorError) as error:
        raise UserError(f"{place}: the adapter cannot be read ({reason(error)}).") from error
    return adapter


def _check_tensors(adapter: SavedAdapter) -> None:
    """Raise ValueError if A or B is missing, or has another rank than the settings say."""
    is_lora = adapter.settings.get("peft_type", "LORA") == "LORA"
    if not adapter.shapes or (is_lora and not adapter.modules):
        raise ValueError(f"{ADAPTER_WEIGHTS} has no tensors of LoRA, such as q_proj.lora_A.weight")
    for name in adapter.shapes:
        for one, other in (("A", "B"), ("B", "A")):
            partner = re.sub(rf"\.lora_(embedding_)?{one}\b", rf".lora_\1{other}", name)
            if partner not in adapter.shapes:
                raise ValueError(f"{partner} is missing")
    for module in adapter.modules:
        shape = adapter.shape(module, "A")
        rank = adapter.setting_of(module, "r", "rank_pattern")
        if shape is not None and ".experts" not in module and shape[0] != rank:
            raise ValueError(f"{module} has rank {shape[0]}, and in {ADAPTER_CONFIG} {rank}")


def _check_settings(settings: Any) -> None:
    """Raise ValueError if numbers of adapter_config.json are none."""
    if not isinstance(settings, dict):
        raise ValueError(f"{ADAPTER_CONFIG} has no settings")
    is_lora = settings.get("peft_type", "LORA") == "LORA"
    for name in ("r", "lora_alpha") if is_lora else ():
        value = settings.get(name)  # servers have other defaults than PEFT, or none
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{ADAPTER_CONFIG}: {name} is {value!r}; expected a number")
    for name in ("rank_pattern", "alpha_pattern"):
        pattern = settings.get(name) or {}
        is_table = isinstance(pattern, dict)
        if not is_table or not all(isinstance(value, int | float) for value in pattern.values()):
            raise ValueError(f"{ADAPTER_CONFIG}: {name} is not a table of numbers")
        for key in pattern:
            re.compile(key)


def read_base(folder: Path, name: str) -> BaseFiles:
    """Read the config and the names of a base model. `name`: the user's name for it."""
    config = read_json(folder / "config.json")
    generation = read_json(folder / "generation_config.json") or config
    tensors = stored_tensors(folder)
    return BaseFiles(
        portable(name),
        config,
        frozenset(tensors),
        read_template(folder),
        generation.get("eos_token_id"),
        {name: shape for name, shape in tensors.items() if shape is not None},
    )


def stored_tensors(folder: Path) -> dict[str, Shape | None]:
    """Return name -> shape of the tensors in a model's safetensors files. None: the file is not here,
    or the tensor is packed."""
    index = read_json(folder / INDEX_FILE).get("weight_map") or {}
    tensors: dict[str, Shape | None] = dict.fromkeys(index)
    paths = {folder / file for file in index.values()} or set(folder.glob("*.safetensors"))
    for path in paths:
        with suppress(OSError, SafetensorError), safe_open(path, "pt") as file:
            for name in file.keys():
                stored = file.get_slice(name)
                is_plain = stored.get_dtype() in PLAIN_DTYPES
                tensors[name] = tuple(stored.get_shape()) if is_plain else None
    return tensors


def numbered_end(module: str) -> str:
    """Return the end of a layer's name from its last number on: 3.self_attn.q_proj."""
    return re.sub(r"^.*\.(?=\d+\.)", "", module)


def find_misfit(adapter: SavedAdapter, base: BaseFiles) -> str:
    """Return a sentence about a layer of an adapter that the base model has not, or in another size;
    "" if there is none."""
    matrices = base.matrices()
    numbers = {part for name in base.names for part in name.split(".") if part.isdigit()}
    for module in adapter.modules:
        number = numbered_end(module).partition(".")[0]
        if number.isdigit() and numbers and number not in numbers:
            return f"{module} is in the adapter, and the base model has no layer {number}"
        inner = adapter.shape(module, "A")
        outer = adapter.shape(module, "B")
        stored = matrices.get(numbered_end(module))
        if inner is None or outer is None or stored is None:
            continue
        size = (outer[0], inner[1])
        if size not in stored and size[::-1] not in stored:  # GPT-2 stores them transposed
            here = " x ".join(map(str, size))
            there = " x ".join(map(str, stored[0]))
            return f"{module} has {here} weights in the adapter, and {there} in the base model"
    return ""


def read_template(folder: Path) -> Any:
    """Return the chat template of a tokenizer's directory, or None."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    return read_json(folder / "tokenizer_config.json").get("chat_template")


def read_json(file: Path) -> dict[str, Any]:
    """Return the settings of a JSON file; {} if it cannot be read."""
    with suppress(OSError, ValueError):
        settings = json.loads(file.read_text())
        if isinstance(settings, dict):
            return settings
    return {}


def portable(name: str) -> str:
    """Return the Hub name of a directory in the Hub's cache; other names unchanged."""
    match = re.search(r"models--([^/]+)--([^/]+)", name)
    return f"{match[1]}/{match[2]}" if match else name.rstrip("/")
