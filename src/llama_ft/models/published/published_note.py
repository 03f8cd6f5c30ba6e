"""The quantization_config of a published checkpoint: find it in config.json, check it, and say what
it means."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llama_ft.errors import UserError

# Of compressed-tensors: name -> how the log calls it
COMPRESSED_FORMATS = {
    "pack-quantized": "integers of 4 or 8 bits in groups",
    "int-quantized": "INT8",
    "float-quantized": "FP8",
    "naive-quantized": "FP8 or INT8",
    "mxfp4-pack-quantized": "MXFP4",
    "nvfp4-pack-quantized": "NVFP4",
}
FP4_FORMATS = ("mxfp4-pack-quantized", "nvfp4-pack-quantized")
MODELOPT_ALGORITHMS = ("FP8", "NVFP4")
# quant_method -> layouts and numbers of bits that can be read. The first layout is the default.
COLUMN_LAYOUTS = {
    "gptq": (("gptq", "gptq_v2"), (4, 8)),
    "awq": (("gemm",), (4,)),
}
# of compressed-tensors' actorder: groups of columns in their order. The others need a g_idx tensor.
IN_ORDER = (None, False, "weight", "static")


def find_note(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the quantization_config of a config.json, or of one of its parts: Transformers reads
    that of a text_config, too. Raises UserError if it cannot be one."""
    for part in (settings, *settings.values()):
        if isinstance(part, Mapping) and part.get("quantization_config"):
            note: dict[str, Any] = part["quantization_config"]
            if not isinstance(note, dict):
                raise _wrong_note("", note, "settings by name")
            method = note.get("quant_method")
            if not isinstance(method, str | None):
                raise _wrong_note("quant_method", method, 'a name such as "fp8"')
            return note
    return None


def read_note(folder: Path) -> dict[str, Any] | None:
    """Return the quantization_config of a model's directory. Raises UserError if it cannot be
    one."""
    return find_note(read_settings(folder))


def read_settings(folder: Path) -> dict[str, Any]:
    """Return config.json, or nothing if it cannot be read: building the model reports it."""
    try:
        settings = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}


def check_note(note: Mapping[str, Any]) -> None:
    """Raise a UserError if a quantization_config has a value that no such checkpoint can have, or
    names a variant that cannot be read."""
    method = note["quant_method"]
    if method == "fp8":
        blocks = note.get("weight_block_size")
        if blocks is not None and not _is_block(blocks):
            raise _wrong_note("weight_block_size", blocks, "two whole numbers above 0, or null")
    elif method == "compressed-tensors":
        _check_compressed(note)
    elif method in COLUMN_LAYOUTS:
        _check_columns(note)
    elif method == "modelopt" and note.get("quant_algo") not in MODELOPT_ALGORITHMS:
        raise _unsupported(method, [str(note.get("quant_algo"))], ", ".join(MODELOPT_ALGORITHMS))


def _check_compressed(note: Mapping[str, Any]) -> None:
    groups = note.get("config_groups")
    are_groups = isinstance(groups, dict) and all(
        isinstance(group, dict) for group in groups.values()
    )
    if not groups or not are_groups:
        raise _wrong_note("config_groups", groups, "groups by name")
    schemes = weight_schemes(note)
    if not schemes:
        raise _wrong_note("config_groups", groups, "a group with weights")
    formats = compressed_formats(note)
    problems = [name for name in formats if name not in COMPRESSED_FORMATS]
    has_fp4 = any(name in FP4_FORMATS for name in formats)
    for scheme in schemes:
        problems += _problems_of(scheme, groups, has_fp4)
    if _section(note, "sparsity_config").get("format", "dense") != "dense":
        problems.append("sparsity")
    if _section(note, "transform_config").get("config_groups"):
        problems.append("transforms")
    if problems:
        raise _unsupported("compressed-tensors", problems, ", ".join(COMPRESSED_FORMATS))


