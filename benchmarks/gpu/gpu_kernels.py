"""Checks of gpu_check.py that need no run: the machine, attention, quantized weights and shards,
compared with plain formulas. Each part is computed in a process of its own, which gpu_child.py
runs: an error of CUDA makes all later calls of its process fail."""

import functools
import importlib
import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.gpu_bench import ON_GPU, last_line
from benchmarks.gpu.gpu_models import DEVICE

Finding = tuple[str, bool | None]  # what was found, and whether it is right; None: left out
SIXTEEN = torch.bfloat16 if ON_GPU else torch.float32  # of attention: 16 bits need a GPU
FULL_SAMPLES = (4096, 8192) if ON_GPU else (128,)  # tokens
REPEATS = 10 if ON_GPU else 1
ALIGNED = 128  # tokens; cuDNN's attention is for samples of one length, a multiple of this
LIBRARIES = ("transformers", "peft", "bitsandbytes", "datasets", "pydantic", "fire", "accelerate")
SECONDS_FOR_A_GROUP = 50.0
GROUP_OF_ONE = """
import sys, torch, torch.distributed as dist
backend, device = sys.argv[1:]
dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1, device=device))
dist.destroy_process_group()
"""


# bitsandbytes starts CUDA when it is imported: the settings of the allocator must be known before.
SEGMENTS = """
import llama_ft.models, torch
from llama_ft.runtime.allocator import check_expandable_segments
print(check_expandable_segments(torch.device("cuda", 0)))
kept = torch.ones(2**20, device="cuda")
print(all(segment["is_expandable"] for segment in torch.cuda.memory_snapshot()))
"""


class Check(NamedTuple):
    """A line of the table, and how it is computed."""

    expected: str
    measure: Callable[[], Finding]


def start() -> dict[str, Check]:
    """Versions, libraries, and how long one process takes to join a group of its own."""
    checks = {"device": Check("a GPU", _device), "torch": Check("imported", _torch)}
    for library in LIBRARIES:
        checks[library] = Check("imported", partial(_import, library))
    checks["liger_kernel"] = Check("optional", _import_liger)
    checks["recipe"] = Check("imported", _import_recipe)
    if ON_GPU:
        checks["compute capability"] = Check(">= 8.0", _capability)
        checks["expandable segments"] = Check("as the log says", _segments)
    claim = "a group of one rank, made, used and ended"
    return checks | {claim: Check(f"< {SECONDS_FOR_A_GROUP:g} s", _group_of_one)}


def _device() -> Finding:
    if ON_GPU:
        return torch.cuda.get_device_name(), True
    return "CPU", None


def _torch() -> Finding:
    python = ".".join(map(str, sys.version_info[:3]))
    return f"{torch.__version__}, Python {python}", True


def _import(library: str) -> Finding:
    importlib.import_module(library)
    return version(library), True


def _import_liger() -> Finding:
    try:
        return _import("liger_kernel")
    except Exception as error:
        return repr(error)[:80], True


def _import_recipe() -> Finding:
    """Import what the recipe imports, of this repository and of others."""
    begun = time.perf_counter()
    for module in ("checkpoint", "data", "models", "observe", "plan", "run", "training"):
        importlib.import_module(f"llama_ft.{module}")
    return f"{time.perf_counter() - begun:.1f} s", True


def _capability() -> Finding:
    major, minor = torch.cuda.get_device_capability()
    cudnn = torch.backends.cudnn.version()
    return f"{major}.{minor}, CUDA {torch.version.cuda}, cuDNN {cudnn}", major >= 8


def _segments() -> Finding:
    """Compare what a run logs about the allocator's segments with what they are, in a process of its
    own."""
    command = [sys.executable, "-c", SEGMENTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_FOR_A_GROUP)
    if done.returncode != 0:
        print(done.stderr, file=sys.stderr)
        return last_line(done.stderr), False
    logged, are_expandable = done.stdout.strip().splitlines()[-2:]
    are_expected = not logged.startswith("no ")
    return f"{logged}; is_expandable: {are_expandable}", are_expandable == str(are_expected)


def _group_of_one() -> Finding:
    """Make, use and end a process group in another process: if NCCL hangs, this one does not."""
    begun = time.perf_counter()
    command = [sys.executable, "-c", GROUP_OF_ONE, "nccl" if ON_GPU else "gloo", DEVICE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_FOR_A_GROUP)
    except subprocess.TimeoutExpired:
        return "hangs", False
    if done.returncode != 0:
        print(done.stderr, file=sys.stderr)
        return last_line(done.stderr), False
    return f"{time.perf_counter() - begun:.1f} s with importing torch", True


