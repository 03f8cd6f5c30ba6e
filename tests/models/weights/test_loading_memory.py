"""No rank holds more than its shards and a part of one tensor while a model loads, measured from
outside the process.

benchmarks/speed/loading.py measures; what is allowed is worked out here, from the model's shape. The
bounds are those the benchmark checks, with twice the room above a rank's own shards."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from forked import REPOSITORY, forked
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
)

JOB = Path(__file__).with_name("loading_memory_job.py")
HIDDEN = 1024
MIDDLE = 2816
LAYERS = 16
WORDS = 4096
RANKS = 2
LORA_RANK = 8
LINEARS = [(HIDDEN, HIDDEN)] * 4 + [(MIDDLE, HIDDEN)] * 2 + [(HIDDEN, MIDDLE)]
IN_LINEARS = LAYERS * sum(rows * columns for rows, columns in LINEARS)
ELSEWHERE = 2 * WORDS * HIDDEN + (2 * LAYERS + 1) * HIDDEN
ADAPTERS = LAYERS * sum(LORA_RANK * (rows + columns) for rows, columns in LINEARS)
MODEL_BYTES = {
    "bf16": 2 * (IN_LINEARS + ELSEWHERE),
    "fp32": 4 * (IN_LINEARS + ELSEWHERE),
    "8bit": IN_LINEARS
    + 4 * LAYERS * sum(rows for rows, _ in LINEARS)
    + 2 * ELSEWHERE
    + 4 * ADAPTERS,
    "4bit": IN_LINEARS // 2 + 4 * IN_LINEARS // 64 + 2 * ELSEWHERE + 4 * ADAPTERS,
}
LARGEST_BYTES = {target: WORDS * HIDDEN * (4 if target == "fp32" else 2) for target in MODEL_BYTES}
ALLOWANCE = 64 * 2**20
# of a rank's shards that its level rises by: some memory is used again that was there before loading
LEAST_SHARE = 0.95


def benchmark() -> ModuleType:
    """benchmarks/speed/loading.py as a module."""
    sys.path.insert(0, str(REPOSITORY))
    return importlib.import_module("benchmarks.speed.loading")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 214 M weights, 407 MiB in bf16."""
    folder = tmp_path_factory.mktemp("large")
    shape = {
        "hidden_size": HIDDEN,
        "intermediate_size": MIDDLE,
        "num_hidden_layers": LAYERS,
        "vocab_size": WORDS,
    }
    config = LlamaConfig(**shape, num_attention_heads=16)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    values = {
        name: torch.full(tensor.shape, 0.01, dtype=torch.bfloat16)
        for name, tensor in model.state_dict().items()
    }
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(
    scope="module",
    params=[
        "fp8",
        "mxfp4",
        pytest.param("int4", marks=pytest.mark.large),
        pytest.param("gptq", marks=pytest.mark.large),
    ],
)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 214 M weights (mxfp4: 222 M) in a published format."""
    folder = tmp_path_factory.mktemp(request.param)
    shape = {"hidden_size": HIDDEN, "num_attention_heads": 16, "vocab_size": WORDS}
    if request.param == "mxfp4":
        config: PretrainedConfig = GptOssConfig(
            **shape,
            intermediate_size=HIDDEN,
            num_key_value_heads=4,
            head_dim=64,
            num_hidden_layers=8,
            num_local_experts=8,
        )
    else:
        config = LlamaConfig(**shape, intermediate_size=MIDDLE, num_hidden_layers=LAYERS)
    benchmark().save_published(folder, config, request.param)
    return folder


def measure(folder: Path, ranks: int, way: str, target: str) -> dict[str, Any]:
    """What the benchmark finds: the peak of each rank's anonymous memory above its level before
    loading, and sizes of tensors."""
    case = {"folder": str(folder), "ranks": ranks, "way": way, "target": target}
    file = folder / "case.json"
    file.write_text(json.dumps(case))
    finished = forked(JOB, file)
    assert finished.exit_code == 0, finished.output
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def bounds(way: str, target: str) -> list[int]:
    largest = LARGEST_BYTES[target]
    above = [
        1.5 * largest if way == "scatter" and rank == 0 else largest / RANKS
        for rank in range(RANKS)
    ]
    return [int(MODEL_BYTES[target] / RANKS + 2 * (room + ALLOWANCE)) for room in above]


@pytest.mark.parametrize(
    ("way", "target"),
    [
        ("slices", "fp32"),
        ("scatter", "fp32"),
        pytest.param("slices", "4bit", marks=pytest.mark.slow),
        pytest.param("slices", "8bit", marks=pytest.mark.slow),
        pytest.param("scatter", "8bit", marks=pytest.mark.slow),
        pytest.param("scatter", "4bit", marks=pytest.mark.slow),
    ],
)
def test_no_rank_holds_more_than_its_shards_and_a_part_of_a_tensor(
    folder: Path, way: str, target: str
) -> None:
    peaks = measure(folder, RANKS, way, target)["host_peaks"]
    for peak, bound in zip(peaks, bounds(way, target), strict=True):
        assert LEAST_SHARE * MODEL_BYTES[target] / RANKS < peak < bound


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=pytest.mark.large), pytest.param(4, marks=pytest.mark.large)]
)
@pytest.mark.parametrize(("way", "target"), [("slices", "bf16"), ("scatter", "4bit")])
def test_a_published_checkpoint_is_not_dequantized_as_a_whole(
    published: Path, ranks: int, way: str, target: str
) -> None:
    found = measure(published, ranks, way, target)
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(published)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    whole = 2 * model.num_parameters()
    in_shards = sum(rank["shards"] for rank in found["ranks"])
    if target == "bf16":
        assert in_shards == whole
    else:
        assert in_shards < 0.4 * whole
    for rank, (loaded, peak) in enumerate(zip(found["ranks"], found["host_peaks"], strict=True)):
        room = 1.5 * loaded["largest"] if way == "scatter" and rank == 0 else loaded["slice"]
        assert LEAST_SHARE * loaded["shards"] < peak < loaded["shards"] + 2 * (room + ALLOWANCE)


def test_a_rank_that_loads_the_whole_model_is_over_the_bound(folder: Path) -> None:
    peaks = measure(folder, RANKS, "from_pretrained", "bf16")["host_peaks"]
    for peak, bound in zip(peaks, bounds("slices", "bf16"), strict=True):
        assert peak > bound