def _check_columns(note: Mapping[str, Any]) -> None:
    """Check the quantization_config of GPTQ or AWQ."""
    method = note["quant_method"]
    layouts, known_bits = COLUMN_LAYOUTS[method]
    bits = note.get("bits")
    if not is_positive(bits):
        raise _wrong_note("bits", bits, "a whole number above 0")
    size = note.get("group_size")
    if size not in (None, -1) and not is_positive(size):
        raise _wrong_note("group_size", size, "a whole number above 0, or -1")
    problems = []
    if bits not in known_bits:
        problems.append(f"{bits} bits")
    layout = column_layout(note)
    if layout not in layouts:
        problems.append(f"layout {layout}")
    if problems:
        in_bits = " or ".join(map(str, known_bits))
        raise _unsupported(method, problems, f"{', '.join(layouts)} in {in_bits} bits")


def column_layout(note: Mapping[str, Any]) -> str:
    """Return the name of the layout of a GPTQ or AWQ checkpoint."""
    layouts, _ = COLUMN_LAYOUTS[note["quant_method"]]
    if note.get("is_marlin_format"):
        return "marlin"
    names = [note.get(key) for key in ("checkpoint_format", "version", "format")]
    return next((str(name).lower() for name in names if name), layouts[0])


def _unsupported(method: str, problems: list[str], supported: str) -> UserError:
    return UserError(
        f"--model_name: quantized with {method} ({', '.join(problems)}), which is not supported. "
        f"Supported are: {supported}.\nUse a version in 16 bits or in bitsandbytes' 4 bits."
    )


def _section(note: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = note.get(name) or {}
    if not isinstance(section, dict):
        raise _wrong_note(name, section, "settings by name")
    return section


def _problems_of(scheme: Any, groups: Any, has_fp4: bool) -> list[str]:
    """Return what cannot be read of how compressed-tensors quantizes a group of modules. Raises
    UserError for a value that it cannot have."""
    if not isinstance(scheme, dict) or not is_positive(scheme.get("num_bits")):
        raise _wrong_note("config_groups", groups, "weights with num_bits in each group")
    size = scheme.get("group_size")
    strategy = scheme.get("strategy")
    if size not in (None, -1) and not is_positive(size):
        raise _wrong_note("group_size", size, "a whole number above 0, or null")
    if strategy == "group" and not is_positive(size):
        raise _wrong_note("group_size", size, "a whole number above 0")
    if strategy == "block" and not _is_block(scheme.get("block_structure")):
        block = scheme.get("block_structure")
        raise _wrong_note("block_structure", block, "two whole numbers above 0")
    problems = []
    if scheme["num_bits"] not in (4, 8):
        problems.append(f"{scheme['num_bits']} bits")
    elif scheme["num_bits"] == 4 and scheme.get("type") == "float" and not has_fp4:
        problems.append("floating-point numbers of 4 bits")
    if scheme.get("actorder") not in IN_ORDER:
        problems.append(f"actorder {scheme['actorder']}")
    return problems


def is_positive(value: Any) -> bool:
    """Return whether a setting is a whole number above 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_block(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(is_positive, value))


def _wrong_note(name: str, value: Any, expected: str) -> UserError:
    shown = str(value)[:100]
    place = f"quantization_config.{name}" if name else "quantization_config"
    return UserError(
        f"config.json: {place} is {shown}; expected {expected}.\n"
        "Download config.json again, or use a version in 16 bits."
    )


def compressed_formats(note: Mapping[str, Any]) -> list[str]:
    """Return the formats of the groups of a compressed-tensors checkpoint."""
    default = str(note.get("format"))
    named = [str(group.get("format") or default) for group in note["config_groups"].values()]
    return list(dict.fromkeys(named))


def weight_schemes(note: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return how each group of modules quantizes its weights. Some quantize only activations."""
    groups = note["config_groups"].values()
    return [group["weights"] for group in groups if group.get("weights")]


def describe_note(note: Mapping[str, Any]) -> str:
    """Return what a quantization_config says of the weights, for the log."""
    method = note["quant_method"]
    if method == "mxfp4":
        return "experts in MXFP4"
    if method == "compressed-tensors":
        return ", ".join(COMPRESSED_FORMATS[name] for name in compressed_formats(note))
    if method == "modelopt":
        return f"{note['quant_algo']} of ModelOpt"
    if method in COLUMN_LAYOUTS:
        return f"{method.upper()} in {note['bits']} bits"
    blocks = note.get("weight_block_size")
    if blocks is None:
        return "FP8 with a scale per tensor"
    return f"FP8 in blocks of {blocks[0]} x {blocks[1]}"
