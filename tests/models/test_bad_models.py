"""Model folders and settings that cannot be trained; tests/recipes/test_bad_input.py has the most
common ones through the real command."""

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from llama_ft.config import ModelConfig
from llama_ft.errors import UserError
from llama_ft.models import build_on_meta, load_model_config, load_tokenizer, local_folder
from llama_ft.models.source import open_weights

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
