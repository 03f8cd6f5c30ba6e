"""A quantized folder that is not what its config.json says is refused naming what is wrong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from llama_ft.config import ModelConfig, QuantizationConfig
from llama_ft.errors import UserError
from llama_ft.models import build_on_meta, choose_quantization, quantize_linears
from llama_ft.models.load_weights import account_for
from llama_ft.models.source import open_weights

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


@pytest.mark.parametrize(
    ("which", "note", "told"),
    [
        ("8bit", None, "is stored in 8bit, config.json says float"),
        ("4bit", {"load_in_8bit": True}, "is stored in 4bit, config.json says 8bit"),
        ("8bit", NESTED, "is stored in 8bit, config.json says 4bit"),
        ("4bit", {**NESTED, "bnb_4bit_quant_type": "int4"}, "quantized with bitsandbytes (int4)"),
    ],
)
def test_a_config_that_says_something_else_than_the_tensors_is_refused(
    stored: dict[str, Path], which: str, note: dict[str, Any] | None, told: str
) -> None:
    folder = stored[which]
    config = AutoConfig.from_pretrained(folder)
    config.quantization_config = note
    if note is None:
        del config.quantization_config
    model = build_on_meta(config, ModelConfig(model_name=str(folder)))
    with pytest.raises(UserError) as refused:
        quantization = choose_quantization(QuantizationConfig(), config, use_peft=True)
        if quantization is not None:
            quantize_linears(model, quantization)
        account_for(model, open_weights(folder).tensors, folder)
    assert told in str(refused.value)
