"""A merged adapter against peft's own merge_and_unload, tensor by tensor, and what cannot be
merged."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_by_hand import load, logits, stored
from conftest import build_model
from safetensors.torch import save_file

from llama_ft import models
from llama_ft.config import ModelConfig, PeftConfig
from llama_ft.errors import UserError
from llama_ft.export import Exporter
from llama_ft.models.adapters.saved_adapter import other_base
from llama_ft.models.base.source import SafetensorsSource, fingerprint

ATTENTION = ["q_proj", "v_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama", {"target_modules": "all-linear"}),
    "rslora": (
        "llama",
        {"target_modules": ATTENTION, "use_rslora": True, "rank_pattern": {"q_proj": 3}},
    ),
    "dora": (
        "llama",
        {"target_modules": "all-linear", "use_dora": True, "alpha_pattern": {"v_proj": 7}},
    ),
    "norms, head": (
        "llama",
        {"target_modules": ATTENTION, "modules_to_save": ["input_layernorm", "lm_head"]},
    ),
    "biases": ("biased", {"target_modules": ATTENTION, "bias": "all"}),
    "tied": ("tied", {"target_modules": "all-linear"}),
    "tied, head in full": ("tied", {"target_modules": ATTENTION, "modules_to_save": ["lm_head"]}),
    "tied, embedding in full": (
        "tied",
        {"target_modules": ATTENTION, "modules_to_save": ["embed_tokens"]},
    ),
    "experts": ("mixtral", {"target_modules": "all-linear", "use_rslora": True}),
    "experts, whose weights are [in, out]": (
        "gpt_oss",
        {"target_modules": ATTENTION, "target_parameters": EXPERTS},
    ),
    "Conv1D": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
}


def save_adapter(base: Path, folder: Path, **settings: Any) -> Path:
    """An adapter as peft saves it, every tensor of it random."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(7)
    model = get_peft_model(
        load(base), LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, **settings)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def merge(adapter: Path, base: Path, folder: Path, save_dtype: torch.dtype | None = None) -> Path:
    Exporter.of_adapter(
        adapter, build_model(), base, str(base), trust_remote_code=False
    ).write_model(folder, save_dtype, 60_000)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_the_merged_model_has_the_logits_of_the_adapted_one(
    case: str, bases: Path, tmp_path: Path
) -> None:
    from peft import PeftModel

    base = bases / CASES[case][0]
    adapter = save_adapter(base, tmp_path / "adapter", **CASES[case][1])
    merged = merge(adapter, base, tmp_path / "merged")
    adapted = PeftModel.from_pretrained(load(base), adapter).eval()
    expected = logits(adapted)
    assert (logits(load(merged)) - expected).abs().max() < 1e-5 * expected.abs().max().clamp(min=1)
    assert (logits(load(base)) - expected).abs().max() > 1e-2
    # peft's merge changes embedding and head together although only one was adapted
    if case.startswith("tied, "):
        assert json.loads((merged / "config.json").read_text())["tie_word_embeddings"] is False
        tensors = stored(merged)
        before = stored(base)["model.embed_tokens.weight"]
        changed = "lm_head.weight" if "head" in case else "model.embed_tokens.weight"
        [kept] = {"lm_head.weight", "model.embed_tokens.weight"} - {changed}
        assert torch.equal(tensors[kept], before)
        assert not torch.equal(tensors[changed], before)
    else:
        reference = adapted.merge_and_unload().state_dict()
        weights = load(merged).state_dict()
        assert weights.keys() == reference.keys()
        for name, tensor in reference.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6, msg=name)
        assert not case.startswith("experts") or stored(merged).keys() == stored(base).keys()


