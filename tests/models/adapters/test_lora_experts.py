"""LoRA on stacked experts in parts: what PEFT's sum of the weights computes, in all ways in which
Transformers' experts multiply."""

import functools
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run_cases
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from profiled import peak_bytes
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from llama_ft.config import TrainConfig
from llama_ft.models import BuiltModel, checkpoint_activations
from llama_ft.models.adapters import lora_experts
from llama_ft.models.adapters.lora import adapter_off, expert_names
from llama_ft.models.adapters.lora_experts import LowRankSum, StackLora, use_split_experts
from llama_ft.models.base.replaced_functions import replace_functions
from llama_ft.models.quantization.layers import FourBit, Int8, Scheme, quantize_stacks
from llama_ft.runtime import Target, computing_on

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "head_dim": 16,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "num_experts_per_tok": 2, "vocab_size": 64}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 5},
    "gpt_oss": {"num_local_experts": 5, "sliding_window": 16},  # [experts, in, out], with biases
    "nemotron_h": {"n_routed_experts": 4, "layers_block_type": ["attention", "moe"], "n_groups": 1,
                   "mamba_num_heads": 4, "moe_shared_expert_intermediate_size": 64},  # without gates
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 128},  # bmm of all experts
    "jetmoe": {"num_local_experts": 4, "kv_channels": 16},  # a loop over experts
}  # fmt: skip
OWN_LOOPS = ("llama4_text", "jetmoe")  # without a choice of implementations
WAYS = [
    (model_type, way)
    for model_type in MODELS
    for way in ("grouped_mm", "batched_mm", "eager")
    if way == "eager" or model_type not in OWN_LOOPS
]
SCHEMES: dict[str, Scheme] = {"8bit": Int8(6.0), "nf4": FourBit("nf4", 64, None)}


def model_of(
    model_type: str,
    way: str = "grouped_mm",
    rank: int = 4,
    dtype: torch.dtype = torch.float32,
    checkpointing: str = "off",
) -> Any:
    """A model with PEFT's adapters of its experts; equal for equal arguments."""
    replace_functions()  # as building a model does
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SHAPE | MODELS[model_type])
    choice = {} if model_type in OWN_LOOPS else {"experts_implementation": way}
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, **choice)
    settings = TrainConfig(activation_checkpointing=checkpointing)
    checkpoint_activations(BuiltModel(model), settings)
    add_adapters(model, rank)
    return model


def add_adapters(model: Any, rank: int = 4) -> None:
    names = expert_names(model)
    lora = LoraConfig(
        r=rank, lora_alpha=3 * rank, target_modules=[], target_parameters=names,
        init_lora_weights=False,
    )  # fmt: skip
    get_peft_model(model, lora, autocast_adapter_dtype=False)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1)
    model.train().get_input_embeddings().requires_grad_(True)


