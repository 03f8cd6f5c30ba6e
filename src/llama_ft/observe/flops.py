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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
    "B200": 2250,
    "H200 NVL|H100 NVL": 835,
    "G?H200": 989,
    "H100 PCIe": 756,
    "H100": 989,
    "A100": 312,
    "A10G": 70,
    "A10": 125,
    "A40": 150,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "RTX A6000": 155,
    "RTX A5000": 111,
    "RTX A4000": 77,
    "RTX 6000 ?A[Dd][Aa]": 364,
    "RTX 5090": 210,
    "RTX 5080": 113,
    "RTX 4090": 165,
    "RTX 4080": 97,
    "RTX 3090": 71,
    "V100": 125,
    "T4": 65,
    "MI300X": 1307,
    "MI250X": 383,
}


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
        tokens = sum(lengths)
        # the LM head counts only at positions with a label
        matmuls = self.per_token * tokens - self.per_target * (tokens - targets)
        attention: float = 0
        for window, flops_per_pair in self.per_pair.items():
            for length in lengths:
                attention += flops_per_pair * visible_pairs(length, window)
        return matmuls, attention

    def recomputed(self, lengths: Sequence[int]) -> float:
        """Return the FLOPs that full activation checkpointing adds: the forward pass of all layers,
        a third of attention's. It includes each layer's last matmul, which PyTorch skips because
        nothing needs its output."""
        _, attention = self.of(lengths, targets=0)
        # forward is 1 part of attention's FLOPs, backward 2
        return self.layers_per_token * sum(lengths) + attention / 3


def visible_pairs(length: int, window: int | None = None) -> int:
    """Return the number of pairs (query, key) in a sample of `length` tokens; at most `window` keys
    each."""
    seen = length if window is None else min(length, window)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def flop_formula(model: PreTrainedModel) -> FlopFormula:
    """Return the formula of a model as it is trained: with adapters and frozen parameters, sharded
    or not."""
    from llama_ft.models.base.layers import decoder_layers
    from llama_ft.models.quantization.layers import weight_counts

    layers = decoder_layers(model)
    config = model.config.get_text_config()
    if config.is_heterogeneous:  # each layer has its own sizes
        configs = list(config.per_layer_config)
    else:
        configs = [config] * max(1, len(layers))
    parameters = _classify_parameters(model, layers)
    matmuls = _count_matmuls(model, parameters, configs, weight_counts(model))
    per_pair = Counter[int | None]()
    for number in range(len(layers)):
        window = _window(configs[number], number)
        if window == 0:
            continue
        # twice as much backward, if gradients pass this layer
        directions = 3 if number >= parameters.first_trained_layer else 1
        per_pair[window] += _flops_per_pair(configs[number]) * directions
    return FlopFormula(
        per_token=matmuls.per_token,
        per_pair=dict(per_pair),
        product=matmuls.product,
        per_target=matmuls.per_target,
        layers_per_token=matmuls.layers_per_token,
    )


class _Parameters(NamedTuple):
    """Where the parameters of a model are, by their id."""

    layers: int  # number of decoder layers
    layer_of: dict[int, int]  # parameters of decoder layers -> number of the layer
    of_head: set[int]
    embedded: set[int]  # a tied LM head is here, too
    trained: set[int]
    first_trained_layer: int  # gradients pass the layers from here on; -1: the embeddings, too

    def layer(self, key: int) -> int:
        """Return the number of a parameter's layer; what is in none counts as above all of them."""
        return self.layer_of.get(key, self.layers)


def _classify_parameters(model: PreTrainedModel, layers: Sequence[nn.Module]) -> _Parameters:
    layer_of = dict[int, int]()
    for number, layer in enumerate(layers):
        for parameter in layer.parameters():
            layer_of[id(parameter)] = number
    head = model.get_output_embeddings()
    of_head = set[int]()
    if head is not None:
        of_head = {id(parameter) for parameter in head.parameters()}
    embedded = {id(parameter) for parameter in model.get_input_embeddings().parameters()}
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            embedded |= {id(parameter) for parameter in module.parameters()}
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    first_trained_layer = len(layers) + 1
    for key in trained:
        number = -1 if key in embedded else layer_of.get(key, len(layers))
        first_trained_layer = min(first_trained_layer, number)
    return _Parameters(len(layers), layer_of, of_head, embedded, trained, first_trained_layer)


@dataclass
class _Matmuls:
    """The sums of FlopFormula over all weights; see there."""

    per_token: float = 0.0
    per_target: float = 0.0
    layers_per_token: float = 0.0
    product: tuple[int, int] = (1, 1)


