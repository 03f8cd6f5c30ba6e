"""Files of an export other than its weights: the base's own settings stay together with those that
Transformers 5 writes, and nothing private is copied. The names of older versions are written by
hand."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_ft.export.export_settings import write_model_settings, write_tokenizer
from llama_ft.models import load_model_config, load_tokenizer

Settings = dict[str, Any]
SHAPE: Settings = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 301,
    "max_position_embeddings": 256,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"type": "longrope", "short_factor": [1.1] * 8, "long_factor": [2.0] * 8}
OLD: dict[str, Settings] = {
    "Llama 3.1": {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": LLAMA3},
    "older llama": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}},
    "Qwen3, yarn": {"model_type": "qwen3", "head_dim": 16, "rope_theta": 1e6, "rope_scaling": YARN},
    "Qwen2": {"model_type": "qwen2", "rope_theta": 1e6, "sliding_window": 4096, "use_sliding_window": False},
    "Qwen3 MoE": {"model_type": "qwen3_moe", "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
                  "rope_theta": 1e7},
    "Gemma 3 text": {"model_type": "gemma3_text", "head_dim": 16, "rope_theta": 3e5, "rope_local_base_freq": 2e4,
                     "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "Phi-4": {"model_type": "phi3", "original_max_position_embeddings": 64, "rope_theta": 2e4, "rope_scaling": LONG},
    "GPT-NeoX": {"model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 50000.0},
    "GLM-4": {"model_type": "glm4", "head_dim": 16, "partial_rotary_factor": 0.5, "rope_theta": 1e5},
    # these classes have a scaling of their own
    "Apertus": {"model_type": "apertus", "rope_theta": 3e5, "rope_scaling": LLAMA3},
    "gpt-oss": {"model_type": "gpt_oss", "head_dim": 16, "rope_theta": 3e5, "rope_scaling": YARN},
    "Llama, long": {"model_type": "llama", "rope_theta": 3e5, "original_max_position_embeddings": 64,
                    "rope_scaling": {"rope_type": "longrope", "short_factor": [1.1] * 8, "long_factor": [2.0] * 8,
                                     "original_max_position_embeddings": 64}},
    "ModernBERT": {"model_type": "modernbert-decoder", "global_rope_theta": 3e5, "local_rope_theta": 2e4},
}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14, "torch_dtype": "bfloat16"}  # fmt: skip
IMAGES: Settings = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "torch_dtype": "bfloat16",
    "text_config": {**SHAPE, **OLD["Gemma 3 text"], "tie_word_embeddings": True},
    "vision_config": VISION,
    "mm_tokens_per_image": 1,
    "_name_or_path": "/home/someone/gemma",
}


@pytest.fixture(scope="module")
def tokenizer_folder(save_tokenizer: Callable[..., Path], tmp_path_factory: Any) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def save_base(folder: Path, tokenizer_folder: Path, config: Settings) -> Path:
    shutil.copytree(tokenizer_folder, folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def export(base: Path, out: Path, change: Callable[[Any], None] = lambda config: None) -> Settings:
    out.mkdir()
    config = load_model_config(base, False)
    change(config)
    write_model_settings(out, config, torch.float32, load_tokenizer(base, False), base)
    return json.loads((out / "config.json").read_text())


def read_by_5(folder: Path) -> Settings:
    from transformers import AutoConfig

    return json.loads(AutoConfig.from_pretrained(folder).to_json_string(use_diff=False))


@pytest.mark.parametrize("name", OLD)
def test_an_export_has_the_settings_of_the_base_in_old_and_in_new_names(
    name: str, tokenizer_folder: Path, tmp_path: Path
) -> None:
    old = {**SHAPE, **OLD[name], "torch_dtype": "float32", "mine": {"kept": True}}
    base = save_base(tmp_path / "base", tokenizer_folder, old)
    written = export(base, tmp_path / "out")
    assert {key: written[key] for key in old} == old
    rope = read_by_5(base)["rope_parameters"]
    assert written["rope_parameters"] == rope == read_by_5(tmp_path / "out")["rope_parameters"]
    # and of a base that only Transformers 5 has written
    again = save_base(tmp_path / "again", tokenizer_folder, {})
    load_model_config(base, False).save_pretrained(again)
    of_new = export(again, tmp_path / "of_new")
    # what the classes of Transformers 4 have as defaults, and another spelling of the same
    defaults = {"use_sliding_window", "sliding_window", "type"}
    lost = {key: value for key, value in old.items() if of_new.get(key) != value}
    assert not lost.keys() - defaults - {"rope_scaling"}, lost
    if "rope_scaling" in lost:
        scaling = of_new["rope_scaling"]
        assert scaling.items() >= {"rope_type": "linear", "factor": 2.0}.items()
    assert read_by_5(tmp_path / "of_new")["rope_parameters"] == rope


def test_what_a_run_changes_wins_in_all_names_and_parts(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    note = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = {**copy.deepcopy(IMAGES), "vocab_size": 301, "quantization_config": note}
    base = save_base(tmp_path / "base", tokenizer_folder, config)

    def change(config: Any) -> None:
        config.tie_word_embeddings = False
        config.text_config.vocab_size = 309
        del config.quantization_config

    written = export(base, tmp_path / "out", change)
    text = written["text_config"]
    assert written["vocab_size"] == text["vocab_size"] == 309
    assert written["tie_word_embeddings"] is text["tie_word_embeddings"] is False
    assert "quantization_config" not in written and "_name_or_path" not in written
    for part in (written, text, written["vision_config"]):
        assert part["dtype"] == part["torch_dtype"] == "float32"
    assert text["rope_theta"] == 3e5 and text["rope_local_base_freq"] == 2e4
    kept = {key: value for key, value in IMAGES["text_config"].items() if key != "vocab_size"}
    assert {key: text[key] for key in kept} == {**kept, "tie_word_embeddings": False}
    read = read_by_5(tmp_path / "out")
    assert read["text_config"]["rope_parameters"] == {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }


def test_a_changed_rope_replaces_that_of_the_base(tokenizer_folder: Path, tmp_path: Path) -> None:
    """A run that changes the rope: the base's old names would undo it."""
    old = {**SHAPE, **OLD["Llama 3.1"]}
    base = save_base(tmp_path / "base", tokenizer_folder, old)
    changed = {**LLAMA3, "factor": 32.0, "rope_theta": 500000.0}

    def change(config: Any) -> None:
        config.rope_parameters = changed

    written = export(base, tmp_path / "out", change)
    assert read_by_5(tmp_path / "out")["rope_parameters"] == changed
    assert written["rope_scaling"] == {**LLAMA3, "factor": 32.0}
    assert written["rope_theta"] == 500000.0


