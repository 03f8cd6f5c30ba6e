"""`llama-ft export SOURCE OUT --for SERVER` on adapters that PEFT has saved."""

import json
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY, Finished
from forked import forked
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from llama_ft.extensions.serving.adapter_files import read_base
from llama_ft.extensions.serving.hand_over import adapter_line, serve_line
from llama_ft.extensions.serving.judgment import AdapterVerdict

EXPORT = REPOSITORY / "recipes" / "export.py"


def export(*flags: str | Path) -> Finished:
    return forked(EXPORT, *flags)


def save_adapter(base: Path, folder: Path, **settings: Any) -> Path:
    """An adapter of random values, as PEFT saves it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base)
    defaults = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    adapted = get_peft_model(model, LoraConfig(**{**defaults, **settings}))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module")
def base(save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("bases") / "llama")


def test_an_adapter_stays_one_and_the_command_names_base_rank_and_place(
    base: Path, tmp_path: Path
) -> None:
    adapter = save_adapter(base, tmp_path / "adapter", r=12)
    (adapter / "probes.json").write_text("text of samples")
    done = export(adapter, tmp_path / "out", "--for", "vllm")
    assert done.exit_code == 0, done.output
    assert not (tmp_path / "out" / "probes.json").exists()
    command = (
        f"vllm serve {base} --enable-lora --max-lora-rank 16 --lora-modules out={tmp_path}/out"
    )
    assert command in done.output
    assert "vLLM (0.32 tried, 0.33 by source)" in done.output
    before = load_file(adapter / "adapter_model.safetensors")
    after = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_vllm_would_ignore_is_refused_and_nothing_is_written(
    base: Path, tmp_path: Path
) -> None:
    adapter = save_adapter(base, tmp_path / "adapter", use_dora=True)
    done = export(adapter, tmp_path / "out", "--for", "vllm")
    assert done.exit_code == 2
    assert "DoRA" in done.output
    way_out = f"llama-ft export {adapter} {tmp_path}/out --for vllm --merge --save_dtype bfloat16"
    assert way_out in done.output
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]
    merged = export(*way_out.split()[2:])
    assert merged.exit_code == 0, merged.output
    assert f"vllm serve {tmp_path}/out" in merged.output
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_the_command_that_merges_has_the_base_model_and_quotes(base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(base, tmp_path / "my adapter", use_dora=True)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    missing = settings | {"base_model_name_or_path": str(tmp_path / "gone")}
    (adapter / "adapter_config.json").write_text(json.dumps(missing))
    done = export(adapter, tmp_path / "out", "--for", "vllm", "--base_model", base)
    assert done.exit_code == 2
    [command] = re.findall(r"Serve the merged model: llama-ft export (.*)", done.output)
    merged = export(*shlex.split(command))
    assert merged.exit_code == 0, merged.output


def test_vllm_reads_the_place_and_the_name_that_the_command_has(base: Path, tmp_path: Path) -> None:
    """It splits NAME=PATH at the first =, reads what has a comma as JSON, and asks the base model for
    a name that is also the base model's."""
    adapter = save_adapter(base, tmp_path / "adapter")
    verdict = AdapterVerdict("vLLM 0.33")
    files = read_base(base, "tiny")
    for place in ("a,b/out", "a=b/out", "a/b=c", "a/out"):
        words = shlex.split(serve_line(verdict, adapter, files, tmp_path / place))
        text = words[words.index("--lora-modules") + 1]
        if "=" in text and "," not in text:
            name, _, path = text.partition("=")
        else:
            name, path = json.loads(text)["name"], json.loads(text)["path"]
        assert (name, path) == (place.rpartition("/")[2], str(tmp_path / place))
    line = serve_line(verdict, adapter, files, tmp_path / "tiny")
    assert f"--lora-modules tiny-adapter={tmp_path}/tiny" in line


def test_names_that_vllm_does_not_find_become_those_of_the_checkpoint(
    base: Path, tmp_path: Path
) -> None:
    """As of an adapter trained on the text part of a model for images."""
    adapter = save_adapter(base, tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    settings["alpha_pattern"] = {"text.layers.0.self_attn.q_proj": 40}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    renamed = {
        name.replace("model.model.layers", "model.text.layers"): tensors[name] for name in tensors
    }
    save_file(renamed, file, {"format": "pt"})
    done = export(adapter, tmp_path / "out", "--for", "vllm")
    assert done.exit_code == 0, done.output
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(tensors[name], written[name]) for name in tensors)
    # a pattern is of a name, which has changed
    layer = "model.layers.{}.self_attn.q_proj"
    saved = json.loads((tmp_path / "out" / "adapter_config.json").read_text())["alpha_pattern"]
    assert saved[layer.format(0)] == 40
    assert saved[layer.format(1)] == settings["lora_alpha"]


