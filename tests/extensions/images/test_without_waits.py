"""Features of images from numbers of the host are those that Transformers' own code computes."""

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from image_models import model_of, plain_processor, save_image_model, write_image
from PIL import Image
from transformers import AutoModel

from llama_ft.data import Batch
from llama_ft.extensions.images.image_inputs import ImageTensors
from llama_ft.extensions.images.towers.image_numbers import NUMBERS, RealImages, numbers_of
from llama_ft.extensions.images.towers.without_waits import encode_without_waits
from llama_ft.libraries import evidence

CPU = torch.device("cpu")
SIZES = [(60, 40), (30, 90), (100, 28)]  # pixels of the images


def image_inputs(folder: Path) -> dict[str, torch.Tensor]:
    """What the processor makes of two samples, with two images and with one."""
    images = []
    for number, (width, height) in enumerate(SIZES):
        file = folder / f"{number}.png"
        write_image(file, width, height, number)
        images.append(Image.open(file).convert("RGB"))
    processor = plain_processor(folder)
    mark = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "."}]}],
        tokenize=False,
    )
    output = processor(
        text=[mark + mark, mark],
        images=[images[:2], images[2:]],
        text_kwargs={"padding": False, "return_tensors": None},
        images_kwargs={"return_tensors": "pt"},
    )
    return {name: value for name, value in output.items() if isinstance(value, torch.Tensor)}


def tensors_of(output: Any) -> list[torch.Tensor]:
    """The features of all images, and those that are added after layers."""
    features = [torch.cat(list(output.pooler_output))]
    for added in getattr(output, "deepstack_features", None) or []:
        features.append(torch.cat(list(added)))
    return features


@pytest.mark.parametrize(
    "family",
    [
        "Qwen2.5-VL",
        "Qwen3-VL",
        "Idefics 3",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "Qwen2-VL",
                "Qwen3.5",
                "GLM-4V",
                "LLaVA-NeXT",
                "LLaVA-OneVision",
                "Mistral 3",
                "SmolVLM",
                "Gemma 4",
            )
        ),
    ],
)
def test_features_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    folder = save_image_model(tmp_path / "model", family)
    inputs = image_inputs(folder)
    inner = model_of(folder).base_model
    names = inspect.signature(inner.get_image_features).parameters
    arguments = {name: value for name, value in inputs.items() if name in names}
    expected = inner.get_image_features(**arguments, return_dict=True)

    model = model_of(folder)
    assert numbers_of(model, inputs) is None  # of a model that does not take them
    encode_without_waits(model)
    numbers = numbers_of(model, inputs)
    assert numbers is not None
    others = {name: value for name, value in arguments.items() if name not in numbers.replaced}
    actual = numbers.sent(CPU).features(model.base_model, others)
    for ours, theirs in zip(tensors_of(actual), tensors_of(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_images_that_are_padding_are_left_out(tmp_path: Path) -> None:
    folder = save_image_model(tmp_path / "model", "Idefics 3")
    inputs = image_inputs(folder)
    inputs["pixel_values"][1, -1] = 0
    model = model_of(folder)
    expected = model.base_model.get_image_features(
        inputs["pixel_values"], inputs["pixel_attention_mask"], return_dict=True
    )
    encode_without_waits(model)
    numbers = numbers_of(model, inputs)
    assert isinstance(numbers, RealImages) and numbers.places is not None
    actual = numbers.features(model.base_model, {"pixel_values": inputs["pixel_values"]})
    assert torch.equal(tensors_of(actual)[0], tensors_of(expected)[0])


def test_a_prepared_batch_has_the_same_arguments(tmp_path: Path) -> None:
    folder = save_image_model(tmp_path / "model", "Qwen3-VL")
    model = model_of(folder)
    encode_without_waits(model)
    inputs = image_inputs(folder)
    tokens = torch.full((1, 40), 7)
    tokens[0, 3:12] = model.config.image_token_id
    kinds = (tokens == model.config.image_token_id).long()
    grid = torch.tensor([[1, 6, 6]])
    pixels = inputs["pixel_values"][:36]
    batch = Batch(tokens, tokens.clone(), [25, 15], True, ["a", "b"], [None, None])

    def media() -> ImageTensors:
        return ImageTensors(
            {"mm_token_type_ids": kinds}, {"pixel_values": pixels, "image_grid_thw": grid}
        )

    late = media().arguments(model, batch, [25, 15], CPU)
    prepared = media()
    prepared.prepare(model, batch, [25, 15], CPU)
    early = prepared.arguments(model, batch, [25, 15], CPU)
    assert early.keys() == late.keys()
    assert torch.equal(early["position_ids"], late["position_ids"])
    assert torch.equal(early[NUMBERS].for_tower["image_cu_seqlens"], torch.tensor([0, 36]).int())
    # an example more than it was prepared for
    longer = prepared.arguments(model, batch, [25, 15, 8], CPU)
    assert longer["position_ids"].shape[-1] == 48


def test_features_are_added_to_the_tokens_of_images(tmp_path: Path) -> None:
    folder = save_image_model(tmp_path / "model", "Qwen3-VL")
    plain = model_of(folder).get_decoder()
    model = model_of(folder)
    encode_without_waits(model)
    hidden = torch.randn(2, 9, 64)
    is_image = torch.rand(2, 9) < 0.4
    features = torch.randn(int(is_image.sum()), 64)
    expected = plain._deepstack_process(hidden, is_image, features)
    assert torch.equal(model.get_decoder()._deepstack_process(hidden, is_image, features), expected)


def source(architecture: str) -> str:
    """The code of a tower, without the name of its architecture."""
    file = import_module(f"transformers.models.{architecture}.modeling_{architecture}")
    [config] = [name for name in vars(file) if name.endswith("VisionConfig")]
    prefix = config.removesuffix("VisionConfig")
    tower = AutoModel._model_mapping[getattr(file, config)]
    return inspect.getsource(tower.forward).replace(prefix, "")


@pytest.mark.parametrize("dense", ["qwen3_vl", "qwen3_5", "glm4v"])
def test_towers_of_models_with_experts_are_those_of_dense_ones(dense: str) -> None:
    assert f"{dense}_moe" in evidence.GRID_TOWERS
    assert source(f"{dense}_moe") == source(dense)