def attention() -> dict[str, Check]:
    """Compare packed attention with fp64, sample by sample: cuDNN (Hopper), varlen,
    memory-efficient. Its memory, and its time for one full sample with cuDNN's."""
    uneven = [1, 7, 64, 33, 128, 1, 22]
    cases: list[tuple[torch.dtype, tuple[int, int], int, int | None, list[int]]] = [
        # dtype, heads of queries and of keys, width, window, lengths
        (SIXTEEN, (8, 2), 64, None, uneven),
        (SIXTEEN, (8, 2), 64, None, [256] * 3),
        (SIXTEEN, (8, 8), 128, None, uneven),
        (SIXTEEN, (8, 2), 64, 16, uneven),
        (SIXTEEN, (4, 4), 96, None, uneven),
        (SIXTEEN, (4, 2), 256, None, uneven),
        (SIXTEEN, (8, 2), 64, None, [3] * 300),
        (SIXTEEN, (8, 2), 64, None, [512]),
        (torch.float32, (8, 2), 64, None, [256] * 3),
        (torch.float32, (8, 2), 64, 16, [200, 1, 55]),
        (torch.float32, (8, 2), 64, None, uneven),
        (torch.float32, (8, 2), 64, 16, [3] * 300),
    ]
    checks: dict[str, Check] = {}
    for case in cases:
        dtype, heads, width, window, lengths = case
        limit = 2e-2 if dtype == torch.bfloat16 else 1e-4
        samples = f"{len(lengths)} samples of {min(lengths)} to {max(lengths)} tokens"
        claim = (
            f"{dtype}, heads {heads[0]} of {heads[1]}, width {width}, window {window}, {samples}"
        )
        expected = f"forward and gradients of fp64, within {limit:g}"
        checks[claim] = Check(expected, partial(_packed_attention, *case, limit))
    for tokens in FULL_SAMPLES:
        measure = partial(_times, tokens)
        expected = "cuDNN is faster on capability 9.0 and 10.x"
        checks[f"a sample of {tokens:,}"] = Check(expected, measure)
    limit = 2e-2 if SIXTEEN == torch.bfloat16 else 1e-4
    expected = f"gradients of fp64, within {limit:g}"
    checks[f"rms_norm, {SIXTEEN}"] = Check(expected, partial(_norm, limit))
    if ON_GPU:
        kinds = ((torch.float32, True), (torch.float32, False), (torch.bfloat16, True))
        for dtype, is_packed in kinds:
            claim = f"memory of 8,192 tokens, {dtype}, {'packed' if is_packed else 'padded'}"
            measure = partial(_attention_memory, 8192, dtype, is_packed)
            checks[claim] = Check("less than half of the scores", measure)
    return checks


def _attend(
    parts: list[torch.Tensor], lengths: list[int] | None, window: int | None = None
) -> torch.Tensor:
    """Return llama_ft's sdpa of queries, keys and values [1, heads, tokens, width], for packed
    samples of these lengths, or one padded sample, as [1, tokens, heads, width]."""
    from transformers import AttentionInterface

    from llama_ft.models.packing import packed_attention

    query, key, value = parts
    packed: dict[str, Any] = {}
    if lengths is not None:
        packed = packed_attention.packed_arguments(_model(), lengths, query.device)
        del packed["position_ids"], packed["attention_mask"]  # of the model, not of a layer
    groups = query.shape[1] // key.shape[1]
    module = SimpleNamespace(num_key_value_groups=groups, is_causal=True, training=True)
    _model()  # registers the function
    attend: Any = AttentionInterface()["packed_sdpa"]
    scale = query.shape[-1] ** -0.5
    output, _ = attend(
        module, query, key, value, None, scaling=scale, sliding_window=window, **packed
    )
    return output


