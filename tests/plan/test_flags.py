"""The flags of recipes/plan.py, and what --fit names."""

from pathlib import Path
from typing import Any

import pytest

from llama_ft.errors import UserError
from llama_ft.plan.flags import read_plan_flags
from llama_ft.plan.gpus import device_bytes

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"


def read(*words: str) -> Any:
    return read_plan_flags(list(words), QUICKSTART)


def test_flags_of_the_plan_stand_among_those_of_the_recipe(tmp_path: Path) -> None:
    """Neither weights nor data have to be there."""
    (tmp_path / "config.json").write_text("{}")
    words = [
        "--lr",
        "1e-5",
        "--nproc=4",
        "--model_name",
        str(tmp_path),
        "--quick",
        "--use-peft",
        "--dataset",
        "no.jsonl",
    ]
    config, places, options = read(*words)
    assert (options.nproc, options.nproc_per_node, options.quick, options.json) == (4, 4, True, False)
    assert config.train.lr == 1e-5 and config.peft.use_peft and config.data.dataset == "no.jsonl"
    assert places["train.lr"] == "--lr"


@pytest.mark.parametrize(("nproc", "node"), [(1, 1), (64, 8), (12, 6), (11, 1)])
def test_nodes_are_as_large_as_they_divide_the_ranks(nproc: int, node: int) -> None:
    assert read("--nproc", str(nproc))[2].nproc_per_node == node


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    words = [
        "--nproc",
        "8",
        "--nproc_per_node",
        "3",
        "--lr",
        "fast",
        "--fit_out",
        "here",
        "--json",
        "now",
        "--lrr",
        "1",
    ]
    with pytest.raises(UserError) as told:
        read(*words)
    for said in ("--nproc_per_node 3: 8 ranks", "--lr fast", "--fit_out: ", "--json now: ", "Did you mean --lr?"):
        assert said in str(told.value)
    with pytest.raises(UserError, match=r"holds no config\.json"):
        read("--model_name", str(tmp_path))
    with pytest.raises(UserError, match="--fit h10: .*Did you mean h100?"):
        read("--fit", "h10")


@pytest.mark.parametrize(("text", "size"), [("80GiB", 80 * 2**30), ("24000MB", 24 * 10**9), ("123456789B", 123456789)])
def test_a_size_is_the_memory_of_a_rank(text: str, size: int) -> None:
    assert device_bytes(text) == size


def test_a_gpu_has_less_than_what_is_on_its_box() -> None:
    sold_as = {"t4": 16, "l4": 24, "RTX4090": 24, "a100-40": 40, "l40s": 48, "a100": 80, "H100": 80, "h200": 141}
    for name, gigabytes in sold_as.items():
        assert 0.9 * gigabytes < device_bytes(name) / 2**30 < gigabytes, name