@pytest.mark.parametrize("case", ["dora", "experts"])
def test_each_tensor_of_an_adapter_is_read_once(
    case: str, bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, settings = CASES[case]
    adapter = save_adapter(bases / kind, tmp_path / "adapter", **settings)
    read = SafetensorsSource.read_rows
    names = list[str]()

    def counted(source: SafetensorsSource, name: str, start: int, stop: int) -> torch.Tensor:
        names.append(name)
        return read(source, name, start, stop)

    monkeypatch.setattr(SafetensorsSource, "read_rows", counted)
    merge(adapter, bases / kind, tmp_path / "merged")
    reads = Counter(name for name in names if "lora_" in name)
    assert reads.keys() == stored(adapter).keys()
    assert set(reads.values()) == {1}


def test_tensors_that_the_adapter_does_not_change_are_bit_identical(
    bases: Path, tmp_path: Path
) -> None:
    base = shutil.copytree(
        bases / "mixtral", tmp_path / "base", ignore=shutil.ignore_patterns("*.safetensors*")
    )
    load(bases / "mixtral").to(torch.bfloat16).save_pretrained(base)
    short = shutil.copytree(bases / "gpt2", tmp_path / "short")
    save_file(
        {n.removeprefix("transformer."): t for n, t in stored(short).items()},
        short / "model.safetensors",
    )
    # by transformers' names
    for place, named, target in ((base, base, "q_proj"), (short, bases / "gpt2", "c_attn")):
        adapter = save_adapter(
            place, tmp_path / target, target_modules=[target], fan_in_fan_out=place == short
        )
        before = stored(named)
        after = stored(merge(adapter, place, tmp_path / f"{target}-merged"))
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert after[name].dtype == tensor.dtype
            assert torch.equal(after[name], tensor) != (f"{target}.weight" in name), name


def test_a_merged_model_is_rounded_once_from_fp32_and_has_the_tokenizer_of_the_adapter(
    bases: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    adapter = save_adapter(bases / "llama", tmp_path / "adapter", target_modules=ATTENTION)
    exact = stored(merge(adapter, bases / "llama", tmp_path / "exact"))
    for file in ("tokenizer_config.json", "tokenizer.json"):
        shutil.copy(bases / "llama" / file, adapter)
    (adapter / "chat_template.jinja").write_text("{{ messages }}")
    merged = merge(adapter, bases / "llama", tmp_path / "merged", save_dtype=torch.bfloat16)
    assert all(
        torch.equal(tensor, exact[name].to(torch.bfloat16))
        for name, tensor in stored(merged).items()
    )
    assert json.loads((merged / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoTokenizer.from_pretrained(merged).chat_template == "{{ messages }}"
    assert "with a LoRA adapter merged into it" in (merged / "README.md").read_text()


def refusal(adapter: Path, base: Path, tmp_path: Path) -> str:
    with pytest.raises(UserError) as error:
        merge(adapter, base, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    return str(error.value)


def test_another_base_or_tensor_is_rejected_with_the_difference(
    bases: Path, tmp_path: Path
) -> None:
    base = shutil.copytree(bases / "llama", tmp_path / "base")
    assert "Embedding" in refusal(
        save_adapter(base, tmp_path / "e", target_modules=["embed_tokens"]), base, tmp_path
    )
    adapter = save_adapter(base, tmp_path / "adapter", target_modules=ATTENTION)
    assert "q_proj" in refusal(adapter, bases / "gpt2", tmp_path)
    tensors = stored(adapter)
    extra = {**tensors, "base_model.model.model.extra.weight": torch.ones(2)}
    save_file(extra, adapter / "adapter_model.safetensors")
    assert "It has base_model.model.model.extra.weight" in refusal(adapter, base, tmp_path)
    save_file(
        {n: t[:, :-1].clone() for n, t in tensors.items()}, adapter / "adapter_model.safetensors"
    )
    assert "q_proj.lora_A.weight (4, 31) for (4, 32)" in refusal(adapter, base, tmp_path)
    config = json.loads((base / "config.json").read_text())
    note = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (base / "config.json").write_text(json.dumps({**config, "quantization_config": note}))
    save_file(tensors, adapter / "adapter_model.safetensors")
    assert "--base_model" in refusal(adapter, base, tmp_path)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"peft_type": "LOHA"}, "peft_type = LOHA"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = pissa"),
        ({"use_something_new": True}, "use_something_new = True"),
    ],
)
def test_unsupported_adapters_are_rejected_by_name(
    settings: dict[str, Any], named: str, bases: Path, tmp_path: Path
) -> None:
    adapter = save_adapter(bases / "llama", tmp_path / "adapter", target_modules=ATTENTION)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, **settings}))
    assert named in refusal(adapter, bases / "llama", tmp_path)


