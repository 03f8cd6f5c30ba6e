"""Model FLOPs: the minimum that the mathematics of a step needs. And the FLOP/s of a device,
measured and published.

FLOPs of a token, where a multiplication and an addition count as two:

- Each weight of a matmul costs 2 in the forward pass, 2 for its gradient if it is trained, and 2
  for the gradient of its input if a layer below is trained. Embeddings, norms and biases do not
  count. Of experts, only those that the token is routed to count; the LM head counts only at
  positions with a label.
- Attention costs 2 x heads x (key width + value width) in the forward pass for each pair of tokens
  that see each other, and twice that backward. A sample of n tokens has n (n + 1) / 2 such pairs,
  fewer with a sliding window.

The forward pass that activation checkpointing repeats is not counted (model FLOPs, not hardware
FLOPs).

Source: Kaplan et al. 2020, arXiv:2001.08361, section 2.1; Chowdhery et al. 2022 (PaLM),
arXiv:2204.02311, appendix B.
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
# Size of the measured matmul. More tokens, or more rows of the weight, hardly change the rate.
MOST_TOKENS = {"cpu": 512, "cuda": 8192}
MOST_WEIGHTS = {"cpu": 2**22, "cuda": 2**26}
# TFLOP/s of dense 16-bit matmuls with fp32 accumulation, from the vendors' data sheets. A key is
# part of the GPU's name in torch; the first match counts.
PUBLISHED_PEAKS = {
    "B200": 2250, "H200 NVL|H100 NVL": 835, "G?H200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312, "A10G": 70,
    "A10": 125, "A40": 150, "L40S": 362, "L40": 181, "L4": 121, "RTX A6000": 155, "RTX 6000 Ada": 364, "RTX 5090": 210,
    "RTX 4090": 165, "RTX 3090": 71, "V100": 125, "T4": 65, "MI300X": 1307, "MI250X": 383,
}  # fmt: skip


@dataclass(frozen=True)
class FlopFormula:
    """The formula for a model's FLOPs per sample.

    Attributes:
        per_token: forward and backward of all weight matmuls. `per_target` is the LM head's part of
            it.
        per_pair: window (None: no limit) -> FLOPs of attention per pair of tokens, over all layers
            with that window.
        product: rows and columns of the largest weight matrix of a layer.
        layers_per_token: forward only, of the weight matmuls in layers that gradients pass.
    """

    per_token: float
    per_pair: dict[int | None, float]
    product: tuple[int, int]
    per_target: float = 0.0
    layers_per_token: float = 0.0

    def of(self, lengths: Sequence[int], targets: int) -> tuple[float, float]:
        """Return the FLOPs of forward and backward: of weight matmuls, and of attention. `lengths`
        are the tokens of each sample, `targets` is the number of all labels."""
        attention = sum(
            each * visible_pairs(length, window)
            for window, each in self.per_pair.items()
            for length in lengths
        )
        return self.per_token * sum(lengths) - self.per_target * (sum(lengths) - targets), attention

    def recomputed(self, lengths: Sequence[int]) -> float:
        """Return the FLOPs that full activation checkpointing adds: the forward pass of all layers,
        a third of attention's. It includes each layer's last matmul, which PyTorch skips because
        nothing needs its output."""
        return self.layers_per_token * sum(lengths) + self.of(lengths, 0)[1] / 3


def visible_pairs(length: int, window: int | None = None) -> int:
    """Return the number of pairs (query, key) in a sample of `length` tokens; at most `window` keys
    each."""
    seen = length if window is None else min(length, window)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def flop_formula(model: PreTrainedModel) -> FlopFormula:
    """Return the formula of a model as it is trained: with adapters and frozen parameters, sharded
    or not."""
    from llama_ft.models.build import decoder_layers
    from llama_ft.models.quantized import weight_counts

    layers = decoder_layers(model)
    quantized = weight_counts(model)
    layer_of = {id(p): number for number, layer in enumerate(layers) for p in layer.parameters()}
    head = model.get_output_embeddings()
    of_head = {id(p) for p in head.parameters()} if head is not None else set()
    tables = [
        model.get_input_embeddings(),
        *(module for module in model.modules() if isinstance(module, nn.Embedding)),
    ]
    embedded = {id(p) for module in tables for p in module.parameters()}
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    first = min(
        (-1 if p in embedded else layer_of.get(p, len(layers)) for p in trained),
        default=len(layers) + 1,
    )

    config = model.config.get_text_config()
    configs = (
        list(config.per_layer_config) if config.is_heterogeneous else [config] * max(1, len(layers))
    )
    per_token = 0.0
    per_target = 0.0
    layers_per_token = 0.0
    product = (1, 1)
    for name, parameter in model.named_parameters():
        key = id(parameter)
        if parameter.ndim < 2 or name.endswith("bias") or ".original_module." in name:
            continue
        if (key in embedded and key not in of_head) or quantized.get(key) == 0:
            continue
        count = quantized.get(key, parameter.numel())
        if key in layer_of and count > product[0] * product[1] and parameter.ndim == 2:
            product = (parameter.shape[0], count // parameter.shape[0])
        active = float(count)
        own = configs[layer_of.get(key, 0)]
        experts = getattr(own, "num_local_experts", None) or getattr(own, "num_experts", None)
        # only the experts that a token is routed to
        if experts and (parameter.ndim == 3 or ".experts." in name):
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
        own = configs[number]
        window = _window(configs[number], number)
        heads = getattr(own, "num_attention_heads", None)
        # otherwise it has no attention, or an unusual one
        if window != 0 and isinstance(heads, int):
            width = getattr(own, "head_dim", None) or own.hidden_size // heads
            key_width = getattr(own, "qk_head_dim", None) or width
            both = key_width + (getattr(own, "v_head_dim", None) or width)
            per_pair[window] += 2 * heads * both * (3 if number >= first else 1)
    return FlopFormula(per_token, dict(per_pair), product, per_target, layers_per_token)


def _window(config: PretrainedConfig, layer: int) -> int | None:
    """Return how many tokens a token sees in a layer; None: all before it, 0: the layer has no
    attention."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return window if getattr(config, "use_sliding_window", None) is not False else None
    chunk = getattr(config, "attention_chunk_size", None)
    return {"full_attention": None, "sliding_attention": window, "chunked_attention": chunk}.get(
        kinds[layer], 0
    )


