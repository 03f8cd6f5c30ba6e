"""What a run leaves behind loads in plain transformers and peft, and gives the logits of the
trained model."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run_cases

SCRIPT = Path(__file__).with_name("export_and_dump.py")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "checkpoint-format.md"
LORA = {"use_peft": True, "r": 6, "target_modules": "all-linear", "lora_dropout": 0}
WORLD_SIZE = 3  # 32 rows over 3 ranks are 11, 11 and 10; 6 rows of an adapter 2 each


@pytest.fixture(scope="module")
def results(tiny_model: Path, tied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished case in each folder below it."""
    from transformers import AutoModelForCausalLM

    half, fp16 = (tmp_path_factory.mktemp(name) for name in ("half", "fp16"))
    for folder, dtype in ((half, torch.bfloat16), (fp16, torch.float16)):
        shutil.copytree(
            tiny_model, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors*")
        )
        AutoModelForCausalLM.from_pretrained(tiny_model, dtype=dtype).save_pretrained(folder)
    untied = {"model": str(tiny_model), "peft": {}, "dtype": None}
    cases: dict[str, dict[str, Any]] = {
        "full": untied,
        "bf16": {**untied, "dtype": "bfloat16"},
        "half": {**untied, "model": str(half)},
        "frozen": {**untied, "model": str(fp16), "precision": "bf16_mixed", "frozen_layers": 1},
        "tied": {**untied, "model": str(tied_model)},
        "copies": {**untied, "shards": 1},
        "lora": {**untied, "peft": LORA},
        "dora": {**untied, "peft": {**LORA, "use_dora": True, "bias": "lora_only"}},
        "head": {
            **untied,
            "peft": {**LORA, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        },
    }
    out = tmp_path_factory.mktemp("results")
    run_cases(out, cases, ranks=WORLD_SIZE, script=SCRIPT)
    return out


def logits_of(model: torch.nn.Module, saved: dict[str, torch.Tensor]) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(input_ids=saved["ids"]).logits.float()


@pytest.mark.parametrize("case", ["full", "tied", "copies", "bf16", "half"])
def test_a_full_model_reloads_with_the_trained_logits(results: Path, case: str) -> None:
    """bf16 by save_dtype, half by the checkpoint's own."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    saved = torch.load(results / case / "logits.pt", weights_only=True)
    model = AutoModelForCausalLM.from_pretrained(results / case / "model")
    is_half = case in ("bf16", "half")
    assert {parameter.dtype for parameter in model.parameters()} == {
        torch.bfloat16 if is_half else torch.float32
    }
    assert (logits_of(model, saved) - saved["logits"]).abs().max() < (0.1 if is_half else 1e-5)
    assert AutoTokenizer.from_pretrained(results / case / "model").decode([10, 11])
    assert (
        "# meta-llama/Llama-3.1-8B, fine-tuned"
        in (results / case / "model" / "README.md").read_text()
    )
    assert not list(results.rglob(".writing-*"))
    assert all(
        file.stat().st_size < 62_000 for file in (results / case / "model").glob("*.safetensors")
    )


def test_frozen_layers_are_bit_identical_although_training_held_them_in_bf16(
    results: Path, tiny_model: Path
) -> None:
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float16).state_dict()
    model = AutoModelForCausalLM.from_pretrained(
        results / "frozen" / "model", dtype="auto"
    ).state_dict()
    for name, tensor in base.items():
        assert model[name].dtype == torch.float16
        assert torch.equal(model[name], tensor) == (".layers.0." in name), name


@pytest.mark.parametrize("case", ["lora", "dora", "head"])
def test_an_adapter_reloads_in_peft_with_the_trained_logits_and_changes_the_base(
    results: Path, tiny_model: Path, case: str
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    saved = torch.load(results / case / "logits.pt", weights_only=True)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    before = logits_of(base, saved)
    model = PeftModel.from_pretrained(base, results / case / "model")
    assert (logits_of(model, saved) - saved["logits"]).abs().max() < 1e-5
    assert (before - saved["logits"]).abs().max() > 1e-2


@pytest.mark.parametrize("case", ["full", "tied", "lora", "dora", "head"])
def test_a_checkpoint_restores_the_trained_weights(results: Path, case: str) -> None:
    saved = torch.load(results / case / "logits.pt", weights_only=True)
    assert torch.equal(saved["from checkpoint"], saved["logits"])


def test_a_checkpoint_of_an_adapter_holds_no_frozen_weight(results: Path) -> None:
    from safetensors import safe_open

    folder = results / "lora" / "checkpoints" / "step-000003"
    trainer = json.loads((folder / "trainer.json").read_text())
    assert (trainer["step"], trainer["epoch"], trainer["world_size"]) == (3, 0.5, 3)
    names = {name for file in folder.glob("shard-*") for name in safe_open(file, "pt").keys()}
    weights = [name for name in names if name.startswith("model.")]
    assert len(weights) == 28 and all(".lora_" in name for name in weights)
    assert {f"optimizer.state.{name.removeprefix('model.')}.exp_avg" for name in weights} <= names


def test_plain_pytorch_reads_a_checkpoint_on_one_process(results: Path, tiny_model: Path) -> None:
    """The code of docs/reference/checkpoint-format.md, as it stands there, on what three ranks
    wrote."""
    from safetensors import safe_open
    from safetensors.torch import load_file

    folder = results / "full" / "checkpoints" / "step-000003"
    names: dict[str, Any] = {}
    for code in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        here = {
            "output/run/checkpoints/step-000100": str(folder),
            "Qwen/Qwen3-4B": str(tiny_model),
        }
        for there, path in here.items():
            code = code.replace(there, path)
        exec(code, names)
    model = names["model"]
    optimizer = names["optimizer"]
    saved = torch.load(results / "full" / "logits.pt", weights_only=True)
    assert (logits_of(model, saved) - saved["logits"]).abs().max() < 1e-5

    files = [folder / f"shard-{rank:05d}-model-00001-of-00001.safetensors" for rank in (1, 2, 3)]
    assert sorted(folder.iterdir()) == sorted(
        [*files, folder / "checksums.txt", folder / "trainer.json"]
    )
    weight = model.model.layers[1].mlp.down_proj.weight
    name = "optimizer.state.model.layers.1.mlp.down_proj.weight.exp_avg"
    pieces = [load_file(file)[name] for file in files]
    assert len(pieces[0]) == 11
    assert torch.equal(optimizer.state[weight]["exp_avg"], torch.cat(pieces))
    assert optimizer.state[weight]["step"].item() == 3
    assert optimizer.param_groups[0]["lr"] == 1e-5
    for rank, file in enumerate(files):
        header = safe_open(file, "pt").metadata()
        offsets = json.loads(header.pop("DCP_SHARDING_INFO"))
        assert header == {"format": "pt", "DCP_VERSION": "1.0"}
        assert offsets[name] == {"saved_offsets": [11 * rank, 0]}
        assert offsets[f"rng.{rank}.cpu"] == {"saved_offsets": [0]}
    parameters = dict(model.named_parameters())
    states = {
        f"optimizer.state.{name}.{key}"
        for name in parameters
        for key in ("step", "exp_avg", "exp_avg_sq")
    }
    found = {name for file in files for name in load_file(file)}
    assert found == {f"model.{name}" for name in parameters} | states | {
        f"rng.{rank}.cpu" for rank in range(3)
    }


@pytest.mark.parametrize("value", ["x", {"a": 1}, [2, "x"]])
def test_a_wrong_end_token_is_an_error_before_training(
    tiny_model: Path, tmp_path: Path, value: object
) -> None:
    from llama_ft.errors import UserError
    from llama_ft.export.export_settings import check_export
    from llama_ft.models import load_model_config, load_tokenizer

    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    tokenizer = load_tokenizer(folder, trust_remote_code=False)
    with pytest.raises(UserError, match="generation_config.json: eos_token_id is"):
        check_export(load_model_config(folder, False), tokenizer, folder)
