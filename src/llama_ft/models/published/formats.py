"""The list of published formats."""

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

from llama_ft.models.published.quantization_config import find_quantization_config
from llama_ft.models.published.weight_format import WeightFormat

# quant_method in config.json -> the module and class of its format, loaded when a checkpoint has it
FORMATS = {
    "fp8": "llama_ft.models.published.fp8:Fp8",
    "mxfp4": "llama_ft.models.published.mxfp4:Mxfp4",
    "compressed-tensors": "llama_ft.models.published.compressed_tensors:CompressedTensors",
    "gptq": "llama_ft.models.published.gptq:Gptq",
    "awq": "llama_ft.models.published.awq:Awq",
    "modelopt": "llama_ft.models.published.modelopt:ModelOpt",
}


def published_format(settings: Mapping[str, Any]) -> WeightFormat | None:
    """Return the format of a checkpoint by its config.json; None if it is in 16 bits, or in a format
    that is not published here. Raises UserError if its variant cannot be read."""
    quantization_config = find_quantization_config(settings)
    if quantization_config is None or quantization_config.get("quant_method") not in FORMATS:
        return None
    kind = _load(quantization_config["quant_method"])
    weight_format = kind(quantization_config)
    weight_format.check()
    return weight_format


def tensor_suffixes() -> tuple[str, ...]:
    """Return the ends of the names of codes, scales and zero points of all formats."""
    return tuple(name for method in FORMATS for name in _load(method).tensor_suffixes)


def methods_kept_as_stored() -> list[str]:
    """Return the formats whose weights `--quantization as_stored` can keep."""
    return [method for method in FORMATS if _load(method).scheme is not None]


def _load(method: str) -> type[WeightFormat]:
    kind: type[WeightFormat] = resolve_name(FORMATS[method])
    return kind
