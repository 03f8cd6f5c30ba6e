"""Read checkpoints that are published quantized, as if they were in 16 bits. Their weights are codes of
few bits, and the scales of blocks of codes.

`open_dequantized` returns a source of weights under the names and in the shapes of the model that was
quantized. Requested rows are dequantized in fp32 and rounded once, to the dtype of config.json. So the
conversion of names, sharding, quantization to 8 or 4 bits and exports see a checkpoint in 16 bits. Which
tensors are quantized is read from the files, not from config.json's lists of excluded modules.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from llama_ft.errors import UserError
from llama_ft.models.base.source import (
    SafetensorsSource,
    StoredTensor,
    WeightSource,
    open_weights,
    row_blocks,
)
from llama_ft.models.published.formats import published_format
from llama_ft.models.published.packed_weights import PackedWeight, damaged, scale_values
from llama_ft.models.published.quantization_config import read_settings
from llama_ft.models.published.weight_format import WeightFormat

# The dtypes of dequantized weights, by their names in config.json.
READ_AS = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
WORK_ELEMENTS = 2**20  # dequantized at once: temporaries in fp32 and of indices take 4 MiB each


def describe_published(
    folder: Path, model_config: PretrainedConfig, keeps_stored: bool = False
) -> str | None:
    """Read the headers of a model's weights. Return a log text about a published format: what it is,
    and what it becomes (`keeps_stored`: with --quantization as_stored). Raises UserError if a file
    cannot be read, or a tensor of the format is missing or does not fit."""
    source = open_dequantized(folder)
    weight_format = published_format(model_config.to_dict())
    if weight_format is None:
        return None
    description = weight_format.describe()
    is_packed = any(header.is_dequantized for header in source.tensors.values())
    if not is_packed:
        return (
            f"config.json says that the checkpoint is quantized ({description}), but no tensor is. "
            f"The weights are read as they are stored."
        )
    read = "Other weights than those kept as stored are" if keeps_stored else "It is"
    return (
        f"The checkpoint is quantized: {description}. {read} read in 16 bits, and whole models are "
        f"written in 16 bits."
    )


def open_dequantized(folder: Path) -> WeightSource:
    """Open the weights of a model directory. Those of a published format are shown in 16 bits. Only
    headers are read. Raises UserError if a tensor of the format is missing or does not fit."""
    source = open_weights(folder)
    settings = read_settings(folder)
    weight_format = published_format(settings)
    if weight_format is None:
        return source
    return DequantizedSource(source, weight_format, dequantized_dtype(settings))


def dequantized_dtype(settings: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of dequantized weights: that of a config.json, or bf16."""
    text = settings.get("text_config") or {}
    names = [section.get(key) for section in (settings, text) for key in ("dtype", "torch_dtype")]
    name = next((name for name in names if name), "bfloat16")
    return READ_AS.get(str(name), torch.bfloat16)


class DequantizedSource(WeightSource):
    """The tensors of another source with quantized ones replaced by what they stand for.

    Args:
        source: the files.
        weight_format: the format of its quantized weights.
        dtype: of the dequantized tensors.
    """

    def __init__(
        self, source: SafetensorsSource, weight_format: WeightFormat, dtype: torch.dtype
    ) -> None:
        self._source = source
        self._packed = weight_format.find(source)
        self.tensors = dict(source.tensors)
        for name, packed in self._packed.items():
            file = source.tensors[packed.codes].file
            if name != packed.codes and name in source.tensors:
                raise damaged(file, f"{name} is stored twice: {packed.codes} is the same weight")
            for stored_name in packed.tensor_names:
                self.tensors.pop(stored_name, None)
            self.tensors[name] = StoredTensor(
                file, packed.shape, dtype, is_dequantized=True, packed=packed
            )
        for name in source.tensors:
            if name.endswith(weight_format.unused):
                del self.tensors[name]

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See `WeightSource`. The rows of a stack are its experts."""
        packed = self._packed.get(name)
        if packed is None:
            return self._source.read_rows(name, start, stop)
        header = self.tensors[name]
        rows = torch.empty(stop - start, *header.shape[1:], dtype=header.dtype)
        if len(header.shape) == 2:
            self._fill(rows, packed, None, start)
            return rows
        for expert in range(start, stop):
            matrix = rows[expert - start]
            self._fill(matrix.T if packed.is_transposed else matrix, packed, expert, 0)
        return rows

    def _fill(
        self, matrix: torch.Tensor, packed: PackedWeight, expert: int | None, offset: int
    ) -> None:
        """Write consecutive rows of a quantized matrix, from row `offset` on."""
        for start, stop in row_blocks(tuple(matrix.shape), 0, len(matrix), WORK_ELEMENTS):
            values = packed.read(self._source, expert, offset + start, offset + stop)
            # the sum first: of 9.4 ms for a block it takes 0.2, and the second check 3.8
            if not values.sum().isfinite() and not values.isfinite().all():
                raise self._not_finite(packed)
            matrix[start:stop] = values

    def _not_finite(self, packed: PackedWeight) -> UserError:
        """Return the error for a weight with a value that is not a number, or is infinite."""
        scale = scale_values(self._source.read(packed.scale))
        broken = packed.codes if scale.isfinite().all() else packed.scale
        file = self._source.tensors[broken].file
        return damaged(file, f"{broken} has values that are not finite (NaN or infinite)")
