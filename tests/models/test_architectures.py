"""Every architecture from its folder to the tuned result: loaded onto 2 ranks, trained a step,
exported, and compared with what plain transformers and peft make of the same files on one
process."""

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoint_by_hand import stored
from conftest import build_model, run_cases
from packaging.version import Version
from transformers import CONFIG_MAPPING

from llama_ft.export import Exporter

SCRIPT = Path(__file__).with_name("architectures_job.py")
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.1] * 8,
    "long_factor": [2.0] * 8,
}
TIED = {"tie_word_embeddings": True}
UNTIED = {"tie_word_embeddings": False}
EXPERTS = {"num_experts_per_tok": 2, "router_jitter_noise": 0.0}
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attn_pdrop": 0.0}  # fmt: skip

# Name -> model_type and what differs from SHAPE (None: left out). 5 experts over 2 ranks are 3 and
# 2.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 2": ("llama", {"num_key_value_heads": 4}),
    "Llama 3": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "Llama 3.1": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "Llama 3.2": ("llama", {"rope_parameters": LLAMA3_ROPE, **TIED}),
    "Mistral": ("mistral", {"sliding_window": 16}),
    "Mixtral": ("mixtral", {"num_local_experts": 5, **EXPERTS}),
    "Qwen2.5": ("qwen2", TIED),
    "Qwen3": ("qwen3", {"head_dim": 32}),
    "Qwen3 MoE": ("qwen3_moe", {"num_experts": 5, "moe_intermediate_size": 64, **EXPERTS}),
    "Gemma 2": ("gemma2", {"sliding_window": 16, "query_pre_attn_scalar": 16, **TIED}),
    "Gemma 3 text": ("gemma3_text", {"sliding_window": 16, "query_pre_attn_scalar": 16, "num_hidden_layers": 6,
                                     "sliding_window_pattern": 6, **TIED}),
    "Phi-3": ("phi3", {"sliding_window": 16}),
    "Phi-4": ("phi3", {"original_max_position_embeddings": 18, "rope_parameters": LONG_ROPE}),
    "Phi-3.5 MoE": ("phimoe", {"num_local_experts": 5, **EXPERTS}),
    "OLMo 2": ("olmo2", {}),
    "SmolLM3": ("smollm3", {"no_rope_layers": [1, 0], **TIED}),
    "GPT-2": ("gpt2", {**GPT2, **TIED}),
    "GPT-NeoX": ("gpt_neox", {"hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "Falcon": ("falcon", {"head_dim": None, "new_decoder_architecture": False, "multi_query": True}),
    "OPT": ("opt", {"ffn_dim": 128, "word_embed_proj_dim": 64, "dropout": 0.0, **TIED}),
    "Phi-2": ("phi", {"resid_pdrop": 0.0}),
    "BLOOM": ("bloom", {"hidden_dropout": 0.0, "attention_dropout": 0.0, "n_layer": 2, "n_head": 4, **TIED}),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 5, "sliding_window": 16, **EXPERTS}),
    "DeepSeek V3": ("deepseek_v3", {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 64,
                                    "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32,
                                    "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
                                    "num_key_value_heads": 4, "num_experts_per_tok": 2}),
    "Granite MoE": ("granitemoe", {"num_local_experts": 5, **EXPERTS}),
    "Granite MoE, balanced": ("granitemoe", {"num_local_experts": 5, **EXPERTS, **BALANCED}),
    "Falcon-H1": ("falcon_h1", {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_state": 16, "mamba_chunk_size": 8,
                                "ssm_multipliers": [0.5, 2.0, 0.7, 1.5, 0.9]}),
    "Gemma 3n text": ("gemma3n_text", {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 16,
                                       "layer_types": ["sliding_attention", "full_attention"] * 2,
                                       "laurel_rank": 16, "hidden_size_per_layer_input": 16,
                                       "vocab_size_per_layer_input": 320, **TIED}),
    "Gemma 4 text": ("gemma4_text", {"global_head_dim": 32, "sliding_window": 16, "hidden_size_per_layer_input": 16,
                                     "layer_types": ["sliding_attention", "full_attention"],
                                     "vocab_size_per_layer_input": 320, **TIED}),
    "Llama 4 text": ("llama4_text", {"intermediate_size_mlp": 128, "num_local_experts": 5, "no_rope_layers": [1, 0],
                                     "layer_types": ["chunked_attention", "full_attention"],
                                     "attention_chunk_size": 16, **EXPERTS}),
    "ModernBERT decoder": ("modernbert-decoder", {"layer_types": ["sliding_attention", "full_attention"],
                                                  "local_attention": 32, **TIED}),
    "Nemotron-H": ("nemotron_h", {"layers_block_type": ["mamba", "attention", "moe"], "mamba_num_heads": 4,
                                  "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 8,
                                  "n_routed_experts": 4, "moe_intermediate_size": 64,
                                  "moe_shared_expert_intermediate_size": 64, "num_hidden_layers": None}),
    # Transformers names no layer class of BioGPT, and Mamba's kernels read the weights of linear
    # layers themselves.
    "BioGPT": ("biogpt", {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, **TIED}),
    "GPT-J": ("gptj", {**GPT2, "rotary_dim": 8}),
    "LFM2": ("lfm2", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 64, **TIED}),
    "Mamba": ("mamba", {"state_size": 8, "time_step_rank": 8}),
}  # fmt: skip
# From 5.24 on.
NEW: dict[str, tuple[str, dict[str, Any]]] = {
    "Dory": ("dory", {}),
    "EXAONE 3": ("exaone", {}),
    "Lara mini": ("lara_mini", {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
                                "shared_expert_intermediate_size": 64, "linear_num_key_heads": 2,
                                "linear_num_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
                                "layer_types": ["linear_attention", "full_attention"]}),
    "Sarvam MoE": ("sarvam_moe", {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
                                  "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}),
    "Sarvam MLA": ("sarvam_mla", ARCHITECTURES["DeepSeek V3"][1]),
    "Apertus 1.5 text": ("apertus1p5_text", {}),
}  # fmt: skip
ARCHITECTURES |= {name: entry for name, entry in NEW.items() if entry[0] in CONFIG_MAPPING}
READ_BY_KERNELS = {"Mamba": ("x_proj", "dt_proj", "out_proj"), "Nemotron-H": ("mixer.out_proj",),
                   "Falcon-H1": ("mamba.out_proj",)}  # fmt: skip
# Models that also take images, of whose towers nothing may be read or changed: model_type, what
# differs in the text part from SHAPE, in the vision tower from VISION, and the rest.
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14}  # fmt: skip
QWENS = {"depth": 2, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
MULTIMODAL: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Gemma 3": ("gemma3", {"sliding_window": 16, "query_pre_attn_scalar": 16, **TIED}, VISION,
                {"mm_tokens_per_image": 1, "image_token_index": 318, **TIED}),
    "Qwen3.5": ("qwen3_5", {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
                            "linear_num_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
                            **MROPE}, QWENS, {"image_token_id": 318, "video_token_id": 319}),
    "Mistral 3": ("mistral3", {"model_type": "mistral"}, VISION | {"model_type": "pixtral", "head_dim": 16},
                  {"image_token_index": 318}),
    "Qwen2.5-VL": ("qwen2_5_vl", MROPE, QWENS, {"image_token_id": 318, "video_token_id": 319}),
    "Llama 4": ("llama4", ARCHITECTURES["Llama 4 text"][1],
                VISION | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
                {"image_token_index": 318}),
    "Phi-4-multimodal": ("phi4_multimodal", {}, VISION | {"crop_size": 28, "image_token_id": 318},
                         {"audio_config": {"hidden_size": 32, "num_blocks": 1, "num_attention_heads": 2,
                                           "intermediate_size": 64, "audio_token_id": 319, "input_size": 16,
                                           "nemo_conv_channels": 32, "ext_pw_out_channel": 32}}),
}  # fmt: skip
# A LoRA step leaves A as it began, because B is 0: so the gradient can be taken again from the
# result.
LORA = [
    "--use_peft",
    "--target_modules",
    "all-linear",
    "--r",
    "4",
    "--lora_dropout",
    "0",
    "--weight_decay",
    "0",
]
METHODS: dict[str, list[str]] = {
    "full": [],
    "full, rank 0 reads": ["--low_cpu_fsdp"],
    "LoRA": [*LORA, "--low_cpu_fsdp"],
    "LoRA 8bit": [*LORA, "--quantization", "8bit"],
    "LoRA 4bit": [*LORA, "--quantization", "4bit", "--low_cpu_fsdp"],
}
# Units by size: attention is one of its own, wrapped layers are units though their parts would be
# large enough.
BY_SIZE = ["--fsdp_wrap_policy", "size"]
SIZED: dict[tuple[str, str], list[str]] = {
    ("Gemma 2", "full, sized"): [*BY_SIZE, "--min_num_params", "8000"],
    ("Llama 2", "LoRA, sized, DoRA"): [*LORA, *BY_SIZE, "--use_dora"],
    ("Mixtral", "LoRA, sized"): [*LORA, *BY_SIZE],
    ("Phi-4", "full, padded"): ["--batching_strategy", "padding"],
    # Its experts are not among what peft takes for all-linear.
    ("Granite MoE, balanced", "LoRA, padded"): [*LORA, "--batching_strategy", "padding",
                                                "--router_aux_loss_coef", "0.25", "--activation_checkpointing", "full"],
}  # fmt: skip
# Two of the five ways are enough for these: each way is tried on fifteen others.
FURTHER = ("Qwen3 MoE", "Phi-2", "Phi-3.5 MoE", "GPT-NeoX", "Falcon", "OPT", "BLOOM", "gpt-oss", "DeepSeek V3",
           "Granite MoE", "Granite MoE, balanced", "Falcon-H1", "Gemma 3n text", "Gemma 4 text", "Llama 4 text",
           "ModernBERT decoder", "Nemotron-H", "BioGPT", "GPT-J", "LFM2", "Mamba", *NEW,
           *MULTIMODAL)  # fmt: skip
