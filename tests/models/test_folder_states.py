"""Directories in which it is not plain which weights are meant: what is loaded has the logits of plain
Transformers, or the directory is rejected."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_by_hand import stored
from conftest import build_model
from image_models import model_of, save_image_model
from safetensors.torch import load_file, save_file

from llama_ft.config import CheckpointConfig, Config, ModelConfig, PeftConfig, QuantizationConfig
from llama_ft.errors import UserError
from llama_ft.export import Exporter, export_adapter, export_model
from llama_ft.models import (
    BuiltModel,
    ModelRequest,
    check_no_adapter,
    load_model_config,
    load_tokenizer,
)
from llama_ft.phases import NULL_MONITOR
from llama_ft.plan.fake.fake_checkpoint import read_headers
from llama_ft.runtime import PRECISIONS, Ranks

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
IDS = torch.arange(3, 40)[None]
# widths of 64: 4 bits need them
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 301}
State = Callable[[Path, "Bases"], None]


class Bases:
    """Two saves of a model, of different weights, and a smaller model; each in one file or in
    several."""

    def __init__(self, folder: Path, save: Callable[..., Path]) -> None:
        self.folder = folder
        for name, seed in (("old", 1), ("new", 2)):
            save(folder / name, seed=seed, **SHAPE)
            save_file(stored(folder / name), folder / f"{name}.safetensors", {"format": "pt"})
        save(folder / "other", seed=3, **SHAPE | {"hidden_size": 32})

    def shards(self, name: str, target: Path) -> None:
        """Copy a save in several files, with its index."""
        for file in (self.folder / name).glob("model*"):
            shutil.copy(file, target)

    def single(self, name: str, target: Path) -> None:
        """Copy a save in one file."""
        shutil.copy(self.folder / f"{name}.safetensors", target / SINGLE)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory, save_model: Callable[..., Path]) -> Bases:
    return Bases(tmp_path_factory.mktemp("bases"), save_model)


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE, {"format": "pt"})


def single_beside_shards(name: str, shards: str) -> State:
    def state(folder: Path, bases: Bases) -> None:
        bases.shards(shards, folder)
        bases.single(name, folder)

    return state


def single_beside(*others: str) -> State:
    """Other files of weights, from the other save."""

    def state(folder: Path, bases: Bases) -> None:
        bases.single("new", folder)
        for other in others:
            (folder / other).parent.mkdir(exist_ok=True)
            if other.endswith(".bin"):
                torch.save(stored(bases.folder / "old"), folder / other)
            else:
                shutil.copy(bases.folder / "old.safetensors", folder / other)

    return state


def changed_tensors(change: Callable[[dict[str, torch.Tensor]], None], **config: Any) -> State:
    def state(folder: Path, bases: Bases) -> None:
        bases.single("new", folder)
        edit_tensors(folder, change)
        edit_json(folder / "config.json", **config)

    return state


def changed_index(change: Callable[[Path, dict[str, str]], None]) -> State:
    def state(folder: Path, bases: Bases) -> None:
        bases.shards("new", folder)
        index = json.loads((folder / INDEX).read_text())
        change(folder, index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return state


def named_in_config(name: str) -> State:
    def state(folder: Path, bases: Bases) -> None:
        bases.shards("old", folder)
        shutil.copy(bases.folder / "new.safetensors", folder / "best.safetensors")
        edit_json(folder / "config.json", transformers_weights=name)

    return state


def dangling_link(folder: Path, bases: Bases) -> None:
    bases.shards("new", folder)
    (folder / SINGLE).symlink_to(folder / "deleted")


def drop_names(folder: Path, weight_map: dict[str, str]) -> None:
    """Of each file only one name is left."""
    by_file = {file: name for name, file in weight_map.items()}
    weight_map.clear()
    weight_map |= {name: file for file, name in by_file.items()}


def swap_names(folder: Path, weight_map: dict[str, str]) -> None:
    files = sorted(set(weight_map.values()))
    weight_map |= {name: files[0] for name in weight_map if weight_map[name] == files[1]}
    weight_map["unknown"] = files[1]


def move_into_folder(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "part").mkdir()
    for name, file in weight_map.items():
        weight_map[name] = f"part/{file}"
    for file in folder.glob("model-*"):
        file.rename(folder / "part" / file.name)


def duplicate(folder: Path, weight_map: dict[str, str]) -> None:
    """The embedding once more, with other values, in the last file; the index names the first."""
    last = sorted(set(weight_map.values()))[-1]
    tensors = load_file(folder / last)
    save_file(tensors | {EMBEDDING: torch.ones(301, 64)}, folder / last, {"format": "pt"})


def extra_shards(folder: Path, weight_map: dict[str, str]) -> None:
    first = min(weight_map.values())
    for name in ("model-00001-of-00002.safetensors", "model-00009-of-00099.safetensors"):
        shutil.copy(folder / first, folder / name)


def copy_of_embedding(tensors: dict[str, torch.Tensor]) -> None:
    tensors[HEAD] = tensors[EMBEDDING].clone()


def head_only(tensors: dict[str, torch.Tensor]) -> None:
    tensors[HEAD] = tensors.pop(EMBEDDING)


def without_prefix(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        tensors[name.removeprefix("model.")] = tensors.pop(name)


def other_dtypes(tensors: dict[str, torch.Tensor]) -> None:
    for number, name in enumerate(tensors):
        tensors[name] = tensors[name].to([torch.float32, torch.bfloat16, torch.float16][number % 3])


def rounded_copy(tensors: dict[str, torch.Tensor]) -> None:
    tensors[HEAD] = tensors[EMBEDDING].bfloat16()
    tensors[EMBEDDING] = tensors[HEAD].float()


def almost_a_copy(tensors: dict[str, torch.Tensor]) -> None:
    tensors[HEAD] = tensors[EMBEDDING].clone()
    tensors[HEAD][-1, -1] += 1


LOADED: dict[str, State] = {
    "an older index": single_beside_shards("new", shards="old"),
    "an index of another model": single_beside_shards("new", shards="other"),
    "a newer index": single_beside_shards("old", shards="new"),
    "a link to nothing beside an index": dangling_link,
    "shards beyond the index": changed_index(extra_shards),
    "an index without some names": changed_index(drop_names),
    "an index with wrong files": changed_index(swap_names),
    "an index into a folder": changed_index(move_into_folder),
    "a name in two shards": changed_index(duplicate),
    "other formats": single_beside("pytorch_model.bin", "model.gguf"),
    "variants": single_beside("model.fp16.safetensors", "consolidated.safetensors"),
    "folders": single_beside("original/model.safetensors", "onnx/model.safetensors"),
    "a file named in config.json": named_in_config("best.safetensors"),
    "an index named in config.json": named_in_config(INDEX),
    "tied in config.json, two matrices": changed_tensors(dict.keys, tie_word_embeddings=True),
    "tied, one weight differs": changed_tensors(almost_a_copy, tie_word_embeddings=True),
    "tied, and a copy": changed_tensors(copy_of_embedding, tie_word_embeddings=True),
    "tied, and a copy in another dtype": changed_tensors(rounded_copy, tie_word_embeddings=True),
    "tied, only the head": changed_tensors(head_only, tie_word_embeddings=True),
    "untied, equal": changed_tensors(copy_of_embedding),
    "tied, two matrices, no prefix": changed_tensors(without_prefix, tie_word_embeddings=True),
    "no prefix": changed_tensors(without_prefix),
    "several dtypes": changed_tensors(other_dtypes),
    "another name": changed_tensors(dict.keys, _name_or_path="/nowhere"),
}
REJECTED: dict[str, tuple[State, str]] = {
    "a missing shard": (
        changed_index(lambda folder, _: next(folder.glob("model-00002*")).unlink()),
        "model-00002.*no such file",
    ),
    "untied, no head": (changed_tensors(lambda tensors: tensors.pop(HEAD)), f"missing: {HEAD}"),
    "only other formats": (
        lambda folder, bases: torch.save({}, folder / "pytorch_model.bin"),
        "no model.safetensors or",
    ),
    "a distributed checkpoint": (
        single_beside("shard-00000-model-00001-of-00001.safetensors"),
        "distributed checkpoint .shard-00000-model",
    ),
    "a file outside": (named_in_config("../best.safetensors"), "outside its directory"),
    "a file of another kind": (named_in_config("best.bin"), "transformers_weights is best.bin"),
}


def folder_of(state: State, bases: Bases, folder: Path) -> Path:
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bases.folder / "new" / name, folder)
    state(folder, bases)
    return folder


def build(folder: Path, ranks: Ranks, **settings: Any) -> BuiltModel:
    config = Config(model=ModelConfig(model_name=str(folder)), **settings)
    request = ModelRequest(
        config, folder, load_model_config(folder, False), storage=PRECISIONS["fp32"]
    )
    return build_model()(request, ranks, NULL_MONITOR)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.eval()(input_ids=IDS).logits
    return found


def plain(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


# one of each kind; the others are slow
FAST = (
    "an older index",
    "a newer index",
    "a link to nothing beside an index",
    "a name in two shards",
    "a file named in config.json",
    "tied in config.json, two matrices",
    "tied, and a copy in another dtype",
    "tied, two matrices, no prefix",
)
STATES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in LOADED]
UNTIED = [name for name in LOADED if "two matrices" in name or "differs" in name]


@pytest.mark.parametrize("name", STATES)
def test_the_weights_are_those_that_transformers_loads(
    name: str, bases: Bases, tmp_path: Path, runtime: Ranks
) -> None:
    folder = folder_of(LOADED[name], bases, tmp_path / "model")
    built = build(folder, runtime)
    torch.testing.assert_close(logits(built.model), logits(plain(folder)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", REJECTED)
def test_a_directory_without_these_weights_is_rejected(
    name: str, bases: Bases, tmp_path: Path, runtime: Ranks
) -> None:
    state, message = REJECTED[name]
    folder = folder_of(state, bases, tmp_path / "model")
    with pytest.raises(UserError, match=message):
        build(folder, runtime)


def test_an_adapter_in_a_models_directory_is_rejected_unless_it_is_continued(
    bases: Bases, tmp_path: Path
) -> None:
    """Transformers applies it when it loads the model."""
    folder = folder_of(single_beside(), bases, tmp_path / "model")
    check_no_adapter(folder, "--model_name")
    (folder / "adapter_config.json").write_text("{}")
    check_no_adapter(folder, "--model_name", continued=str(folder / ".." / "model"))
    for continued in (None, str(bases.folder)):
        with pytest.raises(UserError, match=f"--model_name {folder}: holds a model and an adapter"):
            check_no_adapter(folder, "--model_name", continued)


def test_a_plan_counts_the_head_that_config_json_ties(bases: Bases, tmp_path: Path) -> None:
    """And needs no weights of a model whose index alone was downloaded."""
    names = [HEAD, EMBEDDING]
    folder = folder_of(LOADED[UNTIED[0]], bases, tmp_path / "model")
    settings = ModelConfig(model_name=str(folder))
    config, headers = read_headers(folder, settings)
    assert not config.tie_word_embeddings and headers.keys() >= set(names)
    (folder / SINGLE).unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}
    (folder / INDEX).write_text(json.dumps(index))
    config, headers = read_headers(folder, settings)
    assert config.tie_word_embeddings and HEAD not in headers and EMBEDDING in headers


SLOW_FLAGS = [pytest.param(where, marks=pytest.mark.slow) for where in ("root", "both")]


@pytest.mark.parametrize("flags", ["text", *SLOW_FLAGS])
def test_the_text_part_of_an_image_model_is_untied(
    flags: str, tmp_path: Path, runtime: Ranks
) -> None:
    folder = save_image_model(tmp_path / "model", "Qwen2.5-VL", tie_word_embeddings=False)
    file = folder / "config.json"
    settings = json.loads(file.read_text())
    settings["tie_word_embeddings"] = flags != "text"
    settings["text_config"]["tie_word_embeddings"] = flags != "root"
    file.write_text(json.dumps(settings))
    expected = model_of(folder)
    embedding, head = expected.get_input_embeddings(), expected.lm_head
    assert not torch.equal(embedding.weight, head.weight)
    built = build(folder, runtime)
    torch.testing.assert_close(logits(built.model), logits(expected), rtol=0, atol=1e-4)
    tokenizer = load_tokenizer(folder, False)
    out = tmp_path / "out"
    export_model(built, out, CheckpointConfig(), tokenizer, lambda _: None, runtime)
    file = out / "config.json"
    settings = json.loads(file.read_text())
    assert not settings["tie_word_embeddings"]
    assert not settings["text_config"]["tie_word_embeddings"]
    torch.testing.assert_close(logits(model_of(out)), logits(expected), rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["lm_head", "shared_transformer"])
def test_ties_of_layers_that_cannot_be_undone_are_rejected(part: str, tmp_path: Path) -> None:
    """Zamba 2's layers share a block, and config.json has one flag for all ties."""
    from transformers import Zamba2Config, Zamba2ForCausalLM

    config = Zamba2Config(
        vocab_size=301,
        hidden_size=64,
        num_hidden_layers=5,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid", "mamba"],
        num_attention_heads=4,
        n_mamba_heads=4,
        mamba_headdim=32,
        num_mem_blocks=1,
        intermediate_size=96,
        tie_word_embeddings=True,
    )
    model = Zamba2ForCausalLM(config)
    model.save_pretrained(tmp_path)
    assert load_model_config(tmp_path, False).tie_word_embeddings
    ties = model.all_tied_weights_keys
    target = next(name for name in ties if part in name)
    edit_tensors(tmp_path, lambda tensors: tensors.update({target: tensors[ties[target]] + 1}))
    with pytest.raises(UserError, match=f"ties {target} to {ties[target]}, but their values"):
        load_model_config(tmp_path, False)


