"""LoRA in one product: what peft's own layer computes, with less kept, and peft's own where it is
something else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from llama_ft.models.adapters.lora_linear import FusedLora, use_fused_lora
from llama_ft.models.quantization.layers import FourBit, Int8, QuantizedLinear, Scheme
from llama_ft.runtime import Target, computing_on

IN = 128
OUT = 96
RANK = 4
ROWS = (3, 50)
TOKENS = ROWS[0] * ROWS[1]
SCHEMES: dict[str, Scheme | None] = {
    "plain": None,
    "8bit": Int8(6.0),
    "nf4": FourBit("nf4", 64, None),
}


def model_of(
    scheme: Scheme | None = None,
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
    **lora: Any,
) -> Any:
    """One layer with peft's adapter; equal for equal arguments."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, OUT, bias=bias, dtype=dtype))
    if scheme is not None:
        with torch.device("meta"):
            layer = QuantizedLinear(nn.Linear(IN, OUT, bias=False), scheme)
        packed = scheme.quantize(model[0].weight.data)
        layer.weight, layer.scale = (nn.Parameter(tensor, requires_grad=False) for tensor in packed)
        layer.bias = model[0].bias
        model[0] = layer
    settings = {
        "r": RANK,
        "lora_alpha": 12,
        "target_modules": ["0"],
        "init_lora_weights": False,
        **lora,
    }
    adapted = get_peft_model(model, LoraConfig(**settings), autocast_adapter_dtype=False)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
    return adapted.train()


def layer_of(model: PeftModel) -> Any:
    return model.base_model.model[0]


