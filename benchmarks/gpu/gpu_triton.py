"""The part `triton` of gpu_check.py: kernels in Triton, and attention with sinks. Each is compared with what
runs take without it, and both are timed. On a CPU, Triton interprets its kernels."""

import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.gpu_bench import ON_GPU
from benchmarks.gpu.gpu_kernels import SIXTEEN, Check, Finding, milliseconds
from benchmarks.gpu.gpu_models import DEVICE

# gate_up_proj of Qwen3-30B-A3B: experts, in and out; and 4,096 tokens with 8 experts each
EXPERTS = (128, 2048, 1536) if ON_GPU else (5, 48, 144)
ROWS = 8 * 4096 if ON_GPU else 150
RANK = 16
SCALING = 0.5
# gate_up_proj of gpt-oss-20b: rows of all experts, and columns
MXFP4 = (32 * 5760, 2880) if ON_GPU else (64, 96)
LIMIT = 2e-2 if SIXTEEN == torch.bfloat16 else 1e-5  # as a share of the largest value
HEADS = (64, 8) if ON_GPU else (4, 2)  # of queries, and of keys; those of gpt-oss
WIDTH = 64
UNEVEN = [1, 7, 64, 33, 128, 1, 22]  # tokens of samples
TOKENS = 2048 if ON_GPU else 64  # of the sample that is timed


class Matmuls(NamedTuple):
    """The matmuls of experts, by kernels in Triton or in turn, and their operands.

    Attributes:
        multiply: x, weight, ends, low-rank part -> [rows, out]; see `grouped_matmul.multiplied`.
        outer: x, gradient, ends -> x^T gradient of each expert.
        x: [rows, in], sorted by experts.
        weight: [experts, in, out].
        gradient: of the result, [rows, out].
        ends: of the rows of each expert.
    """

    multiply: Callable[..., torch.Tensor]
    outer: Callable[..., torch.Tensor]
    x: torch.Tensor
    weight: torch.Tensor
    gradient: torch.Tensor
    ends: torch.Tensor


def triton() -> dict[str, Check]:
    """The lines of the table. A kernel that runs choose on this GPU must be faster."""
    if not ON_GPU:
        os.environ["TRITON_INTERPRET"] = "1"
    by_turns = f"values and gradients of matmuls in turn, within {LIMIT:g}"
    checks = {
        "experts": Check(by_turns, partial(_experts, _all_weights)),
        "experts, LoRA": Check(by_turns, partial(_experts, _low_rank)),
        "MXFP4 -> bf16": Check("equal to torch's operators", _mxfp4),
    }
    for dtype in dict.fromkeys((SIXTEEN, torch.float32)):
        for window in (None, 16):
            limit = 2e-2 if dtype == torch.bfloat16 else 1e-4
            expected = f"values and gradients of eager attention in fp64, within {limit:g}"
            measure = partial(_sinks, dtype, window, limit)
            checks[f"attention with sinks, {dtype}, window {window}"] = Check(expected, measure)
    return checks


def _missing() -> Finding | None:
    """Return what is found without Triton, which GPUs need."""
    return None if find_spec("triton") else ("Triton is missing", False if ON_GPU else None)


