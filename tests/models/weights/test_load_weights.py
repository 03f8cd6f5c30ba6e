"""Each rank holds exactly its rows of what transformers loads, whichever way they came."""

import functools
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run_cases
from transformers import AutoConfig, AutoModelForCausalLM

from llama_ft.config import ModelConfig, PeftConfig
from llama_ft.errors import UserError
from llama_ft.models import LoadSettings, build_on_meta, load_model_config, load_weights
from llama_ft.runtime import Ranks

SCRIPT = Path(__file__).with_name("load_and_dump.py")
LORA = {"use_peft": True, "r": 6, "target_modules": "all-linear"}
MODES = {
    "8bit": ({"mode": "8bit"}, {"load_in_8bit": True}),
    "nf4": ({"mode": "4bit"}, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "fp4": (
        {"mode": "4bit", "quant_type": "fp4"},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    ),
}
NESTED = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
WORDS = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_quant_storage": torch.bfloat16,
}
STORED = {"nf4": MODES["nf4"][1], "nested": NESTED, "words": WORDS}
BF16_LORA = {"peft": LORA, "precision": "bf16_mixed"}
# Case -> model, and what differs from loading it in fp32, sharded over all ranks.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "untied": ("untied", {}),
    "tied": ("tied", {}),
    "copies": ("untied", {}),
    "lora": ("untied", BF16_LORA),
    "dora": ("untied", {"peft": {**LORA, "use_dora": True}}),
    "head": ("tied", {"peft": {**LORA, "modules_to_save": ["lm_head"]}}),
    **{
        name: ("odd", {**BF16_LORA, "quantization": settings})
        for name, (settings, _) in MODES.items()
    },
    "double": ("odd", {**BF16_LORA, "quantization": {"mode": "4bit", "double_quant": True}}),
    **{f"stored-{name}": (f"stored-{name}", BF16_LORA) for name in STORED},
}
WORLD_SIZES = [1, 2, pytest.param(4, marks=pytest.mark.slow)]
Held = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folders(
    tiny_model: Path,
    tied_model: Path,
    save_model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    """Models by name. odd has layers of 65 rows, layers of 6 (of which rank 3 of 4 gets none), and
    rows that are not whole blocks. Those of whole are; the stored ones are it, quantized and saved
    by transformers."""
    make = tmp_path_factory.mktemp
    found = {"untied": tiny_model, "tied": tied_model}
    found["odd"] = save_model(
        make("odd"), hidden_size=64, intermediate_size=65, head_dim=6, num_key_value_heads=1
    )
    found["whole"] = save_model(
        make("whole"), hidden_size=64, intermediate_size=192, num_key_value_heads=1
    )
    for name, settings in STORED.items():
        found[f"stored-{name}"] = make(f"stored-{name}")
        quantized(found["whole"], settings).save_pretrained(
            found[f"stored-{name}"], max_shard_size="60KB"
        )
    return found


def quantized(folder: Path, settings: dict[str, Any]) -> torch.nn.Module:
    """What plain transformers and bitsandbytes make of a model."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(**settings)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=config
    )


@pytest.fixture(scope="module")
def held(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], dict[str, list[Held]]]:
    """World size -> case -> what each rank holds, of one launch."""

    @functools.cache
    def launch(world_size: int) -> dict[str, list[Held]]:
        out = tmp_path_factory.mktemp(f"held{world_size}")
        cases = {}
        for name, (model, settings) in CASES.items():
            degree = {"shard_degree": 2 if world_size == 4 else 1} if name == "copies" else {}
            plain = {
                "model": str(folders[model]),
                "peft": {},
                "precision": "fp32",
                "shard_degree": "world",
            }
            for way in ("slices", "scatter"):
                cases[f"{name}-{way}"] = {
                    **plain,
                    **settings,
                    **degree,
                    "scatter": way == "scatter",
                }
        run_cases(out, cases, ranks=world_size if world_size > 1 else 0, script=SCRIPT)
        files = {
            name: [out / f"{name}-rank{rank}.pt" for rank in range(world_size)] for name in cases
        }
        return {
            name: [torch.load(file, weights_only=True) for file in several]
            for name, several in files.items()
        }

    return launch


@pytest.fixture(scope="module")
def of_bitsandbytes(folders: dict[str, Path]) -> Callable[[str], Held]:
    """Case -> what plain transformers and bitsandbytes hold."""
    settings = {name: (folders["odd"], theirs) for name, (_, theirs) in MODES.items()}
    settings |= {f"stored-{name}": (folders["whole"], theirs) for name, theirs in STORED.items()}
    return functools.cache(lambda case: expected_of(quantized(*settings[case])))


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> Held:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return dict(model.named_parameters()) | dict(model.named_buffers())


def chunk(tensor: torch.Tensor, shards: int, index: int) -> torch.Tensor:
    pieces = torch.chunk(tensor.detach(), shards)
    return pieces[index] if index < len(pieces) else tensor.detach()[:0]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("way", ["slices", "scatter"])
def test_double_quantized_rows_do_not_depend_on_the_ranks(
    held: Callable[[int], dict[str, list[Held]]], world_size: int, way: str
) -> None:
    shards = held(world_size)[f"double-{way}"]
    plain = held(world_size)[f"nf4-{way}"]
    checked = 0
    for name, scale in held(1)["double-slices"][0].items():
        if name.endswith(".scale"):
            rows = [shard[name] for shard in shards]
            assert torch.equal(torch.cat(rows), scale)
            assert plain[0][name].shape != rows[0].shape
            weight = name.replace(".scale", ".weight")
            assert torch.equal(shards[0][weight], plain[0][weight])
            checked += 1
    assert checked > 8


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("way", ["slices", "scatter"])
def test_every_rank_holds_the_rows_torch_chunk_gives_it(
    held: Callable[[int], dict[str, list[Held]]],
    folders: dict[str, Path],
    world_size: int,
    way: str,
) -> None:
    for name, degree in {
        "untied": world_size,
        "tied": world_size,
        "copies": 2 if world_size == 4 else 1,
    }.items():
        expected = reference(folders[CASES[name][0]])
        for rank, shards in enumerate(held(world_size)[f"{name}-{way}"]):
            assert shards.keys() == expected.keys()
            for key, tensor in expected.items():
                rows = tensor if "inv_freq" in key else chunk(tensor, degree, rank % degree)
                assert torch.equal(shards[key], rows), (name, rank, key)


def test_a_buffer_without_values_is_an_error(tiny_model: Path, runtime: Ranks) -> None:
    config = load_model_config(tiny_model, False)
    built = build_on_meta(config, ModelConfig(model_name="mine"), folder=tiny_model)
    built.model.model.layers[1].register_buffer(
        "table", torch.empty(3, device="meta"), persistent=False
    )
    with pytest.raises(UserError, match="model_type llama .*\n *model.layers.1.table$"):
        load_weights(built, runtime, LoadSettings(PeftConfig(), 0, torch.float32))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", ["untied", "tied", "lora", "dora", "head"])
def test_parameters_are_bit_identical_on_any_number_of_ranks_and_with_both_ways_of_loading(
    held: Callable[[int], dict[str, list[Held]]], case: str, world_size: int
) -> None:
    alone = held(1)[f"{case}-slices"][0]
    for way in ("slices", "scatter"):
        ranks = held(world_size)[f"{case}-{way}"]
        for key, tensor in alone.items():
            whole = (
                ranks[0][key] if "inv_freq" in key else torch.cat([shards[key] for shards in ranks])
            )
            assert torch.equal(whole, tensor), (way, key)


def expected_of(model: torch.nn.Module) -> Held:
    """Parameter name -> what plain bitsandbytes holds: rows of int8 or of packed bytes, and the
    bits of the scales."""
    import bitsandbytes

    held: Held = {}
    for name, module in model.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear8bitLt):
            held[f"{name}.weight"], held[f"{name}.scale"] = (
                module.weight.data,
                module.weight.SCB.view(torch.int32),
            )
        elif isinstance(module, bitsandbytes.nn.Linear4bit):
            state = module.weight.quant_state
            rows = module.out_features
            if module.in_features % 64:
                continue  # blocks across rows: ours to quantize, and left as it is
            absmax = state.absmax
            if state.nested:
                absmax = (
                    bitsandbytes.functional.dequantize_blockwise(absmax, state.state2)
                    + state.offset
                )
            held[f"{name}.weight"] = module.weight.data.view(torch.uint8).view(rows, -1)
            held[f"{name}.scale"] = absmax.view(torch.int32).view(rows, -1)
    return held


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("way", ["slices", "scatter"])
@pytest.mark.parametrize("case", [*MODES, *(f"stored-{name}" for name in STORED)])
def test_every_rank_holds_its_rows_of_the_model_that_bitsandbytes_quantizes(
    held: Callable[[int], dict[str, list[Held]]],
    of_bitsandbytes: Callable[[str], Held],
    folders: dict[str, Path],
    world_size: int,
    way: str,
    case: str,
) -> None:
    folder = folders["whole" if case.startswith("stored-") else "odd"]
    expected = of_bitsandbytes(case)
    plain = reference(folder, torch.bfloat16)
    # two layers of each have rows of 65 or 24 inputs
    assert len(expected) == (20 if case in ("nf4", "fp4") else 28)
    for rank, shards in enumerate(held(world_size)[f"{case}-{way}"]):
        found = {
            key.replace(".base_layer.", "."): tensor
            for key, tensor in shards.items()
            if ".lora_" not in key
        }
        assert found.keys() == plain.keys() | expected.keys()
        for key, tensor in found.items():
            whole = expected.get(key, plain.get(key))
            assert whole is not None
            rows = whole if "inv_freq" in key else chunk(whole, world_size, rank)
            assert tensor.dtype == whole.dtype and torch.equal(tensor, rows), (rank, key)


def test_rwkv_does_not_change_its_weights_in_eval_mode(tmp_path: Path) -> None:
    """Transformers divides them in place there, and an export would write divided ones."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 4, "attention_hidden_size": 32}
    config = AutoConfig.for_model("rwkv", vocab_size=101, rescale_every=1, **shape)
    plain = AutoModelForCausalLM.from_config(config).eval()
    plain.save_pretrained(tmp_path)
    model = build_on_meta(load_model_config(tmp_path, False), ModelConfig(model_name="mine")).model
    model.load_state_dict(deepcopy(plain.state_dict()), assign=True)
    model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.arange(10)[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        torch.testing.assert_close(logits, plain.train()(input_ids=ids).logits)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