def passes(
    run: Callable[[torch.Tensor], torch.Tensor], model: nn.Module, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Output, gradient of the input and gradients of what is trained."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(*ROWS, IN, generator=generator).to(dtype).requires_grad_()
    torch.manual_seed(2)  # of dropout
    output = run(inputs)
    output.backward(torch.randn(*ROWS, OUT, generator=generator).to(output.dtype))
    trained = [p.grad for p in model.parameters() if p.grad is not None]
    assert inputs.grad is not None
    return [output.detach(), inputs.grad, *trained]


class Calls(TorchDispatchMode):
    """Counts runs of the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.forward += func.name() == "llama_ft::lora_linear"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)]
)
def test_fused_lora_has_the_outputs_and_gradients_of_peft(
    dtype: torch.dtype, tolerance: float, scheme: str, bias: bool, dropout: float
) -> None:
    seen = []
    for is_fused in (True, False):
        model = model_of(SCHEMES[scheme], bias, dtype, lora_dropout=dropout)
        if is_fused:
            use_fused_lora(model)
        with Calls() as calls:
            seen.append(passes(model, model, dtype))
        assert calls.forward == is_fused
    assert len(seen[0]) == len(seen[1]) == 4
    for ours, theirs in zip(*seen, strict=True):
        assert ours.dtype == theirs.dtype == dtype and ours.shape == theirs.shape
        assert (ours - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("is_training", [False, True])
def test_without_gradients_the_output_has_the_same_bits(is_training: bool, scheme: str) -> None:
    model = model_of(SCHEMES[scheme], bias=True, dtype=torch.bfloat16, lora_dropout=0.3)
    use_fused_lora(model)
    model.train(is_training)
    inputs = torch.randn(*ROWS, IN, dtype=torch.bfloat16)
    outputs = []
    for has_gradients in (True, False):
        torch.manual_seed(0)  # of dropout
        with torch.set_grad_enabled(has_gradients):
            outputs.append(model(inputs))
    assert outputs[0].requires_grad and not outputs[1].requires_grad
    assert torch.equal(*outputs) and outputs[0].shape == outputs[1].shape


def test_dropout_on_cuda_has_the_gradients_of_autograd() -> None:
    model = model_of(bias=True, lora_dropout=0.3)
    use_fused_lora(model)
    base = layer_of(model).base_layer
    a = layer_of(model).lora_A["default"]
    b = layer_of(model).lora_B["default"]

    def by_autograd(x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(TOKENS, IN)
        dropped, _ = torch.native_dropout(flat, 0.3, True)
        added = dropped @ a.weight.t() @ b.weight.t() * (12 / RANK)
        return (base(flat) + added).view(*ROWS, OUT)

    # the branch for CUDA, whose operator the CPU has, too
    with computing_on(Target("cuda")), Calls() as calls:
        found = passes(model, model, torch.float32)
    model.zero_grad()
    expected = passes(by_autograd, model, torch.float32)
    assert calls.forward == 1 and len(found) == len(expected) == 4
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_cuda_the_wide_products_are_added_to_the_narrow_ones(
    dtype: torch.dtype, bias: bool
) -> None:
    model = model_of(None, bias, dtype)
    use_fused_lora(model)
    counted = FlopCounterMode(display=False)
    with computing_on(Target("cuda")), counted:  # its operators work on the CPU, too
        found = passes(model, model, dtype)
    model.zero_grad()
    expected = passes(model, model, dtype)
    assert len(found) == len(expected) == 4
    limit = 1e-6 if dtype == torch.float32 else 8e-3
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= limit * theirs.norm()
    wide = 2 * 2 * TOKENS * IN * OUT
    narrow = 2 * TOKENS * RANK * (3 * IN + 3 * OUT)
    assert counted.get_total_flops() == wide + narrow


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_fused_lora_saves_its_input_the_product_with_a_and_one_byte_per_mask_element(
    scheme: str, dropout: float
) -> None:
    model = model_of(SCHEMES[scheme], dtype=torch.bfloat16, lora_dropout=dropout)
    kept = {}
    use_fused_lora(model)
    inputs = torch.randn(*ROWS, IN, dtype=torch.bfloat16, requires_grad=True) * 1
    own = {p.data_ptr() for p in model.parameters()} | {inputs.data_ptr()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(inputs)
    more = sum(size for place, size in kept.items() if place not in own)
    assert inputs.data_ptr() in kept
    assert more == 2 * TOKENS * RANK + (TOKENS * IN if dropout else 0)


@pytest.mark.parametrize(("scheme", "dropout"), [("plain", 0.3), ("8bit", 0.0), ("nf4", 0.3)])
def test_compiled_fused_lora_is_one_graph_with_the_same_results(
    scheme: str, dropout: float
) -> None:
    model = model_of(SCHEMES[scheme], True, lora_dropout=dropout)
    use_fused_lora(model)
    expected = passes(model, model, torch.float32)
    model.zero_grad()
    torch._dynamo.reset()
    compiled = torch.compile(layer_of(model), backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, passes(compiled, model, torch.float32), expected))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_adapters_in_fp32_are_cast_when_they_are_used(scheme: str, dropout: float) -> None:
    seen = []
    for is_cast in (True, False):
        model = model_of(SCHEMES[scheme], dtype=torch.bfloat16, lora_dropout=dropout)
        if is_cast:
            for name, parameter in model.named_parameters():
                parameter.data = parameter.data.float() if "lora_" in name else parameter.data
        use_fused_lora(model)
        seen.append(passes(model, model, torch.bfloat16))
    assert [tensor.dtype for tensor in seen[0]] == [torch.bfloat16] * 2 + [torch.float32] * 2
    assert all(
        torch.equal(ours, expected.to(ours.dtype)) for ours, expected in zip(*seen, strict=True)
    )


def freeze_adapter(model: PeftModel) -> None:
    model.requires_grad_(False)
    layer_of(model).lora_A["default"].weight.requires_grad_()


ELSEWHERE: dict[str, tuple[dict[str, Any], Callable[[PeftModel], Any]]] = {
    "DoRA": ({"use_dora": True}, lambda model: None),
    "a bias of the adapter": ({"lora_bias": True}, lambda model: None),
    "no adapter": ({}, lambda model: model.base_model.disable_adapter_layers()),
    "merged": ({}, lambda model: model.merge_adapter()),
    "a trained bias": ({}, lambda model: layer_of(model).base_layer.bias.requires_grad_()),
    "half an adapter": ({}, freeze_adapter),
}


@pytest.mark.parametrize("case", ELSEWHERE)
def test_unsupported_adapters_use_the_forward_pass_of_peft(case: str) -> None:
    settings, change = ELSEWHERE[case]
    seen = []
    for is_fused in (True, False):
        model = model_of(bias=True, **settings)
        change(model)
        if is_fused:
            use_fused_lora(model)
            assert type(layer_of(model)) is FusedLora
        with Calls() as calls:
            seen.append(passes(model, model, settings.get("dtype", torch.float32)))
        assert calls.forward == 0
    assert all(map(torch.equal, *seen))
