"""Adapters that were edited by hand or cut off end in one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from llama_ft.errors import UserError
from llama_ft.extensions.serving.adapter_files import (
    BaseFiles,
    SavedAdapter,
    find_misfit,
    read_adapter,
)

SETTINGS = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
TENSORS = {
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(4, 16),
    "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": torch.zeros(16, 4),
}


def write_adapter(folder: Path, settings: object) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(TENSORS, folder / "adapter_model.safetensors")
    return folder


def test_the_layers_and_the_rank_of_an_adapter_are_read(tmp_path: Path) -> None:
    settings = SETTINGS | {"rank_pattern": {"q_proj": 4}, "r": 2}
    adapter = read_adapter(write_adapter(tmp_path, settings))
    assert adapter.modules == ["model.layers.0.self_attn.q_proj"]
    assert adapter.rank == 4


@pytest.mark.parametrize("pattern", ["q_proj", "self_attn.q_proj", r".*\.0\..*", "proj", "k"])
def test_the_pattern_of_a_layer_is_the_one_that_peft_finds(pattern: str) -> None:
    from peft.utils.other import get_pattern_key

    name = "model.layers.0.self_attn.q_proj"
    patterns = {"other": 1, pattern: 2, "q_proj": 3}
    adapter = SavedAdapter({"r": 4, "rank_pattern": patterns}, {})
    expected = patterns.get(get_pattern_key(list(patterns), name), 4)
    assert adapter.setting_of(name, "r", "rank_pattern") == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], "has no settings"),
        ({"peft_type": "LORA", "r": 4}, "lora_alpha is None; expected a number"),
        (SETTINGS | {"r": "four"}, "r is 'four'; expected a number"),
        (SETTINGS | {"lora_alpha": float("nan")}, "lora_alpha is nan; expected a number"),
        (SETTINGS | {"lora_alpha": None}, "lora_alpha is None; expected a number"),
        (SETTINGS | {"rank_pattern": {"q_proj": "x"}}, "rank_pattern is not a table of numbers"),
        (SETTINGS | {"alpha_pattern": [1]}, "alpha_pattern is not a table of numbers"),
        (SETTINGS | {"alpha_pattern": {"(q": 1}}, "missing ), unterminated subpattern"),
    ],
)
def test_settings_that_are_none_are_user_errors(
    tmp_path: Path, settings: object, expected: str
) -> None:
    with pytest.raises(UserError, match="the adapter cannot be read") as caught:
        read_adapter(write_adapter(tmp_path, settings))
    assert expected in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"not safetensors"])
def test_weights_that_are_cut_off_are_user_errors(tmp_path: Path, content: bytes) -> None:
    write_adapter(tmp_path, SETTINGS)
    (tmp_path / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match="the adapter cannot be read"):
        read_adapter(tmp_path)


@pytest.mark.parametrize(
    ("kept", "settings", "expected"),
    [
        ([], {}, "has no tensors of LoRA"),
        (["lora_A"], {}, "q_proj.lora_B.weight is missing"),
        (["lora_B"], {}, "q_proj.lora_A.weight is missing"),
        (["lora_A", "lora_B"], {"r": 2}, "q_proj has rank 4, and in adapter_config.json 2"),
        (
            ["lora_A", "lora_B"],
            {"rank_pattern": {"q_proj": 8}},
            "q_proj has rank 4, and in adapter_config.json 8",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_user_errors(
    tmp_path: Path, kept: list[str], settings: dict[str, Any], expected: str
) -> None:
    write_adapter(tmp_path, SETTINGS | settings)
    tensors = {name: TENSORS[name] for name in TENSORS if any(part in name for part in kept)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match="RUN: the adapter cannot be read") as caught:
        read_adapter(tmp_path, "RUN")
    assert expected in str(caught.value)


def adapter_of(module: str, inner: int = 16, outer: int = 32) -> SavedAdapter:
    shapes = {
        f"base_model.model.{module}.lora_A.weight": (4, inner),
        f"base_model.model.{module}.lora_B.weight": (outer, 4),
    }
    return SavedAdapter(SETTINGS, shapes)


@pytest.mark.parametrize(
    ("adapter", "expected"),
    [
        (adapter_of("model.layers.1.mlp.up_proj"), ""),
        (adapter_of("model.text.layers.1.mlp.up_proj"), ""),
        (adapter_of("model.layers.1.mlp.up_proj", 32, 16), ""),  # as GPT-2 stores it
        (adapter_of("model.layers.1.mlp.other"), ""),  # whether a server has it, its rules say
        (
            adapter_of("model.layers.1.mlp.up_proj", 17),
            "32 x 17 weights in the adapter, and 32 x 16",
        ),
        (adapter_of("model.layers.2.mlp.up_proj"), "the base model has no layer 2"),
    ],
)
def test_an_adapter_fits_a_base_model_with_its_layers_and_widths(
    adapter: SavedAdapter, expected: str
) -> None:
    shapes: dict[str, tuple[int, ...]] = {
        "model.layers.1.mlp.up_proj.weight": (32, 16),
        "vision.layers.1.mlp.up_proj.weight": (32, 17),
    }
    base = BaseFiles("base", {}, frozenset(shapes), shapes=shapes)
    found = find_misfit(adapter, base)
    assert expected in found and bool(found) == bool(expected)
