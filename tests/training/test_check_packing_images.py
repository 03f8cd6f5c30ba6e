"""The check before training sees that packed attention is causal where a model's is not: in images of
Gemma 3."""

from functools import partial
from pathlib import Path

import pytest
import torch
from image_models import model_of, save_image_model, write_samples
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoTokenizer

from llama_ft.config import DataConfig
from llama_ft.data import DataRequest, TokenizedData, load_processor, prepare
from llama_ft.errors import UserError
from llama_ft.models import BuiltModel, use_packed_attention
from llama_ft.runtime import Ranks
from llama_ft.training import check_packing

PARTS = ["model.vision_tower", "model.multi_modal_projector"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_image_model(tmp_path_factory.mktemp("images") / "model", "Gemma 3")


def tokenized(folder: Path) -> TokenizedData:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    load = partial(load_processor, folder, AutoConfig.from_pretrained(folder), tokenizer)
    request = DataRequest(context_length=256, want_validation=False, load_processor=load)
    config = DataConfig(dataset=str(write_samples(folder.parent / "data")))
    return prepare(config, tokenizer, request, cache=folder.parent / "cache")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_within_images_runs_per_sample(
    folder: Path, dtype: torch.dtype, runtime: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tokenized(folder)
    assert data.train is not None
    built = BuiltModel(model_of(folder), image_parts=PARTS)
    mixers = built.mixers = use_packed_attention(built)
    fully_shard(built.model, mesh=runtime.mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    check = partial(check_packing, built, data.train, 256, dtype, runtime, data.images)
    with monkeypatch.context() as without:
        without.setattr(mixers, "run_more_per_sample", lambda: False)
        with pytest.raises(UserError, match="does not keep packed samples apart"):
            check()
    check()
    assert mixers.names() == "Gemma3Attention"