def change(built: BuiltModel) -> None:
    """Change every trained weight, each in its own way."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in built.model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape) * 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADED)
def test_an_export_has_the_logits_of_the_trained_model(
    name: str, bases: Bases, tmp_path: Path, runtime: Ranks
) -> None:
    folder = folder_of(LOADED[name], bases, tmp_path / "model")
    built = build(folder, runtime)
    change(built)
    settings = CheckpointConfig(max_shard_size="300KB", save_dtype="float32")
    out = tmp_path / "out"
    export_model(built, out, settings, load_tokenizer(folder, False), lambda _: None, runtime)
    assert (logits(built.model) - logits(plain(folder))).abs().max() > 0.1
    torch.testing.assert_close(logits(plain(out)), logits(built.model), rtol=0, atol=1e-4)
    is_tied = json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    ends_tied = json.loads((out / "config.json").read_text())["tie_word_embeddings"]
    assert ends_tied == (is_tied and name not in UNTIED)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADED)
def test_an_adapter_fits_the_base_that_transformers_loads(
    name: str, bases: Bases, tmp_path: Path, runtime: Ranks
) -> None:
    """Also merged, on any layer, and trained on a base in 4 bits."""
    from peft import PeftModel

    folder = folder_of(LOADED[name], bases, tmp_path / "model")
    tokenizer = load_tokenizer(folder, False)
    peft = PeftConfig(use_peft=True, target_modules="all-linear", modules_to_save=["lm_head"])
    built = build(folder, runtime, peft=peft)
    torch.testing.assert_close(logits(built.model), logits(plain(folder)), rtol=0, atol=1e-5)
    change(built)
    adapter = tmp_path / "adapter"
    export_adapter(built, adapter, CheckpointConfig(), tokenizer, lambda _: None, runtime)
    adapted = PeftModel.from_pretrained(plain(folder), adapter)
    torch.testing.assert_close(logits(adapted), logits(built.model), rtol=0, atol=1e-4)
    merged = tmp_path / "merged"
    exporter = Exporter.of_adapter(adapter, build_model(), folder, str(folder), False)
    exporter.write_model(merged, torch.float32, 300_000)
    torch.testing.assert_close(logits(plain(merged)), logits(built.model), rtol=0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADED)
def test_a_base_in_4_bits_has_the_logits_of_bitsandbytes(
    name: str, bases: Bases, tmp_path: Path, runtime: Ranks
) -> None:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    folder = folder_of(LOADED[name], bases, tmp_path / "model")
    built = build(
        folder,
        runtime,
        peft=PeftConfig(use_peft=True),
        quantization=QuantizationConfig(mode="4bit"),
    )
    expected = plain(folder)
    for module in expected.model.modules():
        if isinstance(module, torch.nn.Linear):
            packed, state = quantize_4bit(module.weight.data, quant_type="nf4")
            module.weight.data = dequantize_4bit(packed, state)
    torch.testing.assert_close(logits(built.model), logits(expected), rtol=0, atol=1e-3)
