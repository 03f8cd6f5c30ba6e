"""The longest packed sequence that fits: what is printed was planned, fits, and is nearly the limit."""

import contextlib
import dataclasses
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import REPOSITORY, load_script
from transformers import AutoModelForCausalLM, LlamaConfig

from llama_ft.config import load
from llama_ft.errors import UserError
from llama_ft.models import BuiltModel
from llama_ft.plan.changes import methods_of
from llama_ft.plan.fake import fake_checkpoint
from llama_ft.plan.fit import USABLE
from llama_ft.plan.flags import USUAL_GPUS, PlanFlags, device_bytes, read_plan_flags
from llama_ft.plan.longest import (
    CLOSE,
    MULTIPLE,
    Longest,
    Method,
    Room,
    describe_longest,
    find_longest,
    find_methods,
)
from llama_ft.plan.predict import predict, predict_lengths
from llama_ft.plan.types import PlanRequest

DEMO = REPOSITORY / "configs" / "demo.yaml"
GPU = "1500MiB"  # a GiB of it is CUDA's and NCCL's


@pytest.fixture(scope="module")
def model(save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 2 layers, whose activations are large beside its weights."""
    folder = tmp_path_factory.mktemp("longest") / "model"
    return save_model(folder, hidden_size=64, intermediate_size=512)


def request_for(model: Path, *flags: str, ranks: int = 1, device: str = "cuda") -> PlanRequest:
    config, _ = load(["--model_name", str(model), "--dataset", "demo", *flags], paths=False)
    return PlanRequest(config, model, ranks, ranks, device)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def rows(model: Path, finetuning: ModuleType) -> list[Longest]:
    request = request_for(model, "--precision", "bf16_pure", "--batch_size_training", "4", ranks=2)
    options = PlanFlags(longest=[GPU])
    found, is_quadratic = find_longest(request, finetuning.RECIPE, options, lambda text: None)
    assert not is_quadratic
    return found


@pytest.mark.slow
def test_each_method_allows_longer_sequences_than_the_one_before(rows: list[Longest]) -> None:
    added = [
        "",
        "--enable_fsdp",
        "--activation_checkpointing full",
        "--tiled_mlp 2048",
        "--activation_offload",
        "--sequence_parallel_size 2",
    ]
    before: list[str] = []
    for row, flag in zip(rows, added, strict=True):
        assert set(row.flags) == {*before, *([flag] if flag else [])}
        before = row.flags
    lengths = [row.tokens for row in rows]
    assert lengths == sorted(lengths)
    assert lengths[0] > 0
    # two ranks share each sequence, and hardly anything else is there
    assert lengths[5] > 1.8 * lengths[4]
    assert all(row.beyond for row in rows)  # the model has 256 positions
    assert rows[0].limits
    assert rows[4].host_bytes > rows[3].host_bytes


@pytest.mark.slow
def test_the_length_fits_and_a_little_more_does_not(
    rows: list[Longest], model: Path, finetuning: ModuleType
) -> None:
    row = rows[2]
    flags = [*" ".join(row.flags).split(), "--precision", "bf16_pure", "--batch_size_training", "1"]
    request = request_for(model, *flags, "--val_batch_size", "1", ranks=2)

    def needed(tokens: int) -> int:
        asked = dataclasses.replace(request, pack_length=tokens)
        return predict(asked, finetuning.RECIPE).device_bytes

    assert needed(row.tokens) <= USABLE * device_bytes(GPU) < needed(int(row.tokens * CLOSE * 1.01))


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/planner/long_context.py, whose launches count tensors."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    return load_script(REPOSITORY / "benchmarks" / "planner" / "long_context.py")


@pytest.mark.skipif(shutil.which("c++") is None, reason="torch's allocations are counted by C++")
@pytest.mark.slow
def test_training_at_the_promised_length_fits(
    benchmark: ModuleType, finetuning: ModuleType, tmp_path: Path
) -> None:
    limit = 80 * 2**20
    benchmark.write_inputs(tmp_path, {8192: 1})
    config, _ = load(benchmark.Case(1, 8192).flags(tmp_path, "cpu"), DEMO)
    request = PlanRequest(config, tmp_path / "model", 1, 1, "cpu")
    method = Method(request, finetuning.RECIPE, [])
    [promised] = method.search([Room(USABLE * limit, float("inf"))])
    assert 1024 < promised < 8192
    more = dataclasses.replace(request, pack_length=round(1.15 * promised))
    assert predict(more, finetuning.RECIPE).device_bytes > limit

    case = benchmark.Case(1, promised)
    benchmark.write_inputs(tmp_path, {promised: 1})
    benchmark.launch([case], tmp_path, "cpu", dump=False)
    measured = benchmark.measured(case, tmp_path)
    assert 0.9 * limit < measured <= limit


def test_the_table_says_what_a_length_needs() -> None:
    rows = [
        Longest("rtx4090", [], 78_464, ["activations"], 2**30, beyond=True),
        Longest("rtx4080", ["--activation_checkpointing full"], 0, ["weights"], 0),
    ]
    lines = describe_longest(rows, False).splitlines()
    assert "one GPU" in lines[0]
    assert lines[2].split() == [
        *("rtx4090 78,464* activations 1.00 GiB the settings as they are".split())
    ]
    assert "none" in lines[3] and "weights" in lines[3]
    assert lines[4].startswith("* above the positions of the model")
    assert "square of the length" not in describe_longest(rows, False)
    assert "square of the length" in describe_longest(rows, True)


def test_plans_of_several_lengths_are_those_of_each_length(
    model: Path, finetuning: ModuleType
) -> None:
    lengths = [3000, 300, 1500]
    flags = "--precision bf16_pure --activation_checkpointing full --tiled_mlp 1024 --enable_fsdp"
    flags += " --sequence_parallel_size 2 --batch_size_training 1"
    request = request_for(model, *flags.split(), ranks=2)
    together = predict_lengths(request, finetuning.RECIPE, lengths, quick=False)
    for length, plan in zip(lengths, together, strict=True):
        alone = dataclasses.replace(request, pack_length=length)
        assert plan == predict(alone, finetuning.RECIPE)


@pytest.mark.slow
def test_plans_of_a_search_build_the_whole_model_once_for_its_headers(
    finetuning: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = 6
    LlamaConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=layers).save_pretrained(
        tmp_path
    )
    built = list[int]()
    build = fake_checkpoint.build_on_meta

    def counted(config: Any, *arguments: Any, **more: Any) -> BuiltModel:
        built.append(config.num_hidden_layers)
        return build(config, *arguments, **more)

    monkeypatch.setattr(fake_checkpoint, "build_on_meta", counted)
    request = request_for(tmp_path, "--use_peft", "--batch_size_training", "1")
    other = request_for(tmp_path, "--use_peft", "--activation_checkpointing", "full")
    search = [
        dataclasses.replace(request, pack_length=2048),
        dataclasses.replace(request, config=other.config, pack_length=256),
    ]
    plans = [predict(each, finetuning.RECIPE, quick=True) for each in search]
    assert all(plan.is_quick for plan in plans)
    # for the headers, to compare the layers, and with the layers of the two plans
    assert sorted(built) == [3, 5, layers, layers]
    alone = dataclasses.replace(other, pack_length=256)
    assert predict(alone, finetuning.RECIPE, quick=True) == plans[1]
    assert len(built) == 8


def test_a_plan_of_a_few_pieces_has_the_memory_of_all(
    model: Path, finetuning: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = "--precision bf16_pure --activation_checkpointing full --tiled_mlp 64"
    request = request_for(model, *flags.split(), "--batch_size_training", "1", device="cpu")
    request = dataclasses.replace(request, pack_length=3000)
    few = predict(request, finetuning.RECIPE)
    monkeypatch.setattr("llama_ft.plan.predict.sampled_pieces", contextlib.nullcontext)
    assert predict(request, finetuning.RECIPE) == few


@pytest.mark.slow
def test_host_memory_can_be_what_limits_the_length(model: Path, finetuning: ModuleType) -> None:
    flags = "--precision bf16_pure --activation_checkpointing full --activation_offload"
    request = request_for(model, *flags.split(), "--batch_size_training", "1")
    method = Method(request, finetuning.RECIPE, [])
    rooms = [Room(device_bytes(GPU), 8 * 2**20), Room(device_bytes(GPU), float("inf"))]
    limited, free = method.search(rooms)
    assert 0 < limited < free
    assert method.describe(GPU, limited, rooms[0]).limits == ["host memory"]
    assert method.describe(GPU, free, rooms[1]).limits == ["activations"]
    [fits, more] = predict_lengths(
        request, finetuning.RECIPE, [limited, round(limited * CLOSE) + MULTIPLE], quick=False
    )
    assert fits.host_bytes <= 8 * 2**20 < more.host_bytes


@pytest.mark.parametrize(("implementation", "expected"), [("sdpa", False), ("eager", True)])
def test_models_without_a_fused_kernel_are_quadratic(
    implementation: str, expected: bool, model: Path, finetuning: ModuleType
) -> None:
    request = request_for(model, "--attn_implementation", implementation)
    assert Method(request, finetuning.RECIPE, []).is_quadratic() == expected


def test_a_peak_that_begins_to_grow_is_not_quadratic(
    finetuning: ModuleType, tmp_path: Path
) -> None:
    # up to about 32,768 tokens the gradients of a layer decide
    width = 2**16
    shape = {"hidden_size": width, "intermediate_size": width, "num_attention_heads": width // 128}
    LlamaConfig(**shape, num_hidden_layers=2, vocab_size=512).save_pretrained(tmp_path)
    flags = "--precision bf16_pure --activation_checkpointing full"
    request = request_for(tmp_path, *flags.split(), "--batch_size_training", "1")
    lengths = [16_384, 32_768, 65_536]
    plans = predict_lengths(request, finetuning.RECIPE, lengths, quick=True)
    first, middle, last = (plan.peak.bytes for plan in plans)
    assert last - middle > 3 * (middle - first)  # 4 times if it were a square
    assert not Method(request, finetuning.RECIPE, []).is_quadratic()


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--enable_fsdp",
        "--enable_fsdp --sharding_strategy SHARD_GRAD_OP --activation_checkpointing full",
        "--enable_fsdp --sequence_parallel_size 2",
        "--enable_fsdp --sequence_parallel_size 4 --tiled_mlp 512",
        "--activation_checkpointing full --activation_offload --use_peft --quantization 4bit",
    ],
)
@pytest.mark.parametrize("ranks", [1, 4])
def test_no_row_of_the_table_is_there_twice(
    flags: str, ranks: int, model: Path, finetuning: ModuleType
) -> None:
    methods = find_methods(request_for(model, *flags.split(), ranks=ranks), finetuning.RECIPE)
    changes = [frozenset(method.flags) for method in methods]
    assert changes[0] == frozenset()
    assert len(set(changes)) == len(changes)


def test_weights_that_are_too_large_end_the_search(model: Path, finetuning: ModuleType) -> None:
    request = request_for(model, "--use_peft", ranks=2)
    assert len(find_methods(request, finetuning.RECIPE)) == 6
    options = PlanFlags(longest=["300MiB", "400MiB"])
    reports = list[str]()
    none, is_quadratic = find_longest(request, finetuning.RECIPE, options, reports.append)
    assert len(reports) == 2  # only sharding changes what weights take
    assert [row for row in none if row.gpu == "400MiB"] == [
        Longest("400MiB", [], 0, ["weights"], 0, ranks=2),
        Longest("400MiB", ["--enable_fsdp"], 0, ["weights"], 0, ranks=2),
    ]
    assert not is_quadratic
    last_line = describe_longest(none, is_quadratic).splitlines()[-1]
    assert last_line.startswith("Not even 512 tokens fit. --fit 400MiB also searches")


@pytest.mark.large
def test_the_number_of_gpus_may_be_part_of_a_gpus_name(
    rows: list[Longest], model: Path, finetuning: ModuleType
) -> None:
    request = request_for(model, "--precision", "bf16_pure", "--batch_size_training", "4")
    options = PlanFlags(longest=[f"2x{GPU}", GPU])
    found, _ = find_longest(request, finetuning.RECIPE, options, lambda text: None)
    of_two = [row for row in found if row.gpu == f"2x{GPU}"]
    assert [row._replace(gpu=GPU) for row in of_two] == rows
    [*_, of_one] = found
    assert (of_one.gpu, of_one.ranks) == (GPU, 1)
    assert {*of_one.flags} == {*rows[4].flags} - {"--enable_fsdp"}
    assert of_one.tokens > 0


@pytest.mark.slow
def test_rows_are_in_the_order_of_the_gpus(model: Path, finetuning: ModuleType) -> None:
    gpus = ["4x300MiB", "300MiB", "4x400MiB", "2x300MiB", "300MiB"]
    request = request_for(model, "--use_peft", ranks=2)
    rows, _ = find_longest(request, finetuning.RECIPE, PlanFlags(longest=gpus), lambda text: None)
    # two for each: sharded and not
    named = [(row.gpu, row.ranks) for row in rows[::2]]
    assert named == [("4x300MiB", 4), ("300MiB", 2), ("4x400MiB", 4), ("2x300MiB", 2)]
    lines = describe_longest(rows, False).splitlines()
    assert "on 2 or 4 GPUs" in lines[0]
    assert "--nproc 2 --fit 300MiB also searches" in lines[-1]


def test_the_weights_of_a_run_are_those_of_its_parameters(
    model: Path, finetuning: ModuleType
) -> None:
    request = request_for(model, "--precision", "bf16_pure", device="cpu")
    method = Method(request, finetuning.RECIPE, [])
    method.plan([2048])
    # in bf16: weights, gradients, and the two states of AdamW
    least = 8 * AutoModelForCausalLM.from_pretrained(model).num_parameters()
    assert method.has_too_large_weights(Room(0.99 * least, math.inf))
    assert not method.has_too_large_weights(Room(1.01 * least, math.inf))


def test_padding_has_no_longest_sequence(model: Path, finetuning: ModuleType) -> None:
    request = request_for(model, "--batching_strategy", "padding")
    with pytest.raises(UserError, match="--longest: packed sequences are planned"):
        find_longest(request, finetuning.RECIPE, PlanFlags(longest=[GPU]), print)


def test_on_the_cpu_nothing_is_offloaded(model: Path) -> None:
    request = dataclasses.replace(request_for(model, device="cpu"), pack_length=2**20)
    assert methods_of(request) == [
        {},
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "full", "tiled_mlp": 2048},
    ]


def test_the_flag_takes_gpus_and_sizes() -> None:
    def read(line: str) -> list[str] | None:
        return read_plan_flags(line.split(), DEMO)[2].longest

    assert read("--longest rtx4090,80GiB") == ["rtx4090", "80GiB"]
    assert read("--dataset demo --longest rtx4090 80GiB,l4 h100 --nproc 2") == [
        *("rtx4090 80GiB l4 h100".split())
    ]
    assert read("--longest --nproc 2") == list(USUAL_GPUS)
    assert read("--longest rtx4090 8xh100 2x80GiB") == ["rtx4090", "8xh100", "2x80GiB"]
    assert read("--nproc 2") is None
    for wrong in ("h10", "0xh100", "8xh10", "8x", "xh100"):
        with pytest.raises(UserError, match="--longest .*: expected the memory of a rank"):
            read(f"--longest h100 {wrong}")
    with pytest.raises(UserError, match="--longest 2xt4: this GPU does not compute bf16"):
        read("--longest h100 2xt4")
    assert read("--longest 2xt4 --precision fp16") == ["2xt4"]
    options = read_plan_flags("--longest h100 --host_memory 64GiB".split(), DEMO)[2]
    assert options.host_bytes == 64 * 2**30
    with pytest.raises(UserError, match="--host_memory: has no effect without --longest"):
        read("--host_memory 64GiB")
    with pytest.raises(UserError, match="--host_memory.*expected a size such as"):
        read("--longest h100 --host_memory lots")
    with pytest.raises(UserError, match="--longest: cannot be combined with --fit"):
        read("--longest h100 --fit h100")
