"""What a published format brings: how its quantized weights are found and read, and maybe a scheme
that keeps them as they are stored. formats.py lists the formats; each has a file of its own."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn import functional

from llama_ft.errors import UserError
from llama_ft.models.base.source import SafetensorsSource, StoredTensor, WeightSource, row_blocks
from llama_ft.models.published.packed_weights import PackedWeight, damaged

DEQUANTIZED_AT_ONCE = 2**24  # weights: the temporaries in fp32 take 64 MiB each


class WeightFormat:
    """A format of quantized weights, and one checkpoint's settings of it.

    Attributes:
        tensor_suffixes: ends of the names of its codes, scales and zero points. A message about tensors
            that no weight needs tells them from others.
        unused: ends of the names of tensors that are not read. These are of activations and of the
            cache of keys and values, which stay in 16 bits here.
        scheme: keeps weights as they are stored (`--quantization as_stored`); None: not supported.
    """

    tensor_suffixes: ClassVar[tuple[str, ...]] = ()
    unused: ClassVar[tuple[str, ...]] = (
        ".activation_scale",
        ".input_scale",
        ".input_global_scale",
        ".input_zero_point",
        ".output_scale",
        ".qscale_act",
        ".q_scale",
        ".k_scale",
        ".v_scale",
    )
    scheme: ClassVar["type[StoredScheme] | None"] = None

    def __init__(self, quantization_config: Mapping[str, Any]) -> None:
        self.quantization_config = quantization_config
        self.method: str = quantization_config["quant_method"]

    def check(self) -> None:
        """Raise a UserError if quantization_config has a value that no such checkpoint can have, or
        names a variant that cannot be read."""

    def describe(self) -> str:
        """Return what quantization_config says of the weights, for the log."""
        raise NotImplementedError

    def find(self, source: WeightSource) -> dict[str, PackedWeight]:
        """Return the quantized weights of a checkpoint, by their names before quantization. Raises
        UserError if one of their tensors is missing or does not fit."""
        raise NotImplementedError

    def modules_in_16_bits(self) -> list[str]:
        """Return the modules that are not quantized: names, ends of names or patterns. Raises
        UserError if config.json has something else in their place."""
        names = self.quantization_config.get("modules_to_not_convert") or []
        if not isinstance(names, list) or not all(_is_pattern(name) for name in names):
            shown = str(names)[:100]
            raise UserError(
                f"config.json: quantization_config.modules_to_not_convert is {shown}; expected a list of names.\n"
                f"Download config.json again, or leave out --quantization as_stored."
            )
        return names


def _is_pattern(name: Any) -> bool:
    try:
        re.compile(name)
    except (TypeError, re.error):
        return False
    return isinstance(name, str)


@dataclass(frozen=True)
class StoredScheme:
    """How weights are kept as a checkpoint stores them, under LoRA (`--quantization as_stored`).

    Like other quantized weights (see quantization/layers.py) they are two frozen parameters, codes
    and scales, which are sharded by rows together. Codes are bytes, because fully_shard would cast
    floating-point parameters. While a weight is used, it is dequantized to the values that its
    format reads.
    """

    dtype: torch.dtype  # to which weights are dequantized, as config.json says
    name: ClassVar[str]  # for messages
    is_of_experts: ClassVar[bool]  # stacked experts are kept; False: linear layers
    is_transposed: ClassVar[bool]  # shapes are those of the transposed matrices
    weights_per_byte: ClassVar[int]  # of codes
    scale_dtype: ClassVar[torch.dtype]
    weight_dtype: ClassVar[torch.dtype] = torch.uint8
    block_size: ClassVar[int] = 1  # any width of a layer is supported

    @classmethod
    def of(cls, quantization_config: Mapping[str, Any], dtype: torch.dtype) -> "StoredScheme":
        """Return the scheme of a checkpoint. `dtype`: of dequantized weights."""
        return cls(dtype)

    def scale_shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        """Return the shape of the scales of a weight [out, in]."""
        raise NotImplementedError

    def misfit(self, packed: object) -> str | None:
        """Return why a quantized weight cannot be kept, or None. `packed`: a PackedWeight."""
        raise NotImplementedError

    def read(
        self, files: SafetensorsSource, header: StoredTensor, start: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read rows [start, stop) of a weight, or experts of a stack. Return its codes and scales as
        the parameters hold them. Raises UserError for values that are not finite.

        Args:
            files: the checkpoint's.
            header: of the weight; `header.packed` names the tensors that it consists of.
            start, stop: the rows.
        """
        raise NotImplementedError

    def values(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return rows in fp32 from codes and scales."""
        raise NotImplementedError

    def dequantize(
        self, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return rows [n, in] in `dtype` from weight and scale."""
        columns = weight.shape[1] * self.weights_per_byte
        rows = torch.empty(len(weight), columns, dtype=dtype, device=weight.device)
        for start, stop in row_blocks(tuple(rows.shape), 0, len(rows), DEQUANTIZED_AT_ONCE):
            values = self.values(weight[start:stop], scale[start:stop])
            rows[start:stop] = values.to(self.dtype)
        return rows

    def matmul(
        self, inputs: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        """inputs [..., in] x weight -> [..., out] in the inputs' dtype."""
        return functional.linear(inputs, self.dequantize(weight, scale, inputs.dtype))


def check_finite(is_finite: torch.Tensor, name: str, header: StoredTensor) -> None:
    """Raise a UserError for a tensor with a value that is not a number, or is infinite."""
    if not is_finite:
        raise damaged(header.file, f"{name} has values that are not finite (NaN or infinite)")
