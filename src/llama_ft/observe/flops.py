"""Model FLOPs: what a step's mathematics needs at least; and how many FLOPs a device can compute, measured and as
published.

FLOPs of a token, counting a multiplication and an addition as two:

- Each weight of a matmul costs 2 forward, 2 for its gradient where it is trained, and 2 for the gradient of its input
  where something below is trained. N has no embeddings, norms and biases, of experts those that a token is sent to, and
  the LM head where there is a label.
- Attention costs 2 x heads x (key width + value width) forward for each pair of tokens that see each other, and twice
  that backward. A row of n tokens has n (n + 1) / 2 such pairs, fewer with a sliding window.

What activation checkpointing computes again is not counted (model FLOPs, not hardware FLOPs).

Source: Kaplan et al. 2020, arXiv:2001.08361, section 2.1; Chowdhery et al. 2022 (PaLM), arXiv:2204.02311, appendix B.
"""

import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel

SECONDS_MEASURED = 0.1
# Of the matmul that is measured: from here on more tokens or rows of weights hardly change the rate.
MOST_TOKENS = {"cpu": 512, "cuda": 8192}
MOST_WEIGHTS = {"cpu": 2**22, "cuda": 2**26}
# TFLOP/s of dense 16-bit matmuls with sums in 32 bits, from the vendors' data sheets, by a word of torch's name of the
# GPU; the first that fits.
PUBLISHED_PEAKS = {
    "B200": 2250, "H200 NVL|H100 NVL": 835, "G?H200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312, "A10G": 70,
    "A10": 125, "A40": 150, "L40S": 362, "L40": 181, "L4": 121, "RTX A6000": 155, "RTX 6000 Ada": 364, "RTX 5090": 210,
    "RTX 4090": 165, "RTX 3090": 71, "V100": 125, "T4": 65, "MI300X": 1307, "MI250X": 383,
}  # fmt: skip


@dataclass(frozen=True)
class FlopFormula:
    """The model FLOPs of any rows.

    Attributes:
        per_token: of matmuls with weights, the LM head's included; `per_target` is its part of that.
        per_pair: window (None: no limit) -> of attention, over all layers with that window.
        product: rows and columns of the largest weight matrix of a layer.
        layers_per_token: of matmuls with weights, forward only, in layers that gradients pass.
    """

    per_token: float
    per_pair: dict[int | None, float]
    product: tuple[int, int]
    per_target: float = 0.0
    layers_per_token: float = 0.0

    def of(self, lengths: Sequence[int], targets: int) -> tuple[float, float]:
        """Forward and backward of rows with so many tokens, of which so many have a label: of matmuls with weights, and
        of attention."""
        attention = sum(
            each * visible_pairs(length, window) for window, each in self.per_pair.items() for length in lengths
        )
        return self.per_token * sum(lengths) - self.per_target * (sum(lengths) - targets), attention

    def recomputed(self, lengths: Sequence[int]) -> float:
        """What activation checkpointing of all layers adds: their forward pass, of attention a third. A layer's last
        matmul counts too, which PyTorch leaves out because its output is not needed."""
        return self.layers_per_token * sum(lengths) + self.of(lengths, 0)[1] / 3