@pytest.mark.parametrize("server", ["vllm", "sglang", "llama.cpp", "transformers"])
def test_an_adapter_of_another_base_model_is_one_message(
    base: Path, save_model: Callable[..., Path], tmp_path: Path, server: str
) -> None:
    if server == "llama.cpp":
        pytest.importorskip("gguf")
    adapter = save_adapter(base, tmp_path / "adapter")
    wider = save_model(tmp_path / "wider", hidden_size=96)
    done = export(adapter, tmp_path / "out", "--for", server, "--base_model", wider)
    assert done.exit_code == 2
    assert f"{adapter}: is an adapter of another base model than {wider}" in done.output
    assert " weights in the adapter, and " in done.output
    assert not (tmp_path / "out").exists()


def test_sglang_gets_the_scaling_of_rslora_as_an_alpha(base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(base, tmp_path / "adapter", r=4, lora_alpha=6, use_rslora=True)
    done = export(adapter, tmp_path / "out", "--for", "sglang")
    assert done.exit_code == 0, done.output
    settings = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert settings["use_rslora"] is False
    # what it computes: lora_alpha / r; what PEFT computes: lora_alpha / sqrt(r)
    assert math.isclose(settings["lora_alpha"] / settings["r"], 6 / math.sqrt(4))
    assert f"--lora-paths out={tmp_path}/out" in done.output
    q_only = save_adapter(base, tmp_path / "q_only", target_modules=["q_proj"])
    refused = export(q_only, tmp_path / "out2", "--for", "sglang")
    assert refused.exit_code == 2
    assert "q_proj, v_proj" in refused.output


def test_wrong_names_and_places_end_in_one_message_each(base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(base, tmp_path / "adapter")
    wrong = export(adapter, tmp_path / "out", "--for", "vlm")
    assert wrong.exit_code == 2
    assert (
        "--for vlm: expected one of vllm, sglang, llama.cpp, ollama, transformers" in wrong.output
    )
    unknown = export(adapter, tmp_path / "out", "--for", "vllm:0.40")
    assert unknown.exit_code == 0, unknown.output
    assert "the rules of vLLM 0.40 are not known. Those of 0.33 are used" in unknown.output
    again = export(adapter, tmp_path / "out", "--for", "vllm")
    assert again.exit_code == 2
    assert "--overwrite" in again.output
    settings = json.loads((adapter / "adapter_config.json").read_text())
    missing = settings | {"base_model_name_or_path": str(tmp_path / "gone")}
    (adapter / "adapter_config.json").write_text(json.dumps(missing))
    without = export(adapter, tmp_path / "out2", "--for", "vllm")
    assert without.exit_code == 2
    assert "--base_model" in without.output
    assert not (tmp_path / "out2").exists()


def test_the_line_at_the_end_of_a_run_has_the_command_or_what_to_do_instead(
    base: Path, tmp_path: Path
) -> None:
    served = save_adapter(base, tmp_path / "run" / "model", r=24)
    line = adapter_line(served, "org/base", base)
    command = "vllm serve org/base --enable-lora --max-lora-rank 32 --lora-modules run="
    assert line == f"vLLM can serve this adapter (0.32 tried, 0.33 by source): {command}{served}"
    refused = save_adapter(base, tmp_path / "dora" / "model", use_dora=True)
    instead = f"llama-ft export {tmp_path}/dora OUT --for vllm --merge --save_dtype bfloat16"
    assert adapter_line(refused, "org/base", base).endswith(f"DoRA (use_dora). Instead: {instead}")


def test_an_adapter_of_experts_gets_the_rank_and_the_format_that_vllm_needs(tmp_path: Path) -> None:
    """PEFT trains gate and up projection as one matrix, with twice the rank."""
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 301}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts, **heads))
    base = tmp_path / "base"
    model.save_pretrained(base)
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    settings = LoraConfig(r=8, target_modules=["q_proj"], target_parameters=names)
    settings.rank_pattern = {r".*\.gate_up_proj": 16}
    adapter = tmp_path / "run" / "model"
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings).save_pretrained(
        str(adapter)
    )
    line = adapter_line(adapter, "org/base", base)
    assert "vllm serve org/base --enable-lora --max-lora-rank 16" in line
    assert "--enable-mixed-moe-lora-format" in line
    assert '"is_3d_lora_weight": true' in line