@pytest.fixture(scope="module")
def shared_blocks(save_tokenizer: Callable[..., Path], tmp_path_factory: Any) -> Path:
    """A Zamba2 in whose layers 1 and 3 the same attention block is called."""
    from transformers import Zamba2Config, Zamba2ForCausalLM

    torch.manual_seed(5)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 4, "vocab_size": 301, "mamba_d_state": 8, "mamba_d_conv": 2, "mamba_expand": 2,
             "n_mamba_heads": 4, "mamba_ngroups": 1, "chunk_size": 8, "num_mem_blocks": 1, "adapter_rank": 4,
             "initializer_range": 0.1, "use_shared_attention_adapter": False, "tie_word_embeddings": True,
             "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "hybrid_layer_ids": [1, 3]}  # fmt: skip
    folder = save_tokenizer(tmp_path_factory.mktemp("shared") / "zamba2")
    Zamba2ForCausalLM(Zamba2Config(**shape)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"target_modules": "all-linear"},
            "layers.1.shared_transformer.self_attn.q_proj.weight and "
            "model.layers.3.shared_transformer.self_attn.q_proj.weight are one weight",
        ),
        (
            {"target_modules": ["q_proj"], "layers_to_transform": [3], "layers_pattern": "layers"},
            "train one without shared_transformer.self_attn.q_proj: exclude_modules",
        ),
        (
            {"target_modules": ["in_proj"], "modules_to_save": ["lm_head"]},
            "changes only one of embedding and LM head",
        ),
        ({"target_modules": ["in_proj", "linear"]}, None),
        (
            {"target_modules": "all-linear", "exclude_modules": r".*\.shared_transformer\..*"},
            None,
        ),
    ],
)
def test_changes_of_a_block_that_layers_share_are_rejected_and_others_merged(
    settings: dict[str, Any], problem: str | None, shared_blocks: Path, tmp_path: Path
) -> None:
    from peft import PeftModel

    adapter = save_adapter(shared_blocks, tmp_path / "adapter", **settings)
    if problem is not None:
        assert problem in refusal(adapter, shared_blocks, tmp_path)
        return
    merged = merge(adapter, shared_blocks, tmp_path / "merged")
    expected = logits(PeftModel.from_pretrained(load(shared_blocks), adapter).eval())
    assert (logits(load(merged)) - expected).abs().max() < 1e-5
    assert (logits(load(shared_blocks)) - expected).abs().max() > 1e-2
    assert stored(merged).keys() == stored(shared_blocks).keys()


