"""The longest packed sequence that fits: what is printed was planned, fits, and is nearly the limit."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from llama_ft.config import load
from llama_ft.errors import UserError
from llama_ft.plan.fit import USABLE
from llama_ft.plan.flags import USUAL_GPUS, device_bytes, read_plan_flags
from llama_ft.plan.longest import CLOSE, Longest, describe_longest, find_longest, methods_of
from llama_ft.plan.predict import predict
from llama_ft.plan.types import PlanRequest

DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo.yaml"
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
    return find_longest(request, finetuning.RECIPE, [GPU], lambda text: None)


@pytest.mark.slow
def test_each_method_allows_longer_sequences_than_the_one_before(rows: list[Longest]) -> None:
    flags = [" ".join(row.flags) for row in rows]
    assert flags == [
        "",
        "--activation_checkpointing full",
        "--activation_checkpointing full --activation_offload",
        "--activation_checkpointing full --activation_offload --enable_fsdp --sequence_parallel_size 2",
    ]
    lengths = [row.tokens for row in rows]
    assert lengths == sorted(lengths)
    assert lengths[0] > 0
    # two ranks share each sequence, and hardly anything else is there
    assert lengths[3] > 1.8 * lengths[2]
    assert all(row.beyond for row in rows)  # the model has 256 positions
    assert rows[0].limits
    assert rows[2].host_bytes > rows[1].host_bytes


@pytest.mark.slow
def test_the_length_fits_and_a_little_more_does_not(
    rows: list[Longest], model: Path, finetuning: ModuleType
) -> None:
    row = rows[1]
    flags = [*" ".join(row.flags).split(), "--precision", "bf16_pure", "--batch_size_training", "1"]
    request = request_for(model, *flags, "--val_batch_size", "1", ranks=2)

    def needed(tokens: int) -> int:
        asked = dataclasses.replace(request, pack_length=tokens)
        return predict(asked, finetuning.RECIPE).device_bytes

    assert needed(row.tokens) <= USABLE * device_bytes(GPU) < needed(int(row.tokens * CLOSE * 1.01))


def test_the_table_says_what_a_length_needs() -> None:
    rows = [
        Longest("rtx4090", [], 78_464, ["activations"], 2**30, True),
        Longest("rtx4080", ["--activation_checkpointing full"], 0, [], 0, False),
    ]
    lines = describe_longest(rows, 1).splitlines()
    assert "one GPU" in lines[0]
    assert lines[2].split() == [
        *("rtx4090 78,464* activations 1.00 GiB the settings as they are".split())
    ]
    assert "none" in lines[3] and "weights" in lines[3]
    assert lines[4].startswith("* above the positions of the model")


def test_padding_has_no_longest_sequence(model: Path, finetuning: ModuleType) -> None:
    request = request_for(model, "--batching_strategy", "padding")
    with pytest.raises(UserError, match="--longest: packed sequences are planned"):
        find_longest(request, finetuning.RECIPE, [GPU], print)


def test_on_the_cpu_nothing_is_offloaded(model: Path) -> None:
    assert methods_of(request_for(model, device="cpu")) == [
        {},
        {"activation_checkpointing": "full"},
    ]


def test_the_flag_takes_gpus_and_sizes() -> None:
    def read(line: str) -> list[str] | None:
        return read_plan_flags(line.split(), DEMO)[2].longest

    assert read("--longest rtx4090,80GiB") == ["rtx4090", "80GiB"]
    assert read("--longest --nproc 2") == list(USUAL_GPUS)
    assert read("--nproc 2") is None
    with pytest.raises(UserError, match="--longest h10: expected the memory of a rank"):
        read("--longest h10")
    with pytest.raises(UserError, match="--longest: cannot be combined with --fit"):
        read("--longest h100 --fit h100")
