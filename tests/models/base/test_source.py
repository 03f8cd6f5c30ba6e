"""Whatever a folder's weights are stored as, rows of them are those of the model that transformers
loads."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, conversion_mapping
from transformers.core_model_loading import Chunk, Interleave, WeightConverter

from llama_ft.config import ModelConfig
from llama_ft.errors import UserError
from llama_ft.models import BuiltModel, build_on_meta, load_model_config
from llama_ft.models.adapters.names import index_names
from llama_ft.models.base.source import (
    SAMPLE_BYTES,
    SAMPLES,
    SafetensorsSource,
    fingerprint,
    open_weights,
)
from llama_ft.models.weights.conversion import ConvertedSource, open_model_weights
from llama_ft.models.weights.load_weights import account_for

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50,
         "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
MODELS = {
    "llama": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16},
    "mixtral": {"num_local_experts": 5},
    "qwen3_5_text": {"head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
                     "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
}  # fmt: skip


def save(
    folder: Path, model_type: str, change: Callable[[str], str] = str, **settings: object
) -> Path:
    """A random model; `change` renames what its file holds."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SHAPE, **MODELS.get(model_type, {}), **settings})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {change(name): tensor for name, tensor in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return folder


def skeleton(folder: Path) -> BuiltModel:
    return build_on_meta(load_model_config(folder, False), ModelConfig(model_name=str(folder)))


def check_against_transformers(folder: Path) -> None:
    """Every parameter, whole and in uneven parts."""
    model = skeleton(folder)
    source = open_model_weights(folder, model).source
    keys = account_for(index_names(model.model), source.tensors, folder)
    expected = dict(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters()
    )
    assert keys.keys() == expected.keys()
    for name, parameter in expected.items():
        key = keys[name]
        rows = parameter.shape[0]
        assert source.tensors[key].shape == tuple(parameter.shape)
        assert torch.equal(source.read(key).float(), parameter), name
        parts = []
        for start in range(0, rows, 3):
            parts.append(source.read_rows(key, start, min(start + 3, rows)))
        assert torch.equal(torch.cat(parts).float(), parameter), name


def test_a_checkpoint_that_already_has_the_models_layout_is_not_converted(tmp_path: Path) -> None:
    folder = save(tmp_path, "mixtral")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained(folder, save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(folder / "model.safetensors")
    check_against_transformers(folder)
    assert isinstance(open_model_weights(folder, skeleton(folder)).source, SafetensorsSource)


def nested(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1)


@pytest.mark.parametrize(
    ("model_type", "change"),
    [
        *((model_type, str) for model_type in MODELS),
        # saved as a base model, without its prefix
        ("llama", lambda name: name.removeprefix("model.")),
        ("gpt2", lambda name: name.removeprefix("transformer.")),
        ("qwen3_5_text", nested),  # the language model of a vision model
    ],
)
def test_each_layout_is_read_as_transformers_reads_it(
    tmp_path: Path, model_type: str, change: Callable[[str], str]
) -> None:
    check_against_transformers(save(tmp_path, model_type, change))


class Watched(SafetensorsSource):
    """Notes which tensors are read."""

    def __init__(self, files: list[Path]) -> None:
        super().__init__(files)
        self.was_read: list[str] = []

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        self.was_read.append(name)
        return super().read_rows(name, start, stop)


def test_rows_of_stacked_experts_read_only_those_experts(tmp_path: Path) -> None:
    stored = Watched([save(tmp_path, "mixtral") / "model.safetensors"])
    built = skeleton(tmp_path)
    source = ConvertedSource(stored, built, index_names(built.model))
    assert not stored.was_read
    source.read_rows("model.layers.1.mlp.experts.gate_up_proj", 2, 4)
    experts = "model.layers.1.block_sparse_moe.experts"
    assert sorted(stored.was_read) == [
        f"{experts}.{n}.{w}.weight" for n in (2, 3) for w in ("w1", "w3")
    ]


@pytest.fixture
def conversions() -> Iterator[None]:
    """Forget afterwards what a test registers, as a user of transformers can."""
    before = dict(conversion_mapping._checkpoint_conversion_mapping_cache or {})
    yield
    conversion_mapping._checkpoint_conversion_mapping_cache = before or None
    conversion_mapping.USER_REGISTERED_MAPPINGS.clear()


def test_rows_that_a_conversion_interleaves_equal_those_of_transformers(
    tmp_path: Path, conversions: None
) -> None:
    mixed = WeightConverter("mlp.mixed.weight", "mlp.gate_proj.weight", [Interleave(dim=0)])
    below = WeightConverter(
        "attn.qkv.weight", [f"self_attn.{n}_proj.weight" for n in "qkv"], [Chunk(dim=0)]
    )
    conversion_mapping.register_checkpoint_conversion_mapping(
        "LlamaForCausalLM", [mixed, below], overwrite=True
    )
    folder = save(tmp_path, "llama", num_key_value_heads=4)  # saved through the conversions undone
    assert {"model.layers.0.mlp.mixed.weight", "model.layers.0.attn.qkv.weight"} <= open_weights(
        folder
    ).tensors.keys()
    check_against_transformers(folder)


def test_a_missing_expert_is_rejected(tmp_path: Path) -> None:
    file = save(folder := tmp_path, "mixtral") / "model.safetensors"
    save_file(
        {
            name: t
            for name, t in load_file(file).items()
            if "0.block_sparse_moe.experts.3." not in name
        },
        file,
    )
    model = skeleton(folder)
    with pytest.raises(
        UserError,
        match=r"experts.gate_up_proj is \[4, 96, 32\], config.json makes it \[5, 96, 32\]",
    ):
        account_for(
            index_names(model.model), open_model_weights(folder, model).source.tensors, folder
        )


def test_a_fingerprint_changes_with_weights_and_settings(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "llama", vocab_size=20_000)
    file = folder / "model.safetensors"
    original = fingerprint(folder)
    assert file.stat().st_size > 3 * SAMPLES * SAMPLE_BYTES, "most of it is not read"
    tensors = load_file(file)
    for name in (
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.1.mlp.up_proj.weight",
    ):
        save_file({**tensors, name: tensors[name] * 1.001}, file, {"format": "pt"})
        assert fingerprint(folder) != original, name
    save_file(tensors, file, {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    incidental = {"_name_or_path": "copy", "transformers_version": "4.40.0", "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(dict(reversed((settings | incidental).items()))))
    assert fingerprint(folder) == original
    settings["rope_parameters"]["rope_theta"] *= 2
    (folder / "config.json").write_text(json.dumps(settings))
    assert fingerprint(folder) != original