def test_a_tokenizer_keeps_the_settings_of_the_base(tokenizer_folder: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(tokenizer_folder, base)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"content": "<s>", "lstrip": False, "__type": "AddedToken"},
        "eos_token": "</s>",
        "pad_token": None,
        "additional_special_tokens": ["<pad>"],
        "model_max_length": 77,
        "clean_up_tokenization_spaces": False,
        "chat_template": "{{ old }}",
        "added_tokens_decoder": {"2": {"content": "<pad>", "special": True}},
        "name_or_path": "/home/someone/base",
    }
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    (base / "tokenizer.model").write_bytes(b"sentencepiece")
    tokenizer = load_tokenizer(base, False)
    tokenizer.chat_template = "{{ new }}"
    tokenizer.add_tokens(["<|end|>"], special_tokens=True)
    tokenizer.eos_token = "<|end|>"
    out = tmp_path / "out"
    out.mkdir()
    write_tokenizer(out, tokenizer)
    written = json.loads((out / "tokenizer_config.json").read_text())
    decoder = written.pop("added_tokens_decoder")
    changed = {"eos_token": "<|end|>", "chat_template": "{{ new }}"}
    expected = {**settings, **changed}
    del expected["added_tokens_decoder"], expected["name_or_path"]
    assert {key: written.get(key) for key in expected} == expected
    assert "name_or_path" not in written and "extra_special_tokens" not in written
    assert decoder["2"] == settings["added_tokens_decoder"]["2"]
    assert decoder["301"]["content"] == "<|end|>"
    assert (out / "tokenizer.model").read_bytes() == b"sentencepiece"
    again = load_tokenizer(out, False)
    assert again.eos_token == "<|end|>" and again.chat_template == "{{ new }}"
    assert again("What<|end|> is").input_ids == tokenizer("What<|end|> is").input_ids


