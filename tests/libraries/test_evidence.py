"""Each name that tells something about a model is in an architecture that has it."""

import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.integrations import moe

from llama_ft.libraries import evidence


def architecture(path: str) -> Any:
    """Return a class, such as llama.LlamaAttention."""
    model, name = path.split(".")
    return getattr(import_module(f"transformers.models.{model}.modeling_{model}"), name)


def parameters(path: str) -> set[str]:
    forward: Callable[..., Any] = architecture(path).forward
    return set(inspect.signature(forward).parameters)


@pytest.mark.parametrize(
    "mixer",
    [
        "llama.LlamaAttention",
        "gpt2.GPT2Attention",
        "bloom.BloomAttention",
        "gpt_neox.GPTNeoXAttention",
        "mamba.MambaMixer",
        "rwkv.RwkvSelfAttention",
        "lfm2.Lfm2ShortConv",
        "falcon_h1.FalconH1Mixer",
        "qwen3_next.Qwen3NextGatedDeltaNet",
    ],
)
def test_a_token_mixer_takes_a_cache(mixer: str) -> None:
    assert evidence.CACHES & parameters(mixer)


def test_attention_takes_a_mask() -> None:
    for attention in ("bloom.BloomAttention", "gptj.GPTJAttention", "falcon.FalconAttention"):
        assert evidence.MASK in parameters(attention)


def test_a_layer_without_a_mixer_takes_none() -> None:
    assert not evidence.CACHES & parameters("llama.LlamaMLP")
    assert not evidence.CACHES & parameters("mixtral.MixtralSparseMoeBlock")


def test_a_decoder_layer_gets_the_cache_and_all_that_varies_by_name() -> None:
    layer = parameters("llama.LlamaDecoderLayer")
    [cache] = evidence.CACHES & layer
    assert evidence.has_cache({cache: object()}) and not evidence.has_cache({cache: None})
    for name in ("position_embeddings", "position_ids", "attention_mask"):
        assert name in layer
        assert any(name in dimension for dimension in evidence.VARYING_DIMENSIONS)


@pytest.mark.parametrize(
    "embedding",
    [
        "bart.BartLearnedPositionalEmbedding",
        "marian.MarianSinusoidalPositionalEmbedding",
        "pegasus.PegasusSinusoidalPositionalEmbedding",
        "blenderbot.BlenderbotLearnedPositionalEmbedding",
        "roberta.RobertaEmbeddings",
    ],
)
def test_a_position_embedding_that_counts_tokens_takes_the_length_of_the_cache(
    embedding: str,
) -> None:
    assert evidence.CACHE_LENGTHS & parameters(embedding)
    looks_up = embedding.startswith(("marian", "pegasus", "blenderbot"))
    assert (evidence.LOOKS_UP_POSITIONS in parameters(embedding)) == looks_up


def test_other_arguments_have_their_names() -> None:
    vision = parameters("mllama.MllamaCrossAttentionDecoderLayer")
    assert {evidence.CROSS_ATTENTION_BIAS, evidence.SEES_IMAGES} <= vision
    decoder = parameters("qwen3_vl.Qwen3VLTextModel")
    assert {evidence.MERGED, evidence.MEDIA_TOKENS, evidence.ADDED_FEATURES} <= decoder
    convolution = architecture("inkling2.Inkling2Model")
    assert evidence.SAMPLE_OF_TOKEN in inspect.getsource(sys.modules[convolution.__module__])
    loss = architecture("mixtral.load_balancing_loss_func")
    assert tuple(inspect.signature(loss).parameters) == evidence.BALANCING_ARGUMENTS
    kwargs = import_module("transformers.modeling_flash_attention_utils").FlashAttentionKwargs
    assert {f"cu_seq_lens_{side}" for side in "qk"} <= kwargs.__annotations__.keys()
    assert evidence.FLASH_ATTENTION_ARGUMENTS - {"cu_seq_lens_q", "cu_seq_lens_k"} == {
        name for name in kwargs.__annotations__ if name.startswith("max_length")
    }


def test_models_that_wait_for_sizes_of_images_have_their_arguments() -> None:
    for path in ("qwen3_vl.Qwen3VLModel", "glm4v.Glm4vModel", "idefics3.Idefics3Model"):
        assert {evidence.PIXELS, evidence.ENCODER_OUTPUTS} <= parameters(path)
    assert evidence.GRID_OF_IMAGES in parameters("qwen2_5_vl.Qwen2_5_VLModel")
    assert set(evidence.SIZES_OF_IMAGES) & parameters("mistral3.Mistral3Model")
    assert evidence.PIXEL_MASK in parameters("smolvlm.SmolVLMModel")
    assert evidence.PATCH_MASK in parameters("idefics3.Idefics3VisionTransformer")
    for tower in ("qwen3_5.Qwen3_5VisionModel", "gemma4.Gemma4VisionModel"):
        assert set(evidence.SIZES_FOR_TOWERS) & parameters(tower)
    for name in evidence.GRID_TOWERS | evidence.TAKES_SIZES | evidence.PADDED_IMAGES:
        file = import_module(f"transformers.models.{name}.modeling_{name}")
        assert evidence.IMAGE_FEATURES in inspect.getsource(file)
    for tower, name in {
        "qwen3_vl.Qwen3VLVisionModel": evidence.INTERPOLATION,
        "qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel": evidence.WINDOW,
    }.items():
        assert f"self.{name} =" in inspect.getsource(architecture(tower).__init__)


