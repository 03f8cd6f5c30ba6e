"""The plan of a run with --reference_model or --teacher_model, which is loaded and used before the
run's own model is built."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from llama_ft.config import load
from llama_ft.plan.predict import predict
from llama_ft.plan.types import Plan, PlanRequest, describe

FLAGS = "--use_peft --context_length 64 --batch_size_training 1 --dataset demo --precision fp32"
OTHER_MODEL = {"dpo": "--reference_model", "distill": "--teacher_model"}


def plan(
    finetuning: ModuleType,
    folder: Path,
    objective: str,
    other_model: Path | None,
    quick: bool,
    *more: str,
) -> Plan:
    other = [OTHER_MODEL[objective], str(other_model)] if other_model else []
    flags = ["--model_name", str(folder), "--objective", objective, *FLAGS.split(), *other, *more]
    config, _ = load(flags, paths=False)
    request = PlanRequest(
        config, folder, 1, 1, "cuda", has_validation=False, samples=(1000, 100_000)
    )
    return predict(request, finetuning.RECIPE, quick)


@pytest.mark.parametrize(
    ("objective", "quick"),
    [
        pytest.param("dpo", True, marks=pytest.mark.slow),
        pytest.param("dpo", False, marks=pytest.mark.slow),
        pytest.param("distill", True, marks=pytest.mark.slow),
        pytest.param("distill", False, marks=pytest.mark.slow),
    ],
)
def test_a_larger_other_model_is_planned(
    finetuning: ModuleType,
    save_model: Callable[..., Path],
    tmp_path: Path,
    objective: str,
    quick: bool,
) -> None:
    small = save_model(tmp_path / "small", num_hidden_layers=2)
    size = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}
    large = save_model(tmp_path / "large", **size)
    stored = tmp_path / "teacher.safetensors"
    stored.touch()
    file = ["--teacher_file", str(stored)] if objective == "distill" else []
    alone = plan(finetuning, small, objective, None, quick, *file)
    with_small = plan(finetuning, small, objective, small, quick)
    with_large = plan(finetuning, small, objective, large, quick)
    assert with_small.device_bytes == pytest.approx(alone.device_bytes, rel=0.02)
    weights = sum(file.stat().st_size for file in large.glob("*.safetensors"))
    extra = with_large.device_bytes - with_large.outside_bytes
    assert weights <= extra < 1.5 * weights
    assert "evaluation" in [peak.phase for peak in with_large.peaks]
    assert with_large.checkpoint_bytes == alone.checkpoint_bytes


def test_the_file_of_a_teacher_is_planned_and_then_takes_the_place_of_the_teacher(
    finetuning: ModuleType, save_model: Callable[..., Path], tmp_path: Path
) -> None:
    small = save_model(tmp_path / "small", num_hidden_layers=2)
    large = save_model(tmp_path / "large", hidden_size=512, intermediate_size=2048)
    quantized = ("--teacher_quantization", "4bit")
    file = tmp_path / "teacher.safetensors"
    stored = ("--teacher_file", str(file), "--distill_top_k", "10")
    whole = plan(finetuning, small, "distill", large, True, *stored)
    in_4_bits = plan(finetuning, small, "distill", large, True, *quantized)
    assert in_4_bits.device_bytes < whole.device_bytes
    assert whole.teacher_bytes == 1000 * 16 + 100_000 * 10 * 8
    assert "The teacher's file takes 80 bytes per token in the loss: 7.6 MiB" in describe(whole)
    file.touch()
    alone = plan(finetuning, small, "distill", None, True, *stored)
    assert plan(finetuning, small, "distill", large, True, *stored) == alone
    assert alone.device_bytes < whole.device_bytes
