"""Checks of gpu_check.py that need no run: attention, quantized weights and shards, compared with
plain formulas."""

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from gpu_bench import ON_GPU, Bench, Row
from gpu_models import DEVICE
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

FULL_ROWS = (4096, 8192) if ON_GPU else (128,)
REPEATS = 10 if ON_GPU else 1


def milliseconds(function: Callable[[], Any], warm_up: int = 2) -> float:
    """Of one call, on the device."""
    for call in range(warm_up + REPEATS):
        if call == warm_up:
            _wait()
            begun = time.perf_counter()
        function()
    _wait()
    return (time.perf_counter() - begun) / REPEATS * 1000


def _wait() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def attention(bench: Bench) -> Iterator[Row]:
    """Compare packed attention with fp64, sample by sample; and its time for one full sample with
    cuDNN's."""
    from llama_ft.models import packed_attention

    dtype = torch.bfloat16 if ON_GPU else torch.float32
    uneven = [1, 7, 64, 33, 128, 1, 22]
    cases = [
        (8, 2, 64, None, uneven),
        (8, 8, 128, None, uneven),
        (8, 2, 64, 16, uneven),
        (4, 4, 96, None, uneven),
    ]
    cases += [(4, 2, 256, None, uneven), (8, 2, 64, None, [3] * 300), (8, 2, 64, None, [512])]
    for heads, shared, width, window, lengths in cases:
        query, key, value = parts = _queries(heads, shared, sum(lengths), width, dtype)
        module = SimpleNamespace(
            num_key_value_groups=heads // shared, is_causal=True, training=True
        )
        offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(DEVICE)
        rows = packed_attention.PackedRows(tuple(lengths), offsets, max(lengths))
        extra = {"scaling": width**-0.5, "sliding_window": window, "packed_rows": rows}
        output, _ = packed_attention._packed_sdpa(module, query, key, value, None, **extra)
        output.sum().backward()
        doubles = [part.detach().double().requires_grad_() for part in parts]
        expected = _by_rows(doubles, lengths, heads // shared, window)
        expected.sum().backward()
        pairs = [
            (output, expected),
            *((a.grad, b.grad) for a, b in zip(parts, doubles, strict=True)),
        ]
        error = max(((a.double() - b).abs().max() / b.abs().max()).item() for a, b in pairs)
        limit = 2e-2 if dtype == torch.bfloat16 else 1e-5
        name = f"heads {heads}/{shared}, width {width}, window {window}, {len(lengths)} rows"
        yield Row(
            "attention",
            name,
            f"forward and gradients of fp64, within {limit:g}",
            f"{error:.1e}",
            error < limit,
        )
    yield from _times(dtype)


def _queries(
    heads: int, shared: int, tokens: int, width: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(1, heads, tokens, width), (1, shared, tokens, width), (1, shared, tokens, width)]
    return [torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True) for shape in shapes]


def _by_rows(
    parts: list[torch.Tensor], lengths: list[int], groups: int, window: int | None
) -> torch.Tensor:
    query, key, value = (
        part.repeat_interleave(by, dim=1)
        for part, by in zip(parts, (1, groups, groups), strict=True)
    )
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(
        query.device
    )
    allowed = (
        (row[:, None] == row).tril()
        if window is None
        else (row[:, None] == row).tril().triu(1 - window)
    )
    scores = (query @ key.transpose(2, 3)) / math.sqrt(query.shape[-1])
    return (scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ value).transpose(1, 2)


def _times(dtype: torch.dtype) -> Iterator[Row]:
    """Forward and backward of one full row by each kernel, and what cuDNN's first call with a shape
    takes."""
    for tokens in FULL_ROWS:
        parts = _queries(32, 8, tokens, 128, dtype)

        def made(kernel: SDPBackend, parts: list[torch.Tensor] = parts) -> None:
            with sdpa_kernel(kernel):
                functional.scaled_dot_product_attention(
                    *parts, is_causal=True, enable_gqa=True
                ).sum().backward()

        begun = time.perf_counter()
        if ON_GPU:
            made(SDPBackend.CUDNN_ATTENTION)
            _wait()
        first = time.perf_counter() - begun
        flash = milliseconds(partial(made, SDPBackend.FLASH_ATTENTION))
        cudnn = milliseconds(partial(made, SDPBackend.CUDNN_ATTENTION)) if ON_GPU else math.nan
        is_right = cudnn < flash or not ON_GPU or torch.cuda.get_device_capability()[0] != 9
        found = f"flash {flash:.2f} ms, cuDNN {cudnn:.2f} ms, its first call {first * 1000:.0f} ms"
        yield Row(
            "attention",
            f"a row of {tokens:,}",
            "cuDNN is faster on capability 9.0",
            found,
            is_right,
        )


