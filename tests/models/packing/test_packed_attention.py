"""Packed samples are computed as if each stood alone: the reference is transformers on one sample at a
time."""

import math
from typing import Any

import pytest
import torch
import transformers
from torch.nn import attention as torch_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_utils import PreTrainedModel

from llama_ft.cpu import block_attention
from llama_ft.models import BuiltModel, packed_arguments, use_packed_attention
from llama_ft.models.base import attention_kernels
from llama_ft.models.base.attention_kernels import AMPERE, HOPPER, T4
from llama_ft.models.base.replaced_functions import replace_functions
from llama_ft.models.packing import packed_attention
from llama_ft.models.packing.packed_samples import PackedSamples
from llama_ft.models.packing.rope import use_rope_per_sample
from llama_ft.runtime import Target, computing_on

CPU = torch.device("cpu")
BF16 = torch.bfloat16
FP16 = torch.float16
FP32 = torch.float32
LENGTHS = [3, 11, 1, 7, 4]  # longer and shorter than the windows of 4 and 5 below
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SHAPE |= {"num_key_value_heads": 2, "vocab_size": 101, "max_position_embeddings": 2048}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 5,
    "short_mscale": 1.0,
    "long_mscale": 2.0,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 5},
    "Gemma2": {"head_dim": 8, "sliding_window": 4},  # soft caps
    "Gemma3Text": {"head_dim": 8, "sliding_window": 4},
    "GptOss": {"head_dim": 8, "sliding_window": 4, "num_local_experts": 4},  # sinks
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},  # learned positions
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "Phi3": {
        "pad_token_id": 0,
        "original_max_position_embeddings": 5,
        "rope_parameters": LONG_ROPE,
    },
    "Phimoe": {"num_local_experts": 4, "router_jitter_noise": 0.0, "rope_parameters": LONG_ROPE},
    "Qwen3": {"head_dim": 8},
    "DeepseekV3": {  # values narrower than keys
        **{
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
        },
        **{
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 4,
        },
        **{"moe_intermediate_size": 32, "first_k_dense_replace": 1},
    },
}
NO_SDPA = {"Gemma2", "GptOss"}
CASES = [
    (name, kind)
    for name in MODELS
    for kind in ("sdpa", "eager")
    if kind == "eager" or name not in NO_SDPA
]


def make(name: str, attention: str, **settings: Any) -> PreTrainedModel:
    """A model with weights so large that a leak shows."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SHAPE, **MODELS.get(name, {}), **settings})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
    return model


def packed(model: PreTrainedModel) -> BuiltModel:
    """The model, whose attention keeps packed samples apart."""
    built = BuiltModel(model)
    built.mixers = use_packed_attention(built)
    return built


def samples(lengths: list[int] = LENGTHS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 101, (length,), generator=generator) for length in lengths]


def loss_of(logits: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:-1].float(), sample[1:], reduction="sum")


def packed_logits(built: BuiltModel, parts: list[torch.Tensor]) -> torch.Tensor:
    layout = packed_arguments(built, [len(part) for part in parts], CPU)
    output = built.model(input_ids=torch.cat(parts)[None], use_cache=False, **layout)
    return output.logits[0]


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_each_packed_sample_has_the_loss_and_gradients_of_the_sample_alone(
    name: str, attention: str
) -> None:
    model = make(name, attention)
    parts = samples()
    alone = []
    for sample in parts:
        output = model(input_ids=sample[None], attention_mask=torch.ones(1, len(sample)))
        alone.append(loss_of(output.logits[0], sample))
    torch.stack(alone).sum().backward()
    expected = {
        key: parameter.grad.clone()
        for key, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()
    built = packed(model)
    use_rope_per_sample(model)
    of_samples = packed_logits(built, parts).split(LENGTHS)
    together = [loss_of(logits, part) for logits, part in zip(of_samples, parts, strict=True)]
    torch.testing.assert_close(torch.stack(together), torch.stack(alone), rtol=1e-5, atol=1e-5)
    torch.stack(together).sum().backward()
    for key, parameter in model.named_parameters():
        if key in expected:
            torch.testing.assert_close(parameter.grad, expected[key], rtol=1e-4, atol=1e-4, msg=key)


@pytest.mark.parametrize("name", ["Phi3", "Phimoe"])
def test_samples_of_a_padded_batch_have_the_longrope_factors_of_their_own_length(name: str) -> None:
    model = make(name, "sdpa")
    parts = samples()
    alone = [model(input_ids=sample[None]).logits[0] for sample in parts]
    padded = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    logits = model(input_ids=padded, attention_mask=mask).logits
    assert (logits[0, :3] - alone[0]).abs().max() > 1e-2, "all have those of the longest sample"
    use_rope_per_sample(model)
    logits = model(input_ids=padded, attention_mask=mask).logits
    for sample, expected in zip(logits, alone, strict=True):
        torch.testing.assert_close(sample[: len(expected)], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padded_batches_and_generation_use_the_attention_of_transformers(attention: str) -> None:
    model = make("Mistral", attention)
    parts = samples([9, 7])
    prompt = {"input_ids": parts[0][None], "attention_mask": torch.ones(1, 9, dtype=torch.int64)}
    padded = torch.stack([parts[0], torch.nn.functional.pad(parts[1], (0, 2))])
    mask = torch.tensor([[1] * 9, [1] * 7 + [0] * 2])
    wanted = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    logits = model(input_ids=padded, attention_mask=mask).logits
    answer = model.generate(**prompt, **wanted)  # type: ignore[operator]
    dense = model(input_ids=padded).logits
    built = packed(model)
    again = built.model(input_ids=padded, attention_mask=mask).logits
    torch.testing.assert_close(again, logits)
    torch.testing.assert_close(model(input_ids=padded).logits, dense)
    assert model.generate(**prompt, **wanted).tolist() == answer.tolist()  # type: ignore[operator]


class Seen(TorchDispatchMode):
    """Notes the largest tensor any operator makes; of attention lengths, heads, and whether cuDNN
    is allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.attended = list[int]()
        self.heads = list[tuple[int, int, bool]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple) else (result,)
        self.largest = max(
            [self.largest, *(one.numel() for one in made if isinstance(one, torch.Tensor))]
        )
        if "scaled_dot_product" in func.name() and "backward" not in func.name():
            self.attended += [args[0].shape[2]] * args[0].shape[0]
            self.heads.append(
                (args[0].shape[1], args[1].shape[1], torch.backends.cuda.cudnn_sdp_enabled())
            )
        return result


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_a_packed_sequence_costs_the_attention_of_its_samples_and_no_mask_over_all_tokens(
    name: str, attention: str
) -> None:
    lengths = [64] * 16
    model = make(name, attention)
    built = packed(model)
    with Seen() as seen, torch.no_grad():
        packed_logits(built, samples(lengths))
    assert seen.largest < sum(lengths) ** 2 / 8  # the largest are the logits, tokens x 101
    if attention == "sdpa":
        assert seen.attended == lengths * 2  # two layers