def test_copies_of_the_base_in_an_adapter_are_left_out_and_other_weights_are_named(
    bases: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What PEFT saves after a resize of the vocabulary, or with save_embedding_layers."""
    from peft import LoraConfig, get_peft_model

    caplog.set_level("INFO")
    base = bases / "tied"
    model = get_peft_model(
        load(base), LoraConfig(target_modules=ATTENTION, init_lora_weights=False)
    )
    model.save_pretrained(tmp_path / "copies", save_embedding_layers=True)
    model.save_pretrained(tmp_path / "plain", save_embedding_layers=False)
    head = "base_model.model.lm_head.weight"
    assert stored(tmp_path / "copies").keys() - stored(tmp_path / "plain").keys() >= {head}
    merged = stored(merge(tmp_path / "copies", base, tmp_path / "merged"))
    expected = stored(merge(tmp_path / "plain", base, tmp_path / "expected"))
    assert merged.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in merged.items())
    assert "left out lm_head.weight, model.embed_tokens.weight, equal to" in caplog.text
    shutil.rmtree(tmp_path / "merged")
    file = tmp_path / "copies" / "adapter_model.safetensors"
    tensors = stored(tmp_path / "copies")
    # in the dtype in which the model was loaded
    half = {n: t.bfloat16() if "lora" not in n else t for n, t in tensors.items()}
    save_file({n: t.clone() for n, t in half.items()}, file)
    merge(tmp_path / "copies", base, tmp_path / "half")
    tensors[head] = tensors[head].clone()
    tensors[head][0, 0] += 1
    save_file({n: t.clone() for n, t in tensors.items()}, file)
    assert "lm_head.weight, with other values" in refusal(tmp_path / "copies", base, tmp_path)
    tensors[head] = torch.cat([tensors[head], tensors[head][:4]])
    save_file({n: t.clone() for n, t in tensors.items()}, file)
    assert "lm_head.weight [305, 32] for [301, 32]" in refusal(tmp_path / "copies", base, tmp_path)


def test_names_that_peft_adds_to_the_settings_do_not_matter(
    save_tokenizer: Callable[..., Path], tmp_path: Path
) -> None:
    """PEFT counts HunYuan's experts among Qwen2-MoE's, and writes `gate.weight`: here the router is
    gate.wg."""
    from peft import PeftModel
    from transformers import HunYuanMoEV1Config, HunYuanMoEV1ForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 301, "num_experts": 3, "moe_topk": 2,
             "initializer_range": 0.1, "eod_token_id": 1, "pad_token_id": 2}  # fmt: skip
    base = save_tokenizer(tmp_path / "base")
    torch.manual_seed(2)
    HunYuanMoEV1ForCausalLM(HunYuanMoEV1Config(**shape)).save_pretrained(base)
    # an adapter of all linear layers, as a run writes it
    built = models.build_on_meta(models.load_model_config(base, False), ModelConfig(), folder=base)
    peft = PeftConfig(use_peft=True, r=2, target_modules="all-linear", lora_dropout=0)
    built.adapter = models.inject_lora(built, peft, str(base))
    written = built.adapter.config.to_dict()
    assert "gate.weight" in written["target_parameters"]
    adapter = tmp_path / "adapter"
    built.adapter.config.save_pretrained(adapter)
    parameters = dict(built.model.named_parameters())
    values = {
        key: torch.randn(parameters[name].shape) * 0.1 for name, key in built.adapter.keys.items()
    }
    save_file(values, adapter / "adapter_model.safetensors")
    expected = logits(PeftModel.from_pretrained(load(base), adapter).eval())
    merged = merge(adapter, base, tmp_path / "merged")
    assert (logits(load(merged)) - expected).abs().max() < 1e-5
    assert (logits(load(base)) - expected).abs().max() > 1e-2


def test_an_adapter_of_another_base_is_named(bases: Path, tmp_path: Path) -> None:
    adapter = save_adapter(bases / "llama", tmp_path / "adapter", target_modules=ATTENTION)
    file = adapter / "adapter_config.json"
    settings = json.loads(file.read_text())

    def warning(named: str | None, given: str, folder: Path = bases / "llama") -> str | None:
        file.write_text(json.dumps({**settings, "base_model_name_or_path": named}))
        return other_base(adapter, given, folder)

    base = str(bases / "llama")
    other = shutil.copytree(bases / "llama", tmp_path / "llama")  # a folder that has moved
    load(bases / "llama").half().save_pretrained(tmp_path / "half" / "llama")
    assert warning(base, base) is None
    assert warning(base, str(other), other) is None
    assert warning("/gone/llama", base) is None
    assert warning("Org/Llama", base) is None
    assert warning("Org/Llama", "/cache/models--Org--Llama/snapshots/abc") is None
    assert warning("/cache/models--Org--Llama/snapshots/abc", "Org/Llama") is None
    assert warning(None, base) is None
    for named, given in (
        (str(bases / "tied"), base),
        (str(tmp_path / "half" / "llama"), base),
        ("/gone/llama2", base),
        ("Org/Llama-Instruct", base),
        ("Org/Llama", "Other/Llama"),
        ("Org/Llama-Instruct", "/cache/models--Org--Llama/snapshots/abc"),
    ):
        text = str(warning(named, given))
        assert f"names the base model {named}, but {given} is used" in text
    # the run of the adapter has recorded the content of its base
    step = tmp_path / "checkpoints" / "step-000004"
    step.mkdir(parents=True)
    trainer = {"contents": {"model_name": fingerprint(bases / "llama")}}
    (step / "trainer.json").write_text(json.dumps(trainer))
    assert warning("/gone/llama2", base) is None
    assert warning("/gone/llama", str(bases / "tied"), bases / "tied") is not None
