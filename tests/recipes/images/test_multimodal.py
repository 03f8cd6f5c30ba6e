"""Runs of a model that also takes images, from its checkpoint to the same checkpoint with another
text part."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_by_hand import logits, stored
from conftest import build_model, run_cases
from models.test_architectures import SHAPE, VISION

from llama_ft.errors import UserError
from llama_ft.export import Exporter, find_valid
from llama_ft.inference.flags import InferenceFlags
from llama_ft.inference.load import open_model
from llama_ft.runtime import Ranks

TOWERS = (
    "model.vision_tower.",
    "model.multi_modal_projector.",
    "vision_tower.",
    "multi_modal_projector.",
)


@pytest.fixture(scope="module")
def runs(
    save_tokenizer: Callable[..., Path], rows16: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A bf16 Llava in several files, and runs with it: a full one, which is resumed, and QLoRA."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    folder = tmp_path_factory.mktemp("multimodal")
    torch.manual_seed(0)
    text, vision = (
        {"model_type": kind, "dtype": "bfloat16", **shape}
        for kind, shape in (
            ("llama", SHAPE),
            ("clip_vision_model", VISION | {"projection_dim": 32}),
        )
    )
    config = LlavaConfig(
        text_config=text, vision_config=vision, image_token_index=319, tie_word_embeddings=False
    )
    model = LlavaForConditionalGeneration(config).to(torch.bfloat16)
    model.save_pretrained(save_tokenizer(folder / "base"), max_shard_size="100KB")
    (folder / "base" / "preprocessor_config.json").write_text(
        '{"image_processor_type": "CLIPImageProcessor"}'
    )
    shared = ["--device", "cpu", "--lr", "1e-2", "--precision", "fp32", "--dataset", str(rows16)]
    shared += ["--model_name", f"{folder}/base"]
    full = [
        *shared,
        "--output_dir",
        f"{folder}/full",
        "--max_shard_size",
        "100KB",
        "--max_train_step",
    ]
    lora = "--use_peft --lora_dropout 0 --target_modules all-linear --quantization 4bit".split()
    lora += ["--sample_tokens", "4", "--sample_prompts", "Hi"]
    cases = [
        [*full, "1"],
        [*full, "2", "--resume", "auto", "--resume_allow_changes", "max_train_step"],
        [*shared, *lora, "--output_dir", f"{folder}/lora", "--max_train_step", "2"],
    ]
    finished = run_cases(folder, cases)
    assert "Copied unchanged: model.vision_tower, model.multi_modal_projector" in finished.output
    assert "After fine-tuning\n  question:  Hi\n  answer: " in finished.output
    return folder


def llava(folder: Path) -> Any:
    """By the checkpoint's own class."""
    from transformers import LlavaForConditionalGeneration

    return LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


def opened(place: Path, runtime: Ranks, **flags: Any) -> torch.Tensor:
    """Logits of a text prompt as inference and evaluation of this project load the model."""
    options = InferenceFlags(precision="fp32", **flags)
    return logits(open_model(str(place), options, runtime, build_model()).model)


def has_base_towers(folder: Path, base: Path) -> bool:
    was = stored(base)
    now = stored(folder)
    towers = [name for name in was if name.startswith(TOWERS)]
    same = all(
        was[name].dtype == now[name].dtype and torch.equal(was[name], now[name]) for name in towers
    )
    return same and len(towers) > 30 and was.keys() == now.keys()


def added_names(was: dict[str, Any], now: dict[str, Any]) -> set[str]:
    """The settings that an export adds to config.json, at any depth. All others must be equal."""
    added = now.keys() - was.keys()
    for name, value in was.items():
        if isinstance(value, dict):
            added |= added_names(value, now[name])
        else:
            assert now[name] == value, name
    return added


def test_full_fine_tuning_changes_only_the_text_weights_of_the_checkpoint(
    runs: Path, runtime: Ranks
) -> None:
    base = runs / "base"
    result = runs / "full" / "model"
    ours = opened(result, runtime)
    before = logits(llava(base))
    assert (
        torch.allclose(logits(llava(result)), ours, atol=1e-4)
        and (ours - before).abs().max() > 1e-2
    )
    assert has_base_towers(result, base)
    was, now = (json.loads((folder / "config.json").read_text()) for folder in (base, result))
    assert now["architectures"] == ["LlavaForConditionalGeneration"]
    other_names = {"rope_theta", "rope_scaling", "torch_dtype", "image_token_id"}
    assert added_names(was, now) <= other_names
    assert now["image_token_id"] == was["image_token_index"]
    assert (result / "preprocessor_config.json").read_text() == (
        base / "preprocessor_config.json"
    ).read_text()
    assert "model = AutoModelForMultimodalLM.from_pretrained" in (result / "README.md").read_text()


def test_a_checkpoint_exports_the_whole_model_if_its_base_exists(
    runs: Path, tmp_path: Path
) -> None:
    checkpoint = find_valid(runs / "full")
    assert checkpoint.step == 2 and not any(TOWERS[0] in name for name in checkpoint.tensors)
    Exporter.prepare(checkpoint, build_model(), None, None, False, merge=False).write_model(
        tmp_path / "out", None, 100_000
    )
    ours = stored(tmp_path / "out")
    theirs = stored(runs / "full" / "model")
    assert ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )
    with pytest.raises(UserError, match=r"base_model overrides it\): base model .*/gone"):
        Exporter.prepare(
            checkpoint, build_model(), str(tmp_path / "gone"), None, False, merge=False
        )


def test_an_adapter_fits_the_class_of_the_checkpoint_and_is_merged_into_its_layout(
    runs: Path, tmp_path: Path, runtime: Ranks, recwarn: pytest.WarningsRecorder
) -> None:
    from peft import PeftModel

    base = runs / "base"
    adapter = runs / "lora" / "model"
    reference = PeftModel.from_pretrained(llava(base), adapter)
    assert not [str(warning.message) for warning in recwarn if "missing" in str(warning.message)]
    assert not any(
        "vision_tower" in name for name, _ in reference.named_parameters() if "lora_" in name
    )
    expected = logits(reference)
    assert (expected - logits(llava(base))).abs().max() > 1e-2
    assert torch.allclose(opened(adapter, runtime, quantization="none"), expected, atol=1e-4)
    Exporter.of_adapter(adapter, build_model(), base, str(base), False).write_model(
        tmp_path / "out", torch.float32, 100_000
    )
    assert torch.allclose(logits(llava(tmp_path / "out")), expected, atol=1e-4)
    assert has_base_towers(tmp_path / "out", base)
