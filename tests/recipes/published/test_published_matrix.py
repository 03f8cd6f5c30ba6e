"""Every published format, with every method, on 1, 2 and 4 ranks and with both ways of loading, is
trained as the same checkpoint in 16 bits, and comes out in 16 bits."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import build_model, losses, run_cases
from models.weights.test_load_weights import SCRIPT as LOAD_AND_DUMP
from published_models import PUBLISHED
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from llama_ft.export import Exporter, find_valid

pytestmark = pytest.mark.slow

SAMPLES = 8
SECONDS = 600.0
LORA = ["--use_peft", "--lora_dropout", "0"]
METHODS: dict[str, list[str]] = {
    "full": [],
    "lora": LORA,
    "4bit": [*LORA, "--quantization", "4bit"],
    "8bit": [*LORA, "--quantization", "8bit"],
}
WAYS: dict[str, list[str]] = {"slices": [], "scatter": ["--low_cpu_fsdp"]}


@dataclass(frozen=True)
class Published:
    """A checkpoint as it is published, and in 16 bits; samples, and linear layers for LoRA."""

    folder: Path
    plain: Path
    samples: Path
    targets: str


# Blocks with an edge, experts, and integers with zero points; runs of the others differ in values.
SLOW = ("fp8-edge", "mxfp4", "awq")


@pytest.fixture(
    scope="module",
    params=[
        name if name in SLOW else pytest.param(name, marks=pytest.mark.large) for name in PUBLISHED
    ],
)
def published(
    request: pytest.FixtureRequest,
    save_tokenizer: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Published:
    write, targets = PUBLISHED[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    for name in ("published", "plain"):
        save_tokenizer(folder / name)
    write(folder / "published", folder / "plain")
    generator = torch.Generator().manual_seed(1)
    lines = []
    for number in range(SAMPLES):
        ids = torch.randint(0, 301, (10 + number,), generator=generator).tolist()
        lines.append(json.dumps({"input_ids": ids, "labels": ids}))
    samples = folder / "samples.jsonl"
    samples.write_text("\n".join(lines))
    return Published(folder / "published", folder / "plain", samples, targets)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(1, marks=pytest.mark.large),
        2,
        pytest.param(4, marks=pytest.mark.large),
    ],
    ids=["1rank", "2ranks", "4ranks"],
)
def ranks(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


@pytest.fixture(scope="module")
def runs(ranks: int, published: Published, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of each method and way of loading, with all samples in each step. One way is repeated
    from the first step's checkpoint, loading in the other way; quantized runs also from the checkpoint
    in 16 bits."""
    folder = tmp_path_factory.mktemp("runs")
    common = ["--dataset", str(published.samples), "--device", "cpu", "--enable_fsdp"]
    common += ["--batching_strategy", "padding", "--batch_size_training", str(SAMPLES // ranks)]
    common += ["--precision", "fp32", "--lr", "1e-3", "--save_steps", "1", "--num_epochs", "2"]
    common += ["--max_train_step", "2"]
    flags = []
    for method, of_method in METHODS.items():
        settings = [*common, *of_method]
        if method != "full":
            settings += ["--target_modules", published.targets]
        if "bit" in method:
            plain = [*settings, "--model_name", str(published.plain)]
            flags.append([*plain, "--output_dir", f"{folder}/{method}-plain"])
        settings += ["--model_name", str(published.folder)]
        for way, of_way in WAYS.items():
            flags.append([*settings, *of_way, "--output_dir", f"{folder}/{method}-{way}"])
        checkpoint = f"{folder}/{method}-slices/checkpoints/step-000001"
        again = [*settings, *WAYS["scatter"], "--resume", checkpoint]
        flags.append([*again, "--output_dir", f"{folder}/{method}-resumed"])
    run_cases(folder, flags, ranks=0 if ranks == 1 else ranks, timeout=SECONDS)
    return folder


@pytest.fixture(scope="module")
def first_loss(published: Published) -> float:
    """Plain Transformers' mean loss of all samples."""
    model = AutoModelForCausalLM.from_pretrained(published.plain, dtype=torch.float32)
    total = 0.0
    tokens = 0
    for line in published.samples.read_text().splitlines():
        ids = torch.tensor([json.loads(line)["input_ids"]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0]
        loss = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="sum")
        total += loss.item()
        tokens += ids.shape[1] - 1
    return total / tokens


def test_each_rank_holds_the_rows_of_the_checkpoint_in_16_bits(
    ranks: int, published: Published, tmp_path: Path
) -> None:
    """Weights, quantized weights and their scales are equal to the last bit."""
    peft = {"use_peft": True, "r": 6, "target_modules": "all-linear"}
    settings: dict[str, dict[str, Any]] = {
        "full": {"peft": {}, "precision": "fp32"},
        "lora": {"peft": peft, "precision": "bf16_mixed"},
    }
    for bits in ("4bit", "8bit"):
        settings[bits] = settings["lora"] | {"quantization": {"mode": bits}}
    cases = {}
    for method, of_method in settings.items():
        common = {"shard_degree": "world", **of_method}
        plain = {"model": str(published.plain), "scatter": False}
        cases[f"{method}-plain"] = common | plain
        for way in WAYS:
            own = {"model": str(published.folder), "scatter": way == "scatter"}
            cases[f"{method}-{way}"] = common | own
    count = 0 if ranks == 1 else ranks
    run_cases(tmp_path, cases, ranks=count, script=LOAD_AND_DUMP, timeout=SECONDS)
    for method in settings:
        for rank in range(ranks):
            expected = torch.load(tmp_path / f"{method}-plain-rank{rank}.pt")
            for way in WAYS:
                held = torch.load(tmp_path / f"{method}-{way}-rank{rank}.pt")
                assert held.keys() == expected.keys()
                for name, tensor in held.items():
                    assert tensor.dtype == expected[name].dtype
                    assert torch.equal(tensor, expected[name]), (method, way, name)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", METHODS)
def test_a_run_is_that_of_the_checkpoint_in_16_bits(
    runs: Path, published: Published, first_loss: float, tmp_path: Path, method: str, way: str
) -> None:
    by_step = losses(runs / f"{method}-{way}")
    assert losses(runs / f"{method}-resumed")[-1] == by_step[-1]
    if "bit" in method:
        assert by_step == losses(runs / f"{method}-plain")
    else:
        assert by_step[0] == pytest.approx(first_loss, rel=1e-5)
    is_merged = method != "full"
    check_result(runs / f"{method}-{way}", published, tmp_path / "exported", is_merged)


def check_result(run: Path, published: Published, exported: Path, merge: bool) -> None:
    """Compare the final model with the checkpoint in 16 bits, or the merged adapter with PEFT's."""
    from peft import PeftModel

    base: Any = AutoModelForCausalLM.from_pretrained(published.plain, dtype=torch.float32)
    if merge:
        settings = json.loads((run / "model" / "adapter_config.json").read_text())
        assert settings["base_model_name_or_path"] == str(published.folder)
        base = PeftModel.from_pretrained(base, run / "model").merge_and_unload()
    expected = base.state_dict()
    exporter = Exporter.prepare(
        find_valid(run), build_model(), None, None, trust_remote_code=False, merge=merge
    )
    exporter.write_model(exported, None, 10**9)
    config = json.loads((exported / "config.json").read_text())
    assert "quantization_config" not in config
    stored = load_file(exported / "model.safetensors")
    whole = load_file(published.plain / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in stored.items()} == {
        name: tensor.dtype for name, tensor in whole.items()
    }
    loaded = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).state_dict()
    assert loaded.keys() == expected.keys()
    # full fine-tuning: two steps of AdamW with a learning rate of 1e-3, rounded to bf16
    largest_change = 1e-5 if merge else 3e-3
    for name, tensor in loaded.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-2, atol=largest_change)
    if not merge:
        written = load_file(run / "model" / "model.safetensors")
        assert written.keys() == stored.keys()
        assert all(torch.equal(written[name], tensor) for name, tensor in stored.items())
