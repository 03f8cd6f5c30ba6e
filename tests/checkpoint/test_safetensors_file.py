from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llama_ft.checkpoint.safetensors_file import SafetensorsFile

TENSORS = {
    "a": torch.randn(5, 3),
    "b": torch.randn(4, 2).bfloat16(),
    "empty": torch.zeros(0, 3),
    "numbers": torch.arange(7),
}


def test_rows_appended_in_pieces_are_read_back_by_safetensors(tmp_path: Path) -> None:
    with SafetensorsFile(tmp_path / "x.safetensors", TENSORS) as file:
        for tensor in TENSORS.values():
            for rows in tensor.split(2):
                file.append(rows)
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())


def test_a_file_with_rows_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bytes written"):
        with SafetensorsFile(tmp_path / "x.safetensors", TENSORS) as file:
            file.append(TENSORS["a"])
