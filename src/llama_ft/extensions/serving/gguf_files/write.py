"""Write model.gguf and adapter.gguf."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from llama_ft.errors import UserError
from llama_ft.extensions.serving.adapter_files import SavedAdapter
from llama_ft.extensions.serving.gguf_files.architecture import (
    GgufModel,
    gguf_model,
    import_gguf,
    text_key,
)
from llama_ft.extensions.serving.gguf_files.vocabulary import write_vocabulary
from llama_ft.extensions.serving.judgment import AdapterVerdict, check_method, flag_without
from llama_ft.models.adapters.adapter_config import ADAPTER_CONFIG
from llama_ft.models.adapters.names import ADAPTER_WEIGHTS, PEFT_PREFIX
from llama_ft.models.base.source import INDEX_FILE, listed

MODEL_FILE = "model.gguf"
ADAPTER_FILE = "adapter.gguf"
Read = Callable[[], torch.Tensor]


def write_model(folder: Path) -> Path:
    """Replace the safetensors files of a written model by model.gguf. Matrices keep their precision,
    vectors become fp32, as llama.cpp wants them.

    Raises:
        UserError: llama.cpp would compute something else.
    """
    gguf = import_gguf()
    model = gguf_model(folder)
    files = sorted(folder.glob("*.safetensors"))
    tensors = dict[str, Read]()
    opened = [safe_open(file, "pt") for file in files]
    unknown = []
    for file in opened:
        for key in file.keys():
            name = model.name_of(key)
            if name is not None:
                tensors[name] = _reader(model, file, key)
            elif "vision" not in key and "multi_modal" not in key:
                unknown.append(key)
    if unknown:
        raise UserError(f"llama.cpp has no tensors for {listed(unknown, 3)}.")
    factors = model.rope_factors()
    if factors is not None:
        tensors["rope_freqs.weight"] = lambda: factors
    writer = gguf.GGUFWriter(None, model.architecture)
    writer.add_name(folder.name.removeprefix(".writing-"))
    model.write_settings(writer)
    write_vocabulary(writer, folder, gguf)
    _write(writer, folder / MODEL_FILE, tensors, gguf)
    del opened
    for path in (*files, folder / INDEX_FILE):
        path.unlink(missing_ok=True)
    return folder / MODEL_FILE


def _reader(model: GgufModel, file: Any, key: str) -> Read:
    def read() -> torch.Tensor:
        tensor = model.converted(text_key(key), file.get_tensor(key))
        return tensor.float() if tensor.dim() == 1 else tensor

    return read


def check_adapter(model: GgufModel, adapter: SavedAdapter) -> AdapterVerdict:
    """Judge an adapter for llama.cpp."""
    verdict = AdapterVerdict("llama.cpp")
    check_method(verdict, adapter)
    unknown = []
    for module in adapter.modules:
        is_matrix = adapter.shape(module, "A") is not None
        if not is_matrix or ".experts" in module or model.name_of(f"{module}.weight") is None:
            unknown.append(module)
        elif module.endswith("lm_head") and model.config.tie_word_embeddings:
            unknown.append(module)
    if unknown:
        verdict.refuse(f"it has no LoRA for {listed(unknown, 2)}.", flag_without(adapter, unknown))
    return verdict


def write_adapter(folder: Path, model: GgufModel, adapter: SavedAdapter) -> Path:
    """Replace the files of a written adapter by adapter.gguf.

    llama.cpp adds lora_alpha / rank * B A. If that is not the scaling of all layers, B is scaled.
    """
    gguf = import_gguf()
    scalings = {module: _scaling(adapter, module) for module in adapter.modules}
    alphas = {scaling * _rank(adapter, module) for module, scaling in scalings.items()}
    alpha = alphas.pop() if len(alphas) == 1 else 1.0
    tensors = dict[str, Read]()
    file = safe_open(folder / ADAPTER_WEIGHTS, "pt")
    for module, scaling in scalings.items():
        name = model.name_of(f"{module}.weight")
        factor = scaling * _rank(adapter, module) / alpha
        tensors[f"{name}.lora_a"] = _part(file, module, "A")
        tensors[f"{name}.lora_b"] = _scaled(model, _part(file, module, "B"), module, factor)
    writer = gguf.GGUFWriter(None, model.architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    _write(writer, folder / ADAPTER_FILE, tensors, gguf)
    del file
    for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG):
        (folder / name).unlink()
    return folder / ADAPTER_FILE


def _part(file: Any, module: str, part: str) -> Read:
    return lambda: file.get_tensor(f"{PEFT_PREFIX}{module}.lora_{part}.weight").float()


def _scaled(model: GgufModel, read: Read, module: str, factor: float) -> Read:
    return lambda: model.converted(f"{module}.weight", read()) * factor


def _rank(adapter: SavedAdapter, module: str) -> int:
    shape = adapter.shape(module, "A")
    assert shape is not None
    return shape[0]


def _scaling(adapter: SavedAdapter, module: str) -> float:
    """Return the factor of B A in a layer, as PEFT computes it."""
    alpha = float(adapter.setting_of(module, "lora_alpha", "alpha_pattern"))
    rank = _rank(adapter, module)
    return alpha / (rank**0.5 if adapter.settings.get("use_rslora") else rank)


def _write(writer: Any, path: Path, tensors: Mapping[str, Read], gguf: Any) -> None:
    """Write the settings, then one tensor after the other."""
    for name, read in tensors.items():
        array, kind = _as_array(read(), gguf)
        writer.add_tensor_info(name, array.shape, array.dtype, array.nbytes, kind)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for read in tensors.values():
        array, _ = _as_array(read(), gguf)
        writer.write_tensor_data(array)
    writer.close()


def _as_array(tensor: torch.Tensor, gguf: Any) -> tuple[np.ndarray[Any, Any], Any]:
    tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16:
        array: np.ndarray[Any, Any] = tensor.view(torch.uint8).numpy()
        return array, gguf.GGMLQuantizationType.BF16
    is_half = tensor.dtype == torch.float16
    kind = gguf.GGMLQuantizationType.F16 if is_half else gguf.GGMLQuantizationType.F32
    array = (tensor if is_half else tensor.float()).numpy()
    return array, kind


def for_adapter(base: Path, adapter: SavedAdapter) -> tuple[GgufModel, AdapterVerdict]:
    """Return how llama.cpp stores the base of an adapter, and its judgment."""
    model = gguf_model(base)
    return model, check_adapter(model, adapter)
