"""What --fit names."""

import pytest

from llama_ft.errors import UserError
from llama_ft.plan.gpus import TABLE, device_for


@pytest.mark.parametrize(
    ("text", "size"), [("80GiB", 80 * 2**30), ("80GB", 80 * 10**9), ("24000MB", 24 * 10**9), ("123456789B", 123456789)]
)
def test_a_size_is_the_memory_of_a_rank(text: str, size: int) -> None:
    assert device_for(text, "cuda").bytes == device_for(text, "cpu").bytes == size


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("h100", "h100"),
        ("H100 80GB", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("a100-80", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("Tesla T4", "t4"),
        ("RTX 6000 Ada", "rtx6000ada"),
    ],
)
def test_a_gpu_is_known_by_its_usual_names(text: str, name: str) -> None:
    assert device_for(text, "cuda").name.startswith(f"{name} (")


def test_a_gpu_has_less_than_what_is_on_its_box() -> None:
    sold_as = {"t4": 16, "l4": 24, "rtx4090": 24, "a100-40": 40, "l40s": 48, "a100": 80, "h100": 80, "h200": 141}
    for name, gigabytes in sold_as.items():
        assert 0.9 * gigabytes < device_for(name, "cuda").bytes / 2**30 < gigabytes, name


def test_an_unknown_gpu_is_refused_with_the_nearest_and_all_names() -> None:
    with pytest.raises(UserError) as refused:
        device_for("h10", "cuda")
    assert str(refused.value).startswith("error: --fit h10: expected the memory of a rank, such as 80GiB, or one of ")
    assert "Did you mean h100?" in str(refused.value)
    assert all(name in str(refused.value) for name in TABLE)


def test_on_the_cpu_only_a_size_will_do() -> None:
    with pytest.raises(UserError, match="expected the memory of a rank, such as 80GiB."):
        device_for("h100", "cpu")
