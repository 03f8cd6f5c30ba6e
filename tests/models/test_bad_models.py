"""Model folders and settings that cannot be trained; tests/recipes/test_bad_input.py has the most common ones through
the real command."""

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import BertConfig

from llama_ft.config import ModelConfig
from llama_ft.errors import UserError
from llama_ft.models import build_on_meta, load_model_config, load_tokenizer
from llama_ft.models.source import open_weights

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 64}


def build(folder: Path, model_config: dict[str, object]) -> None:
    (folder / "config.json").write_text(json.dumps(model_config))
    build_on_meta(load_model_config(folder, False), ModelConfig(model_name="mine"))


@pytest.mark.parametrize(
    ("model_type", "name"),
    [("vit", "ViTModel"), ("t5", "T5ForConditionalGeneration"), ("florence2", "Florence2ForConditionalGeneration")],
)
def test_a_model_without_a_text_decoder_is_rejected_by_its_config_alone(
    tmp_path: Path, model_type: str, name: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "architectures": [name]}))
    with pytest.raises(UserError, match=f"(?s){name} .*no text decoder.*loads with AutoModelForCausalLM or Auto"):
        load_model_config(tmp_path, False)


def test_a_text_part_in_which_tokens_see_the_next_ones_is_rejected(tmp_path: Path) -> None:
    towers = {"text_config": SMALL | {"model_type": "gemma", "head_dim": 16}, "vision_config": SMALL}
    with pytest.raises(UserError, match="PaliGemmaForConditionalGeneration is an encoder here"):
        build(tmp_path, {"model_type": "paligemma", **towers})


@pytest.mark.skipif(find_spec("timm") is not None, reason="timm is installed")
def test_a_package_that_a_models_code_needs_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the code of model_type gemma3n needs a package .*timm"):
        build(tmp_path, {"model_type": "gemma3n"})


def test_an_unknown_architecture_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path}: its config.json cannot be used"):
        build(tmp_path, {"model_type": "lamma"})


@pytest.mark.parametrize(
    "content", [b"", b"xx", b"\xff" * 8 + b"x", (2**62).to_bytes(8, "little"), b"\2" + b"\0" * 7 + b"[]"]
)
def test_headers_that_are_damaged_are_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(UserError, match=f"{file}: cannot be read as safetensors"):
        open_weights(tmp_path)


@pytest.mark.parametrize("model_type", ["qwen3", "gemma2"])
def test_a_tokenizer_without_its_files_is_refused_naming_them(tmp_path: Path, model_type: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "model_type": model_type}))
    with pytest.raises(UserError, match=f"(?s){tmp_path}.*only special tokens.*--tokenizer_name"):
        load_tokenizer(tmp_path, False)


def test_weights_that_are_links_are_read_and_pipes_and_devices_are_refused(tmp_path: Path) -> None:
    blob, folder = tmp_path / "blobs" / "0f", tmp_path / "snapshot"
    blob.parent.mkdir()
    folder.mkdir()
    save_file({"w": torch.ones(2)}, blob)
    (folder / "index.json").write_text('{"weight_map": {"w": "part.safetensors"}}')
    (folder / "model.safetensors.index.json").symlink_to("index.json")
    (folder / "part.safetensors").symlink_to("../blobs/0f")
    assert open_weights(folder).read("w").tolist() == [1, 1]
    for file in (folder / "part.safetensors", folder / "model.safetensors.index.json", folder / "model.safetensors"):
        file.unlink(missing_ok=True)
        os.mkfifo(file)
        with pytest.raises(UserError, match=f"{file}: is not a regular file"):
            open_weights(folder)
        file.unlink()
        file.symlink_to("/dev/zero")
        with pytest.raises(UserError, match=f"{file}: is not a regular file"):
            open_weights(folder)
        file.unlink()


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ('{"weight_map": {"a": ', "not a safetensors index"),
        ("[]", "not a safetensors index"),
        ('{"weight_map": {"w": 3}}', "not a safetensors index"),
        ('{"weight_map": {"w": "../secret.safetensors"}}', "outside its directory"),
        ('{"weight_map": {"w": "a/../../b.safetensors"}}', "outside its directory"),
        ('{"weight_map": {"w": "/etc/passwd"}}', "outside its directory"),
    ],
)
def test_an_index_that_is_malformed_or_leaves_its_folder_is_refused(tmp_path: Path, index: str, problem: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match=f"index.json: .*{problem}"):
        open_weights(tmp_path)


def test_an_encoder_is_refused() -> None:
    config = BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    with pytest.raises(UserError, match="is an encoder here"):
        build_on_meta(config, ModelConfig(model_name="bert"))
