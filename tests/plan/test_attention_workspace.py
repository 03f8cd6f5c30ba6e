"""Memory of attention in plans for GPUs, compared with the shapes in the kernels' sources and with
the operations of eager attention."""

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen  # registers its operator
from model_shapes import write_llama

from llama_ft.plan.fake.attention_workspace import attention_workspace_bytes, efficient_bytes

Plan = Callable[..., Any]
ATEN = torch.ops.aten
FP32 = 4
BF16 = 2


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_varlen_attention_takes_the_tensors_of_mha_varlen_bwd() -> None:
    # 3 samples, 32 heads, 8 of keys and values, head dimension 96
    query = tensor(5000, 32, 96)
    key = tensor(5000, 8, 96)
    offsets = tensor(4, dtype=torch.int32)
    padded = 5000 + 128 * 3
    shapes = {
        "dq_accum": (FP32, padded, 32, 96),
        "softmax_d": (FP32, 32, padded),
        "dk_expanded": (BF16, 5000, 32, 96),
        "dv_expanded": (BF16, 5000, 32, 96),
    }
    backward = torch.ops.torch_attn._varlen_attn_backward.default
    args = (query, query, key, key, query, None, offsets, offsets)
    assert attention_workspace_bytes(backward, args) == sum(map(prod, shapes.values()))


@pytest.mark.parametrize(("width", "padded_width"), [(80, 96), (128, 128), (160, 192), (256, 256)])
def test_sdpa_takes_the_tensors_of_mha_bwd(width: int, padded_width: int) -> None:
    # 2 samples of 1000 tokens, 4 heads for queries and keys
    query = tensor(2, 4, 1000, width)
    shapes = {"dq_accum": (FP32, 2, 1024, 4, padded_width), "softmax_d": (FP32, 2, 4, 1024)}
    backward = ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default
    args = (query, query, query, query, query, None, 0.0, True)
    assert attention_workspace_bytes(backward, args) == sum(map(prod, shapes.values()))


def test_efficient_attention_takes_the_buffers_of_its_kernel() -> None:
    # 1 sample of 1000 tokens, 4 heads, head dimensions 192 (keys) and 128 (values), as in DeepSeek
    query = tensor(1, 1000, 4, 192)
    value = tensor(1, 1000, 4, 128)
    splits = 200 // 4
    summed_keys = min(splits * 128, 1024)
    shapes = {
        "delta": (FP32, 4, 1000),
        "gradient of queries": (FP32, 4, 1024, 256),
        "gradient of keys": (FP32, 4, summed_keys, 256),
        "gradient of values": (FP32, 4, summed_keys, 128),
    }
    backward = ATEN._efficient_attention_backward.default
    no_offsets = (None, None, None, None)
    args = (value, query, query, value, None, value, *no_offsets)
    assert attention_workspace_bytes(backward, args) == sum(map(prod, shapes.values()))
    narrow = tensor(1, 1000, 4, 64)
    in_registers = {"delta": (FP32, 4, 1000), "gradient of queries": (FP32, 4, 1024, 64)}
    args = (narrow, narrow, narrow, narrow, None, narrow, *no_offsets)
    assert attention_workspace_bytes(backward, args) == sum(map(prod, in_registers.values()))
    # 3 packed samples, which take buffers for the longest one each
    offsets = tensor(4, dtype=torch.int32)
    args = (narrow, narrow, narrow, narrow, None, narrow, offsets, offsets, 500, 500)
    per_sample = {"delta": (FP32, 3, 4, 500), "gradient of queries": (FP32, 3, 4, 512, 64)}
    assert attention_workspace_bytes(backward, args) == sum(map(prod, per_sample.values()))


def peak(plan: Any, phase: str) -> Any:
    return next(peak for peak in plan.peaks if peak.phase == phase)


def test_the_backward_peak_of_a_gpu_holds_the_workspace(plan: Plan, tmp_path: Path) -> None:
    # so narrow that attention is the largest part
    narrow = {"hidden_size": 32, "intermediate_size": 16, "vocab_size": 64, "num_hidden_layers": 1}
    folder = write_llama(tmp_path / "model", **narrow, max_position_embeddings=65_536)
    tokens = 65_536
    flags = ("--context_length", str(tokens), "--batch_size_training", "1")
    planned = plan(folder, 1, *flags, "--activation_checkpointing", "off", device="cuda")
    padded = tokens + 128
    # 4 heads of width 16, padded to 32; and keys and values per query head
    workspace = FP32 * padded * 4 * (32 + 1) + 2 * BF16 * tokens * 4 * 16
    cublas = 32 * 2**20
    temporaries = peak(planned, "backward").holders["temporaries"]
    assert temporaries == pytest.approx(workspace + cublas, rel=0.001)


