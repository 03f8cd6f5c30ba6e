import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY, load_script
from peft import IA3Config, LoHaConfig, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from llama_ft.config import ModelConfig, PeftConfig
from llama_ft.config.settings.structured_values import PeftOptions
from llama_ft.errors import UserError
from llama_ft.models import (
    BuiltModel,
    build_on_meta,
    describe_experts,
    inject_lora,
    load_model_config,
)
from llama_ft.models.adapters.lora import first_values, inject_adapter
from llama_ft.models.adapters.names import PEFT_PREFIX


def skeleton(folder: Path) -> BuiltModel:
    return build_on_meta(load_model_config(folder, False), ModelConfig(model_name=str(folder)))


def test_only_adapters_are_trained_and_nothing_has_storage(tiny_model: Path) -> None:
    built = skeleton(tiny_model)
    model = built.model
    adapter = inject_lora(built, PeftConfig(use_peft=True), "base")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    # A and B of the linear layers in 2 layers
    assert trained == set(adapter.keys) and len(trained) == 2 * 2 * 7
    assert all(parameter.is_meta for parameter in model.parameters())
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in adapter.keys.values()


def test_the_adapter_names_the_base_that_was_asked_for(tiny_model: Path) -> None:
    """Not the directory that it was read from: PEFT takes that, for a Hub model a cache's."""
    name = "owner/model"
    adapter = inject_lora(skeleton(tiny_model), PeftConfig(use_peft=True), name)
    assert adapter.config.base_model_name_or_path == name


OPTIONS: tuple[dict[str, Any], ...] = (
    {"rank_pattern": {"q_proj": 4, "layers.1.mlp.up_proj": 2}, "alpha_pattern": {"q_proj": 3.0}},
    {"exclude_modules": ["o_proj", "layers.0.mlp.up_proj"]},
    {"exclude_modules": r".*\.layers\.0\..*"},
    {"layers_to_transform": [1], "layers_pattern": "layers"},
)


@pytest.mark.parametrize("method", ["lora", "loha"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "o_proj", "up_proj"]])
def test_options_give_the_adapters_of_peft(
    options: dict[str, Any], targets: Any, method: str, tiny_model: Path
) -> None:
    if targets == "all-linear" and "layers_to_transform" in options:
        return  # a configuration error
    settings: dict[str, Any] = {"target_modules": targets, "task_type": "CAUSAL_LM", **options}
    kind: Any = LoraConfig(r=8, lora_alpha=16, **settings)
    if method == "loha":
        kind = LoHaConfig(r=8, alpha=16, **settings)
    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    theirs: Any = get_peft_model(plain, kind)
    built = skeleton(tiny_model)
    peft = PeftConfig(
        use_peft=True,
        peft_method=method,  # type: ignore[arg-type]
        lora_alpha=16,
        target_modules=targets,
        options=options,  # type: ignore[arg-type]
    )
    inject_lora(built, peft, "base")

    def described(model: Any) -> dict[str, Any]:
        found = {}
        for name, module in model.named_modules():
            if hasattr(module, "scaling"):
                parameters = module.named_parameters()
                found[name] = (module.scaling, {key: p.shape for key, p in parameters})
        return found

    expected = described(theirs.base_model.model)
    assert described(built.model) == expected and expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exclude_modules": ["lm_heat"]}, "exclude_modules lm_heat: not in this model"),
        ({"exclude_modules": "o_proj"}, "exclude_modules o_proj: not in this model"),
        ({"rank_pattern": {"k_pro": 2}}, 'rank_pattern "k_pro" matches no layer that has'),
        ({"layers_to_transform": 2}, "layers_to_transform 2: this model has 2 decoder layers"),
    ],
)
def test_options_without_effect_are_errors(options: Any, message: str, tiny_model: Path) -> None:
    peft = PeftConfig(use_peft=True, target_modules=["q_proj"], options=options)
    with pytest.raises(UserError) as raised:
        inject_lora(skeleton(tiny_model), peft, "base")
    assert message in str(raised.value)


def test_every_option_is_a_field_of_pefts_configs() -> None:
    own = set(PeftOptions.__annotations__)
    for kind in (LoraConfig, LoHaConfig):
        assert own <= {field.name for field in fields(kind)}