def test_gated_delta_nets_have_their_parts() -> None:
    kinds = (
        "qwen3_5.Qwen3_5GatedDeltaNet",
        "qwen3_next.Qwen3NextGatedDeltaNet",
        "olmo_hybrid.OlmoHybridGatedDeltaNet",
    )
    for path, projections in zip(kinds, evidence.DELTA_NETS, strict=True):
        assert evidence.STATES in parameters(path)
        source = inspect.getsource(architecture(path).__init__)
        names = projections | evidence.PER_HEAD | {evidence.CONVOLUTION, *evidence.HEAD_SIZES}
        assert all(f"self.{name} =" in source for name in names), path
        assert any(f"self.{name} =" in source for name in evidence.OUTPUT_PROJECTIONS), path


def test_the_files_of_models_have_their_functions() -> None:
    forward = inspect.unwrap(architecture("llama.LlamaAttention").forward)
    assert evidence.ATTENTION_INTERFACE in forward.__code__.co_names
    for path, names in {
        "llama.LlamaModel": [evidence.EAGER_ATTENTION, evidence.CAUSAL_MASK],
        "gpt_neox_japanese.GPTNeoXJapaneseModel": [evidence.CAUSAL_MASK],
        "bert.BertModel": [evidence.MASK_OF_ENCODERS],
        "mixtral.MixtralModel": [evidence.BALANCING_LOSS],
    }.items():
        file = sys.modules[architecture(path).__module__]
        assert all(hasattr(file, name) for name in names), path


def test_modules_have_their_attributes() -> None:
    for path, name in {
        "llama.LlamaAttention": evidence.IS_CAUSAL,
        "llama.LlamaRotaryEmbedding": evidence.ROPE_TYPE,
        "mllama.MllamaCrossAttentionDecoderLayer": evidence.CROSS_ATTENTION,
        "llama4.Llama4TextAttention": evidence.COUNTS_POSITIONS,
        "gpt_oss.GptOssAttention": evidence.SINKS,
        "gemma3.Gemma3Model": evidence.IMAGE_FEATURES,
    }.items():
        assert f"{name}" in inspect.getsource(architecture(path)), path


def test_experts_and_kernels_have_their_names() -> None:
    for path in (
        "mixtral.MixtralExperts",
        "gpt_oss.GptOssExperts",
        "deepseek_v3.DeepseekV3Experts",
    ):
        kind = architecture(path)
        assert evidence.is_experts(kind.__new__(kind))
    mlp = architecture("llama.LlamaMLP")
    assert not evidence.is_experts(mlp.__new__(mlp))
    for name in evidence.FP32_KERNELS:
        assert architecture(f"xlstm.{name}")
    known = {"eager", *moe.ExpertsInterface._global_mapping}
    assert set(evidence.EXPERTS_IMPLEMENTATIONS) <= known


@pytest.mark.parametrize(
    "mlp", ["llama.LlamaMLP", "qwen2_5_vl.Qwen2_5_VLMLP", "gpt2.GPT2MLP", "bloom.BloomMLP"]
)
def test_an_mlp_has_its_name_and_arguments(mlp: str) -> None:
    assert evidence.MLP_CLASSES.search(mlp)
    assert evidence.parameters_of(architecture(mlp).forward) in evidence.MLP_PARAMETERS


def test_experts_get_the_choices_of_each_token() -> None:
    for path in ("mixtral.MixtralExperts", "gpt_oss.GptOssExperts", "qwen3_moe.Qwen3MoeExperts"):
        assert evidence.parameters_of(architecture(path).forward) in evidence.ROUTED_PARAMETERS
    # they get each token once for every expert
    experts = evidence.parameters_of(architecture("llama4.Llama4TextExperts").forward)
    assert experts not in evidence.ROUTED_PARAMETERS


def test_activations_and_norms_are_where_they_are_expected() -> None:
    for path in ("llama.LlamaRMSNorm", "bloom.BloomGelu"):
        assert evidence.PER_TOKEN_CLASSES.search(path)
        assert architecture(path)
    files = {torch.nn.SiLU, torch.nn.Dropout, torch.nn.Identity, type(ACT2FN["gelu_new"])}
    assert {kind.__module__ for kind in files} == evidence.ACTIVATIONS
