"""The flags of recipes/plan.py, and what --fit names."""

from pathlib import Path
from typing import Any

import pytest
import torch

from llama_ft.errors import UserError
from llama_ft.observe.flops import peak_of
from llama_ft.plan.duration import peak_name
from llama_ft.plan.flags import GPUS, device_bytes, find_gpu, read_plan_flags

DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo.yaml"


def read(line: str) -> Any:
    return read_plan_flags(line.split(), DEMO)


def test_flags_of_the_plan_can_be_mixed_with_those_of_the_recipe(tmp_path: Path) -> None:
    """Neither weights nor data have to be there."""
    (tmp_path / "config.json").write_text("{}")
    line = f"--lr 1e-5 --nproc=12 --model_name {tmp_path} --quick --use-peft --dataset no.jsonl --fit 24000MB"
    config, places, options = read(line)
    assert (options.nproc, options.nproc_per_node, options.quick, options.json) == (
        12,
        6,
        True,
        False,
    )
    assert config.train.lr == 1e-5 and config.peft.use_peft and config.data.dataset == "no.jsonl"
    assert places["train.lr"] == "--lr" and options.fit_bytes == 24 * 10**9


def test_all_user_errors_are_reported_at_once() -> None:
    with pytest.raises(UserError) as refusal:
        read("--nproc 0 --lr fast --json now --lrr 1")
    for said in ("--nproc 0: ", "--lr fast", "--json now: ", "Did you mean --lr?"):
        assert said in str(refusal.value)
    assert read("--fit RTX4090")[2].fit_bytes == 23.5 * 2**30
    with pytest.raises(UserError, match="^error: --gpu is not a flag. Did you mean --fit[?]$"):
        read("--gpu rtx4090")
    with pytest.raises(
        UserError, match="--fit h10: expected the memory of a rank, .*h200.* Did you mean h100?"
    ):
        read("--fit h10")


def test_fit_plans_quickly_unless_asked_otherwise() -> None:
    assert read("--fit 24")[2].quick is True
    assert read("--fit 24 --quick false")[2].quick is False
    assert read("--lr 1e-5")[2].quick is False
    assert read("--quick")[2].quick is True


def test_a_t4_needs_fp16() -> None:
    with pytest.raises(UserError, match="does not compute bf16"):
        read("--fit t4")
    assert read("--fit T4 --precision fp16")[2].gpu == "t4"


@pytest.mark.parametrize(
    ("text", "gpu", "gib"),
    [
        ("a100-80", "a100", 79.1),
        ("A100-80GB", "a100", 79.1),
        ("a100-40gb", "a100-40", 39.3),
        ("RTX 4090", "rtx4090", 23.5),
        ("NVIDIA GeForce RTX 4090", "rtx4090", 23.5),
        ("4090", "rtx4090", 23.5),
        ("NVIDIA GeForce RTX 4080", "rtx4080", 15.6),
        ("5080", "rtx5080", 15.4),
        ("Tesla V100-32GB", "v100-32", 31.7),
        ("NVIDIA RTX A6000", "rtxa6000", 47.4),
        ("a6000", "rtxa6000", 47.4),
        ("RTX 6000 Ada", "rtx6000ada", 47.3),
        ("A40", "a40", 44.3),
        ("24", "", 24.0),
        ("24GiB", "", 24.0),
    ],
)
def test_gpus_are_found_by_their_usual_names(text: str, gpu: str, gib: float) -> None:
    assert find_gpu(text) == gpu
    assert device_bytes(text) == int(gib * 2**30)


def test_tokens_of_images_need_a_number_of_images() -> None:
    options = read("--images 2 --image_tokens 400")[2]
    assert (options.images, options.image_tokens) == (2, 400)
    with pytest.raises(UserError, match="--image_tokens: has no effect without --images"):
        read("--image_tokens 400")


def test_every_gpu_of_fit_has_a_published_speed() -> None:
    for gpu in GPUS:
        assert peak_of(peak_name(gpu), torch.float16) > 0, gpu


@pytest.mark.parametrize("line", ["--fit 24GB --price 1", "--price 1"])
def test_a_price_needs_the_name_of_a_gpu(line: str) -> None:
    with pytest.raises(UserError, match="--price 1: needs --fit with a GPU's name, .* l40s,"):
        read(line)
    assert read("--fit l40s --price 1")[2].price == 1


def test_the_sizes_and_speeds_of_gpus_are_plausible() -> None:
    """A driver and ECC leave 88 to 100% of a nominal size, and newer GPUs of a class are not
    slower."""
    nominal = {"t4": 16, "v100": 16, "v100-32": 32, "l4": 24, "a40": 48, "l40": 48, "l40s": 48}
    nominal |= {"a10": 24, "a10g": 24, "rtx3090": 24, "rtx4080": 16, "rtx4090": 24, "rtx5080": 16}
    nominal |= {"rtx5090": 32, "rtxa4000": 16, "rtxa5000": 24, "rtxa6000": 48, "rtx6000ada": 48}
    nominal |= {"a100-40": 40, "a100": 80, "h100": 80, "h200": 141, "b200": 180}
    assert nominal.keys() == GPUS.keys()
    for gpu, gib in GPUS.items():
        assert 0.88 * nominal[gpu] < gib < nominal[gpu], gpu
    speeds = {gpu: peak_of(peak_name(gpu), torch.float16) for gpu in GPUS}
    for older, newer in [("t4", "v100"), ("v100", "a100"), ("a100", "h100"), ("h100", "b200")]:
        assert speeds[older] < speeds[newer]
    assert speeds["a100"] == speeds["a100-40"] and speeds["h100"] == speeds["h200"]
    assert speeds["a10g"] == 70e12, "not that of an A10"


@pytest.mark.parametrize("gpu", ["v100", "v100-32", "t4"])
def test_gpus_before_ampere_have_no_bf16(gpu: str) -> None:
    with pytest.raises(UserError, match="does not compute bf16. Add --precision fp16"):
        read(f"--fit {gpu}")
