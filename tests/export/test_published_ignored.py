"""Layers for multi-token prediction that are published in FP8: Transformers ignores them at loading,
and an export, which is in 16 bits, has them in 16 bits, too."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from checkpoint_by_hand import stored
from conftest import build_model, run_cases
from models.published.test_sources import DEEPSEEK_V3, fp8_note, in_blocks, publish
from safetensors.torch import load_file, save_file

from llama_ft.export import Exporter, find_valid

MTP = "model.layers.61."


def test_ignored_layers_in_fp8_are_exported_in_16_bits(
    save_tokenizer: Callable[..., Path], rows16: Path, tmp_path: Path
) -> None:
    base = save_tokenizer(tmp_path / "base")
    publish(base, "deepseek_v3", DEEPSEEK_V3, fp8_note(), in_blocks)
    file = base / "model.safetensors"
    tensors = load_file(file)
    expected = {f"{MTP}enorm.weight": torch.rand(256).bfloat16()}
    tensors |= expected
    for name in ("eh_proj", "mlp.experts.0.up_proj", "self_attn.kv_a_proj_with_mqa"):
        weight = f"{MTP}{name}.weight"
        packed = in_blocks(weight, torch.empty(128, 256))
        tensors |= packed
        scale = packed[f"{weight}_scale_inv"].repeat_interleave(128, 1)
        expected[weight] = (packed[weight].float() * scale).bfloat16()
    save_file(tensors, file, {"format": "pt"})

    flags = ["--model_name", str(base), "--dataset", str(rows16), "--device", "cpu"]
    flags += ["--precision", "fp32"]  # bf16 is slow on a CPU without AMX
    flags += ["--max_train_step", "1", "--enable_fsdp"]
    lora = ["--use_peft", "--target_modules", "o_proj"]
    cases = [
        [*flags, "--output_dir", f"{tmp_path}/full"],
        [*flags, *lora, "--output_dir", f"{tmp_path}/lora"],
    ]
    run_cases(tmp_path, cases, ranks=2)
    exporter = Exporter.prepare(
        find_valid(tmp_path / "lora"),
        build_model(),
        None,
        None,
        trust_remote_code=False,
        merge=True,
    )
    exporter.write_model(tmp_path / "merged", None, 10**9)
    plain = {name for name in tensors if not name.endswith("_scale_inv")}
    for result in (tmp_path / "full" / "model", tmp_path / "merged"):
        assert "quantization_config" not in json.loads((result / "config.json").read_text())
        written = stored(result)
        assert written.keys() == plain
        for name, tensor in expected.items():
            assert torch.equal(written[name], tensor), name