def _count_matmuls(
    model: PreTrainedModel,
    parameters: _Parameters,
    configs: Sequence[PretrainedConfig],
    quantized: Mapping[int, int],
) -> _Matmuls:
    """Sum up the FLOPs of all weight matmuls.

    Args:
        model: the model.
        parameters: its parameters by where they are.
        configs: one per decoder layer.
        quantized: id of a quantized parameter -> the number of weights in it; 0 for scales.
    """
    sums = _Matmuls()
    towers = _tower_parameters(model)
    for name, parameter in model.named_parameters():
        key = id(parameter)
        if key in towers:  # they multiply patches of images, not tokens
            continue
        # .original_module. is the frozen copy of a module that PEFT's modules_to_save trains
        if parameter.ndim < 2 or name.endswith("bias") or ".original_module." in name:
            continue
        is_lookup = key in parameters.embedded and key not in parameters.of_head
        if is_lookup or quantized.get(key) == 0:
            continue
        is_in_layer = key in parameters.layer_of
        count = quantized.get(key, parameter.numel())
        rows, columns = sums.product
        if is_in_layer and parameter.ndim == 2 and count > rows * columns:
            # a quantized parameter may have another shape, so the columns come from the count
            sums.product = (parameter.shape[0], count // parameter.shape[0])
        # parameters outside of the layers have no experts: any layer's config will do
        config = configs[parameters.layer_of.get(key, 0)]
        active = _active_weights(name, parameter, count, config)
        has_input_gradient = parameters.layer(key) >= parameters.first_trained_layer
        is_trained = key in parameters.trained
        flops = active * (2 + 2 * has_input_gradient + 2 * is_trained)
        sums.per_token += flops
        if key in parameters.of_head:
            sums.per_target += flops
        if is_in_layer and has_input_gradient:
            sums.layers_per_token += 2 * active
    return sums


def _tower_parameters(model: PreTrainedModel) -> set[int]:
    """Return the ids of the parameters of a multimodal model outside of its text part, which only
    runs on images have."""
    from llama_ft.models.base.layers import takes_more_than_text

    if not takes_more_than_text(model.config):
        return set()
    decoder = model.get_decoder()
    of_decoder = set(decoder.modules())
    outside = [module for module in model.modules() if module not in of_decoder]
    towers = [
        module
        for module in outside
        if isinstance(module, PreTrainedModel) and decoder not in module.modules()
    ]
    if not towers:
        return set()
    of_text = {id(parameter) for parameter in decoder.parameters()}
    head = model.get_output_embeddings()
    if head is not None:
        of_text |= {id(parameter) for parameter in head.parameters()}
    of_text |= {id(parameter) for parameter in model.get_input_embeddings().parameters()}
    return {id(parameter) for parameter in model.parameters()} - of_text


def _active_weights(
    name: str,
    parameter: nn.Parameter,
    count: int,
    config: PretrainedConfig,
) -> float:
    """Return how many of a parameter's `count` weights multiply one token: of experts, only those
    that the token is routed to."""
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    is_stacked = parameter.ndim == 3  # [experts, rows, columns]
    if not experts or not (is_stacked or ".experts." in name):
        return float(count)
    routed = getattr(config, "num_experts_per_tok", None) or experts
    share: float = routed / (parameter.shape[0] if is_stacked else experts)
    return count * share


def _flops_per_pair(config: PretrainedConfig) -> int:
    """Return the forward FLOPs of a layer's attention per pair of tokens; 0 without attention, or
    with an unusual one."""
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return 0
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_width = getattr(config, "qk_head_dim", None) or width
    value_width = getattr(config, "v_head_dim", None) or width
    flops: int = 2 * heads * (key_width + value_width)
    return flops


def _window(config: PretrainedConfig, layer: int) -> int | None:
    """Return how many tokens a token sees in a layer; None: all before it, 0: the layer has no
    attention."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return window if getattr(config, "use_sliding_window", None) is not False else None
    chunk = getattr(config, "attention_chunk_size", None)
    windows = {"full_attention": None, "sliding_attention": window, "chunked_attention": chunk}
    return windows.get(kinds[layer], 0)


def published_peak(dtype: torch.dtype, device: torch.device) -> float:
    """Return the GPU's FLOP/s by its data sheet; 0 if it is unknown, for CPUs, and for fp32
    matmuls."""
    if device.type != "cuda":
        return 0.0
    return peak_of(torch.cuda.get_device_name(device), dtype)


def peak_of(name: str, dtype: torch.dtype) -> float:
    """Return `published_peak` of a GPU by torch's name of it, such as `NVIDIA A100-SXM4-40GB`."""
    if dtype not in (torch.bfloat16, torch.float16):
        return 0.0
    for words, tflops in PUBLISHED_PEAKS.items():
        if re.search(rf"\b({words})\b", name):
            return tflops * 1e12
    return 0.0


def matmul_rate(
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """Return the FLOP/s of a matmul: the fastest one within 0.1 s. All ranks must call it at the
    same time, because the ranks of a machine share its cores, caches and power.

    Args:
        shape: rows and columns of the weight; of a large one, only the first rows are used
            (MOST_WEIGHTS).
        dtype: of the weight and its inputs.
        device: of the weight and its inputs.
    """
    is_cuda = device.type == "cuda"
    tokens = MOST_TOKENS[device.type]
    columns = shape[1]
    most_rows = MOST_WEIGHTS[device.type] // columns
    rows = max(1, min(shape[0], most_rows))
    generator = torch.Generator(device).manual_seed(0)  # GPUs multiply constant numbers faster
    inputs = torch.randn(tokens, columns, generator=generator, device=device).to(dtype)
    weight = torch.randn(rows, columns, generator=generator, device=device).to(dtype)
    wait = torch.cuda.synchronize if is_cuda else lambda: None
    repeats = 10 if is_cuda else 1  # synchronize with a GPU after ten matmuls
    seconds = list[float]()
    end = time.perf_counter() + SECONDS_MEASURED
    while len(seconds) < 2 or time.perf_counter() < end:  # at least two: the first is a warm-up
        wait()
        start = time.perf_counter()
        for _ in range(repeats):
            linear(inputs, weight)
        wait()
        seconds.append((time.perf_counter() - start) / repeats)
    return 2.0 * tokens * rows * columns / min(seconds)