@functools.cache
def _model() -> Any:
    """Return a model without storage that is prepared for packed samples."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from llama_ft.models import BuiltModel
    from llama_ft.models.packing.packed_attention import use_packed_attention

    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1
    )
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    built = BuiltModel(model)
    built.mixers = use_packed_attention(built)
    return built


def _packed_attention(
    dtype: torch.dtype,
    heads: tuple[int, int],
    width: int,
    window: int | None,
    lengths: list[int],
    limit: float,
) -> Finding:
    from llama_ft.models.base.attention_kernels import choose_kernel
    from llama_ft.runtime import current_target

    parts = _queries(*heads, sum(lengths), width, dtype)
    output = _attend(parts, lengths, window)
    output.sum().backward()
    doubles = [part.detach().double().requires_grad_() for part in parts]
    expected = _by_samples(doubles, lengths, heads[0] // heads[1], window)
    expected.sum().backward()
    pairs = [(output, expected)]
    pairs += [(part.grad, double.grad) for part, double in zip(parts, doubles, strict=True)]  # type: ignore[misc]
    error = _largest_error(pairs)
    is_equal = len(set(lengths)) == 1 and lengths[0] % ALIGNED == 0 and window is None
    kernel = choose_kernel(current_target().capability, dtype, (width, width), is_equal)
    return f"{kernel}: {error:.1e}", error < limit


def _largest_error(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return the largest error of tensors, as a share of the largest value of each one's
    reference."""
    errors = []
    for value, reference in pairs:
        difference = (value.double() - reference).abs().max()
        errors.append((difference / reference.abs().max()).item())
    # max() of Python would lose a NaN
    return torch.tensor(errors).max().item()


def _queries(
    heads: int, shared: int, tokens: int, width: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(1, heads, tokens, width), (1, shared, tokens, width), (1, shared, tokens, width)]
    return [torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True) for shape in shapes]


def _by_samples(
    parts: list[torch.Tensor], lengths: list[int], groups: int, window: int | None
) -> torch.Tensor:
    """Return attention by its formula, with a mask of tokens x tokens."""
    query = parts[0]
    key = parts[1].repeat_interleave(groups, dim=1)
    value = parts[2].repeat_interleave(groups, dim=1)
    numbers = torch.arange(len(lengths))
    sample = torch.repeat_interleave(numbers, torch.tensor(lengths)).to(query.device)
    allowed = (sample[:, None] == sample).tril()
    if window is not None:
        allowed = allowed.triu(1 - window)
    scores = (query @ key.transpose(2, 3)) / math.sqrt(query.shape[-1])
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return (weights @ value).transpose(1, 2)


def _times(tokens: int) -> Finding:
    """Forward and backward of one full sample by each kernel, and what cuDNN's first call with a
    shape takes."""
    query, key, value = _queries(32, 8, tokens, 128, SIXTEEN)

    def compute(kernel: SDPBackend) -> None:
        with sdpa_kernel(kernel):
            output = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            )
        output.sum().backward()

    flash = milliseconds(partial(compute, SDPBackend.FLASH_ATTENTION))
    if not ON_GPU:
        return f"flash {flash:.2f} ms", True
    begun = time.perf_counter()
    compute(SDPBackend.CUDNN_ATTENTION)
    _wait()
    first = (time.perf_counter() - begun) * 1000
    cudnn = milliseconds(partial(compute, SDPBackend.CUDNN_ATTENTION))
    is_right = cudnn < flash or torch.cuda.get_device_capability()[0] not in (9, 10)
    found = f"flash {flash:.2f} ms, cuDNN {cudnn:.2f} ms, its first call {first:.0f} ms"
    return found, is_right


def milliseconds(function: Callable[[], Any], warm_up: int = 2) -> float:
    """Of one call, on the device."""
    for _ in range(warm_up):
        function()
    _wait()
    begun = time.perf_counter()
    for _ in range(REPEATS):
        function()
    _wait()
    return (time.perf_counter() - begun) / REPEATS * 1000