TOWERS = re.compile("visi|visual|projector|image_embed|audio_embed")
LENGTHS = [[24, 16], [20, 12]]  # the two samples of each rank; the windows have 16 tokens
NOT_QUANTIZED = ("GPT-2",)  # its layers are not nn.Linear; refused, see test_quantized.py
TWO_WAYS = ("full, rank 0 reads", "LoRA 4bit")
# The fast cases: three ways of one, both usual ways of experts, and one way of a tied head, and of each
# further kind of attention and of layers. The others are slow.
FAST = {
    *(("Llama 2", method) for method in (TWO_WAYS[0], "LoRA 8bit", TWO_WAYS[1])),
    ("Gemma 2", TWO_WAYS[0]),
    *(("Mixtral", method) for method in TWO_WAYS),
    ("Llama 2", "LoRA, sized, DoRA"),
    ("Phi-4", "full, padded"),
    ("Granite MoE, balanced", "LoRA, padded"),
    ("GPT-2", "LoRA"),
    ("gpt-oss", TWO_WAYS[0]),
    ("DeepSeek V3", TWO_WAYS[1]),
    ("Nemotron-H", TWO_WAYS[0]),
    ("Gemma 4 text", TWO_WAYS[0]),
    ("Qwen3.5", TWO_WAYS[1]),
}
CASES = [
    (architecture, method)
    for architecture in (*ARCHITECTURES, *MULTIMODAL)
    for method in METHODS
    if not (architecture in NOT_QUANTIZED and "bit" in method)
    and (architecture not in FURTHER or method in TWO_WAYS)
] + [*SIZED]
assert FAST < {*CASES}


