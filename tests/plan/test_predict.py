"""Plans compared with numbers computed by hand. test_predicted.py compares them with real runs."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY
from image_models import model_of, plain_loss, save_image_model, write_samples
from model_shapes import write_llama
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, modeling_utils

from llama_ft.config import TrainConfig
from llama_ft.extensions.images.planned_images import PlannedImages
from llama_ft.models import BuiltModel, checkpoint_activations
from llama_ft.plan.duration import generation_seconds

VOCABULARY = 1000
HIDDEN = 64
INNER = 160
LAYERS = 2
HEADS = 4
KEY_VALUE_HEADS = 2
HEAD = 16
LAYER = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEY_VALUE_HEADS * HEAD + 3 * HIDDEN * INNER + 2 * HIDDEN
PARAMETERS = 2 * VOCABULARY * HIDDEN + LAYERS * LAYER + HIDDEN
LENGTH = 128
MICRO_BATCH = 2
TOKENS = LENGTH * MICRO_BATCH
FLAGS = (
    "--enable_fsdp",
    "--context_length",
    str(LENGTH),
    "--batch_size_training",
    str(MICRO_BATCH),
)
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
LORA = ("--use_peft", "--peft.r", "4", "--peft.target_modules", "q_proj,v_proj")

Plan = Callable[..., Any]


def held(plan: Any, phase: str) -> dict[str, int]:
    holders: dict[str, int] = next(peak for peak in plan.peaks if peak.phase == phase).holders
    return holders


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 64])
def test_full_fine_tuning_has_its_shard_of_weights_gradients_and_states(
    plan: Plan, tmp_path: Path, ranks: int
) -> None:
    planned = plan(write_llama(tmp_path / "model"), ranks, *FLAGS)
    square = (HIDDEN, HIDDEN)
    narrow = (KEY_VALUE_HEADS * HEAD, HIDDEN)
    norm = (HIDDEN, 1)
    layer = [
        square,
        square,
        narrow,
        narrow,
        (INNER, HIDDEN),
        (INNER, HIDDEN),
        (HIDDEN, INNER),
        norm,
        norm,
    ]
    shapes = [(VOCABULARY, HIDDEN)] * 2 + LAYERS * layer + [norm]
    assert sum(rows * columns for rows, columns in shapes) == PARAMETERS
    # fp32, as torch.chunk deals rows
    own = 4 * sum(-(-rows // ranks) * columns for rows, columns in shapes)
    step = held(planned, "optimizer step")
    assert step["sharded parameters"] == own
    assert step["gradients"] == own
    # and a step counter each
    assert step["optimizer state"] == pytest.approx(2 * own, abs=8 * len(shapes))
    assert held(planned, "load")["sharded parameters"] == own
    copies = plan(tmp_path / "model", ranks, *FLAGS[1:])  # without --enable_fsdp
    assert held(copies, "optimizer step")["sharded parameters"] == 4 * PARAMETERS


@pytest.mark.parametrize("quick", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_frozen_groups_have_neither_gradients_nor_states(
    plan: Plan, tmp_path: Path, quick: bool
) -> None:
    frozen = "[{match: 'embed_tokens|lm_head', freeze: true}, {match: 'layers.1', lr: 2x}]"
    layers = 6 if quick else LAYERS  # quick: extrapolated from 3 and 5
    model = write_llama(tmp_path / "model", num_hidden_layers=layers)
    planned = plan(model, 1, *FLAGS, "--groups", frozen, quick=quick)
    trained = 4 * (layers * LAYER + HIDDEN)
    step = held(planned, "optimizer step")
    assert step["gradients"] == trained
    assert step["optimizer state"] == pytest.approx(2 * trained, abs=8 * 40)
    # in bf16
    assert step["sharded parameters"] == trained + 2 * 2 * VOCABULARY * HIDDEN


@pytest.mark.parametrize(
    "trained",
    [
        "all",
        pytest.param("no text", marks=pytest.mark.slow),
        pytest.param("projector by LoRA", marks=pytest.mark.slow),
    ],
)
def test_trained_parts_for_images_have_gradients_and_states(
    plan: Plan, tmp_path: Path, trained: str
) -> None:
    model = save_image_model(tmp_path / "model", "LLaVA")
    lora = "--use_peft --target_modules q_proj --train_vision projector"
    flags = {"all": "--train_vision all", "no text": "--freeze_LLM_only", "projector by LoRA": lora}
    planned = plan(model, 1, *FLAGS, "--precision", "fp32", *flags[trained].split())
    plain = model_of(model)
    loss, _ = plain_loss(plain, model, write_samples(tmp_path / "data"))
    loss.backward()
    weights = 0
    if trained == "projector by LoRA":
        weights = 2 * 2 * 8 * 64  # 2 layers, r 8, A and B of 64 x 64
    unused = 0  # LLaVA does not use the last layer of its tower
    for name, parameter in plain.named_parameters():
        is_projector = "projector" in name
        is_for_images = is_projector or "vision" in name
        is_trained = is_projector if "LoRA" in trained else is_for_images or trained == "all"
        weights += parameter.numel() if is_trained else 0
        unused += parameter.numel() if is_trained and parameter.grad is None else 0
    step = held(planned, "optimizer step")
    assert step["gradients"] == 4 * (weights - unused)
    assert step["optimizer state"] == pytest.approx(8 * weights, abs=8 * 100)


@pytest.mark.slow
def test_a_frozen_tower_keeps_no_activations_and_a_trained_one_keeps_them(
    plan: Plan, tmp_path: Path
) -> None:
    model = save_image_model(tmp_path / "model", "Qwen2.5-VL")
    flags = (*FLAGS, "--precision", "fp32", "--batching_strategy", "padding")

    def activations(images: int, *more: str) -> int:
        planned = plan(model, 1, *flags, *more, media=PlannedImages(images))
        return held(planned, "backward")["activations"]

    # the largest image is 12,544 pixels: 64 patches of 14 x 14, which become 16 tokens
    hidden = 32
    patches = 64 * MICRO_BATCH
    frozen = activations(2) - activations(1)
    whole = activations(2, "--train_vision", "all") - activations(1, "--train_vision", "all")
    # of each block at least the inputs of its norms, of attention and of the MLP
    assert whole - frozen > 2 * 4 * patches * hidden * 4
    assert frozen < patches * hidden * 4


@pytest.mark.slow
def test_a_quick_plan_leaves_out_layers_of_the_text_part_only(plan: Plan, tmp_path: Path) -> None:
    model = save_image_model(tmp_path / "model", "Qwen3-VL", num_hidden_layers=6)
    asked = {"media": PlannedImages(1), "device": "cuda"}
    whole = plan(model, 1, *FLAGS, **asked)
    quick = plan(model, 1, *FLAGS, **asked, quick=True)
    assert quick.is_quick and not whole.is_quick
    for phase in ("load", "backward", "optimizer step"):
        for name in ("sharded parameters", "gradients", "optimizer state", "activations"):
            expected = held(whole, phase)[name]
            assert held(quick, phase)[name] == pytest.approx(expected, rel=0.01, abs=2000), name


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
def test_an_optimizer_of_a_users_file_is_planned(plan: Plan, tmp_path: Path, ranks: int) -> None:
    model = write_llama(tmp_path / "model")
    flags = ("--enable_fsdp", "--optimizer", f"{REPOSITORY}/examples/muon.py:muon")
    adamw = held(plan(model, ranks, *FLAGS), "optimizer step")
    muon = held(plan(model, ranks, *FLAGS[1:], *flags), "optimizer step")
    assert muon["gradients"] == adamw["gradients"]
    # Muon has one state, not two, for the matrices of the layers
    matrices = LAYERS * (LAYER - 2 * HIDDEN)
    saved = adamw["optimizer state"] - muon["optimizer state"]
    assert saved == pytest.approx(4 * matrices / ranks, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_scored_answers_are_planned_with_their_keys_and_values(
    plan: Plan, tmp_path: Path, ranks: int
) -> None:
    """Each rank answers its own batch, with its shard of the weights and one gathered layer."""
    model = write_llama(tmp_path / "model", max_position_embeddings=4096)
    score = ("--score", "exact", "--score_tokens", "512", "--precision", "fp32", "--no_plan")

    def peak(batch: int) -> int:
        planned = plan(model, ranks, *FLAGS, *score, "--score_batch_size", str(batch))
        holders = held(planned, "evaluation")
        assert holders["sharded parameters"] == pytest.approx(4 * PARAMETERS / ranks, rel=0.01)
        return int(sum(holders.values()))

    per_answer = (peak(48) - peak(16)) / 32
    cache = 2 * LAYERS * KEY_VALUE_HEADS * HEAD * (LENGTH + 512) * 4
    # and the activations of one layer
    assert cache < per_answer < cache + 8 * INNER * (LENGTH + 512) * 4


@pytest.mark.parametrize(
    ("answers", "phase"),
    [
        ("--sample_tokens 8", "evaluation"),
        pytest.param("--score exact", "evaluation", marks=pytest.mark.slow),
        pytest.param(
            "--objective grpo --reward r.py:f --max_completion_length 64",
            "generation",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_units_that_are_kept_for_answers_are_planned(
    plan: Plan, tmp_path: Path, answers: str, phase: str
) -> None:
    """With them, a rank has the whole model in addition to its shard."""
    layers = 5
    model = write_llama(tmp_path / "model", num_hidden_layers=layers)
    planned = plan(model, 4, *FLAGS, *answers.split(), "--precision", "fp32")
    [kept] = planned.kept_peaks
    assert kept.phase == phase and not planned.keeps_units
    whole = PARAMETERS + (layers - LAYERS) * LAYER
    assert kept.holders["unsharded units"] == pytest.approx(4 * whole, rel=0.01)
    freed = held(planned, phase)
    # The root, the last layer, which the LM head follows, and one more are unsharded at most.
    most = whole - (layers - 2) * LAYER
    assert freed["unsharded units"] <= 4 * most * 1.01
    for name in ("sharded parameters", "optimizer state", "gradients"):
        assert kept.holders[name] == freed[name]
    with_units = planned.with_kept_units()
    assert held(with_units, phase) == kept.holders
    assert with_units.reserved_bytes >= kept.bytes


def test_without_units_to_unshard_nothing_is_kept(plan: Plan, tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model")
    # One process uses weights as stored.
    assert not plan(model, 1, *FLAGS, "--precision", "fp32", "--sample_tokens", "8").kept_peaks


def test_generated_answers_are_planned_with_their_keys_and_values(
    plan: Plan, tmp_path: Path
) -> None:
    """64 answers of 96 tokens to prompts of 32, in batches of 16 or 48."""
    model = write_llama(tmp_path / "model", max_position_embeddings=4096)
    flags = ("--objective", "grpo", "--reward", "reward.py:score", "--max_completion_length", "96")
    flags += ("--precision", "fp32")
    few, many = (plan(model, 1, *FLAGS, *flags, "--generate_batch_size", n) for n in ("16", "48"))
    # held-out prompts may need larger batches than those of a step
    settings = ("--prompts_per_step", "1", "--validation", "0.1", "--generate_batch_size", "48")
    validated = plan(model, 1, *FLAGS, *flags, *settings)
    assert held(validated, "generation") == held(many, "generation")
    assert all(peak.phase != "evaluation" for peak in validated.peaks)

    cache = 2 * LAYERS * KEY_VALUE_HEADS * HEAD * LENGTH * 4
    peaks = [sum(held(one, "generation").values()) for one in (few, many)]
    per_answer = (peaks[1] - peaks[0]) / 32
    # the keys and values of one layer are copied to add a token; 16 numbers per token of the vocabulary
    assert cache < per_answer < cache + cache / LAYERS + 16 * VOCABULARY * 4

    assert few.generated_tokens == 64 * 96
    assert few.micro_batches == 64 / MICRO_BATCH
    # on average the second half of the answer is not in the cache yet
    read = 4 * PARAMETERS + 16 * cache * (32 + 48) / LENGTH
    assert few.generation_bytes == pytest.approx(4 * 96 * read, rel=0.01)
    assert few.generation_flops == pytest.approx(2 * PARAMETERS * 64 * 32, rel=0.01)
    seconds = few.generation_bytes / (0.2 * 3350e9)
    assert generation_seconds(few, "h100") == pytest.approx(seconds)


@pytest.mark.slow
def test_dequantized_rows_take_host_memory_also_if_only_config_json_is_known(
    plan: Plan, tmp_path: Path
) -> None:
    """The rows of a plain checkpoint are a mapped file."""
    note = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    plain = write_llama(tmp_path / "plain")
    published = write_llama(tmp_path / "published", quantization_config=note)
    flags = (*FLAGS, *LORA)
    loads = [plan(folder, 1, *flags).host_load_bytes for folder in (plain, published)]
    assert loads[1] - loads[0] >= 2 * INNER * HIDDEN


def test_experts_are_planned_in_fp32(plan: Plan, tmp_path: Path) -> None:
    mixtral = write_llama(tmp_path / "model", **MIXTRAL)
    fp32, bf16 = (
        plan(mixtral, 1, *FLAGS, "--precision", precision) for precision in ("fp32", "bf16_mixed")
    )
    expert = 3 * HIDDEN * INNER
    parameters = PARAMETERS + LAYERS * (3 * expert + 4 * HIDDEN)  # 3 more, and the router
    assert held(fp32, "optimizer step")["gradients"] == 4 * parameters
    activations = [held(plan, "forward")["activations"] for plan in (fp32, bf16)]
    assert 1.5 < activations[0] / activations[1] < 2, "what is fp32 in both does not double"


@pytest.mark.slow
def test_vision_towers_count_only_in_the_size_of_the_model_file(plan: Plan, tmp_path: Path) -> None:
    text = write_llama(tmp_path / "text")
    settings = json.loads((text / "config.json").read_text())
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    whole = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": settings,
    }
    (tmp_path / "llava").mkdir()
    (tmp_path / "llava" / "config.json").write_text(
        json.dumps(whole | {"vision_config": vision, "dtype": "bfloat16"})
    )
    for flags in ([], LORA):
        alone, of_whole = (plan(tmp_path / name, 2, *FLAGS, *flags) for name in ("text", "llava"))
        assert [peak.holders for peak in of_whole.peaks] == [peak.holders for peak in alone.peaks]
        assert (of_whole.result_bytes > alone.result_bytes + 100_000) == (flags == [])


@pytest.mark.slow
@pytest.mark.parametrize("quick", [False, True])
def test_tensors_that_an_export_copies_count_in_the_final_model(
    plan: Plan, tmp_path: Path, quick: bool
) -> None:
    shape = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": 301, "first_k_dense_replace": 6, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v3", **shape))
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    extra = {"model.layers.61.eh_proj.weight": torch.ones(32, 64, dtype=torch.bfloat16)}
    save_file(stored | extra, tmp_path / "model.safetensors", {"format": "pt"})
    size = sum(tensor.nbytes for tensor in (stored | extra).values())
    assert plan(tmp_path, 1, *FLAGS, quick=quick).result_bytes == size


@pytest.mark.slow
def test_expert_adapters_and_the_router_loss_are_planned(plan: Plan, tmp_path: Path) -> None:
    mixtral = write_llama(tmp_path / "model", **MIXTRAL)
    lora = ("--target_parameters", "experts.gate_up_proj,experts.down_proj", "--lora_dropout", "0")
    router_loss = ("--router_aux_loss_coef", "0.1")
    with_adapters = plan(mixtral, 2, *FLAGS, *LORA, *lora, *router_loss)
    adapters = (
        HIDDEN
        + HIDDEN
        + HIDDEN
        + KEY_VALUE_HEADS * HEAD
        + 4 * (HIDDEN + 2 * INNER + INNER + HIDDEN)
    )
    # this rank's
    assert held(with_adapters, "optimizer step")["gradients"] == 4 * LAYERS * 4 * adapters // 2
    # Each layer keeps, in bf16 and for each of a token's two experts, the inputs of both stacks and
    # their products with A, of rank 4 filled up to 8. It keeps no W + B A.
    kept = 2 * 2 * TOKENS * (HIDDEN + INNER + 2 * 8)
    more = (
        held(with_adapters, "forward")["activations"]
        - held(plan(mixtral, 2, *FLAGS, *LORA, *router_loss), "forward")["activations"]
    )
    assert more == LAYERS * kept
    dequantized = 2 * 4 * 3 * HIDDEN * INNER
    flags = (*FLAGS, *LORA, *lora, "--quantization", "4bit", "--activation_checkpointing", "full")
    deep = write_llama(tmp_path / "deep", **MIXTRAL, num_hidden_layers=4)
    few, many = (
        held(plan(folder, 2, *flags), "forward")["activations"] for folder in (mixtral, deep)
    )
    assert many - few < dequantized / 3, "a layer keeps no dequantized experts"


def test_a_reward_model_has_one_score_a_response_and_no_logits(plan: Plan, tmp_path: Path) -> None:
    """A pair is two rows; the head is HIDDEN numbers, and with an adapter those and a frozen
    copy."""
    model = write_llama(tmp_path / "model")
    planned = plan(model, 2, *FLAGS, "--objective", "reward", "--precision", "fp32")
    assert (
        held(planned, "optimizer step")["gradients"]
        == 2 * (PARAMETERS - VOCABULARY * HIDDEN) + 4 * HIDDEN
    )
    assert planned.tokens == 2 * TOKENS
    assert max(peak.holders["logits and loss"] for peak in planned.peaks) < 4 * TOKENS * HIDDEN
    adapted = plan(model, 1, *FLAGS, *LORA, "--objective", "reward", "--precision", "fp32")
    matrices = LAYERS * 4 * (3 * HIDDEN + KEY_VALUE_HEADS * HEAD)
    assert held(adapted, "optimizer step")["gradients"] == 4 * (matrices + HIDDEN)


def test_lora_trains_its_matrices_only(plan: Plan, tmp_path: Path) -> None:
    planned = plan(write_llama(tmp_path / "model"), 2, *FLAGS, *LORA)
    adapters = LAYERS * 4 * (HIDDEN + HIDDEN + HIDDEN + KEY_VALUE_HEADS * HEAD) // 2  # this rank's
    step = held(planned, "optimizer step")
    # bf16 frozen, fp32 trained
    assert step["sharded parameters"] == 2 * PARAMETERS // 2 + 4 * adapters
    assert step["gradients"] == 4 * adapters
    assert planned.checkpoint_bytes == pytest.approx(3 * 4 * 2 * adapters, rel=0.01)
    assert planned.result_bytes == 4 * 2 * adapters
    twice = plan(tmp_path / "model", 2, *FLAGS, *LORA, "--init_lora_weights", "pissa")
    assert held(twice, "optimizer step")["gradients"] == 2 * step["gradients"]
    base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "model"))
    get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).save_pretrained(
        tmp_path / "adapter"
    )
    continued = plan(
        tmp_path / "model",
        2,
        *FLAGS,
        "--use_peft",
        "--from_peft_checkpoint",
        str(tmp_path / "adapter"),
    )
    assert held(continued, "optimizer step") == step


@pytest.mark.parametrize(("mode", "bits"), [("8bit", 8), ("4bit", 4)])
def test_quantized_layers_take_their_quantized_bytes(
    plan: Plan, tmp_path: Path, mode: str, bits: int
) -> None:
    inner = 128
    key_value = KEY_VALUE_HEADS * HEAD
    planned = plan(
        write_llama(tmp_path / "model", intermediate_size=inner),
        2,
        *FLAGS,
        *LORA,
        "--quantization",
        mode,
    )
    # of all but down_proj, each HIDDEN long: a block of 64
    rows = 2 * HIDDEN + 2 * key_value + 2 * inner
    scales = rows + HIDDEN * (inner // 64 if mode == "4bit" else 1)
    weights = rows * HIDDEN + HIDDEN * inner
    assert (
        held(planned, "optimizer step")["quantized parts"]
        == LAYERS * (weights * bits // 8 + 4 * scales) // 2
    )


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_weights_as_stored_take_the_bytes_of_the_checkpoint(
    plan: Plan, tmp_path: Path, ranks: int
) -> None:
    note = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    linear = (*FLAGS, *LORA, "--quantization", "as_stored")
    fp8 = write_llama(tmp_path / "fp8", intermediate_size=256, quantization_config=note)
    # of all but down_proj; a block of columns, for 256 columns two
    rows = 2 * HIDDEN + 2 * KEY_VALUE_HEADS * HEAD + 2 * 256
    in_bytes = LAYERS * (rows * (HIDDEN + 4) + HIDDEN * (256 + 2 * 4))
    assert held(plan(fp8, ranks, *linear), "load")["quantized parts"] == in_bytes // ranks
    shape = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]}
    shape |= {"num_local_experts": 4, "quantization_config": {"quant_method": "mxfp4"}}
    mxfp4 = write_llama(tmp_path / "mxfp4", intermediate_size=96, **shape)
    planned = plan(mxfp4, ranks, *linear, "--target_modules", "q_proj")
    weights = LAYERS * 4 * 3 * HIDDEN * 96
    assert held(planned, "load")["quantized parts"] == weights * 17 // 32 // ranks


@pytest.mark.slow
def test_double_quantization_takes_an_eighth_of_the_scales(plan: Plan, tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", hidden_size=1024, intermediate_size=1024)
    flags = (*FLAGS, *LORA, "--quantization", "4bit")
    plain = held(plan(model, 1, *flags), "load")["quantized parts"]
    double = held(plan(model, 1, *flags, "--double_quant"), "load")["quantized parts"]
    heads = HEADS * HEAD
    # down_proj, gate_proj, up_proj, q_proj, k_proj, v_proj: 16 blocks in each row
    rows = 3 * 1024 + heads + 2 * KEY_VALUE_HEADS * HEAD
    # 4 words of codes, a scale and a mean in the place of 16 scales
    saved = rows * 4 * (16 - 6)
    # o_proj has a block per row: a word of codes, a scale and a mean in the place of a scale
    saved -= 1024 * 4 * (3 - 1)
    assert plain - double == LAYERS * saved


def test_the_chunked_loss_holds_the_logits_of_one_chunk(plan: Plan, tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "model", vocab_size=32_000)
    found = []
    for sequences in (MICRO_BATCH, 2 * MICRO_BATCH):
        flags = [*FLAGS[:-1], str(sequences), *LORA, "--precision", "fp32"]
        found.append(held(plan(folder, 2, *flags), "forward")["logits and loss"])
    once, twice = found
    from llama_ft.models.computing.chunked_loss import FEWEST_POSITIONS, LOGITS_AT_ONCE

    piece = LOGITS_AT_ONCE["cpu"] // 32_000 // FEWEST_POSITIONS * FEWEST_POSITIONS
    # Logits and their softmax; in addition the gradient of the hidden states
    assert once == pytest.approx(piece * 32_000 * (4 + 4) + TOKENS * HIDDEN * 4, rel=0.02)
    assert twice - once == pytest.approx(TOKENS * HIDDEN * 4, rel=0.1)


@pytest.mark.slow
def test_8bit_adam_takes_fp32_copies_of_a_weight_on_the_cpu(plan: Plan, tmp_path: Path) -> None:
    planned = plan(write_llama(tmp_path / "model"), 2, *FLAGS, "--optimizer", "AdamW8bit")
    # Of the embedding's rows, filled up to a block of 256: gradient, weight and codes, and then
    # five times fp32.
    padded = VOCABULARY // 2 * 256
    assert held(planned, "optimizer step")["temporaries"] == pytest.approx(
        padded * (4 + 4 + 1 + 1 + 5 * 4), rel=0.02
    )


@pytest.mark.slow
def test_unsharded_accumulation_holds_the_gradients_of_the_whole_model(
    plan: Plan, tmp_path: Path
) -> None:
    folder = write_llama(tmp_path / "model")
    accumulate = ("--gradient_accumulation_steps", "2")
    shards = held(plan(folder, 4, *FLAGS, *accumulate), "forward")["gradients"]
    whole = held(plan(folder, 4, *FLAGS, *accumulate, "--accumulate_unsharded"), "forward")[
        "gradients"
    ]
    assert shards == pytest.approx(4 * PARAMETERS / 4, rel=0.01)
    assert whole == pytest.approx(4 * PARAMETERS, rel=0.01)  # in fp32, in which they are reduced


@pytest.mark.slow
def test_cpu_offload_leaves_unsharded_units_and_activations_on_the_device(
    plan: Plan, tmp_path: Path
) -> None:
    folder = write_llama(tmp_path / "model")
    kept, gone = (
        plan(folder, 2, *FLAGS, *more, device="cuda") for more in ((), ("--fsdp_cpu_offload",))
    )
    assert (
        held(gone, "forward")["sharded parameters"] == held(gone, "forward")["optimizer state"] == 0
    )
    assert held(gone, "forward")["activations"] == held(kept, "forward")["activations"]
    assert gone.host_save_bytes > kept.host_save_bytes


def test_as_many_bytes_are_offloaded_as_planned(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU a copy on the CPU stands in for the one in pinned memory."""
    folder = write_llama(tmp_path / "model", max_position_embeddings=512)
    flags = "--precision fp32 --activation_checkpointing full --activation_offload"
    size = "--batch_size_training 1 --context_length 300"
    planned = plan(folder, 1, *flags.split(), *size.split(), device="cuda")
    moved = {"to the host": 0, "back": 0}

    class Copy(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, **_: object) -> None:
            super().__init__(partial(self.copy, "to the host"), partial(self.copy, "back"))

        def copy(self, way: str, tensor: torch.Tensor) -> torch.Tensor:
            moved[way] += 1 << max(0, tensor.nbytes - 1).bit_length()  # as torch pins memory
            return tensor.clone()

    monkeypatch.setattr(modeling_utils, "save_on_cpu", Copy)
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    train = TrainConfig(activation_checkpointing="full", activation_offload=True)
    checkpoint_activations(BuiltModel(model), train)
    ids = torch.zeros(1, 300, dtype=torch.int64)
    model(input_ids=ids, use_cache=False).logits.sum().backward()
    assert moved["to the host"] == pytest.approx(LAYERS * 2**17, abs=8)  # of 300 x 64 x 4 bytes
    assert moved["back"] == moved["to the host"]
    assert planned.host_activation_bytes == pytest.approx(moved["to the host"], abs=8)


