"""Which of two recipes is faster: an estimate of the seconds a step takes, good for an order, not for a promise.

A rank's seconds for one micro-batch are the longest of three things that overlap, and a tenth of the others:

- computing. Floating-point operations of a token: a forward pass takes F = 2 P + 2 L h d (P weights of matrices without
  the input embedding; attention over L tokens, d layers, width h, half of it masked; Kaplan et al. 2020,
  arXiv:2001.08361, section 2.1). The backward pass takes F for the gradients of activations (attention twice) and, in
  full tuning, 2 P for those of weights. Checkpointing adds a forward pass of the layers it recomputes, selective about
  0.15 of one (norms, activations, rotary embedding). At 45 % of the device's peak (PyTorch's blog, "Maximizing training
  throughput using PyTorch FSDP", has up to 57 % on A100s). 8-bit layers multiply at half the speed on GPUs (15 % to 3
  times slower, the smaller the model: Hugging Face's blog, "A gentle introduction to 8-bit matrix multiplication");
  4-bit ones write their weights out in 16 bits in every pass, at half the memory's speed.
- sending: what the plan of the recipe's own steps sent with FULL_SHARD. SHARD_GRAD_OP gathers once and not twice,
  copies of the model reduce their gradients among each other.
- starting kernels: 0.5 ms a decoder layer and pass of Python's and PyTorch's time on GPUs.

Offloading adds what goes over PCIe, at 20 GB/s, and AdamW on the host, at 10 GB/s.
"""

from dataclasses import dataclass

from transformers.modeling_utils import PreTrainedModel

from llama_ft.config import Config
from llama_ft.config.gpus import Device
from llama_ft.models.skeleton import decoder_layers
from llama_ft.plan.changes import Layout
from llama_ft.plan.predict import MOST_MICRO_BATCHES
from llama_ft.plan.record import Plan

UTILIZATION, OVERLAPPED = 0.45, 0.9
SELECTIVE_SHARE = 0.15
DEQUANTIZED_BYTES = {"8bit": 7.0, "4bit": 2.6}  # read 1, write, read and write 2; read 0.6, write 2
LAYER_SECONDS = {"cuda": 0.5e-3, "cpu": 0.2e-3}
PCIE_GBS, HOST_GBS, HOST_ADAMW_BYTES = 20.0, 10.0, 28


@dataclass(frozen=True)
class Shape:
    """What counts of a model.

    Attributes:
        weights: of matrices that every token passes.
        head: of which the output head.
        layers: decoder layers.
        width: of the hidden state.
    """

    weights: int
    head: int
    layers: int
    width: int


def shape_of(skeleton: PreTrainedModel) -> Shape:
    """Of a model on the meta device. Of experts, those that a token passes."""
    text = skeleton.config.get_text_config()
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None) or 1
    share = (getattr(text, "num_experts_per_tok", None) or 1) / experts
    head = skeleton.get_output_embeddings()
    head_weights = head.weight.numel() if head is not None else 0
    layers = decoder_layers(skeleton)
    inner = 0.0
    for layer in layers:
        for name, parameter in layer.named_parameters():
            if parameter.ndim > 1:
                inner += parameter.numel() * (share if ".experts." in f".{name}" else 1)
    return Shape(round(inner) + head_weights, head_weights, len(layers), text.hidden_size)


@dataclass(frozen=True)
class Ranks:
    """Who computes: as many ranks, of which so many a node, each on such a device."""

    world_size: int
    local_world_size: int
    device: Device
    kind: str


def seconds_a_token(
    config: Config, layout: Layout, base: Plan, accumulated: int, context: int, shape: Shape, ranks: Ranks
) -> float:
    """Of an optimizer step, for each token of a rank.

    Args:
        config: with the layout.
        layout: how it is done.
        base: a plan of the same training with FULL_SHARD.
        accumulated: gradient_accumulation_steps of the recipe `base` was made for.
        context: tokens of a row.
        shape: of the model.
        ranks: who computes.
    """
    steps, device = config.train.gradient_accumulation_steps, ranks.device
    tokens = context * layout.micro_batch
    computing = _operations(config, shape, context) * tokens / (device.teraflops * 1e12 * UTILIZATION)
    passes = 2 + _recomputed(config)
    computing += _dequantizing(config, shape, passes, device)
    shards, reductions = _sent(config, layout, base, accumulated, steps, ranks)
    starting = LAYER_SECONDS[ranks.kind] * shape.layers * (1 + passes)
    parts = (computing, shards + reductions, starting)
    seconds = OVERLAPPED * max(parts) + (1 - OVERLAPPED) * sum(parts)
    if layout.offload:
        seconds += _offloaded(base, ranks, steps)
    return seconds / tokens


def _recomputed(config: Config) -> float:
    train = config.train
    every = 1 / train.activation_checkpointing_k
    return {"off": 0.0, "full": 1.0, "selective": SELECTIVE_SHARE, "every_k": every}[train.activation_checkpointing]


def _operations(config: Config, shape: Shape, context: int) -> float:
    attention = 2.0 * context * shape.width * shape.layers
    forward = 2.0 * shape.weights + attention
    layers = forward - 2.0 * shape.head
    backward = forward + attention + (0.0 if config.peft.use_peft else 2.0 * shape.weights)
    return forward + backward + _recomputed(config) * layers


def _dequantizing(config: Config, shape: Shape, passes: float, device: Device) -> float:
    if config.quantization.mode == "none":
        return 0.0
    moved = (shape.weights - shape.head) * DEQUANTIZED_BYTES[config.quantization.mode]
    return passes * moved / (device.memory_gbs * 1e9 / 2)


def _sent(
    config: Config, layout: Layout, base: Plan, accumulated: int, steps: int, ranks: Ranks
) -> tuple[float, float]:
    """Seconds a micro-batch for weights and for gradients."""
    if ranks.world_size == 1:
        return 0.0, 0.0
    planned = min(accumulated, MOST_MICRO_BATCHES)
    last_only = config.peft.use_peft or config.train.accumulate_unsharded
    whole = base.sent_bytes.get("all-gather", 0) / planned * ranks.world_size / (ranks.world_size - 1)
    gradients = base.sent_bytes.get("reduce-scatter", 0) / (1 if last_only else planned)
    gradients *= ranks.world_size / (ranks.world_size - 1)
    times = {"FULL_SHARD": 1.0, "HYBRID_SHARD": 1.0, "SHARD_GRAD_OP": 0.5, "NO_SHARD": 0.0}[layout.strategy]
    share = (layout.degree - 1) / layout.degree
    among_shards = ranks.device.link_gbs if layout.degree <= ranks.local_world_size else ranks.device.network_gbs
    among_copies = ranks.device.link_gbs if ranks.world_size <= ranks.local_world_size else ranks.device.network_gbs
    copies = ranks.world_size // layout.degree
    reducing = gradients * share / (among_shards * 1e9)
    reducing += 2 * gradients / layout.degree * (copies - 1) / copies / (among_copies * 1e9)
    return whole * times * share / (among_shards * 1e9), reducing / (steps if last_only else 1)


def _offloaded(base: Plan, ranks: Ranks, steps: int) -> float:
    held = next(peak for peak in base.peaks if peak.phase == "optimizer step").holders
    weights = held["sharded parameters"] + held["quantized parts"]
    stepping = held["optimizer state"] / 8 * HOST_ADAMW_BYTES / (HOST_GBS * 1e9)
    return 2 * weights / (PCIE_GBS * 1e9) + (2 * held["gradients"] / (PCIE_GBS * 1e9) + stepping) / steps