def published_peak(dtype: torch.dtype, device: torch.device) -> float:
    """Return the GPU's FLOP/s by its data sheet; 0 if it is unknown, for CPUs, and for fp32
    matmuls."""
    return 0.0 if device.type != "cuda" else peak_of(torch.cuda.get_device_name(device), dtype)


def peak_of(name: str, dtype: torch.dtype) -> float:
    """Return `published_peak` of a GPU by torch's name of it, such as `NVIDIA A100-SXM4-40GB`."""
    if dtype not in (torch.bfloat16, torch.float16):
        return 0.0
    return next(
        (
            peak * 1e12
            for words, peak in PUBLISHED_PEAKS.items()
            if re.search(rf"\b({words})\b", name)
        ),
        0.0,
    )


def matmul_rate(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> float:
    """Return the FLOP/s of a matmul: the fastest one within 0.1 s. All ranks must call it at the
    same time, because the ranks of a machine share its cores, caches and power.

    Args:
        shape: rows and columns of the weight; of a large one, only the first rows are used
        (MOST_WEIGHTS). dtype, device: of the weight and its inputs.
    """
    rows = max(1, min(shape[0], MOST_WEIGHTS[device.type] // shape[1]))
    tokens = MOST_TOKENS[device.type]
    generator = torch.Generator(device).manual_seed(0)  # GPUs multiply constant numbers faster
    x, weight = (
        torch.randn(n, shape[1], generator=generator, device=device).to(dtype)
        for n in (tokens, rows)
    )
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    repeats = 10 if device.type == "cuda" else 1  # synchronize with a GPU after ten matmuls
    taken = list[float]()
    ends = time.perf_counter() + SECONDS_MEASURED
    while len(taken) < 2 or time.perf_counter() < ends:  # at least two: the first is a warm-up
        wait()
        started = time.perf_counter()
        for _ in range(repeats):
            linear(x, weight)
        wait()
        taken.append((time.perf_counter() - started) / repeats)
    return 2.0 * tokens * rows * shape[1] / min(taken)