class Operators(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.runs[func.name().partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def results(model: Any) -> dict[str, torch.Tensor]:
    """Loss and gradients."""
    ids = torch.arange(40).view(2, 20)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys() and len(found) >= 2 + 2 * 2
    for name, value in expected.items():
        assert (found[name] - value).norm() <= 1e-5 * value.norm(), name
        assert value.norm() > 0, name


@pytest.mark.parametrize("rank", [4, 3], ids=["", "rank 3"])
@pytest.mark.parametrize(("model_type", "way"), WAYS)
def test_loss_and_gradients_are_those_of_peft(model_type: str, way: str, rank: int) -> None:
    expected = results(model_of(model_type, way, rank))
    model = model_of(model_type, way, rank)
    use_split_experts(model)
    assert any(type(module) is StackLora for module in model.modules())
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(LowRankSum, "merged")  # the sum of all experts' weights is never made
        found = results(model)
    assert_close(found, expected)


@pytest.mark.parametrize("checkpointing", ["off", "full", "selective"])
@pytest.mark.parametrize("rank", [4, 3], ids=["", "rank 3"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_experts_one_after_another_have_the_gradients_of_peft(
    model_type: str, rank: int, checkpointing: str
) -> None:
    """As on a GPU without a kernel for all of them."""
    expected = results(model_of(model_type, rank=rank))
    model = model_of(model_type, rank=rank, checkpointing=checkpointing)
    use_split_experts(model)
    with (
        pytest.MonkeyPatch.context() as patch,
        computing_on(Target("cuda", (8, 0))),
        Operators() as operators,
    ):
        patch.delattr(LowRankSum, "merged")
        found = results(model)
    assert_close(found, expected)
    assert operators.runs["llama_ft::lora_experts"] and not operators.runs["aten::_grouped_mm"]


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "llama4_text"])
def test_gradients_are_the_same_with_activation_checkpointing(
    model_type: str, checkpointing: str
) -> None:
    expected = results(model_of(model_type))
    model = model_of(model_type, checkpointing=checkpointing)
    use_split_experts(model)
    assert_close(results(model), expected)


def test_selective_keeps_what_experts_without_adapters_compute(model_type: str = "gpt_oss") -> None:
    """Also if Transformers adds a bias to it, and on a GPU without a kernel for all experts."""
    seen = []
    for checkpointing in ("off", "selective"):
        for target in (Target(), Target("cuda", (8, 0))):
            model = model_of(model_type, checkpointing=checkpointing)
            with computing_on(target), adapter_off(model), Operators() as operators:
                model.requires_grad_(True)
                seen.append(results(model))
            runs = operators.runs
            by_group = runs["llama_ft::grouped_matmul"] + runs["llama_ft::grouped_weight_gradient"]
            assert runs["aten::_grouped_mm"] + by_group == 3 * 2 * 2
            assert bool(by_group) == target.is_cuda
    for found in seen[1:]:
        assert_close(found, seen[0])


@pytest.mark.parametrize("way", ["grouped_mm", "eager"])
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_quantized_experts_have_the_gradients_of_their_dequantized_weights(
    model_type: str, name: str, way: str
) -> None:
    plain = model_of(model_type, way)
    ours = model_of(model_type, way)
    for experts, copied in zip(stacks_of(plain), stacks_of(ours), strict=True):
        quantize(copied, SCHEMES[name])
        for part in copied.stack_shapes:
            experts.get_parameter(part).data = getattr(copied, part).clone()
    expected = results(plain)
    use_split_experts(ours)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(LowRankSum, "merged")
        found = results(ours)
    assert_close(found, expected)


@pytest.mark.parametrize("name", ["", "nf4"])
def test_experts_with_a_kernel_of_their_own_read_the_sum(name: str) -> None:
    """As Liger's, which replaces `forward` and would get no gradient through a LowRankSum."""
    models = [model_of("qwen3_moe") for _ in range(2)]
    for model in models:
        for experts in stacks_of(model):
            if name:
                quantize(experts, SCHEMES[name])
        use_split_experts(model)
    expected = results(models[0])
    for experts in stacks_of(models[1]):
        experts.forward = partial(type(experts).forward, experts)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(LowRankSum, "__init__")
        found = results(models[1])
    assert_close(found, expected)


def stacks_of(model: nn.Module) -> list[Any]:
    adapters = [module for module in model.modules() if isinstance(module, ParamWrapper)]
    return list(dict.fromkeys(adapter.get_base_layer() for adapter in adapters))


def quantize(experts: Any, scheme: Scheme) -> None:
    values = {name: value.detach() for name, value in experts.named_parameters()}
    names = [name for name, value in values.items() if value.dim() == 3]
    quantize_stacks(experts, names, scheme)
    for name in names:
        parts = scheme.quantize(values[name].flatten(0, 1))
        for key, part in zip((name, f"{name}_scale"), parts, strict=True):
            part = part.view(experts._parameters[key].shape)
            experts._parameters[key] = nn.Parameter(part, requires_grad=False)


def test_a_function_without_parts_gets_the_sum() -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, 8, 6)
    left = torch.randn(3, 8, 2, requires_grad=True)
    right = torch.randn(3, 2, 6)
    lazy = LowRankSum(lambda: weight, left, right, 0.5)
    whole = weight + 0.5 * left @ right
    x = torch.randn(4, 6)
    assert lazy.shape == (3, 8, 6) and lazy.dtype == torch.float32 and lazy.size(1) == 8
    for found, expected in (
        (torch.einsum("tc,erc->etr", x, lazy), torch.einsum("tc,erc->etr", x, whole)),
        (torch.stack([lazy[0], lazy[2]]), torch.stack([whole[0], whole[2]])),
        (lazy[:, 1:3], whole[:, 1:3]),
        (lazy.sum(dim=0), whole.sum(dim=0)),
        (lazy.view(24, 6), whole.view(24, 6)),
        (lazy.transpose(0, 1), whole.transpose(0, 1)),
        (x @ lazy[1].T, x @ whole[1].T),
        (lazy @ x.t(), whole @ x.t()),
    ):
        torch.testing.assert_close(found, expected)


JOB = Path(__file__).with_name("lora_experts_job.py")
CASES = {
    "off": [],
    "full": ["--activation_checkpointing", "full"],
    "selective": ["--activation_checkpointing", "selective"],
    "4bit": ["--quantization", "4bit"],
}


@pytest.fixture(scope="module")
def work(save_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, an adapter saved by PEFT, and four samples."""
    work = tmp_path_factory.mktemp("experts")
    save_tokenizer(work / "tokenizer")
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **SHAPE | MODELS["qwen3_moe"] | {"vocab_size": 320})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(work / "model")
    lora = LoraConfig(
        r=4, lora_alpha=12, target_modules=["q_proj"], target_parameters=expert_names(model),
        init_lora_weights=False, task_type="CAUSAL_LM",
    )  # fmt: skip
    adapted = get_peft_model(model, lora)
    adapted.save_pretrained(work / "adapter")
    samples = torch.randint(3, 320, (4, 12), generator=torch.Generator().manual_seed(1))
    torch.save(samples, work / "samples.pt")
    return work


@pytest.fixture(scope="module")
def of_peft(work: Path) -> dict[str, torch.Tensor]:
    """The gradients of plain Transformers and PEFT."""
    base = AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, work / "adapter", is_trainable=True).train()
    samples = torch.load(work / "samples.pt", weights_only=True)
    model(input_ids=samples, labels=samples, use_cache=False).loss.backward()
    trained = {name: p for name, p in model.named_parameters() if p.grad is not None}
    return {name.replace(".default", ""): p.grad for name, p in trained.items()}


@pytest.fixture(scope="module")
def results_on(work: Path) -> Callable[[int], Path]:
    """Runs the cases on so many ranks, once; returns the folder of the results."""

    @functools.cache
    def run(ranks: int) -> Path:
        common = ["--model_name", str(work / "model")]
        common += ["--from_peft_checkpoint", str(work / "adapter")]
        cases = {name: [*common, *flags] for name, flags in CASES.items()}
        run_cases(work, cases, ranks=ranks, script=JOB)
        return work / "results" / str(ranks)

    return run


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_on_ranks_are_those_of_plain_peft(
    work: Path, of_peft: dict[str, torch.Tensor], results_on: Callable[[int], Path], ranks: int
) -> None:
    """The 4-bit case has those of one rank: PEFT itself cannot adapt quantized experts."""
    on_one = torch.load(results_on(1) / "4bit" / "gradients.pt", weights_only=True)
    for name in CASES:
        result = results_on(ranks) / name
        found = torch.load(result / "gradients.pt", weights_only=True)
        assert found.keys() == of_peft.keys() and len(found) == 2 * 2 * 3
        for key, expected in (on_one if name == "4bit" else of_peft).items():
            difference = (found[key] - expected).norm()
            assert difference <= 1e-5 * expected.norm(), (name, key)
        # nothing was trained, so the adapter's file is the one that PEFT wrote
        saved = load_file(result / "model" / "adapter_model.safetensors")
        stored = load_file(work / "adapter" / "adapter_model.safetensors")
        assert saved.keys() == stored.keys()
        assert all(torch.equal(saved[key], value) for key, value in stored.items())


def grouped(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Output and gradients of one stack of 4 experts for 300, 0, 41 and 159 tokens, r = 3."""
    torch.manual_seed(0)
    x = torch.randn(500, 64).to(dtype).requires_grad_()
    left = torch.randn(4, 64, 3).to(dtype).requires_grad_()
    right = torch.randn(4, 3, 96).to(dtype).requires_grad_()
    weight = torch.randn(4, 64, 96).to(dtype)
    ends = torch.tensor([300, 300, 341, 500], dtype=torch.int32)
    low_rank: Any = LowRankSum(lambda: weight, left, right, 0.5)
    y = functional.grouped_mm(x, low_rank, offs=ends)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).to(dtype))
    found = {"y": y.detach()}
    for name, tensor in (("x", x), ("left", left), ("right", right)):
        assert tensor.grad is not None
        found[name] = tensor.grad
    return found


