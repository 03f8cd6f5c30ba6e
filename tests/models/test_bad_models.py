"""Model folders and settings that cannot be trained; tests/recipes/test_bad_input.py has the most
common ones through the real command."""

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from llama_ft.config import ModelConfig, PeftConfig
from llama_ft.errors import UserError
from llama_ft.inference.load import read_generation_config
from llama_ft.models import (
    build_on_meta,
    inject_lora,
    load_model_config,
    load_tokenizer,
    local_folder,
)
from llama_ft.models.adapters.adapter_config import saved_config
from llama_ft.models.base.source import open_weights

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 64,
}


def build(folder: Path, model_config: dict[str, object]) -> None:
    (folder / "config.json").write_text(json.dumps(model_config))
    build_on_meta(load_model_config(folder, False), ModelConfig(model_name="mine"))


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("vit", "ViTModel"),
        ("t5", "T5ForConditionalGeneration"),
        ("florence2", "Florence2ForConditionalGeneration"),
    ],
)
def test_a_model_without_a_text_decoder_is_rejected_by_its_config_alone(
    tmp_path: Path, model_type: str, name: str
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": model_type, "architectures": [name]})
    )
    with pytest.raises(
        UserError, match=f"(?s){name} .*no text decoder.*loads with AutoModelForCausalLM or Auto"
    ):
        load_model_config(tmp_path, False)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("bert", SMALL),
        (
            "paligemma",
            {
                "text_config": SMALL | {"model_type": "gemma", "head_dim": 16},
                "vision_config": SMALL,
            },
        ),
    ],
)
def test_a_model_whose_tokens_attend_to_later_ones_is_rejected(
    tmp_path: Path, model_type: str, settings: dict[str, object]
) -> None:
    with pytest.raises(UserError, match="is an encoder here"):
        build(tmp_path, {"model_type": model_type, **settings})


@pytest.mark.skipif(find_spec("timm") is not None, reason="timm is installed")
def test_a_package_that_a_models_code_needs_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the code of model_type gemma3n needs a package .*timm"):
        build(tmp_path, {"model_type": "gemma3n"})


def test_an_unknown_architecture_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path}: its config.json cannot be used"):
        build(tmp_path, {"model_type": "lamma"})


@pytest.mark.parametrize("model_type", ["qwen3", "gemma2"])
def test_a_tokenizer_without_its_files_is_rejected_by_name(tmp_path: Path, model_type: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "model_type": model_type}))
    with pytest.raises(UserError, match=f"(?s){tmp_path}.*only special tokens.*--tokenizer_name"):
        load_tokenizer(tmp_path, False)


@pytest.mark.parametrize("names", [-1, "LlamaForCausalLM", [None]])
def test_architectures_that_are_no_list_of_names_are_rejected(tmp_path: Path, names: Any) -> None:
    with pytest.raises(UserError, match="architectures is .*; expected a list of names"):
        build(tmp_path, {"model_type": "llama", **SMALL, "architectures": names})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alpha_pattern", "x"),
        ("rank_pattern", [8]),
        ("modules_to_save", 1e400),
        ("target_parameters", True),
        ("alora_invocation_tokens", -1),
        ("layers_to_transform", {"a": 1}),
    ],
)
def test_a_setting_of_an_adapter_that_is_no_list_or_dict_is_rejected(
    tmp_path: Path, name: str, value: Any
) -> None:
    from peft import LoraConfig

    LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]).save_pretrained(tmp_path)
    saved_config(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    with pytest.raises(UserError, match=f"{file}: cannot be used .*{name}"):
        saved_config(tmp_path)


def test_an_adapter_that_begins_after_certain_tokens_is_rejected(
    tiny_model: Path, tmp_path: Path
) -> None:
    """It would have no effect: the loss was that of the base model."""
    from peft import LoraConfig

    LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[3]).save_pretrained(tmp_path)
    model = ModelConfig(model_name="mine")
    built = build_on_meta(load_model_config(tiny_model, False), model, folder=tiny_model)
    peft = PeftConfig(use_peft=True, from_peft_checkpoint=str(tmp_path))
    with pytest.raises(UserError, match="aLoRA.* not supported"):
        inject_lora(built, peft, "mine")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[1]", "not a mapping"),
        ('{"a', "not a valid JSON file"),
        ('{"eos_token_id": "</s>"}', "eos_token_id is </s>; expected a number or a list"),
        ('{"penalty_alpha": 0.6, "top_k": 4}', "contrastive_search needs code from the Hub"),
    ],
)
def test_a_generation_config_that_cannot_be_used_is_named(
    tmp_path: Path, text: str, problem: str
) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(text)
    with pytest.raises(UserError, match=f"{file}: cannot be used .*{problem}"):
        read_generation_config(tmp_path)


@pytest.mark.skipif(find_spec("sentencepiece") is not None, reason="sentencepiece is installed")
@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("tokenizer.model", b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02", "pip install sentencepiece"),
        ("spiece.model", b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02", "pip install sentencepiece"),
        ("tokenizer.model", b"IQ== 0\nIg== 1\n", "tiktoken"),
    ],
)
def test_the_package_that_reads_a_tokenizer_is_named(
    tmp_path: Path, name: str, content: bytes, expected: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "model_type": "llama"}))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"(?s){tmp_path}: .*{expected}"):
        load_tokenizer(tmp_path, False)


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ('{"weight_map": {"a": ', "not a safetensors index"),
        ("[]", "not a safetensors index"),
        ('{"weight_map": {"w": 3}}', "not a safetensors index"),
        ('{"weight_map": {"w": "../secret.safetensors"}}', "outside its directory"),
        ('{"weight_map": {"w": "a/../../b.safetensors"}}', "outside its directory"),
        ('{"weight_map": {"w": "/etc/passwd"}}', "outside its directory"),
        ('{"weight_map": ' + '{"w": ' * 100_000, "not a safetensors index"),
    ],
)
def test_an_index_that_is_malformed_or_leaves_its_directory_is_rejected(
    tmp_path: Path, index: str, problem: str
) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match=f"index.json: .*{problem}"):
        open_weights(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "part/pipe", "part"])
def test_weights_that_are_not_a_regular_file_are_rejected_before_they_are_opened(
    tmp_path: Path, name: str
) -> None:
    """Opening a pipe waits until somebody writes into it."""
    (tmp_path / "part").mkdir()
    os.mkfifo(tmp_path / "part" / "pipe")
    os.mkfifo(tmp_path / "model.safetensors")
    if name != "model.safetensors":
        index = {"weight_map": {"w": name}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=f"{name}: is a directory, a pipe or a device"):
        open_weights(tmp_path)


def test_a_model_directory_with_a_device_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").symlink_to("/dev/zero")
    with pytest.raises(UserError, match="--model_name .*holds generation_config.json, which is a"):
        local_folder(str(tmp_path), "--model_name")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention_dropout": 5}, "attention_dropout is 5; expected 0 to 1"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers is 10,000,000; expected at most 10,000"),
        ({"text_config": [1]}, r"text_config is \[1\]; expected settings by name"),
    ],
)
def test_impossible_values_in_config_json_are_rejected(
    tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        build(tmp_path, {**SMALL, "model_type": "llama", **settings})