@pytest.fixture
def save_small(tmp_path: Path) -> Callable[[str], Path]:
    """Write a small model as benchmarks/model_support/models.py builds it."""
    import transformers

    bench = load_script(REPOSITORY / "benchmarks" / "model_support" / "models.py")

    def save(model_type: str) -> Path:
        torch.manual_seed(0)
        config = bench.shrunk(transformers.CONFIG_MAPPING[model_type]())
        name = bench.MULTIMODAL.get(model_type) or bench.DECODERS[model_type]
        getattr(transformers, name)(config).save_pretrained(tmp_path / "base")
        return tmp_path / "base"

    return save


@pytest.mark.parametrize("model_type", ["laguna", "mistral_large4"])
def test_peft_loads_every_tensor_though_transformers_renames_some(
    model_type: str, save_small: Callable[[str], Path], tmp_path: Path
) -> None:
    import transformers

    base = save_small(model_type)
    peft = PeftConfig(use_peft=True, target_modules="all-linear", r=4, lora_dropout=0.0)
    built = skeleton(base)
    adapter = inject_lora(built, peft, str(base))
    written = {
        adapter.keys[name]: torch.randn(parameter.shape)
        for name, parameter in built.model.named_parameters()
        if name in adapter.keys
    }
    adapter.config.save_pretrained(tmp_path / "adapter")
    save_file(written, tmp_path / "adapter" / "adapter_model.safetensors", {"format": "pt"})
    kind = json.loads((base / "config.json").read_text())["architectures"][0]
    plain = getattr(transformers, kind).from_pretrained(base)
    loaded = dict(PeftModel.from_pretrained(plain, tmp_path / "adapter").named_parameters())
    for name, key in adapter.keys.items():
        assert torch.equal(loaded[PEFT_PREFIX + name], written[key]), name


def test_an_adapter_that_peft_cannot_load_is_rejected(save_small: Callable[[str], Path]) -> None:
    base = save_small("inkling2_text")
    with pytest.raises(UserError, match=r"PEFT would not load .*sconv\.weight_proj\.lora_A"):
        inject_lora(skeleton(base), PeftConfig(use_peft=True, target_modules="all-linear"), "base")
    inject_lora(skeleton(base), PeftConfig(use_peft=True, target_modules=["sink_proj"]), "base")


DEEPSEEK = {"num_attention_heads": 4, "head_dim": 16, "q_lora_rank": 16, "o_lora_rank": 16, "o_groups": 2,
            "index_n_heads": 2, "index_head_dim": 16, "qk_rope_head_dim": 8, "n_routed_experts": 4,
            "moe_intermediate_size": 32}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "shape", "left_out", "adapted"),
    [
        # its kernels read the weight and do not call the layer
        ("mamba", {"state_size": 4}, "out_proj", "in_proj"),
        # one product a group of heads: derived from nn.Linear
        ("deepseek_v4", DEEPSEEK, "o_a_proj", "o_b_proj"),
    ],
)
def test_all_linear_skips_layers_that_adapters_cannot_train(
    model_type: str, shape: dict[str, Any], left_out: str, adapted: str
) -> None:
    config = AutoConfig.for_model(
        model_type, hidden_size=32, num_hidden_layers=2, vocab_size=64, **shape
    )
    built = build_on_meta(config, ModelConfig(model_name=model_type))
    model = built.model
    assert any(name.endswith(left_out) for name, _ in model.named_modules())
    adapter = inject_lora(
        built, PeftConfig(use_peft=True, target_modules="all-linear", lora_dropout=0), "base"
    )
    modules = {key.rsplit(".", 3)[1] for key in adapter.keys.values()}
    assert adapted in modules and left_out not in modules


EXPERTS = ["experts.down_proj", "experts.gate_up_proj"]


