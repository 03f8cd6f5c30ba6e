"""The loss in pieces is that of all logits at once: the reference is the same model's logits and
torch's loss."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models.test_architectures import ARCHITECTURES, SHAPE
from peft import LoraConfig, get_peft_model
from tiny_llama import tiny_llama
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM
from transformers.modeling_utils import PreTrainedModel

from llama_ft.models import BuiltModel, use_chunked_loss
from llama_ft.models.adapters.lora_linear import use_fused_lora
from llama_ft.models.computing import chunked_loss

VOCABULARY = 320
INPUT_IDS = torch.randint(3, VOCABULARY, (2, 50), generator=torch.Generator().manual_seed(1))
POSITIONS = torch.randperm(100, generator=torch.Generator().manual_seed(2))[:83].sort().values
TARGETS = torch.randint(0, VOCABULARY, (83,), generator=torch.Generator().manual_seed(3))
LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0}
ADAPTERS: dict[str, dict[str, Any]] = {
    "on the head and elsewhere": {"target_modules": ["q_proj", "lm_head"]},
    "not on the head": {"target_modules": ["q_proj"]},
    "the head in full": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "some rows of the head": {
        "target_modules": ["q_proj"],
        "trainable_token_indices": {"lm_head": [3, 7]},
    },
}

# The LM head is scaled by a number of the decoder's; a layer stands between both; the decoder has
# no such head.
ALL_LOGITS = ("OPT", "Falcon-H1", "ModernBERT decoder", "Mamba")


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """83 positions in pieces of 16."""
    monkeypatch.setattr(chunked_loss, "FEWEST_POSITIONS", 16)
    for limits in ("LOGITS_AT_ONCE", "LOGITS_WITH_TRAINED_HEAD"):
        monkeypatch.setattr(chunked_loss, limits, {"cpu": VOCABULARY * 16})


def with_chunked_loss(model: PreTrainedModel) -> PreTrainedModel:
    """The model with its weights, made ready on the meta device as the recipe does."""
    weights = dict(model.state_dict())
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to("meta")
    assert use_chunked_loss(BuiltModel(model))
    model.to_empty(device="cpu")
    model.tie_weights()
    model.load_state_dict(weights)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    return model


def loss_and_gradients(
    model: PreTrainedModel, in_pieces: bool, per_token: bool = False
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    if in_pieces:
        loss, *_ = model(
            input_ids=INPUT_IDS,
            use_cache=False,
            positions=POSITIONS,
            targets=TARGETS,
            per_token=per_token,
        )
        loss = loss.sum()
    else:
        logits = model(input_ids=INPUT_IDS, use_cache=False).logits.flatten(0, 1)[POSITIONS]
        loss = torch.nn.functional.cross_entropy(logits.float(), TARGETS, reduction="sum")
    (loss / 83).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), gradients


def check(model: PreTrainedModel, **tolerance: float) -> None:
    expected, theirs = loss_and_gradients(model, in_pieces=False)
    loss, ours = loss_and_gradients(model, in_pieces=True)
    with torch.no_grad():
        evaluated, *_ = model.eval()(
            input_ids=INPUT_IDS, use_cache=False, positions=POSITIONS, targets=TARGETS
        )
    torch.testing.assert_close(evaluated, expected, **tolerance)
    torch.testing.assert_close(loss, expected, **tolerance)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        torch.testing.assert_close(
            ours[name], theirs[name], msg=lambda text, n=name: f"{n}: {text}", **tolerance
        )


def architecture(name: str) -> PreTrainedModel:
    model_type, settings = ARCHITECTURES[name]
    # where they are known; strong enough to show
    caps = {"final_logit_softcapping": 0.5, "logits_scaling": 3.0}
    known = AutoConfig.for_model(model_type).to_dict()
    settings = {**SHAPE, **settings, **{key: caps[key] for key in caps if key in known}}
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type, **{key: value for key, value in settings.items() if value is not None}
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    return model


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in ALL_LOGITS])
def test_chunked_loss_and_gradients_equal_those_of_all_logits(name: str) -> None:
    check(with_chunked_loss(architecture(name)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ALL_LOGITS)
def test_other_architectures_compute_all_logits_at_once(name: str) -> None:
    assert not use_chunked_loss(BuiltModel(architecture(name)))


@pytest.fixture
def llama() -> Iterator[LlamaForCausalLM]:
    yield tiny_llama(**{**SHAPE, "num_hidden_layers": 1})


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_chunked_loss_supports_adapters_on_the_head_and_elsewhere(
    llama: LlamaForCausalLM, adapter: str
) -> None:
    get_peft_model(llama, LoraConfig(**LORA, **ADAPTERS[adapter]))
    use_fused_lora(llama)
    for name, parameter in llama.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    check(with_chunked_loss(llama), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
def test_in_16_bits_chunks_are_as_close_to_fp32_as_all_logits_at_once(
    llama: LlamaForCausalLM, per_token: bool, is_frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of 2: what is rounded to 16 bits 42 times shows."""
    llama.lm_head.requires_grad_(not is_frozen)
    monkeypatch.setattr(chunked_loss, "FEWEST_POSITIONS", 2)
    for limits in ("LOGITS_AT_ONCE", "LOGITS_WITH_TRAINED_HEAD"):
        monkeypatch.setattr(chunked_loss, limits, {"cpu": 1})
    exact = loss_and_gradients(llama, in_pieces=False)[1]
    llama = with_chunked_loss(llama.bfloat16())
    _, theirs = loss_and_gradients(llama, False, per_token)
    _, ours = loss_and_gradients(llama, True, per_token)
    for name, gradient in exact.items():
        error = (ours[name].float() - gradient).norm()
        their_error = (theirs[name].float() - gradient).norm()
        assert error < 1.2 * their_error + 1e-3 * gradient.norm(), name