def _wait() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def _norm(limit: float) -> Finding:
    """Compare torch's RMSNorm, one kernel on CUDA, with LlamaRMSNorm's code in fp64: both
    gradients."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    torch.manual_seed(0)
    norm = LlamaRMSNorm(512).to(DEVICE, SIXTEEN)
    norm.weight.data.uniform_(0.5, 2)
    epsilon = norm.variance_epsilon
    hidden = torch.randn(256, 512, device=DEVICE, dtype=SIXTEEN, requires_grad=True)
    output = functional.rms_norm(hidden, (512,), norm.weight, epsilon)
    output.square().sum().backward()
    wide = hidden.detach().double().requires_grad_()
    weight = norm.weight.detach().double().requires_grad_()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight
    expected.square().sum().backward()
    error = _largest_error([(hidden.grad, wide.grad), (norm.weight.grad, weight.grad)])  # type: ignore[list-item]
    return f"{error:.1e}", error < limit


def _attention_memory(tokens: int, dtype: torch.dtype, is_packed: bool) -> Finding:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    parts = _queries(8, 2, tokens, 64, dtype)
    lengths = [tokens] if is_packed else None
    milliseconds_per_call = milliseconds(lambda: _attend(parts, lengths).sum().backward())
    peak = torch.cuda.max_memory_allocated() - before
    limit = 8 * tokens**2 * parts[0].element_size() / 2
    found = f"{peak / 2**20:,.0f} of {limit / 2**20:,.0f} MiB, {milliseconds_per_call:.1f} ms"
    return found, peak < limit


def one_pass() -> dict[str, Check]:
    """What is one kernel on CUDA: anyprecision's update, and weights out of 8 bits. A pass has to
    move 26 bytes per parameter, and 3 per weight."""
    expected = ">= 500 GB/s" if ON_GPU else "runs"
    return {
        "anyprecision": Check(expected, _anyprecision),
        "8bit": Check(expected, _int8_pass),
        "8bit against the CPU": Check("equal", _int8_against_the_cpu),
        "copies for a checkpoint": Check("equal, >= 10 GB/s", _host_block),
    }


def _weights() -> torch.Tensor:
    count = 2**26 if ON_GPU else 2**16
    return torch.ones(count // 4096, 4096, device=DEVICE, dtype=torch.bfloat16)


def _pass(compute: Callable[[], Any], nbytes: int) -> Finding:
    rate = nbytes / milliseconds(compute, warm_up=3) / 1e6
    return f"{rate:,.0f} GB/s", rate >= 500 or not ON_GPU


def _anyprecision() -> Finding:
    from llama_ft.training.optimizers.anyprecision import AnyPrecisionAdamW

    weight = nn.Parameter(_weights())
    weight.grad = torch.ones_like(weight)
    optimizer = AnyPrecisionAdamW([weight], lr=1e-3)
    return _pass(optimizer.step, 26 * weight.numel())


def _int8_pass() -> Finding:
    from llama_ft.models.quantization.layers import Int8

    scheme = Int8(6.0)
    weight = torch.randn_like(_weights(), dtype=torch.float32)
    packed = scheme.quantize(weight)
    return _pass(lambda: scheme.dequantize(*packed, torch.bfloat16), 3 * weight.numel())


def _int8_against_the_cpu() -> Finding:
    from llama_ft.models.quantization.layers import Int8

    scheme = Int8(6.0)
    torch.manual_seed(0)
    codes, scale = scheme.quantize(torch.randn(256, 512))
    expected = scheme.dequantize(codes, scale, torch.bfloat16)
    found = scheme.dequantize(codes.to(DEVICE), scale.to(DEVICE), torch.bfloat16)
    return _equal(torch.equal(found.cpu(), expected))


def _host_block() -> Finding:
    """Copy tensors into the block of a checkpoint, which is pinned by the first copy."""
    from llama_ft.checkpoint import HostBlock

    tensors = {"weight": _weights(), "step": torch.tensor(3.0, device=DEVICE)}
    tensors["codes"] = torch.arange(100, device=DEVICE).to(torch.uint8)
    block = HostBlock()
    begun = time.perf_counter()
    block.copy(tensors)
    first = (time.perf_counter() - begun) * 1000
    took = milliseconds(lambda: block.copy(tensors))
    copies = block.copy(tensors)
    is_equal = all(torch.equal(copies[name], tensor.cpu()) for name, tensor in tensors.items())
    rate = tensors["weight"].nbytes / took / 1e6
    found = f"{rate:.1f} GB/s, the first in {first:.0f} ms, {'equal' if is_equal else 'different'}"
    return found, is_equal and (rate >= 10 or not ON_GPU)


def _equal(is_equal: bool) -> Finding:
    return "equal" if is_equal else "different", is_equal


def quantized() -> dict[str, Check]:
    """Compare quantized weights on this device with their formulas and bitsandbytes' CPU
    backend."""
    checks: dict[str, Check] = {}
    for kind in ("nf4", "fp4"):
        checks[f"{kind} against its formula"] = Check("within 1e-3", partial(_four_bit, kind))
        checks[f"{kind}, half of the rows"] = Check("bits of the whole", partial(_half, kind))
    checks["8bit against its formula"] = Check("within 1e-5", _int8)
    checks["int8_threshold 0"] = Check("the product within 2e-2", _int8_threshold)
    checks["3 steps of AdamW8bit against the CPU"] = Check("within 1e-3", _adamw_8bit)
    for kind, least in (("8bit", 1500.0), ("nf4", 700.0)):
        expected = f">= {least:,.0f} GB/s" if ON_GPU else "a number"
        claim = f"{kind} -> bf16, bytes read and written"
        checks[claim] = Check(expected, partial(_dequantize_rate, kind, least))
    return checks


def _random_weight() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(256, 512).to(DEVICE)


def _four_bit(kind: Any) -> Finding:
    from bitsandbytes import functional as bnb

    from llama_ft.models.quantization.layers import FourBit

    scheme = FourBit(kind, 64, None)
    codes, scale = scheme.quantize(_random_weight())
    absmax = scale.view(torch.float32).cpu().double().repeat_interleave(64, dim=1)
    bytes_of_codes = codes.cpu()
    nibbles = torch.stack([bytes_of_codes >> 4, bytes_of_codes & 15], dim=-1).flatten(1).long()
    expected = bnb.get_4bit_type(kind, device="cpu").double()[nibbles] * absmax
    found = scheme.dequantize(codes, scale, torch.float32).cpu()
    error = (found - expected).abs().max().item()
    return f"{error:.1e}", error < 1e-3


def _half(kind: Any) -> Finding:
    from llama_ft.models.quantization.layers import FourBit

    scheme = FourBit(kind, 64, None)
    weight = _random_weight()
    whole = scheme.quantize(weight)
    half = scheme.quantize(weight[:128])
    pairs = zip(half, whole, strict=True)
    return _equal(all(torch.equal(part, all_rows[:128]) for part, all_rows in pairs))


def _int8() -> Finding:
    from llama_ft.models.quantization.layers import Int8

    scheme = Int8(6.0)
    codes, scale = scheme.quantize(_random_weight())
    factors = scale.view(torch.float32).cpu().double()
    expected = codes.cpu().double() * factors[:, None] / 127
    found = scheme.dequantize(codes, scale, torch.float32).cpu()
    error = (found - expected).abs().max().item()
    return f"{error:.1e}", error < 1e-5


def _int8_threshold() -> Finding:
    from llama_ft.models.quantization.layers import Int8

    codes, scale = Int8(6.0).quantize(_random_weight())
    inputs = torch.randn(64, 512, device=DEVICE, dtype=torch.bfloat16)
    expected = Int8(6.0).matmul(inputs, codes, scale).float()
    found = Int8(0.0).matmul(inputs, codes, scale).float()
    error = ((found - expected).norm() / expected.norm()).item()
    return f"{error:.1e}", error < 2e-2


def _adamw_8bit() -> Finding:
    from llama_ft.training.optimizers.adamw_8bit import AdamW8bit

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
    return f"{error:.1e}", error < 1e-3


def _dequantize_rate(kind: str, least: float) -> Finding:
    from llama_ft.models.quantization.layers import FourBit, Int8

    shape = (4096, 14336) if ON_GPU else (256, 512)
    weight = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
    scheme = Int8(6.0) if kind == "8bit" else FourBit("nf4", 64, None)
    parts = scheme.quantize(weight)
    took = milliseconds(partial(scheme.dequantize, *parts, torch.bfloat16))
    nbytes = sum(part.nbytes for part in parts) + weight.nbytes
    rate = nbytes / took / 1e6
    return f"{rate:,.0f} GB/s", rate >= least or not ON_GPU


def sharded() -> dict[str, Check]:
    """fully_shard with a fake second rank, which "sends" this rank's half: each gathered half must
    be this."""
    checks: dict[str, Check] = {}
    for name, dtype in MIXED.items():
        checks[f"{dtype} gathered"] = Check("this rank's bits", partial(_gathered, name))
    checks["gradient"] = Check("bf16, half of the weight", _sharded_gradient)
    checks["copies of one gather"] = Check("a time", _gather_time)
    checks["layers gathered early"] = Check("the same gradients", _early_gathers)
    return checks


# parameters of the dtypes that layers with quantized weights have
MIXED = {
    "trained": torch.bfloat16,
    "codes": torch.int8,
    "nibbles": torch.uint8,
    "scale": torch.int32,
}


class _Mixed(nn.Module):
    """A matmul with a weight that is trained, and frozen integers."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.trained: nn.Parameter
        for name, dtype in MIXED.items():
            values = torch.randint(-100, 100, shape).to(dtype)
            setattr(self, name, nn.Parameter(values, requires_grad=dtype.is_floating_point))
        self.seen: dict[str, torch.Tensor] = {}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for name, parameter in self.named_parameters():
            self.seen[name] = parameter.detach().clone()
        return inputs @ self.trained.T