def quantized(bench: Bench) -> Iterator[Row]:
    """Compare quantized weights on this device with their formulas and bitsandbytes' CPU
    backend."""
    from bitsandbytes import functional as bnb

    from llama_ft.models.quantized import FourBit, Int8
    from llama_ft.training.adamw_8bit import AdamW8bit

    torch.manual_seed(0)
    weight = torch.randn(256, 512)
    for kind in ("nf4", "fp4"):
        scheme = FourBit(kind, 64, None)
        codes, scale = scheme.quantize(weight.to(DEVICE))
        absmax = scale.view(torch.float32).cpu().double().repeat_interleave(64, dim=1)
        nibbles = torch.stack([codes.cpu() >> 4, codes.cpu() & 15], dim=-1).flatten(1).long()
        expected = bnb.get_4bit_type(kind, device="cpu").double()[nibbles] * absmax
        error = (scheme.dequantize(codes, scale, torch.float32).cpu() - expected).abs().max().item()
        yield Row(
            "quantized", f"{kind} beside its formula", "within 1e-3", f"{error:.1e}", error < 1e-3
        )
        half, whole = (
            scheme.quantize(weight[:128].to(DEVICE)),
            [part[:128] for part in (codes, scale)],
        )
        same = all(torch.equal(a, b) for a, b in zip(half, whole, strict=True))
        yield Row(
            "quantized",
            f"{kind}, half of the rows",
            "bits of the whole",
            "equal" if same else "differ",
            same,
        )
    int8 = Int8(6.0)
    codes, scale = int8.quantize(weight.to(DEVICE))
    expected = codes.cpu().double() * scale.view(torch.float32).cpu().double()[:, None] / 127
    error = (int8.dequantize(codes, scale, torch.float32).cpu() - expected).abs().max().item()
    yield Row("quantized", "8bit beside its formula", "within 1e-5", f"{error:.1e}", error < 1e-5)
    inputs = torch.randn(64, 512, device=DEVICE, dtype=torch.bfloat16)
    products = [Int8(threshold).matmul(inputs, codes, scale).float() for threshold in (6.0, 0.0)]
    error = ((products[0] - products[1]).norm() / products[0].norm()).item()
    yield Row(
        "quantized", "int8_threshold 0", "the product within 2e-2", f"{error:.1e}", error < 2e-2
    )

    values = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(1)
        parameter = nn.Parameter(torch.randn(64, 512).to(device))
        optimizer = AdamW8bit([parameter], lr=1e-2)
        for _ in range(3):
            parameter.grad = torch.randn(64, 512).to(device)
            optimizer.step()
        values.append(parameter.detach().cpu())
    error = (values[0] - values[1]).abs().max().item()
    yield Row(
        "quantized",
        "3 steps of AdamW8bit beside the CPU",
        "within 1e-3",
        f"{error:.1e}",
        error < 1e-3,
    )

    rows, columns = (14336, 4096) if ON_GPU else (256, 512)
    large = torch.randn(rows, columns, device=DEVICE, dtype=torch.bfloat16)
    for name, tried, least in (("8bit", int8, 1500.0), ("nf4", FourBit("nf4", 64, None), 700.0)):
        parts = tried.quantize(large)
        took = milliseconds(partial(tried.dequantize, *parts, torch.bfloat16))
        rate = (sum(part.nbytes for part in parts) + large.nbytes) / took / 1e6
        found, limit = f"{rate:,.0f} GB/s", least if ON_GPU else 0.0
        yield Row(
            "quantized",
            f"{name} -> bf16, bytes read and written",
            f">= {limit:,.0f} GB/s",
            found,
            rate >= limit,
        )