@pytest.mark.parametrize("window", [None, 6])
def test_samples_on_the_cpu_have_the_same_gradients_in_16_bits(window: int | None) -> None:
    """The backward pass on the CPU takes padded samples."""
    lengths = (64, 64, 33, 5, 32, 1, 150, 151)
    generator = torch.Generator().manual_seed(0)
    wide = [
        torch.randn(1, heads, sum(lengths), 8, generator=generator).bfloat16().float()
        for heads in (4, 2, 2, 4)
    ]
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        *inputs, wanted = [part.to(dtype) for part in wide]
        inputs = [part.requires_grad_() for part in inputs]
        several = PackedSamples.of(list(lengths), CPU)
        output = packed_attention._SampleAttention.apply(*inputs, several, 0.3, window, False)
        found.append([output, *torch.autograd.grad(output, inputs, wanted)])
    for exact, rounded in zip(*found, strict=True):
        assert (rounded.float() - exact).norm() < 0.01 * exact.norm()


CALLS: list[list[int]] = []  # ends of the samples of each forward call


def emulated(
    q: Any,
    k: Any,
    v: Any,
    bias: None,
    offsets: torch.Tensor | None,
    key_offsets: torch.Tensor | None,
    longest: int | None,
    *_: Any,
    scale: float,
    window_size: int | None = None,
) -> Any:
    """The memory-efficient kernel by its formula: output, sums [samples, heads, longest], and what
    is unused."""
    length = q.shape[1]
    ends = [0, length]
    if offsets is not None:
        assert offsets.dtype == torch.int32 and offsets.is_contiguous()
        assert key_offsets is offsets
        ends = offsets.tolist()
        assert longest == int(offsets.diff().max())
    CALLS.append(ends)
    sample_of = torch.repeat_interleave(torch.arange(len(ends) - 1), torch.tensor(ends).diff())
    allowed = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - (window_size or length))
    allowed = allowed & (sample_of[:, None] == sample_of)
    scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) * scale
    scores = scores.masked_fill(~allowed, -math.inf)
    output = scores.softmax(-1) @ v.transpose(1, 2)
    size = longest or length
    by_sample = [
        torch.nn.functional.pad(part, (0, -(-size // 32) * 32 - part.shape[-1]))
        for part in scores.logsumexp(-1)[0].split(torch.tensor(ends).diff().tolist(), dim=-1)
    ]
    unused = torch.zeros(())
    return output.transpose(1, 2), torch.stack(by_sample), unused, unused, length, length


def emulated_backward(
    gradient: Any, q: Any, k: Any, v: Any, _: Any, output: Any, *rest: Any, **how: Any
) -> Any:
    assert output.is_contiguous()  # the kernel reads it as such, whatever its strides are
    offsets, key_offsets, longest, longest_key, sums, *_ = rest
    assert longest == longest_key <= q.shape[1]
    samples = 1 if offsets is None else len(offsets) - 1
    assert sums.shape == (samples, q.shape[2], -(-longest // 32) * 32)
    several = (None, offsets, key_offsets, longest if offsets is not None else None)
    _, backward = torch.func.vjp(lambda *parts: emulated(*parts, *several, **how)[0], q, k, v)
    return *backward(gradient), torch.zeros(())


@pytest.mark.parametrize("window", [None, 6])
def test_the_memory_efficient_kernel_has_the_results_of_the_cpu_kernel(
    window: int | None,
) -> None:
    lengths = [64, 33, 5, 1, 7, 20, 64]
    generator = torch.Generator().manual_seed(0)
    found = []
    wide = [torch.randn(1, heads, sum(lengths), 8, generator=generator) for heads in (4, 2, 2, 4)]
    library = torch.library.Library("aten", "IMPL")
    library.impl("_efficient_attention_forward", emulated, "CPU")
    library.impl("_efficient_attention_backward", emulated_backward, "CPU")
    for is_efficient in (False, True):
        inputs = [part.clone().requires_grad_() for part in wide[:3]]
        several = PackedSamples.of(lengths, CPU)
        how = (0.3, window, is_efficient)
        output = packed_attention._SampleAttention.apply(*inputs, several, *how)
        found.append([output, *torch.autograd.grad(output, inputs, wide[3])])
    library._destroy()
    # As many neighbors per call as, times the longest one, are at most 194 tokens.
    assert CALLS[: len(CALLS) // 2] == [[0, 64, 97, 102], [0, 1, 8, 28], [0, 64]]
    CALLS.clear()
    for exact, efficient in zip(*found, strict=True):
        torch.testing.assert_close(efficient, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("capability", "dtype", "widths", "equal_length", "kernel"),
    [
        (None, FP32, (64, 64), True, "cpu"),
        (None, BF16, (24, 16), False, "own"),
        (HOPPER, BF16, (128, 128), True, "cudnn"),
        (HOPPER, BF16, (128, 128), False, "varlen"),
        (HOPPER, BF16, (256, 256), True, "varlen"),
        (HOPPER, FP32, (128, 128), True, "efficient"),
        ((10, 0), BF16, (128, 128), True, "cudnn"),
        ((10, 3), BF16, (128, 128), True, "cudnn"),
        ((12, 0), BF16, (128, 128), True, "varlen"),
        (AMPERE, FP16, (64, 64), True, "varlen"),
        (AMPERE, BF16, (192, 128), False, "efficient"),
        (AMPERE, BF16, (60, 60), False, "own"),
        (T4, FP16, (64, 64), False, "efficient"),
        (T4, BF16, (64, 64), False, "own"),
    ],
)
def test_the_kernel_follows_from_device_dtype_and_shape(
    capability: Any, dtype: torch.dtype, widths: tuple[int, int], equal_length: bool, kernel: str
) -> None:
    assert attention_kernels.choose_kernel(capability, dtype, widths, equal_length) == kernel


def test_samples_of_equal_length_use_cudnn_on_hopper_although_it_is_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_attention, "is_faster", lambda _: False)
    model = make("Llama", "sdpa").bfloat16()
    built = packed(model)
    per_sample = packed_logits(built, samples([128, 128]))
    torch.backends.cuda.enable_cudnn_sdp(False)
    with computing_on(Target("cuda", HOPPER)), Seen() as seen:
        alike = packed_logits(built, samples([128, 128]))
    assert seen.attended == [128, 128] * 2 and seen.heads == [(4, 2, True)] * 2  # two layers
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.testing.assert_close(alike, per_sample)


def test_without_flash_attention_heads_of_padded_samples_share_no_keys() -> None:
    replace_functions()
    model = make("Llama", "sdpa")
    ids = torch.arange(32).view(2, 16)
    found = []
    for target, heads in ((Target("cpu"), 2), (Target("cuda", HOPPER), 4)):
        with computing_on(target), Seen() as seen:
            found.append(model(input_ids=ids, use_cache=False).logits)
        assert [keys for _, keys, _ in seen.heads] == [heads] * 2
    torch.testing.assert_close(*found)


def test_flash_attention_3_is_for_hopper_without_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    activated: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(attention_kernels, "find_spec", lambda name: name)
    monkeypatch.setattr(torch_attention, "activate_flash_attention_impl", activated.append)
    for capability, dropout in ((AMPERE, 0.0), (HOPPER, 0.1), (HOPPER, 0.0)):
        assert not activated
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda value=capability: value)
        attention_kernels.activate_flash_attention_3(PretrainedConfig(attention_dropout=dropout))
    assert activated == ["FA3"]
