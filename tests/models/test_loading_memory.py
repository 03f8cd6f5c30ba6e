"""No rank holds more than its shards and a part of one tensor while a model loads, measured from
outside the process.

benchmarks/loading.py measures; what is allowed is worked out here, from the model's shape. The
bounds are those the benchmark checks, with twice the room above a rank's own shards."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from forked import REPOSITORY, start_server
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

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


def benchmark() -> ModuleType:
    """benchmarks/loading.py as a module, under a name by which the processes it starts find it
    too."""
    sys.path.insert(0, str(REPOSITORY / "benchmarks"))
    return importlib.import_module("loading")


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


@pytest.fixture(scope="module")
def fp8_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, published in FP8."""
    published = tmp_path_factory.mktemp("fp8")
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = "bfloat16"
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (published / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in list(tensors.items()):
        if "_proj" in name:
            rows, columns = tensor.shape
            tensors[name] = tensor.to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.ones(rows // 128, columns // 128)
    save_file(tensors, published / "model.safetensors", {"format": "pt"})
    return published


def peaks(folder: Path, way: str, target: str) -> list[int]:
    """Peak of each rank's anonymous memory above its level before loading."""
    start_server()
    loading = benchmark()
    result = loading.Result()
    loading.measure(loading.Case(RANKS, way, target), folder, "cpu", result)
    return result.host_peaks


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
        ("slices", "4bit"),
        ("scatter", "fp32"),
        pytest.param("slices", "fp32", marks=pytest.mark.slow),
        pytest.param("slices", "8bit", marks=pytest.mark.slow),
        pytest.param("scatter", "8bit", marks=pytest.mark.slow),
        pytest.param("scatter", "4bit", marks=pytest.mark.slow),
    ],
)
def test_no_rank_holds_more_than_its_shards_and_a_part_of_a_tensor(
    folder: Path, way: str, target: str
) -> None:
    for peak, bound in zip(peaks(folder, way, target), bounds(way, target), strict=True):
        assert MODEL_BYTES[target] / RANKS < peak < bound


@pytest.mark.slow
@pytest.mark.parametrize(("way", "target"), [("slices", "fp32"), ("scatter", "4bit")])
def test_a_checkpoint_in_fp8_is_not_dequantized_as_a_whole(
    fp8_folder: Path, way: str, target: str
) -> None:
    for peak, bound in zip(peaks(fp8_folder, way, target), bounds(way, target), strict=True):
        assert MODEL_BYTES[target] / RANKS < peak < bound


def test_a_rank_that_loads_the_whole_model_is_over_the_bound(folder: Path) -> None:
    for peak, bound in zip(
        peaks(folder, "from_pretrained", "bf16"), bounds("slices", "bf16"), strict=True
    ):
        assert peak > bound