def test_a_gpu_without_flash_attention_is_planned_with_the_memory_efficient_kernel(
    plan: Plan, tmp_path: Path
) -> None:
    """fp16 is for a T4. Its kernel sums in fp32 per block of 128 keys and queries, and query heads
    share no keys."""
    narrow = {"hidden_size": 32, "intermediate_size": 16, "vocab_size": 64, "num_hidden_layers": 1}
    folder = write_llama(tmp_path / "model", **narrow, head_dim=128, max_position_embeddings=16_384)
    tokens = 16_384
    heads = 4
    flags = ("--context_length", str(tokens), "--batch_size_training", "1", "--precision", "fp16")
    planned = plan(folder, 1, *flags, "--activation_checkpointing", "off", device="cuda")
    summed = min(200 // heads * 128, tokens)
    workspace = FP32 * heads * (tokens + tokens * 128 + summed * (128 + 128))
    cublas = 32 * 2**20
    temporaries = peak(planned, "backward").holders["temporaries"]
    assert temporaries == pytest.approx(workspace + cublas, rel=0.001)


@pytest.mark.parametrize("precision", ["bf16_mixed", pytest.param("fp32", marks=pytest.mark.slow)])
def test_padded_samples_of_a_gpu_are_planned_with_the_memory_efficient_kernel(
    precision: str, plan: Plan, tmp_path: Path
) -> None:
    """Flash attention supports no mask. Query heads share no keys, and each layer keeps the mask's
    numbers for its backward pass: those of both samples, once for all heads."""
    itemsize = {"bf16_mixed": BF16, "fp32": FP32}[precision]
    tokens = 2048
    samples = 2
    heads = 4
    narrow = {"hidden_size": 32, "intermediate_size": 16, "vocab_size": 64, "head_dim": 128}
    narrow |= {"num_attention_heads": heads, "num_key_value_heads": heads}
    flags = ("--context_length", str(tokens), "--batch_size_training", str(samples))
    flags += ("--activation_checkpointing", "off", "--precision", precision)

    def backward(layers: int, strategy: str) -> Any:
        shape = {**narrow, "num_hidden_layers": layers, "max_position_embeddings": tokens}
        folder = write_llama(tmp_path / str(layers), **shape)
        planned = plan(folder, 1, *flags, "--batching_strategy", strategy, device="cuda")
        return peak(planned, "backward").holders

    workspace = samples * heads * FP32 * (tokens + tokens * 128)
    if precision == "bf16_mixed":
        summed = min(200 // (samples * heads) * 128, tokens)
        workspace += samples * heads * summed * (128 + 128) * FP32
    cublas = 32 * 2**20
    padded = backward(2, "padding")
    assert padded["temporaries"] == pytest.approx(workspace + cublas, rel=0.001)
    of_a_layer = padded["activations"] - backward(1, "padding")["activations"]
    packed = backward(2, "packing")["activations"] - backward(1, "packing")["activations"]
    assert of_a_layer - packed == pytest.approx(itemsize * samples * tokens**2, rel=0.02)


@pytest.mark.parametrize(
    ("heads", "widths", "tokens", "mebibytes"),
    [(128, (192, 128), 4096, 538), (16, (192, 128), 4096, 100.25), (32, (128, 128), 2048, 56.25)],
)
def test_the_workspace_of_the_memory_efficient_kernel_in_numbers(
    heads: int, widths: tuple[int, int], tokens: int, mebibytes: float
) -> None:
    """DeepSeek V3's attention, one with fewer heads, and Llama's in fp16."""
    nbytes = efficient_bytes(1, tokens, tokens, heads, widths, itemsize=2)
    assert nbytes / 2**20 == pytest.approx(mebibytes)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [2, 3])
def test_eager_attention_is_planned_with_all_its_scores(
    layers: int, plan: Plan, tmp_path: Path
) -> None:
    """Scores with a soft cap, as in Gemma 2: what grows with the square of the tokens."""
    heads = 4
    gemma2 = {
        **{"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]},
        **{"attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 16, "sliding_window": 4096},
        **{"num_attention_heads": heads, "num_hidden_layers": layers, "vocab_size": 64},
        **{"max_position_embeddings": 4096, "final_logit_softcapping": None},
    }
    folder = write_llama(tmp_path / "model", **gemma2)
    block = 512
    sizes = dict[str, list[int]]()
    for multiple in (1, 2, 3):
        flags = ("--context_length", str(block * multiple), "--batch_size_training", "1")
        planned = plan(folder, 1, *flags, "--activation_checkpointing", "off", device="cuda")
        for phase in ("forward", "backward"):
            sizes.setdefault(phase, []).append(peak(planned, phase).bytes)
    # Kept per score: tanh (bf16), softmax (fp32), its cast for the matmul (bf16)
    kept = BF16 + FP32 + BF16
    # In the last layer's softmax: tanh, capped scores, their fp32 copy, the result; and the mask,
    # which all heads share
    in_forward = (layers - 1) * kept + BF16 + BF16 + FP32 + FP32 + BF16 / heads
    # In its backward pass: tanh, softmax, gradients after and before it
    in_backward = (layers - 1) * kept + BF16 + FP32 + FP32 + FP32
    for phase, expected in (("forward", in_forward), ("backward", in_backward)):
        first, second, third = sizes[phase]
        quadratic = (third - 2 * second + first) / 2  # of block x block scores
        assert quadratic / block**2 / heads == pytest.approx(expected, abs=0.01), phase