@functools.cache
def _shard_mixed() -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a sharded module after forward and backward, and its parameters before."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from llama_ft.models.base.torch_2_11 import allow_integers

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    shape = (8192, 4096) if ON_GPU else (64, 32)
    with torch.device(DEVICE):
        model = _Mixed(shape)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    allow_integers()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharded_model: Any = fully_shard(model, mesh=init_device_mesh(DEVICE, (2,)), mp_policy=policy)
    sharded_model.set_gradient_divide_factor(1.0)
    sharded_model.set_force_sum_reduction_for_comms(True)
    inputs = torch.randn(16, shape[1], device=DEVICE, dtype=torch.bfloat16)
    sharded_model(inputs).sum().backward()
    return sharded_model, before


def _gathered(name: str) -> Finding:
    model, before = _shard_mixed()
    expected = before[name].chunk(2)[0]
    halves = model.seen[name].chunk(2)
    has_dtype = halves[0].dtype == expected.dtype
    return _equal(has_dtype and all(torch.equal(half, expected) for half in halves))


def _sharded_gradient() -> Finding:
    model, before = _shard_mixed()
    gradient = model.trained.grad
    shape = tuple(gradient.to_local().shape)
    expected = before["trained"].chunk(2)[0]
    is_right = gradient.dtype == torch.bfloat16 and shape == tuple(expected.shape)
    return f"{gradient.dtype}, {shape}", is_right