class _Mixed(nn.Module):
    """A matmul whose weight, scale and code are of the dtypes that quantized layers have."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.randn(rows, columns, dtype=torch.bfloat16))
        for name, dtype in (
            ("codes", torch.int8),
            ("nibbles", torch.uint8),
            ("scale", torch.int32),
        ):
            values = torch.randint(0, 100, (rows, columns)).to(dtype)
            setattr(self, name, nn.Parameter(values, requires_grad=False))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen = {
            name: parameter.detach().clone() for name, parameter in self.named_parameters()
        }
        return inputs @ self.trained.T


def sharded(bench: Bench) -> Iterator[Row]:
    """fully_shard with a fake second rank, which "sends" this rank's rows: each gathered half must
    be these."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from llama_ft.models.torch_2_11 import allow_integers

    rows, columns = (8192, 4096) if ON_GPU else (64, 32)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with torch.device(DEVICE):
            model = _Mixed(rows, columns)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        allow_integers()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model, mesh=init_device_mesh(DEVICE, (2,)), mp_policy=policy)
        assert isinstance(model, FSDPModule)
        model.set_gradient_divide_factor(1.0)
        model.set_force_sum_reduction_for_comms(True)
        inputs = torch.randn(16, columns, device=DEVICE, dtype=torch.bfloat16)
        model(inputs).sum().backward()
        for name, own in before.items():
            halves = model.seen[name].chunk(2)
            same = (
                all(torch.equal(half, own[: rows // 2]) for half in halves)
                and halves[0].dtype == own.dtype
            )
            yield Row(
                "sharded",
                f"{own.dtype} gathered",
                "this rank's bits",
                "equal" if same else "differ",
                same,
            )
        gradient = model.trained.grad
        found = f"{gradient.dtype}, {tuple(gradient.to_local().shape)}"
        expected = f"{torch.bfloat16}, {(rows // 2, columns)}"
        yield Row("sharded", "gradient", expected, found, found == expected)
        del model.seen

        took = milliseconds(lambda: (model.unshard(), model.reshard()))
        nbytes = sum(own.nbytes for own in before.values())
        found = f"{took:.2f} ms, {nbytes / took / 1e6:,.0f} GB/s"
        yield Row(
            "sharded",
            f"copies for {nbytes / 2**20:,.1f} MiB, gathered and freed",
            "a time",
            found,
            True,
        )
    finally:
        dist.destroy_process_group()


def kernels(bench: Bench) -> Iterator[Row]:
    """Compare every attention kernel for packed samples with fp64: cuDNN (Hopper), varlen,
    memory-efficient; and memory."""
    from llama_ft.models import attention_kernels, packed_attention

    module = SimpleNamespace(num_key_value_groups=4, is_causal=True, training=True)
    sixteen = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    cases = [(sixteen, [256] * 3, None), (sixteen, [200, 1, 55], None)]
    cases += [(torch.float32, [256] * 3, None), (torch.float32, [200, 1, 55], 16)]
    for dtype, lengths, window in cases:
        torch.manual_seed(0)
        shapes = [(1, heads, sum(lengths), 64) for heads in (8, 2, 2)]
        parts = [
            torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True) for shape in shapes
        ]
        offsets = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)
        are_alike = len(set(lengths)) == 1
        rows = packed_attention.PackedRows(tuple(lengths), offsets, max(lengths), are_alike)
        extra = {"scaling": 0.125, "sliding_window": window, "packed_rows": rows}
        output, _ = packed_attention._packed_sdpa(module, *parts, None, **extra)  # type: ignore[arg-type]
        output.sum().backward()
        doubles = [part.detach().double().requires_grad_() for part in parts]
        expected = _by_rows(doubles, lengths, 4, window)
        expected.sum().backward()
        pairs = [
            (output, expected),
            *((a.grad, b.grad) for a, b in zip(parts, doubles, strict=True)),
        ]
        error = max(((a.double() - b).abs().max() / b.abs().max()).item() for a, b in pairs)
        limit = 1e-4 if dtype == torch.float32 else 2e-2
        capability = attention_kernels.capability_of(parts[0])
        name = attention_kernels.choose_kernel(capability, dtype, (64, 64), are_alike)
        claim = f"{name}, {dtype}, {lengths}, window {window}"
        yield Row(
            "kernels",
            claim,
            f"forward and gradients of fp64, within {limit:g}",
            f"{error:.1e}",
            error < limit,
        )
    yield _norm(sixteen)
    if DEVICE != "cuda":
        return
    tokens = 8192
    for dtype, is_packed in ((torch.float32, True), (torch.float32, False), (sixteen, True)):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        shapes = [(1, heads, tokens, 64) for heads in (8, 2, 2)]
        parts = [
            torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True) for shape in shapes
        ]
        offsets = torch.tensor([0, tokens], device=DEVICE, dtype=torch.int32)
        rows = packed_attention.PackedRows((tokens,), offsets, tokens, True) if is_packed else None
        for _ in range(3):
            started = time.perf_counter()
            output, _ = packed_attention._packed_sdpa(
                module, *parts, None, scaling=0.125, packed_rows=rows
            )  # type: ignore[arg-type]
            output.sum().backward()
            torch.cuda.synchronize()
            seconds = time.perf_counter() - started
        peak, scores = (
            torch.cuda.max_memory_allocated() - before,
            8 * tokens**2 * parts[0].element_size(),
        )
        found = f"{peak / 2**20:,.0f} MiB, {seconds * 1e3:.1f} ms"
        claim = f"memory of {tokens:,} tokens, {dtype}, {'packed' if is_packed else 'padded'}"
        yield Row(
            "kernels",
            claim,
            f"< {scores / 2**21:,.0f} MiB, half of the scores",
            found,
            peak < scores / 2,
        )


