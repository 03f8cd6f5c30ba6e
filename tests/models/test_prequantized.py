"""A quantized folder that is not whole, or not what its config.json says, is refused naming what is wrong."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from llama_ft.config import ModelConfig, QuantizationConfig
from llama_ft.errors import UserError
from llama_ft.models import build_on_meta, choose_quantization, quantize_linears
from llama_ft.models.load_weights import account_for
from llama_ft.models.prequantized import read_4bit
from llama_ft.models.quantized import FourBit
from llama_ft.models.source import open_weights

UP = "model.layers.0.mlp.up_proj"
Tensors = dict[str, torch.Tensor]
NESTED = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


@pytest.fixture(scope="module")
def stored(save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model saved by transformers in 8 bits, and twice over in 4."""
    base = save_model(tmp_path_factory.mktemp("base"), hidden_size=64, intermediate_size=128)
    folders = {}
    for name, settings in {"8bit": {"load_in_8bit": True}, "4bit": NESTED}.items():
        folders[name] = tmp_path_factory.mktemp(name)
        config = BitsAndBytesConfig(**settings)
        AutoModelForCausalLM.from_pretrained(base, quantization_config=config).save_pretrained(folders[name])
    return folders


def refusal(folder: Path, note: dict[str, Any] | None) -> str:
    """What a run says of a folder whose config.json has `note` as its quantization_config."""
    config = AutoConfig.from_pretrained(folder)
    if note is None:
        del config.quantization_config
    else:
        config.quantization_config = note
    model = build_on_meta(config, ModelConfig(model_name=str(folder)))
    with pytest.raises(UserError) as refused:
        quantization = choose_quantization(QuantizationConfig(), config, use_peft=True)
        if quantization is not None:
            quantize_linears(model, quantization)
        account_for(model, open_weights(folder).tensors, folder)
    return str(refused.value)


def shorten(key: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({key: tensors[key][:-3].clone()})


def drop(key: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(key)


@pytest.mark.parametrize(
    ("which", "damage", "told"),
    [
        ("8bit", shorten(f"{UP}.SCB"), f"{UP}.SCB is [125], expected [128]"),
        ("8bit", drop(f"{UP}.SCB"), f"{UP}.weight is stored in float, config.json says 8bit"),
        ("4bit", shorten(f"{UP}.weight.absmax"), f"{UP}.weight.absmax is [125], expected [128]"),
        ("4bit", drop(f"{UP}.weight.nested_absmax"), f"{UP}.weight.nested_absmax is missing"),
        ("4bit", drop(f"{UP}.weight.quant_state.bitsandbytes__nf4"), f"{UP}.weight.quant_state is missing"),
        ("4bit", shorten(f"{UP}.weight"), f"{UP}.weight is [8186], config.json makes it [128, 64]"),
    ],
)
def test_a_damaged_folder_is_refused_naming_the_tensor(
    stored: dict[str, Path], tmp_path: Path, which: str, damage: Callable[[Tensors], None], told: str
) -> None:
    folder = shutil.copytree(stored[which], tmp_path / "damaged")
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    note = {"load_in_8bit": True} if which == "8bit" else NESTED
    assert told in refusal(folder, note)


@pytest.mark.parametrize(
    ("which", "note", "told"),
    [
        ("8bit", None, "is quantized, but config.json has no quantization_config"),
        ("4bit", None, "is quantized, but config.json has no quantization_config"),
        ("4bit", {"load_in_8bit": True}, "is stored in 4bit, config.json says 8bit"),
        ("8bit", NESTED, "is stored in 8bit, config.json says 4bit (nf4, blocks of 64)"),
        ("4bit", {**NESTED, "bnb_4bit_quant_type": "int4"}, "quantized with bitsandbytes (int4)"),
    ],
)
def test_a_config_that_says_something_else_than_the_tensors_is_refused(
    stored: dict[str, Path], which: str, note: dict[str, Any] | None, told: str
) -> None:
    assert told in refusal(stored[which], note)


def test_values_of_another_kind_than_config_says_and_a_garbled_state_are_refused(
    stored: dict[str, Path], tmp_path: Path
) -> None:
    source = open_weights(stored["4bit"])
    with pytest.raises(UserError, match=r"stored in nf4, blocks of 64; config.json says\s+4bit \(fp4"):
        read_4bit(source, f"{UP}.weight", 64, FourBit("fp4", 64, None), 0, 4)
    tensors = load_file(stored["4bit"] / "model.safetensors")
    tensors[f"{UP}.weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(b"{garbled"), dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="cannot be read; the file is damaged"):
        read_4bit(open_weights(tmp_path), f"{UP}.weight", 64, FourBit("nf4", 64, None), 0, 4)