@pytest.mark.parametrize(
    ("model_type", "settings", "adapts"),
    [
        ("mixtral", {}, True),  # peft adapts its experts anyway
        ("gpt_oss", {}, True),
        # of adapters of parameters, peft has neither of these
        ("gpt_oss", {"lora_dropout": 0.1}, False),
        ("gpt_oss", {"use_dora": True}, False),
        ("gpt_oss", {"target_modules": ["q_proj"]}, False),
        ("gpt_oss", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}, True),
        ("gpt_oss", {"target_modules": ["q_proj"], "target_parameters": EXPERTS[:1]}, False),
    ],
)
def test_experts_are_adapted_or_the_log_names_the_flags_for_it(
    model_type: str, settings: dict[str, Any], adapts: bool
) -> None:
    shape = {
        "hidden_size": 32,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    config = AutoConfig.for_model(
        model_type, num_hidden_layers=2, num_local_experts=4, vocab_size=64, **shape
    )
    built = build_on_meta(config, ModelConfig(model_name=model_type))
    model = built.model
    inject_lora(built, PeftConfig(use_peft=True, r=2, **settings), "base")
    trained = [p for name, p in model.named_parameters() if ".experts." in name and p.requires_grad]
    # A and B in 2 layers
    assert len(trained) == 2 * 2 * (2 if adapts else len(settings.get("target_parameters", ())))
    line = str(describe_experts(model))
    assert ("adapts the experts" in line) == adapts
    assert adapts or f"--target_parameters {','.join(EXPERTS)} --lora_dropout 0" in line


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_dropout": 0.1}, "experts support neither lora_dropout nor use_dora"),
        ({"init_lora_weights": "pissa"}, "not an unquantized linear layer"),
        (
            {"init_lora_weights": "pissa", "target_modules": ["q_proj"], "r": 33},
            "at least 33 inputs",
        ),
    ],
)
def test_settings_that_a_layer_does_not_support_are_named(
    settings: dict[str, Any], message: str
) -> None:
    config = AutoConfig.for_model(
        "mixtral", num_hidden_layers=1, hidden_size=32, intermediate_size=16, vocab_size=64
    )
    built = build_on_meta(config, ModelConfig(model_name="mixtral"))
    with pytest.raises(UserError, match=message):
        inject_lora(built, PeftConfig(use_peft=True, **settings), "base")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"target_parameters": ["experts.w1"]},
            r"\[experts.w1\]: not in this model. It has: no stacked",
        ),
        (
            {"target_modules": ["q_proj", "query", "key"]},
            r"(?s)\[key, query\].*q_proj, k_proj, v_proj, o_proj",
        ),
        ({"from_peft_checkpoint": "."}, "IA3 adapters"),
    ],
)
def test_unknown_target_modules_and_adapter_types_are_named(
    settings: dict[str, Any],
    message: str,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"}))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        inject_lora(skeleton(tiny_model), PeftConfig(use_peft=True, **settings), "base")


def test_a_saved_adapter_with_unknown_settings_is_rejected(
    tiny_model: Path, tmp_path: Path
) -> None:
    LoraConfig(target_modules=["q_proj"]).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    stored = json.loads(file.read_text())
    file.write_text(json.dumps(stored | {"future_feature": True, "off": False}))
    settings = PeftConfig(use_peft=True, from_peft_checkpoint=str(tmp_path))
    with pytest.raises(UserError, match="PEFT does not know future_feature[)]"):
        inject_lora(skeleton(tiny_model), settings, "base")


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (LoraConfig, {"r": 6}),
        (LoraConfig, {"r": 6, "init_lora_weights": "gaussian"}),
        (LoHaConfig, {"r": 6}),
        (IA3Config, {"feedforward_modules": []}),
    ],
)
def test_adapters_of_every_method_have_the_initial_values_of_peft(
    tiny_model: Path, method: type[Any], settings: dict[str, Any]
) -> None:
    settings = {"target_modules": ["q_proj"], **settings}
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    torch.manual_seed(0)
    theirs = dict(get_peft_model(model, method(**settings)).named_parameters())
    adapter = inject_adapter(skeleton(tiny_model).model, method(**settings))
    ours = dict(first_values(adapter, seed=1))
    trained = {name for name, value in theirs.items() if value.requires_grad}
    assert {PEFT_PREFIX + name for name in ours} == trained
    for name, value in ours.items():
        expected = theirs[PEFT_PREFIX + name]
        assert value.shape == expected.shape and value.any() == expected.any(), name
        assert value.std().item() == pytest.approx(expected.std().item(), rel=0.3), name
        largest = expected.abs().max().item()
        assert value.abs().max().item() == pytest.approx(largest, rel=0.5), name
    drawn = [value.flatten()[0].item() for value in ours.values() if value.std() > 0]
    assert len(set(drawn)) == len(drawn), "all begin differently"


def test_a_parameter_without_initial_values_from_peft_is_an_error(tiny_model: Path) -> None:
    adapter = inject_lora(skeleton(tiny_model), PeftConfig(use_peft=True), "base")
    layer: Any = adapter.layers["model.layers.1.self_attn.q_proj"]
    layer.lora_A["more"] = torch.nn.Linear(4, 4, device="meta")
    with pytest.raises(
        UserError, match=r"model\.layers\.1\.self_attn\.q_proj\.lora_A\.more\.weight"
    ):
        list(first_values(adapter, seed=1))