def _norm(dtype: torch.dtype) -> Row:
    """Compare torch's RMSNorm, one kernel on CUDA, with LlamaRMSNorm's code in fp64: output and
    both gradients."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    torch.manual_seed(0)
    norm = LlamaRMSNorm(512).to(DEVICE, dtype)
    norm.weight.data.uniform_(0.5, 2)
    hidden = torch.randn(256, 512, device=DEVICE, dtype=dtype, requires_grad=True)
    torch.nn.functional.rms_norm(
        hidden, (512,), norm.weight, norm.variance_epsilon
    ).square().sum().backward()
    wide, weight = (it.detach().double().requires_grad_() for it in (hidden, norm.weight))
    expected = (
        wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.variance_epsilon) * weight
    )
    expected.square().sum().backward()
    pairs = [(hidden.grad, wide.grad), (norm.weight.grad, weight.grad)]
    error = max(((a.double() - b).abs().max() / b.abs().max()).item() for a, b in pairs)  # type: ignore[union-attr, operator]
    limit = 1e-4 if dtype == torch.float32 else 2e-2
    return Row(
        "kernels",
        f"rms_norm, {dtype}",
        f"gradients of fp64, within {limit:g}",
        f"{error:.1e}",
        error < limit,
    )


def one_pass(bench: Bench) -> Iterator[Row]:
    """What is one kernel on CUDA: anyprecision's update, and weights out of 8 bits. A pass has to
    move 26 bytes per parameter, and 3 per weight."""
    from llama_ft.models.quantized import Int8
    from llama_ft.runtime.one_kernel import runs_compiled
    from llama_ft.training.anyprecision import AnyPrecisionAdamW

    count = 2**26 if DEVICE == "cuda" else 2**16
    weight = torch.nn.Parameter(
        torch.ones(count // 4096, 4096, device=DEVICE, dtype=torch.bfloat16)
    )
    weight.grad = torch.ones_like(weight)
    optimizer, scheme = AnyPrecisionAdamW([weight], lr=1e-3), Int8(6.0)
    packed = scheme.quantize(torch.randn(weight.shape, device=DEVICE))
    work = {
        "anyprecision": (optimizer.step, 26),
        "8bit": (lambda: scheme.dequantize(*packed, torch.bfloat16), 3),
    }
    for name, (compute, nbytes) in work.items():
        for _ in range(3):
            compute()
        started = time.perf_counter()
        for _ in range(10):
            compute()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        rate = 10 * nbytes * count / (time.perf_counter() - started) / 1e9
        expected = "at least 500 GB/s" if DEVICE == "cuda" else "runs"
        yield Row(
            "one_pass", name, expected, f"{rate:.0f} GB/s", rate > 500 or not runs_compiled(weight)
        )
    exact = scheme.quantize(torch.randn(256, 512))
    beside = scheme.dequantize(*exact, torch.bfloat16)
    same = torch.equal(
        scheme.dequantize(*(it.to(DEVICE) for it in exact), torch.bfloat16).cpu(), beside
    )
    yield Row("one_pass", "8bit beside the CPU", "equal", "equal" if same else "differ", same)