def test_checkpoint_copies_take_host_memory_and_no_gpu_memory(plan: Plan, tmp_path: Path) -> None:
    """They are on the host; there they would be weights and states again, more than a step holds of
    gradients."""
    wide = write_llama(tmp_path / "model", hidden_size=1024, intermediate_size=4096, head_dim=256)
    planned = plan(wide, 1, *FLAGS, "--precision", "bf16_pure", device="cuda")
    step = held(planned, "optimizer step")
    assert planned.host_save_bytes == pytest.approx(
        step["sharded parameters"] + step["optimizer state"], rel=0.01
    )
    assert planned.host_save_bytes > 1.4 * (step["gradients"] + step["sharded parameters"])
    assert planned.reserved_bytes == round(1.03 * planned.peak.bytes)


@pytest.mark.slow
def test_on_a_cpu_only_a_save_during_training_takes_memory_for_copies(
    plan: Plan, tmp_path: Path
) -> None:
    folder = write_llama(tmp_path / "model")
    during = plan(folder, 1, *FLAGS)
    state = during.checkpoint_bytes
    for flags in (("--num_epochs", "1"), ("--save_async", "false")):
        waiting = plan(folder, 1, *FLAGS, *flags)
        copied = during.host_save_bytes - waiting.host_save_bytes
        assert copied == pytest.approx(state, rel=0.01)
    for flags in (("--save_steps", "1"), ("--eval_steps", "1")):
        saving = plan(folder, 1, *FLAGS, "--num_epochs", "1", *flags)
        assert saving.host_save_bytes == during.host_save_bytes