def test_in_16_bits_small_products_of_experts_are_computed_in_fp32() -> None:
    """They are as exact as products in 16 bits, which a GPU computes."""
    exact = grouped(torch.float32)
    ours = grouped(torch.bfloat16)
    with computing_on(Target("cuda")):
        in_16_bits = grouped(torch.bfloat16)
    for name, value in exact.items():
        error = (ours[name].float() - value).norm()
        assert error <= 1.01 * (in_16_bits[name].float() - value).norm(), name
        assert 0 < error < 0.01 * value.norm(), name


@pytest.mark.parametrize("rank", [1, 3, 8, 16])
@pytest.mark.parametrize("experts", [4, 64])
def test_the_planned_workspace_is_what_the_operator_allocates(rank: int, experts: int) -> None:
    x = torch.randn(512, 64, dtype=torch.bfloat16)
    u = torch.randn(512, -(-rank // 8) * 8, dtype=torch.bfloat16)
    weight = torch.randn(experts, 64, 256, dtype=torch.bfloat16)
    right = torch.randn(experts, rank, 256, dtype=torch.bfloat16)
    ends = torch.arange(1, experts + 1, dtype=torch.int32) * (512 // experts)
    arguments = (x, u, weight, right, ends, 0.5)
    torch.ops.llama_ft.lora_experts(*arguments)  # compiles kernels
    peak = peak_bytes(lambda: torch.ops.llama_ft.lora_experts(*arguments))
    planned = lora_experts.workspace_bytes(arguments) + 512 * 256 * 2
    assert 0.9 * planned < peak <= planned
