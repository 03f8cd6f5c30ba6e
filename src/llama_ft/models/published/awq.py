"""AWQ: as GPTQ, but words hold codes of 8 outputs, in an order of their own.

    qweight [in, out / 8]    qzeros [groups, out / 8]    scales [groups, out]

Source: https://github.com/casper-hansen/AutoAWQ
"""

from dataclasses import dataclass
from math import ceil

import torch

from llama_ft.models.base.source import SafetensorsSource, WeightSource
from llama_ft.models.published.gptq import ColumnFormat, ColumnWeight, find_scales

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place of each of 8 outputs in its word


@dataclass(frozen=True)
class AwqWeight(ColumnWeight):
    """A matrix whose codes are packed along the outputs."""

    def read_codes(self, source: SafetensorsSource, start: int, stop: int) -> torch.Tensor:
        """See `ColumnWeight`."""
        return self.packed_outputs(source, self.codes, start, stop)

    def in_order(self, codes: torch.Tensor) -> torch.Tensor:
        """See `ColumnWeight`."""
        return codes.unflatten(1, (-1, len(ORDER)))[..., torch.tensor(ORDER)].flatten(1)


class Awq(ColumnFormat):
    """Checkpoints of AWQ."""

    tensor_suffixes = (".qweight", ".qzeros", ".scales")
    layouts = ("gemm",)
    known_bits = (4,)

    def weight(self, source: WeightSource, codes: str) -> AwqWeight:
        """See `ColumnFormat`."""
        per_word = 32 // self.bits
        inputs, words = source.tensors[codes].shape
        outputs = words * per_word
        group_size = self.group_size(inputs)
        groups = ceil(inputs / group_size)
        scale, zero_point = find_scales(source, codes, outputs, groups, per_word)
        return AwqWeight(
            codes=codes,
            scale=scale,
            shape=(outputs, inputs),
            zero_point=zero_point,
            bits=self.bits,
            group_size=group_size,
        )