def visible_pairs(length: int, window: int | None = None) -> int:
    """Pairs of tokens of a row of which one sees the other or itself; at most `window` each."""
    seen = length if window is None else min(length, window)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def flop_formula(model: PreTrainedModel) -> FlopFormula:
    """Of a model as it is trained: adapters in it, frozen what is frozen; sharded or not."""
    from llama_ft.models.build import decoder_layers
    from llama_ft.models.quantized import weight_counts

    layers, quantized = decoder_layers(model), weight_counts(model)
    layer_of = {id(p): number for number, layer in enumerate(layers) for p in layer.parameters()}
    head = model.get_output_embeddings()
    of_head = {id(p) for p in head.parameters()} if head is not None else set()
    tables = [model.get_input_embeddings(), *(module for module in model.modules() if isinstance(module, nn.Embedding))]
    embedded = {id(p) for module in tables for p in module.parameters()}
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    first = min((-1 if p in embedded else layer_of.get(p, len(layers)) for p in trained), default=len(layers) + 1)

    config = model.config.get_text_config()
    configs = list(config.per_layer_config) if config.is_heterogeneous else [config] * max(1, len(layers))
    per_token, per_target, layers_per_token, product = 0.0, 0.0, 0.0, (1, 1)
    for name, parameter in model.named_parameters():
        key = id(parameter)
        if parameter.ndim < 2 or name.endswith("bias") or ".original_module." in name:
            continue
        if (key in embedded and key not in of_head) or quantized.get(key) == 0:
            continue
        count = quantized.get(key, parameter.numel())
        if key in layer_of and count > product[0] * product[1] and parameter.ndim == 2:
            product = (parameter.shape[0], count // parameter.shape[0])
        active, own = float(count), configs[layer_of.get(key, 0)]
        experts = getattr(own, "num_local_experts", None) or getattr(own, "num_experts", None)
        if experts and (parameter.ndim == 3 or ".experts." in name):  # those that a token goes to
            active *= (getattr(own, "num_experts_per_tok", None) or experts) / (
                parameter.shape[0] if parameter.ndim == 3 else experts
            )
        is_above = layer_of.get(key, len(layers)) >= first
        flops = active * (2 + 2 * is_above + 2 * (key in trained))
        per_token += flops
        per_target += flops * (key in of_head)
        layers_per_token += 2 * active * (key in layer_of and is_above)

    per_pair = Counter[int | None]()
    for number in range(len(layers)):
        own, window = configs[number], _window(configs[number], number)
        heads = getattr(own, "num_attention_heads", None)
        if window != 0 and isinstance(heads, int):  # else it has no attention, or not as most have it
            width = getattr(own, "head_dim", None) or own.hidden_size // heads
            key_width = getattr(own, "qk_head_dim", None) or width
            both = key_width + (getattr(own, "v_head_dim", None) or width)
            per_pair[window] += 2 * heads * both * (3 if number >= first else 1)
    return FlopFormula(per_token, dict(per_pair), product, per_target, layers_per_token)


def _window(config: PretrainedConfig, layer: int) -> int | None:
    """How many tokens one sees in a layer; None: all before it, 0: it has no attention."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return window if getattr(config, "use_sliding_window", None) is not False else None
    chunk = getattr(config, "attention_chunk_size", None)
    return {"full_attention": None, "sliding_attention": window, "chunked_attention": chunk}.get(kinds[layer], 0)


def published_peak(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of a GPU by its data sheet; 0 where that is not known here, for CPUs, and for matmuls in 32 bits."""
    return 0.0 if device.type != "cuda" else peak_of(torch.cuda.get_device_name(device), dtype)


def peak_of(name: str, dtype: torch.dtype) -> float:
    """As `published_peak`, of a GPU that is not here: torch's name of it, such as `NVIDIA A100-SXM4-40GB`."""
    if dtype not in (torch.bfloat16, torch.float16):
        return 0.0
    return next((peak * 1e12 for words, peak in PUBLISHED_PEAKS.items() if re.search(rf"\b({words})\b", name)), 0.0)


def product_rate(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of a matmul with a weight of that shape, or of fewer rows, the fastest of those in a tenth of a second.
    All ranks call it at the same time: those of a machine share its cores, caches and power."""
    rows, tokens = max(1, min(shape[0], MOST_WEIGHTS[device.type] // shape[1])), MOST_TOKENS[device.type]
    generator = torch.Generator(device).manual_seed(0)  # on GPUs constant numbers are multiplied faster
    x, weight = (torch.randn(n, shape[1], generator=generator, device=device).to(dtype) for n in (tokens, rows))
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    repeats = 10 if device.type == "cuda" else 1  # a GPU is waited for once in ten
    taken, ends = list[float](), time.perf_counter() + SECONDS_MEASURED
    while len(taken) < 2 or time.perf_counter() < ends:  # the first warms up
        wait()
        started = time.perf_counter()
        for _ in range(repeats):
            linear(x, weight)
        wait()
        taken.append((time.perf_counter() - started) / repeats)
    return 2.0 * tokens * rows * shape[1] / min(taken)