LLAMA_4_NEEDS_IMAGES = pytest.mark.skipif(
    Version("5.24") <= Version(transformers.__version__) < Version("5.25"),
    reason="Transformers 5.24: Llama4ForConditionalGeneration.forward reads image_outputs, also without images",
)
PARAMETERS = [
    pytest.param(
        (architecture, method),
        id=f"{architecture}-{method}",
        marks=[
            *([] if (architecture, method) in FAST else [pytest.mark.slow]),
            *([LLAMA_4_NEEDS_IMAGES] if architecture == "Llama 4" else []),
        ],
    )
    for architecture, method in CASES
]


@dataclass(frozen=True)
class Case:
    """A trained and exported model, and what plain transformers and peft make of its files."""

    architecture: str
    method: str
    tokens: torch.Tensor  # [ranks, positions]
    seen: dict[str, Any]  # by the job: loss, gradient norm, logits after the step
    base: Path
    result: Path
    model: torch.nn.Module  # the base; with LoRA the base with the trained adapter
    before: torch.Tensor  # logits of the base
    after: torch.Tensor  # logits of the result


@pytest.fixture(scope="module")
def models(save_tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, and a batch in tokens.pt; models/ is filled before a launch."""
    work = tmp_path_factory.mktemp("architectures")
    save_tokenizer(work / "tokenizer")
    torch.save(
        torch.randint(3, 320, (2, 40), generator=torch.Generator().manual_seed(1)),
        work / "tokens.pt",
    )
    return work


def save_random_model(name: str, folder: Path) -> None:
    """Save a model of an architecture, unless it is there."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

    if folder.exists():
        return
    if name in MULTIMODAL:
        model_type, text, vision, more = MULTIMODAL[name]
        own: dict[str, Any] = {"text_config": SHAPE | text, **UNTIED}
        if model_type == "phi4_multimodal":
            own = SHAPE | text
        settings = {**own, "vision_config": vision, **more}
    else:
        model_type, more = ARCHITECTURES[name]
        settings = {**SHAPE, **more}
    torch.manual_seed(0)
    config = {key: value for key, value in settings.items() if value is not None}
    auto = AutoModelForMultimodalLM if name in MULTIMODAL else AutoModelForCausalLM
    model = auto.from_config(AutoConfig.for_model(model_type, **config))
    for buffer_name, buffer in model.named_buffers():
        if buffer_name in model.state_dict() and buffer.is_floating_point():
            # DeepSeek's correction of routing, which begins as zeros
            buffer.uniform_(-0.5, 0.5)
    model.save_pretrained(folder, max_shard_size="100KB")


@pytest.fixture(scope="module")
def launches(models: Path) -> Callable[[bool], None]:
    """Runs all fast cases, or all the others, into results/ of the folder."""

    @functools.cache
    def launch(fast: bool) -> None:
        cases = {}
        for name, method in CASES:
            if ((name, method) in FAST) == fast:
                save_random_model(name, models / "models" / name)
                flags = SIZED.get((name, method)) or METHODS[method]
                cases[f"{name}/{method}"] = ["--model_name", str(models / "models" / name), *flags]
        run_cases(models, cases, ranks=2, script=SCRIPT, timeout=600)

    return launch


@pytest.fixture(scope="module", params=PARAMETERS)
def case(
    request: pytest.FixtureRequest, models: Path, launches: Callable[[bool], None]
) -> Iterator[Case]:
    """A case that has been run; both tests of it share the models."""
    from peft import PeftModel

    architecture, method = request.param
    launches((architecture, method) in FAST)
    base = models / "models" / architecture
    result = models / "results" / architecture / method
    tokens = torch.load(models / "tokens.pt", weights_only=True)

    def logits(model: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():  # in eval mode bitsandbytes computes something else on some CPUs
            model.train("bit" in method)
            # Dory repeats layers, and computes otherwise with a cache
            return model(input_ids=tokens, use_cache=False).logits

    model = loaded(base, method)
    before = logits(model)
    if "LoRA" in method:
        model = PeftModel.from_pretrained(model, result / "model", is_trainable=True)
        after = logits(model)
    else:
        after = logits(loaded(result / "model"))
    seen = torch.load(result / "seen.pt", weights_only=True)
    yield Case(architecture, method, tokens, seen, base, result / "model", model, before, after)


def loaded(folder: Path, method: str = "") -> torch.nn.Module:
    """A model in plain transformers and bitsandbytes."""
    from bitsandbytes import functional as bnb
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, BitsAndBytesConfig
    from transformers.quantizers.base import get_keys_to_not_convert

    auto = (
        AutoModelForMultimodalLM
        if "vision_config" in (folder / "config.json").read_text()
        else AutoModelForCausalLM
    )
    model = auto.from_pretrained(folder, dtype=torch.float32)
    # Transformers leaves its class of linear layers as it is
    if "bit" in method and folder.name == "Falcon":
        for linear in [m for m in model.transformer.h.modules() if isinstance(m, torch.nn.Linear)]:
            linear.weight.data = bnb.dequantize_4bit(
                *bnb.quantize_4bit(linear.weight.data, quant_type="nf4")
            )
    elif "bit" in method:
        linears = {
            name: module
            for name, module in model.named_modules()
            if type(module) is torch.nn.Linear
        }
        across = 64 if "4bit" in method else 1  # blocks that cross rows are not ours
        broken = [name for name, module in linears.items() if module.in_features % across]
        broken += [
            name for name in linears if name.endswith(READ_BY_KERNELS.get(folder.name, ("?",)))
        ]
        settings = BitsAndBytesConfig(
            load_in_8bit="8bit" in method,
            load_in_4bit="4bit" in method,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.float32,
            llm_int8_skip_modules=[*get_keys_to_not_convert(model), *broken],
        )
        model = auto.from_pretrained(folder, dtype=torch.float32, quantization_config=settings)
        for _, weight in stacked_experts(model, across):  # transformers leaves them as they are
            weight.copy_(torch.stack([rounded(matrix, "4bit" in method) for matrix in weight]))
    return model


def stacked_experts(model: torch.nn.Module, block: int) -> list[tuple[str, torch.Tensor]]:
    """Weights [experts, rows, columns] whose rows are whole blocks."""
    found = [
        (name, parameter.detach())
        for name, parameter in model.named_parameters()
        if ".experts." in name
    ]
    return [
        (name, weight)
        for name, weight in found
        if weight.dim() == 3 and weight.shape[2] % block == 0
    ]


def rounded(matrix: torch.Tensor, four_bit: bool) -> torch.Tensor:
    """A matrix as bitsandbytes' own functions give it back."""
    from bitsandbytes import functional

    if four_bit:
        return functional.dequantize_4bit(
            *functional.quantize_4bit(matrix, blocksize=64, quant_type="nf4")
        )
    return functional.int8_vectorwise_dequant(*functional.int8_vectorwise_quant(matrix.half())[:2])


def test_the_first_loss_and_gradient_are_those_of_plain_transformers(case: Case) -> None:
    model = case.model.train()
    seen = case.seen
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.zeros_(parameter)
        if "lora_magnitude_vector" in name:  # its initial value: the norms of the rows
            base = model.get_parameter(name.replace("lora_magnitude_vector.default", "base_layer"))
            parameter.data = base.norm(dim=1)
    samples = list[torch.Tensor]()
    for of_rank, lengths in zip(case.tokens, LENGTHS, strict=True):
        samples += of_rank[: sum(lengths)].split(lengths)
    outputs = [model(input_ids=ids[None], labels=ids[None], use_cache=False) for ids in samples]
    targets = [len(ids) - 1 for ids in samples]
    losses = [output.loss * count for output, count in zip(outputs, targets, strict=True)]
    loss = sum(losses) / sum(targets)
    if case.architecture.endswith("balanced"):  # over the tokens of both ranks together
        from transformers.models.granitemoe.modeling_granitemoe import load_balancing_loss_func

        weighted = [out.aux_loss * count for out, count in zip(outputs, targets, strict=True)]
        mean_of_samples = sum(weighted) / sum(targets)
        router_logits = [output.router_logits for output in outputs]
        layers = tuple(torch.cat(logits) for logits in zip(*router_logits, strict=True))
        balance = load_balancing_loss_func(layers, num_experts=5, top_k=2)
        assert abs(balance - mean_of_samples) > 1e-3
        coefficient = 0.25 if case.method == "LoRA, padded" else 0.5
        loss = loss - 0.5 * mean_of_samples + coefficient * balance
        assert seen["logged"] == {"train/router_aux_loss": pytest.approx(balance.item(), rel=1e-5)}
    loss.backward()
    assert seen["loss"] == pytest.approx(loss.item(), rel=1e-5)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert seen["norm"] == pytest.approx(torch.nn.utils.get_total_norm(gradients).item(), rel=1e-4)


def test_the_result_reloads_with_the_trained_logits(case: Case) -> None:
    assert (case.after - case.seen["logits"]).abs().max() < 1e-4
    assert (case.before - case.seen["logits"]).abs().max() > 1e-2, "the step has changed something"
    if "LoRA" in case.method:
        return
    was = stored(case.base)
    now = stored(case.result)
    assert was.keys() == now.keys(), "saved in the layout it came in"
    towers = [name for name in was if TOWERS.search(name)]
    assert (len(towers) > 20) == (case.architecture in MULTIMODAL)
    for name in towers:
        assert torch.equal(was[name], now[name]), name
        assert was[name].dtype == now[name].dtype, name


# of the ways of each architecture, one that leaves a LoRA adapter
ADAPTERS = {architecture: method for architecture, method in CASES if "LoRA" in method}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ADAPTERS)
def test_a_merged_adapter_reloads_with_the_logits_of_peft(
    architecture: str, models: Path, launches: Callable[[bool], None], tmp_path: Path
) -> None:
    from peft import PeftModel

    method = ADAPTERS[architecture]
    launches((architecture, method) in FAST)
    base = models / "models" / architecture
    adapter = models / "results" / architecture / method / "model"
    tokens = torch.load(models / "tokens.pt", weights_only=True)
    exporter = Exporter.of_adapter(adapter, build_model(), base, str(base), trust_remote_code=False)
    exporter.write_model(tmp_path / "merged", None, 10**9)
    with torch.no_grad():
        before = loaded(base).eval()(input_ids=tokens).logits
        merged = loaded(tmp_path / "merged").eval()(input_ids=tokens).logits
        expected = PeftModel.from_pretrained(loaded(base), adapter).eval()(input_ids=tokens).logits
    assert (merged - expected).abs().max() < 1e-5 * expected.abs().max().clamp(min=1)
    assert (merged - before).abs().max() > 1e-2
    assert stored(tmp_path / "merged").keys() == stored(base).keys()
