"""The weight format of the page is added to a copy of the tree: a file, and a line in the list."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import write_rows
from edited_copy import EditedCopy
from pages import Page
from safetensors.torch import load_file, save_file

PAGE = Page("docs/development/add-a-weight-format.md")
FOLDER = "src/llama_ft/models/published"


@pytest.fixture
def copy(tmp_path: Path) -> EditedCopy:
    copy = EditedCopy(tmp_path / "copy")
    [module] = PAGE.blocks("python")
    [line] = PAGE.blocks("diff")
    copy.write(f"{FOLDER}/int8_rows.py", module)
    copy.apply(line)
    return copy


def quantize(model: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Write a model with the projections of its decoder layers in INT8. Return what they stand for,
    in bf16."""
    shutil.copytree(model, folder)
    dequantized = dict[str, torch.Tensor]()
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name in [name for name in tensors if "_proj" in name]:
            # without 0, which even the smallest learning rate changes
            codes = torch.randint(1, 128, tuple(tensors[name].shape), dtype=torch.int8)
            scale = torch.rand(len(codes)) * 1e-3 + 1e-4
            tensors |= {name: codes, f"{name}_scale": scale}
            dequantized[name] = (codes * scale[:, None]).bfloat16()
        save_file(tensors, file, {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "int8-rows", "bits": 8}
    (folder / "config.json").write_text(json.dumps(settings | {"dtype": "bfloat16"}))
    return dequantized


def test_a_format_is_a_file_and_a_line(copy: EditedCopy) -> None:
    assert copy.touched() == [f"{FOLDER}/formats.py", f"{FOLDER}/int8_rows.py"]


@pytest.mark.slow
def test_a_run_trains_a_checkpoint_of_a_format_that_is_a_file_and_a_line(
    copy: EditedCopy, tiny_model: Path, tmp_path: Path
) -> None:
    dequantized = quantize(tiny_model, tmp_path / "int8")
    write_rows(tmp_path / "rows.jsonl", 4)
    flags = f"--model_name {tmp_path}/int8 --dataset {tmp_path}/rows.jsonl --context_length 64"
    # a learning rate that changes nothing: the final model has the values that were read
    settings = "--lr 1e-30 --precision bf16_pure --max_train_step 1 --no_plan --device cpu"
    recipe = copy.folder / "recipes" / "finetuning.py"
    run = tmp_path / "run"
    output = copy.run(recipe, *flags.split(), *settings.split(), "--output_dir", run)
    assert "The checkpoint is quantized: INT8 with a scale per row. It is read" in output
    written = load_file(run / "model" / "model.safetensors")
    assert len(dequantized) > 7
    for name, tensor in dequantized.items():
        assert torch.equal(written[name], tensor), name
