"""Tensors of a checkpoint that Transformers ignores at loading, such as layers for multi-token
prediction: an export has the names, dtypes and bytes of the base for everything that is not
trained."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from checkpoint_by_hand import stored
from conftest import REPOSITORY, build_model, load_script, run_cases
from safetensors.torch import load_file, save_file

from llama_ft.config import CheckpointConfig, ModelConfig, PeftConfig
from llama_ft.errors import UserError
from llama_ft.export import Exporter, export_model, find_valid
from llama_ft.models import build_on_meta, load_model_config, load_tokenizer
from llama_ft.models.weights.load_weights import LoadSettings, load_weights
from llama_ft.runtime import Ranks

SaveBase = Callable[[Path, str], tuple[Path, list[str]]]
# model_type -> the beginning of the names of such tensors
FAST = {
    "deepseek_v3": "model.layers.61.",
    "deepseek_v4": "mtp.",
    "gemma3n_text": "layers.3.self_attn.k_proj.",
    "glm_ocr": "model.language_model.layers.16.",
    "gpt_neox": "attention.masked_bias.",
    "qwen3_5": "mtp.",
    "qwen3_next": "mtp.",
}
SLOW = {
    "axk1": "mlp.post_mlp_layernorm.",
    "bailing_hybrid": "model.layers.42.",
    "bart": "decoder.version.",
    "cosmos3_edge": "layers.0.mlp_moe_gen.",
    "cosmos3_omni": "time_embedder.",
    "deepseek_v32": "model.layers.61.",
    "dots3_note_text": "model.layers.46.",
    "ernie4_5_moe": "mtp.",
    "exaone4_5": "mtp.",
    "exaone_moe": "mtp.",
    "glm4_moe": "model.layers.46.",
    "glm4_moe_lite": "model.layers.47.",
    "glm4v_moe": "model.layers.92.",
    "glm5_next": "layers.45.",
    "glm_moe_dsa": "model.layers.78.",
    "granite_docling": "mtp.",
    "hy_v3": "model.layers.80.",
    "hy_v4": "model.mtp_layers.",
    "inkling_mm_model": "model.mtp.",
    "inkling_text": "model.mtp.",
    "kimi_k25": "model.layers.61.",
    "longcat_flash": "model.mtp.",
    "mellum": "mtp.",
    "mimo_v2_flash": "model.mtp.",
    "minicpm_ocr": "mtp.",
    "minimax_m3_vl": "mtp.",
    "minimax_m3_vl_text": "mtp.",
    "mistral_large4": "mtp_dspark.",
    "nemotron_h": "mtp.",
    "olmo_hybrid": "mtp.",
    "paddleocr_vl": "packing_position_embedding.",
    "qwen2_5_omni_thinker": "talker.",
    "qwen3_5_moe": "mtp.",
    "qwen3_5_moe_text": "mtp.",
    "qwen3_5_text": "model.visual.",
    "qwen4_exp": "mtp.",
    "qwen4_exp_text": "mtp.",
}
PREFIXES = FAST | SLOW
TYPES = [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_script(REPOSITORY / "benchmarks" / "model_support" / "models.py")


@pytest.fixture(scope="module")
def save_base(bench: ModuleType, save_tokenizer: Callable[..., Path]) -> SaveBase:
    """Write a tiny model in bf16 with such tensors. Returns its directory and their names."""
    import transformers

    def save(folder: Path, model_type: str) -> tuple[Path, list[str]]:
        torch.manual_seed(0)
        config = bench.shrunk(transformers.CONFIG_MAPPING[model_type]())
        name = bench.MULTIMODAL.get(model_type) or bench.DECODERS[model_type]
        model = getattr(transformers, name)(config)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name in model.state_dict() and buffer.is_floating_point():
                buffer.uniform_(-0.5, 0.5)
        model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="200KB")
        names = bench.add_ignored_tensors(folder, model)
        save_tokenizer(folder)
        return folder, names

    return save


def train_and_export(base: Path, folder: Path, runtime: Ranks) -> None:
    """Load the base as a run does, change every weight, and export."""
    model_config = load_model_config(base, False)
    built = build_on_meta(model_config, ModelConfig(model_name=str(base)), folder=base)
    how = LoadSettings(PeftConfig(), 0, torch.float32)
    built.stored = load_weights(built, runtime, how)
    with torch.no_grad():
        for parameter in built.model.parameters():
            parameter.add_(1)
    tokenizer = load_tokenizer(base, False)
    sizes = CheckpointConfig(max_shard_size="300KB")
    export_model(built, folder, sizes, tokenizer, lambda folder: None, runtime)


def dtypes_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in tensors.items()}


def changed_names(was: dict[str, torch.Tensor], now: dict[str, torch.Tensor]) -> set[str]:
    """Names of the tensors whose bytes differ."""
    return {
        name
        for name in was
        if not torch.equal(was[name].view(torch.uint8), now[name].view(torch.uint8))
    }


@pytest.mark.parametrize("model_type", TYPES)
def test_an_export_has_every_tensor_of_its_base(
    model_type: str, save_base: SaveBase, tmp_path: Path, runtime: Ranks
) -> None:
    base, ignored = save_base(tmp_path / "base", model_type)
    assert any(name.startswith(PREFIXES[model_type]) for name in ignored)
    train_and_export(base, tmp_path / "out", runtime)
    was = stored(base)
    now = stored(tmp_path / "out")
    assert dtypes_of(was) == dtypes_of(now)
    changed = changed_names(was, now)
    buffers = {name for name in was if name.endswith("e_score_correction_bias")}
    assert not changed.intersection(ignored) and not changed.intersection(buffers)
    assert len(changed) > 5


def renumber(folder: Path, keep: Callable[[str], bool] = lambda name: True) -> list[str]:
    """Give the layer for multi-token prediction the number behind the last decoder layer, which
    Transformers does not list. Returns the names of those of its tensors that are kept."""
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    file = folder / "model-ignored.safetensors"
    tensors = {
        re.sub(r"layers\.\d+\.", f"layers.{layers}.", name): tensor
        for name, tensor in load_file(file).items()
        if keep(name)
    }
    save_file(tensors, file, {"format": "pt"})
    return list(tensors)


@pytest.mark.parametrize(
    "model_type",
    [
        "deepseek_v3",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("glm4_moe", "hy_v3")),
    ],
)
def test_a_layer_at_another_number_than_transformers_lists_is_copied(
    model_type: str, save_base: SaveBase, tmp_path: Path, runtime: Ranks
) -> None:
    """GigaChat3 is a DeepSeek V3 of 26 layers, and has model.layers.26."""
    base, _ = save_base(tmp_path / "base", model_type)
    ignored = renumber(base)
    train_and_export(base, tmp_path / "out", runtime)
    was = stored(base)
    now = stored(tmp_path / "out")
    assert dtypes_of(was) == dtypes_of(now)
    changed = changed_names(was, now)
    assert len(ignored) > 5 and not changed.intersection(ignored) and len(changed) > 5


def test_a_decoder_layer_that_config_json_does_not_count_is_rejected(
    save_base: SaveBase, tmp_path: Path, runtime: Ranks
) -> None:
    """Unless config.json counts it as a layer for multi-token prediction."""
    base, _ = save_base(tmp_path / "base", "deepseek_v3")
    ignored = renumber(base, keep=lambda name: "eh_proj" not in name and "enorm" not in name)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(UserError, match=r"not part of the model: model.layers.\d"):
        train_and_export(base, tmp_path / "out", runtime)
    (base / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    train_and_export(base, tmp_path / "out", runtime)
    assert set(ignored) <= stored(tmp_path / "out").keys()


@pytest.mark.parametrize("name", ["self_attn.q_norm.weight", "self_attn.q_proj.bias"])
def test_a_tensor_of_another_architecture_is_rejected(
    name: str, save_model: Callable[..., Path], tmp_path: Path, runtime: Ranks
) -> None:
    """Plain Transformers warns, and computes another model."""
    base = save_model(tmp_path / "base")
    file = sorted(base.glob("model-*"))[0]
    extra = {f"model.layers.{layer}.{name}": torch.ones(32) for layer in range(2)}
    save_file(load_file(file) | extra, file, {"format": "pt"})
    with pytest.raises(UserError, match=f"not part of the model: model.layers.0.{name}"):
        train_and_export(base, tmp_path / "out", runtime)


@pytest.fixture(scope="module")
def runs(
    save_base: SaveBase, rows16: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """Runs of 2 ranks with DeepSeek V3: all weights, and LoRA. Returns their directory and what
    they printed."""
    folder = tmp_path_factory.mktemp("runs")
    base, _ = save_base(folder / "base", "deepseek_v3")
    flags = ["--model_name", str(base), "--dataset", str(rows16), "--device", "cpu"]
    flags += ["--lr", "1e-2", "--max_train_step", "1", "--min_num_params", "1000"]
    lora = ["--use_peft", "--lora_dropout", "0", "--target_modules", "all-linear"]
    cases = [
        [*flags, "--enable_fsdp", "--output_dir", f"{folder}/full"],
        [*flags, "--enable_fsdp", *lora, "--output_dir", f"{folder}/lora"],
    ]
    return folder, run_cases(folder, cases, ranks=2).output


@pytest.mark.slow
def test_a_run_copies_ignored_tensors_and_logs_it_once(runs: tuple[Path, str]) -> None:
    folder, output = runs
    was = stored(folder / "base")
    now = stored(folder / "full" / "model")
    assert dtypes_of(was) == dtypes_of(now)
    ignored = {name for name in was if name.startswith("model.layers.61.")}
    assert len(ignored) > 20 and not ignored.intersection(changed_names(was, now))
    line = f"Copied unchanged: {len(ignored)} tensors that Transformers ignores at loading"
    assert output.count(line) == 1, output


@pytest.mark.slow
def test_a_merged_adapter_and_an_exported_checkpoint_have_ignored_tensors(
    runs: tuple[Path, str], tmp_path: Path
) -> None:
    folder, _ = runs
    base = folder / "base"
    was = stored(base)
    Exporter.of_adapter(
        folder / "lora" / "model", build_model(), base, str(base), False
    ).write_model(tmp_path / "merged", None, 100_000)
    Exporter.prepare(
        find_valid(folder / "full"), build_model(), None, None, False, merge=False
    ).write_model(tmp_path / "full", None, 100_000)
    for result in ("merged", "full"):
        now = stored(tmp_path / result)
        assert dtypes_of(was) == dtypes_of(now)
        changed = changed_names(was, now)
        assert changed and not [name for name in changed if name.startswith("model.layers.61.")]
