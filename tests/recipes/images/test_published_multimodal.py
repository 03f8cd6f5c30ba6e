"""Runs on the text part of a model for images whose text part is published in FP8, as Ministral 3 is,
compared with Transformers' dequantized model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_by_hand import stored
from conftest import build_model, losses, run_cases
from models.published.test_sources import Tensors, fp8_note, per_tensor
from models.test_architectures import SHAPE, VISION
from safetensors.torch import load_file, save_file
from transformers import FineGrainedFP8Config, Mistral3Config, Mistral3ForConditionalGeneration

from llama_ft.export import Exporter, find_valid

WORLD_SIZES = [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
NOTE = fp8_note(
    weight_block_size=None,
    activation_scheme="static",
    modules_to_not_convert=["model.vision_tower", "model.multi_modal_projector", "lm_head"],
)
TOWERS = ("vision_tower.", "multi_modal_projector.")
SAMPLES = 8
# where the note is, and what is trained
RUNS = {
    "lora": ("whole", ["--use_peft", "--lora_dropout", "0", "--target_modules", "q_proj,o_proj"]),
    "full": ("text", []),
}


def publish_text_part(folder: Path, note_is_in_text_config: bool) -> None:
    """Save a random Mistral 3 whose text part is in FP8."""
    torch.manual_seed(0)
    config = Mistral3Config(
        text_config={"model_type": "ministral3", "head_dim": 16, **SHAPE},
        vision_config=VISION | {"model_type": "pixtral", "head_dim": 16},
        image_token_index=318,
        tie_word_embeddings=False,
    )
    model = Mistral3ForConditionalGeneration(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = Tensors()
    for name, tensor in load_file(file).items():
        is_quantized = "language_model" in name and "_proj" in name
        tensors |= per_tensor(name, tensor) if is_quantized else {name: tensor}
    save_file(tensors, file, {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    noted = settings["text_config"] if note_is_in_text_config else settings
    noted["quantization_config"] = NOTE
    (folder / "config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module", params=WORLD_SIZES)
def runs(
    request: pytest.FixtureRequest,
    save_tokenizer: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Two steps of LoRA, and of full fine-tuning."""
    ranks: int = request.param
    folder = tmp_path_factory.mktemp("published")
    for name, is_nested in (("whole", False), ("text", True)):
        publish_text_part(save_tokenizer(folder / name), is_nested)
    generator = torch.Generator().manual_seed(1)
    samples = []
    for number in range(SAMPLES):
        ids = torch.randint(0, 300, (10 + number,), generator=generator).tolist()
        samples.append(json.dumps({"input_ids": ids, "labels": ids}))
    (folder / "rows.jsonl").write_text("\n".join(samples))
    common = ["--dataset", f"{folder}/rows.jsonl", "--device", "cpu", "--precision", "fp32"]
    common += ["--batching_strategy", "padding", "--batch_size_training", str(SAMPLES // ranks)]
    common += ["--max_train_step", "2", "--num_epochs", "2", "--lr", "1e-3", "--enable_fsdp"]
    cases = []
    for name, (base, flags) in RUNS.items():
        place = f"{folder}/{name}"
        cases.append([*common, *flags, "--model_name", f"{folder}/{base}", "--output_dir", place])
    finished = run_cases(folder, cases, ranks=0 if ranks == 1 else ranks)
    output = " ".join(finished.output.split())
    assert output.count("The checkpoint is quantized: FP8 with a scale per tensor") == len(RUNS)
    return folder


def dequantized(folder: Path) -> Any:
    """Transformers' model, dequantized to bf16 and then widened to fp32."""
    model = Mistral3ForConditionalGeneration.from_pretrained(
        folder, dtype="auto", quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    return model.float()


@pytest.mark.parametrize("name", RUNS)
def test_the_first_loss_is_that_of_the_dequantized_model(runs: Path, name: str) -> None:
    model = dequantized(runs / RUNS[name][0])
    total = 0.0
    tokens = 0
    for line in (runs / "rows.jsonl").read_text().splitlines():
        ids = torch.tensor([json.loads(line)["input_ids"]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0]
        loss = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="sum")
        total += loss.item()
        tokens += ids.shape[1] - 1
    assert losses(runs / name)[0] == pytest.approx(total / tokens, rel=1e-5)


def check_result(folder: Path, base: Path, expected: dict[str, torch.Tensor]) -> None:
    """The whole model in 16 bits, without a quantization_config, its towers unchanged."""
    assert "quantization_config" not in (folder / "config.json").read_text()
    was = stored(base)
    now = stored(folder)
    quantized = {name for name in was if name.endswith("_scale_inv")}
    scales = {name for name in was if name.endswith("activation_scale")} | quantized
    assert now.keys() == was.keys() - scales
    towers = [name for name in now if any(tower in name for tower in TOWERS)]
    assert len(towers) > 10
    assert all(torch.equal(now[name], was[name]) for name in towers)
    assert {tensor.dtype for tensor in now.values()} == {torch.bfloat16}
    model = Mistral3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    loaded = model.state_dict()
    assert loaded.keys() == expected.keys()
    for name, tensor in loaded.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-2, atol=1e-5)


def test_a_merged_adapter_is_that_of_peft(runs: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    adapter = runs / "lora" / "model"
    base = runs / "whole"
    settings = json.loads((adapter / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(base)
    exporter = Exporter.prepare(
        find_valid(runs / "lora"), build_model(), None, None, trust_remote_code=False, merge=True
    )
    exporter.write_model(tmp_path / "merged", None, 10**9)
    by_peft: Any = PeftModel.from_pretrained(dequantized(base), adapter)
    check_result(tmp_path / "merged", base, by_peft.merge_and_unload().state_dict())


def test_full_fine_tuning_writes_16_bits(runs: Path, tmp_path: Path) -> None:
    base = runs / "text"
    result = runs / "full" / "model"
    model = Mistral3ForConditionalGeneration.from_pretrained(result, dtype=torch.float32)
    check_result(result, base, model.state_dict())
    before = dequantized(base).state_dict()
    changed = [
        name for name, tensor in model.state_dict().items() if not tensor.equal(before[name])
    ]
    assert len(changed) > 10
    assert not any(tower in name for name in changed for tower in TOWERS)
    for name in changed:
        # two steps of AdamW with a learning rate of 1e-3, rounded to bf16
        torch.testing.assert_close(model.state_dict()[name], before[name], rtol=1e-2, atol=3e-3)
    exporter = Exporter.prepare(
        find_valid(runs / "full"), build_model(), None, None, trust_remote_code=False, merge=False
    )
    exporter.write_model(tmp_path / "exported", None, 10**9)
    exported = stored(tmp_path / "exported")
    written = stored(result)
    assert exported.keys() == written.keys()
    assert all(torch.equal(exported[name], written[name]) for name in written)
