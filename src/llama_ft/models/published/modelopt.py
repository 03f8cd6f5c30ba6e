"""FP8 and NVFP4 of NVIDIA's ModelOpt.

    weight float8 [out, in]         weight_scale, one number
    weight uint8 [out, in / 2]      weight_scale [out, in / 16]     weight_scale_2, one number

    value = code * scale * scale_2

Source: https://github.com/NVIDIA/Model-Optimizer, modelopt/torch/quantization/qtensor
"""

import torch

from llama_ft.models.base.source import WeightSource
from llama_ft.models.published.packed_weights import (
    FP8,
    PackedWeight,
    ScaledWeight,
    find_number,
    find_tensor,
    fitting_block,
    matrix_shape,
)
from llama_ft.models.published.quantization_config import unsupported
from llama_ft.models.published.weight_format import WeightFormat

ALGORITHMS = ("FP8", "NVFP4")
NVFP4_BLOCK = (1, 16)


class ModelOpt(WeightFormat):
    """Checkpoints of ModelOpt."""

    tensor_suffixes = ("_scale",)

    def check(self) -> None:
        """See `WeightFormat`."""
        algorithm = self.quantization_config.get("quant_algo")
        if algorithm not in ALGORITHMS:
            raise unsupported(self.method, [str(algorithm)], ", ".join(ALGORITHMS))

    def describe(self) -> str:
        """See `WeightFormat`."""
        return f"{self.quantization_config['quant_algo']} of ModelOpt"

    def find(self, source: WeightSource) -> dict[str, PackedWeight]:
        """See `WeightFormat`."""
        weights = dict[str, PackedWeight]()
        for name, header in source.tensors.items():
            is_fp4 = header.dtype == torch.uint8
            is_weight = name.endswith(".weight") and (is_fp4 or header.dtype in FP8)
            if not is_weight:
                continue
            rows, columns = matrix_shape(name, header)
            scale = find_tensor(source, name, [f"{name}_scale"])
            factor = None
            blocks = [(rows, columns)]
            if is_fp4:
                columns *= 2
                factor = find_number(source, name, f"{name}_scale_2")
                blocks = [NVFP4_BLOCK]
            shape = (rows, columns)
            block = fitting_block(source, name, scale, shape, blocks)
            weights[name] = ScaledWeight(
                name, scale, shape, block, is_fp4, global_scale=factor, divides=False
            )
        return weights