def _gather_time() -> Finding:
    model, before = _shard_mixed()

    def gather() -> None:
        model.unshard()
        model.reshard()

    took = milliseconds(gather)
    nbytes = sum(parameter.nbytes for parameter in before.values())
    return f"{nbytes / 2**20:,.1f} MiB: {took:.2f} ms, {nbytes / took / 1e6:,.0f} GB/s", True


class _RepeatingGather:
    """An all-gather whose other rank has the same part as this one. The fake group sends nothing."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool
    ) -> None:
        own = input_tensor.clone()  # it lies in the output
        output_tensor.view(group.size(), -1).copy_(own)


class _KeepingReduceScatter:
    """A reduce-scatter that leaves out the other rank."""

    allocate = _RepeatingGather.allocate

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])


def _early_gathers() -> Finding:
    """Two micro-batches of a sharded Llama whose layers are all-gathered before they are needed."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule
    from transformers import LlamaConfig, LlamaForCausalLM

    from llama_ft.config import FSDPConfig
    from llama_ft.models import BuiltModel, apply_fsdp
    from llama_ft.models.base.shards import local_shard
    from llama_ft.runtime import PRECISIONS, computing_on, current_target

    _shard_mixed()  # starts the group of two ranks
    mesh = init_device_mesh(DEVICE, (2,), mesh_dim_names=("shard",))
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=1024,
    )
    ids = torch.arange(512, device=DEVICE).view(2, 256)
    gradients = []
    for is_early in (False, True):
        torch.manual_seed(0)
        with torch.device(DEVICE):
            model = LlamaForCausalLM(config)
        target = replace(current_target(), device="cuda" if is_early else "cpu")
        with computing_on(target):
            settings = FSDPConfig(enable_fsdp=True)
            apply_fsdp(BuiltModel(model), mesh, settings, PRECISIONS["bf16_mixed"])
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(_RepeatingGather())
                module.set_custom_reduce_scatter(_KeepingReduceScatter())
        for _ in range(2):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients.append([local_shard(cast(Any, value.grad)) for value in model.parameters()])
    late, early = gradients
    error = _largest_error(
        [(value, other.double()) for value, other in zip(early, late, strict=True)]
    )
    # flash attention's backward pass adds in any order
    return f"{error:.1e}", error < 1e-2


def triton() -> dict[str, Check]:
    """See gpu_triton.py."""
    from benchmarks.gpu import gpu_triton

    return gpu_triton.triton()


PARTS: dict[str, Callable[[], dict[str, Check]]] = {
    "start": start,
    "attention": attention,
    "triton": triton,
    "one_pass": one_pass,
    "quantized": quantized,
    "sharded": sharded,
}