@pytest.mark.slow
def test_a_quick_plan_agrees_with_a_full_one(plan: Plan, tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "model", num_hidden_layers=6)
    flags = (
        *FLAGS,
        *LORA,
        "--activation_checkpointing",
        "full",
        "--quantization",
        "4bit",
        "--low_cpu_fsdp",
        *("--sample_tokens", "8"),
    )
    full, quick = (plan(folder, 2, *flags, quick=quick) for quick in (False, True))
    assert quick.is_quick and not full.is_quick
    assert full.kept_peaks
    exact_peaks = full.peaks + full.kept_peaks
    for exact, guess in zip(exact_peaks, quick.peaks + quick.kept_peaks, strict=True):
        assert guess.bytes == pytest.approx(exact.bytes, rel=0.01)
    assert quick.checkpoint_bytes == full.checkpoint_bytes


@pytest.mark.slow
def test_planning_an_8b_model_allocates_no_weights(plan: Plan, tmp_path: Path) -> None:
    """8 B parameters on 1 rank: as numbers they would take 128 GB."""
    folder = write_llama(
        tmp_path / "model",
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128_256,
    )
    planned = plan(folder, 1, *FLAGS, device="cuda", quick=True)
    assert held(planned, "optimizer step")["optimizer state"] == pytest.approx(
        8 * 8_030_261_248, rel=0.01
    )
    assert planned.device_bytes > 4 * 4 * 8_030_261_248


def test_a_plan_restores_what_it_patched(plan: Plan, tmp_path: Path) -> None:
    import torch.distributed as dist

    resize = torch.UntypedStorage.resize_
    plan(write_llama(tmp_path / "model"), 2, *FLAGS)
    assert not dist.is_initialized()
    assert torch.UntypedStorage.resize_ is resize
    assert nn.Linear(2, 2)(torch.ones(1, 2)).sum().item() != 0  # real numbers
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]


def test_images_of_a_model_that_takes_text_are_an_error(plan: Plan, tmp_path: Path) -> None:
    from llama_ft.errors import UserError

    with pytest.raises(
        UserError, match="LlamaForCausalLM takes no images. Choose a model that does."
    ):
        plan(write_llama(tmp_path / "model"), 1, *FLAGS, media=PlannedImages(1))