def test_a_tokenizer_of_transformers_5_alone_gets_a_class_that_version_4_has(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    settings = json.loads((tokenizer_folder / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "TokenizersBackend"
    base = tmp_path / "base"
    shutil.copytree(tokenizer_folder, base)
    # version 4 takes a list for a name -> token
    settings["extra_special_tokens"] = ["<pad>"]
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    out = tmp_path / "out"
    out.mkdir()
    write_tokenizer(out, load_tokenizer(base, False))
    written = json.loads((out / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "extra_special_tokens" not in written
    assert written["additional_special_tokens"] == ["<pad>"]
    assert load_tokenizer(out, False).extra_special_tokens == ["<pad>"]


def test_the_template_of_a_run_replaces_that_of_an_older_processor(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    base = save_base(tmp_path / "base", tokenizer_folder, {**SHAPE, **OLD["Llama 3.1"]})
    (base / "chat_template.json").write_text('{"chat_template": "{{ old }}"}')
    (tmp_path / "out").mkdir()
    tokenizer = load_tokenizer(base, False)
    tokenizer.chat_template = "{{ new }}"
    config = load_model_config(base, False)
    write_model_settings(tmp_path / "out", config, None, tokenizer, base)
    legacy = json.loads((tmp_path / "out" / "chat_template.json").read_text())
    assert legacy == {"chat_template": "{{ new }}"}


def test_no_link_is_followed_out_of_the_model_and_private_files_stay(
    tokenizer_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "models--me--base"
    base = cache / "snapshots" / "abc"
    config = {**SHAPE, **OLD["Llama 3.1"], "auto_map": {"AutoConfig": "configuration_mine.Mine"}}
    save_base(base, tokenizer_folder, config)
    blobs = cache / "blobs"
    blobs.mkdir()
    private = tmp_path / "private.txt"
    private.write_text("the door's code is 1234")
    texts = {
        "LICENSE": "Do what you want.",
        "USE_POLICY.md": "Be kind.",
        "Notice": "",
        "preprocessor_config.json": "{}",
        "configuration_mine.py": "from .parts import x\nNAMES = 'vocab_map.json'",
        "parts.py": "x = 1",
        "vocab_map.json": "{}",
    }
    for number, (name, text) in enumerate(texts.items()):
        (blobs / str(number)).write_text(text)
        (base / name).symlink_to(f"../../blobs/{number}")
    outside = ("COPYING", "NOTICE", "generation_config.json", "chat_template.json")
    for name in outside:
        (base / name).symlink_to(private)
    (base / "LICENSE.link").symlink_to(base / "LICENSE")
    mine = ("my.txt", "notes.yaml", "extra.json", "train.py", "LICENSE_KEY.txt", "prompt.jinja")
    for name in mine:
        (base / name).write_text("db password is hunter2, pin: 1234")
    export(base, tmp_path / "out")
    held = {file.name for file in (tmp_path / "out").iterdir()}
    assert {name for name in texts if (tmp_path / "out" / name).exists()} == texts.keys() - {
        "Notice"
    }
    assert not held & {*outside, *mine, "LICENSE.link"}
    # of a directory of links to a model elsewhere, too
    links = tmp_path / "links"
    links.mkdir()
    for file in base.iterdir():
        (links / file.name).symlink_to(file)
    (links / "NOTICE.txt").symlink_to(private)
    export(links, tmp_path / "of_links")
    assert {file.name for file in (tmp_path / "of_links").iterdir()} == held
    for file in (tmp_path / "out").iterdir():
        assert "1234" not in file.read_text() and not file.is_symlink()
    assert ", ".join(sorted(outside)) in caplog.text