def _random(*shape: int, dtype: torch.dtype = SIXTEEN) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def _experts(compute: Callable[[Matmuls], list[torch.Tensor]]) -> Finding:
    from llama_ft.models.base import grouped_matmul
    from llama_ft.runtime import current_target

    if (missing := _missing()) is not None:
        return missing
    torch.manual_seed(0)
    groups, terms, columns = EXPERTS
    chosen = torch.randint(0, groups - 1, (ROWS,))  # the last one has no rows
    ends = torch.bincount(chosen, minlength=groups).cumsum(0).to(torch.int32)
    x = _random(ROWS, terms)
    weight = _random(*EXPERTS)
    gradient = _random(ROWS, columns)

    def kernel(name: str, *args: Any) -> torch.Tensor:
        result = grouped_matmul.KERNELS.call(name, *args)
        if result is None:
            raise RuntimeError("runs would not use the kernel: see the warning above")
        return torch.as_tensor(result)

    kernels = (partial(kernel, "multiply"), partial(kernel, "outer"))
    in_turn = (grouped_matmul._multiply_in_turn, grouped_matmul._outer_in_turn)
    in_one = partial(compute, Matmuls(*kernels, x, weight, gradient, ends.to(DEVICE)))
    by_turns = partial(compute, Matmuls(*in_turn, x, weight, gradient, ends))
    error = 0.0
    for found, expected in zip(in_one(), by_turns(), strict=True):
        error = max(error, _error(found, expected))
    took = milliseconds(in_one)
    took_in_turn = milliseconds(by_turns)
    capability = current_target().capability or (9, 0)
    is_chosen = capability[0] not in grouped_matmul.MAJORS_WITH_KERNEL
    is_right = error < LIMIT and (took < took_in_turn or not is_chosen)
    return f"{error:.1e}; {took:.2f} ms, in turn {took_in_turn:.2f} ms", is_right


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, as a share of the largest value; inf for a NaN."""
    wide = expected.float()
    share = ((found.float() - wide).abs().max() / wide.abs().max()).item()
    return share if share == share else float("inf")


def _all_weights(of: Matmuls) -> list[torch.Tensor]:
    """Return y, and the gradients of x and of the weight."""
    y = of.multiply(of.x, of.weight, of.ends, None)
    dx = of.multiply(of.gradient, of.weight.mT, of.ends, None)
    return [y, dx, of.outer(of.x, of.gradient, of.ends)]


def _low_rank(of: Matmuls) -> list[torch.Tensor]:
    """Return y, and the gradients of x and of both factors of LoRA."""
    multiply, outer, x, weight, gradient, ends = of
    groups, terms, columns = weight.shape
    numbers = torch.linspace(-1, 1, groups * RANK * (terms + columns), device=x.device)
    left, right = numbers.sin().to(x.dtype).split([groups * RANK * terms, groups * RANK * columns])
    left = left.view(groups, terms, RANK)
    right = right.view(groups, RANK, columns)
    u = multiply(x, left, ends, None)
    y = multiply(x, weight, ends, (u, right, SCALING))
    t = multiply(gradient, right.mT, ends, None)
    dx = multiply(gradient, weight.mT, ends, (t, left.mT, SCALING))
    return [y, dx, outer(x, t, ends), outer(u, gradient, ends)]


def _mxfp4() -> Finding:
    from llama_ft.models.published import mxfp4

    if (missing := _missing()) is not None:
        return missing
    torch.manual_seed(0)
    rows, columns = MXFP4
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=DEVICE)
    scale = torch.randint(110, 140, (rows, columns // 32), dtype=torch.uint8, device=DEVICE)
    arguments = (codes, scale, torch.bfloat16)
    found = mxfp4.KERNELS.call("dequantize", *arguments)
    if found is None:
        raise RuntimeError("runs would not use the kernel: see the warning above")
    is_equal = torch.equal(found, mxfp4._by_operators(*arguments))
    nbytes = codes.nbytes + scale.nbytes + found.nbytes
    took = milliseconds(lambda: mxfp4.KERNELS.call("dequantize", *arguments))
    by_operators = milliseconds(lambda: mxfp4._by_operators(*arguments))
    rate = f"{nbytes / took / 1e6:,.0f} GB/s"
    found_text = f"{'equal' if is_equal else 'different'}; {rate}, {took:.2f} ms"
    is_right = is_equal and (took < by_operators or not ON_GPU)
    return f"{found_text}, torch's operators {by_operators:.2f} ms", is_right


def _sinks(dtype: torch.dtype, window: int | None, limit: float) -> Finding:
    from llama_ft.models.base.attention_kernels import choose_kernel
    from llama_ft.models.packing.packed_samples import PackedSamples
    from llama_ft.models.packing.sinks import attend_with_sinks
    from llama_ft.runtime import current_target

    kernel = choose_kernel(current_target().capability, dtype, (WIDTH, WIDTH), False)

    def attend(tensors: list[torch.Tensor], lengths: list[int]) -> torch.Tensor:
        query, key, value, sinks = tensors
        samples = PackedSamples.of(lengths, query.device)
        return attend_with_sinks((query, key, value), sinks, samples, kernel, None, window)

    tensors = _attention_inputs(sum(UNEVEN), dtype)
    doubles = [tensor.detach().double().requires_grad_() for tensor in tensors]
    output = attend(tensors, UNEVEN)
    expected = _eager(doubles, UNEVEN, window)
    output.square().sum().backward()
    expected.square().sum().backward()
    error = _error(output.detach(), expected.detach())
    for tensor, double in zip(tensors, doubles, strict=True):
        error = max(error, _error(tensor.grad, double.grad))  # type: ignore[arg-type]
    timed = _attention_inputs(TOKENS, dtype)
    took = milliseconds(lambda: attend(timed, [TOKENS]).sum().backward())
    eager = milliseconds(lambda: _eager(timed, [TOKENS], window).sum().backward())
    found = f"{kernel}: {error:.1e}; {took:.2f} ms, eager {eager:.2f} ms"
    return found, error < limit and (took < eager or not ON_GPU)


def _attention_inputs(tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    heads, shared = HEADS
    shapes = [(1, count, tokens, WIDTH) for count in (heads, shared, shared)]
    return [_random(*shape, dtype=dtype).requires_grad_() for shape in (*shapes, (heads,))]


def _eager(tensors: list[torch.Tensor], lengths: list[int], window: int | None) -> torch.Tensor:
    """Return Transformers' attention of gpt-oss for each sample alone."""
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    *parts, sinks = tensors
    groups = parts[0].shape[1] // parts[1].shape[1]
    module: Any = SimpleNamespace(num_key_value_groups=groups, sinks=sinks, training=False)
    outputs = []
    for sample in zip(*(part.split(lengths, dim=2) for part in parts), strict=True):
        query = sample[0]
        length = query.shape[2]
        allowed = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        allowed = allowed.triu(1 - (window or length))
        mask = query.new_zeros(length, length).masked_fill(~allowed, -torch.inf)
        scaling = WIDTH**-0.5
        outputs.append(eager_attention_forward(module, *sample, mask, scaling=scaling)[0])
    return torch.cat(outputs, dim=1)