def test_losses_per_token_have_the_gradients_of_their_sum_even_with_dropout(
    llama: LlamaForCausalLM,
) -> None:
    settings = {"target_modules": ["q_proj", "lm_head"], "init_lora_weights": False}
    get_peft_model(llama, LoraConfig(r=4, lora_dropout=0.5, **settings))
    llama = with_chunked_loss(llama).train()
    results = []
    for per_token in (False, True):
        torch.manual_seed(5)
        results.append(loss_and_gradients(llama, True, per_token))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("is_frozen", [True, False])
def test_weighted_losses_need_the_logits_of_a_frozen_head_only_once(
    llama: LlamaForCausalLM, is_frozen: bool
) -> None:
    class Logits(TorchDispatchMode):
        """Counts the rows of logits."""

        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mm.default and result.shape[-1] == VOCABULARY:
                self.count += len(result)
            return result

    llama.lm_head.requires_grad_(not is_frozen)
    weights = torch.linspace(-1, 2, len(TARGETS))
    logits = llama(input_ids=INPUT_IDS, use_cache=False).logits.flatten(0, 1)[POSITIONS]
    losses = torch.nn.functional.cross_entropy(logits, TARGETS, reduction="none")
    (losses * weights).sum().backward()
    expected = {name: p.grad for name, p in llama.named_parameters() if p.grad is not None}
    llama.zero_grad()

    llama = with_chunked_loss(llama)
    inputs = {"input_ids": INPUT_IDS, "positions": POSITIONS, "targets": TARGETS}
    with Logits() as made:
        found, *_ = llama(**inputs, use_cache=False, per_token=True)
        (found * weights).sum().backward()
    torch.testing.assert_close(found, losses)
    gradients = {name: p.grad for name, p in llama.named_parameters() if p.grad is not None}
    torch.testing.assert_close(gradients, expected)
    padded = -(-len(TARGETS) // 8) * 8
    assert made.count == padded * (1 if is_frozen else 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_probability_is_that_of_the_largest_logit(dtype: torch.dtype) -> None:
    logits = torch.randn(50, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0] = 0.0  # all are the largest
    probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
    by_position = chunked_loss._largest(logits, probabilities, by_position=True)
    by_value = chunked_loss._largest(logits, probabilities, by_position=False)
    assert all(map(torch.equal, by_position, by_value))


def test_gradients_of_a_sum_are_not_multiplied_by_ones(llama: LlamaForCausalLM) -> None:
    class Factors(TorchDispatchMode):
        """Counts the logits that are multiplied in place."""

        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten.mul_.Tensor and args[0].shape[-1] == VOCABULARY:
                self.count += len(args[0])
            return func(*args, **(kwargs or {}))

    llama = with_chunked_loss(llama)
    counts = []
    for per_token in (False, True):
        with Factors() as factors:
            loss_and_gradients(llama, True, per_token)
        counts.append(factors.count)
    padded = -(-len(TARGETS) // 8) * 8
    assert counts == [padded % 32, padded], "only the last chunk, which is padded with factors of 0"


def test_a_trained_head_gets_larger_chunks_but_not_in_fp16_or_for_an_adapter(
    llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_loss, "LOGITS_WITH_TRAINED_HEAD", {"cpu": VOCABULARY * 64})
    largest = []

    def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        sizes.append(len(targets))
        return chunked_loss.cross_entropy(logits, targets)

    for kind in ("full", "fp16", "adapter"):
        model = copy.deepcopy(llama)
        if kind == "fp16":
            model.half()
        if kind == "adapter":
            get_peft_model(model, LoraConfig(r=4, target_modules=["lm_head"]))
        model = with_chunked_loss(model)
        sizes: list[int] = []
        model(
            input_ids=INPUT_IDS,
            use_cache=False,
            positions=POSITIONS,
            targets=TARGETS,
            loss_fn=loss_fn,
        )
        largest.append(max(sizes))
    assert largest == [64, 32, 32]


def test_in_fp16_the_sum_of_the_head_gradients_may_exceed_the_range_of_fp16(
    llama: LlamaForCausalLM,
) -> None:
    """Each piece of 16 targets has a gradient below 65,504, all 83 together do not."""
    torch.nn.init.constant_(llama.model.norm.weight, 1000.0)
    torch.nn.init.normal_(llama.lm_head.weight, std=1e-4)
    targets = torch.zeros_like(TARGETS)
    logits = llama(input_ids=INPUT_IDS, use_cache=False).logits.flatten(0, 1)[POSITIONS]
    expected = torch.autograd.grad(
        torch.nn.functional.cross_entropy(logits, targets), llama.lm_head.weight
    )[0]
    assert (83 * expected).abs().max() > 65_504
    llama = with_chunked_loss(llama.half())
    (
        llama(input_ids=INPUT_IDS, use_cache=False, positions=POSITIONS, targets=targets)[0] / 83
    ).backward()
    found = llama.lm_head.weight.grad.float()
    assert (found - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("targets", [83, 16, 1, 0])
def test_chunks_have_few_shapes(
    llama: LlamaForCausalLM, targets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of 32, as the head is trained; the last is filled up to 8, and what fills it counts
    nothing."""
    positions = POSITIONS[:targets]
    wanted = TARGETS[:targets]
    seen = list[int]()
    logits = llama(input_ids=INPUT_IDS, use_cache=False).logits.flatten(0, 1)[positions]
    expected = torch.nn.functional.cross_entropy(logits, wanted, reduction="none")
    plain = chunked_loss.CrossEntropy.forward
    monkeypatch.setattr(
        chunked_loss.CrossEntropy,
        "forward",
        lambda ctx, *each: (seen.append(len(each[1])), plain(ctx, *each))[1],
    )
    inputs = {"input_ids": INPUT_IDS, "use_cache": False, "positions": positions, "targets": wanted}
    found = with_chunked_loss(llama)(**inputs, per_token=True)[0]
    torch.testing.assert_close(found, expected)
    assert seen == {83: [32, 32, 24], 16: [16], 1: [8], 0: [0]}[targets]


class Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor an operator makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_no_tensor_is_as_large_as_the_logits(llama: LlamaForCausalLM) -> None:
    weights = max(parameter.numel() for parameter in llama.parameters())
    llama = with_chunked_loss(llama)
    with Largest() as at_once:
        loss_and_gradients(llama, in_pieces=False)
    with Largest() as in_pieces:
        loss_and_gradients(llama, in_pieces=True)
    assert at_once.elements >= 83 * VOCABULARY > 1.2 * weights
    assert in_pieces.elements <= weights


class BatchedMatmuls(TorchDispatchMode):
    """Collects the shapes of the second factors of batched matmuls."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes = list[tuple[int, ...]]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        if func is torch.ops.aten.bmm.default:
            self.shapes.append(tuple(args[1].shape))
        result: torch.Tensor = func(*args, **(kwargs or {}))
        return result


def test_answers_to_several_prompts_do_not_copy_a_frozen_head(llama: LlamaForCausalLM) -> None:
    """A batched matmul has one factor per prompt, and the CPU makes each contiguous."""
    llama.eval().requires_grad_(False)
    expected = llama.generate(INPUT_IDS, max_new_tokens=3, do_sample=False)
    with BatchedMatmuls() as plain:
        llama(INPUT_IDS, logits_to_keep=1)
    with_loss = with_chunked_loss(llama)
    with BatchedMatmuls() as ours:
        generated = with_loss.generate(INPUT_IDS, max_new_tokens=3, do_sample=False)
    assert any(VOCABULARY in shape for shape in plain.shapes)
    assert not any(VOCABULARY in shape for shape in ours.shapes)
    assert torch.equal(generated, expected)
