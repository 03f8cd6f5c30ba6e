"""Packed samples with images: the check before training sees that packed attention is causal where a
model's is not, in images of Gemma 3; and a sequence may end with an image."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import write_jsonl
from image_models import (
    model_of,
    plain_inputs,
    plain_processor,
    save_image_model,
    write_image,
    write_samples,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoTokenizer

from llama_ft.config import DataConfig
from llama_ft.data import DataRequest, MediaModel, TokenizedData, collate, prepare
from llama_ft.errors import UserError
from llama_ft.models import BuiltModel, use_packed_attention
from llama_ft.models.base.replaced_functions import replace_functions
from llama_ft.runtime import Ranks
from llama_ft.training import SupervisedFineTuning, check_packing

PARTS = ["model.vision_tower", "model.multi_modal_projector"]


@pytest.fixture(scope="module", autouse=True)
def functions_of_built_models() -> None:
    replace_functions()  # as build_on_meta does


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_image_model(tmp_path_factory.mktemp("images") / "model", "Gemma 3")


def tokenized(folder: Path, file: Path | None = None, length: int = 256) -> TokenizedData:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    media_model = MediaModel(folder, AutoConfig.from_pretrained(folder), tokenizer, False)
    request = DataRequest(context_length=length, want_validation=False, media_model=media_model)
    config = DataConfig(dataset=str(file or write_samples(folder.parent / "data")))
    return prepare(config, tokenizer, request, cache=folder.parent / "cache")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_within_images_runs_per_sample(
    folder: Path, dtype: torch.dtype, runtime: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tokenized(folder)
    assert data.train is not None
    built = BuiltModel(model_of(folder), towers=PARTS)
    mixers = built.mixers = use_packed_attention(built)
    fully_shard(built.model, mesh=runtime.mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    check = partial(check_packing, built, data.train, 256, dtype, runtime, data.media)
    with monkeypatch.context() as without:
        without.setattr(mixers, "run_more_per_sample", lambda: False)
        with pytest.raises(UserError, match="does not keep packed samples apart"):
            check()
    check()
    assert mixers.names() == "Gemma3Attention"


@pytest.mark.parametrize("family", ["LLaVA", "Qwen2.5-VL"])
def test_a_packed_sequence_may_end_with_an_image(
    family: str, tmp_path: Path, runtime: Ranks
) -> None:
    """If a sample is truncated right behind it, and the sequence is filled up to a multiple of 64."""
    folder = save_image_model(tmp_path / "model", family)
    write_image(tmp_path / "0.png", 60, 40, 0)
    image = {"type": "image", "image": "0.png"}
    chat = {
        "messages": [
            {"role": "user", "content": "Are you there?"},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": [{"type": "text", "text": "What is it?"}, image]},
            {"role": "assistant", "content": "Noise."},
        ]
    }
    file = write_jsonl(tmp_path / "chats.jsonl", [chat])
    processor = plain_processor(folder)
    inputs, labels = plain_inputs(processor, tmp_path, json.loads(file.read_text()))
    [last, *_] = (inputs["input_ids"][0] == processor.image_token_id).nonzero().flatten().flip(0)
    length = int(last) + 1
    assert length % 64
    model = model_of(folder)
    cut = {
        name: values[:, :length] if values.shape == inputs["input_ids"].shape else values
        for name, values in inputs.items()
    }
    logits = model(**cut).logits[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, labels[1:length], reduction="sum")
    data = tokenized(folder, file, length)
    assert data.train is not None
    packed = collate(data.train, [0], 0, is_packed=True, media=data.media)
    assert packed.tokens == length
    parts = [name for name, _ in model.model.named_children() if name != "language_model"]
    built = BuiltModel(model, towers=[f"model.{name}" for name in parts])
    built.mixers = use_packed_attention(built)
    found = SupervisedFineTuning().loss(built, packed, runtime)
    torch.testing.assert_close(found.loss, expected, rtol=1e-5, atol=1e-5)
    assert found.count == int((labels[1:length] != -100).sum())
