"""Rows of a pack are computed as if each stood alone: the reference is transformers on one row at a time."""

from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel

from llama_ft.errors import UserError
from llama_ft.models import packed_arguments, packed_attention, use_packed_attention

CPU = torch.device("cpu")
LENGTHS = [3, 11, 1, 7, 4]  # longer and shorter than the windows of 4 and 5 below
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "vocab_size": 101, "max_position_embeddings": 2048}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 5},
    "Gemma2": {"head_dim": 8, "sliding_window": 4},  # soft caps
    "Gemma3Text": {"head_dim": 8, "sliding_window": 4},
    "GptOss": {"head_dim": 8, "sliding_window": 4, "num_local_experts": 4},  # sinks
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},  # learned positions
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "Phi3": {"pad_token_id": 0},
    "Phimoe": {"num_local_experts": 4, "router_jitter_noise": 0.0},
    "Qwen3": {"head_dim": 8},
    "DeepseekV3": {  # values narrower than keys
        **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12},
        **{"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "num_key_value_heads": 4},
        **{"moe_intermediate_size": 32, "first_k_dense_replace": 1},
    },
}
NO_SDPA = {"Gemma2", "GptOss"}
CASES = [(name, kind) for name in MODELS for kind in ("sdpa", "eager") if kind == "eager" or name not in NO_SDPA]


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


def rows(lengths: list[int] = LENGTHS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 101, (length,), generator=generator) for length in lengths]


def loss_of(logits: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:-1].float(), row[1:], reduction="sum")


def packed_logits(model: PreTrainedModel, parts: list[torch.Tensor]) -> torch.Tensor:
    layout = packed_arguments(model, [len(part) for part in parts], CPU)
    logits: torch.Tensor = model(input_ids=torch.cat(parts)[None], use_cache=False, **layout).logits[0]
    return logits


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_loss_and_gradient_of_each_row_are_those_of_the_row_alone(name: str, attention: str) -> None:
    model, parts = make(name, attention), rows()
    alone = [
        loss_of(model(input_ids=row[None], attention_mask=torch.ones(1, len(row))).logits[0], row) for row in parts
    ]
    sum(alone).backward()  # type: ignore[union-attr]
    expected = {
        key: parameter.grad.clone() for key, parameter in model.named_parameters() if parameter.grad is not None
    }
    model.zero_grad()
    use_packed_attention(model)
    together = [
        loss_of(logits, row) for logits, row in zip(packed_logits(model, parts).split(LENGTHS), parts, strict=True)
    ]
    torch.testing.assert_close(torch.stack(together), torch.stack(alone), rtol=1e-5, atol=1e-5)
    sum(together).backward()  # type: ignore[union-attr]
    for key, parameter in model.named_parameters():
        if key in expected:
            torch.testing.assert_close(parameter.grad, expected[key], rtol=1e-4, atol=1e-4, msg=key)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padded_batches_and_generation_still_go_through_transformers_own(attention: str) -> None:
    model, parts = make("Mistral", attention), rows([9, 7])
    prompt = {"input_ids": parts[0][None], "attention_mask": torch.ones(1, 9, dtype=torch.int64)}
    padded = torch.stack([parts[0], torch.nn.functional.pad(parts[1], (0, 2))])
    mask = torch.tensor([[1] * 9, [1] * 7 + [0] * 2])
    wanted = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    before = model(input_ids=padded, attention_mask=mask).logits, model.generate(**prompt, **wanted)  # type: ignore[operator]
    dense = model(input_ids=padded).logits
    use_packed_attention(model)
    after = model(input_ids=padded, attention_mask=mask).logits, model.generate(**prompt, **wanted)  # type: ignore[operator]
    torch.testing.assert_close(after[0], before[0])
    torch.testing.assert_close(model(input_ids=padded).logits, dense)
    assert after[1].tolist() == before[1].tolist()


class Seen(TorchDispatchMode):
    """Notes the largest tensor any operator makes, and the lengths attention is computed over."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.attended = 0, list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple) else (result,)
        self.largest = max([self.largest, *(one.numel() for one in made if isinstance(one, torch.Tensor))])
        if "scaled_dot_product" in func.name() and "backward" not in func.name():
            self.attended += [args[0].shape[2]] * args[0].shape[0]
        return result


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_a_pack_costs_its_rows_own_attention_and_no_mask_over_all_of_it(name: str, attention: str) -> None:
    lengths = [64] * 16
    model = make(name, attention)
    use_packed_attention(model)
    with Seen() as seen, torch.no_grad():
        packed_logits(model, rows(lengths))
    assert seen.largest < sum(lengths) ** 2 / 8  # the largest are the logits, tokens x 101
    if attention == "sdpa":
        assert seen.attended == lengths * 2  # two layers


@pytest.mark.parametrize("window", [None, 6])
def test_the_cpu_kernel_has_the_same_gradients_in_16_bits(window: int | None) -> None:
    """There its backward pass takes rows that are filled up."""
    lengths, generator = (64, 64, 33, 5, 32, 1), torch.Generator().manual_seed(0)
    wide = [torch.randn(1, heads, sum(lengths), 8, generator=generator).bfloat16().float() for heads in (4, 2, 2, 4)]
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        *inputs, wanted = [part.to(dtype) for part in wide]
        inputs = [part.requires_grad_() for part in inputs]
        output = packed_attention._CpuAttention.apply(*inputs, lengths, 0.3, window)
        found.append([output, *torch.autograd.grad(output, inputs, wanted)])
    for exact, rounded in zip(*found, strict=True):
        assert (rounded.float() - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize(
    ("name", "settings", "why"),
    [
        ("Falcon", {}, "its attention has no interface"),
        ("Mamba", {}, "it has layers of linear_attention"),
        ("Llama4Text", {"num_local_experts": 2, "attention_chunk_size": 8}, "it has layers of chunked_attention"),
    ],
)
def test_a_model_that_cannot_keep_rows_apart_is_refused(name: str, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=f"(?s){why}.*--batching_strategy padding"):
        use_packed_attention(make(name, "eager", **settings))
