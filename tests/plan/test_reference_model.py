"""The plan of a run with --reference_model, which is loaded and used before the policy is built."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from llama_ft.config import load
from llama_ft.plan.predict import predict
from llama_ft.plan.types import Plan, PlanRequest

FLAGS = "--objective dpo --use_peft --context_length 64 --batch_size_training 1 --dataset demo"


def plan(finetuning: ModuleType, folder: Path, reference: Path | None, quick: bool) -> Plan:
    other = ["--reference_model", str(reference)] if reference else []
    flags = ["--model_name", str(folder), *FLAGS.split(), "--precision", "fp32", *other]
    config, _ = load(flags, paths=False)
    request = PlanRequest(config, folder, 1, 1, "cuda", has_validation=False)
    return predict(request, finetuning.build_model, quick)


@pytest.mark.parametrize("quick", [False, True])
def test_a_larger_reference_model_is_planned(
    finetuning: ModuleType, save_model: Callable[..., Path], tmp_path: Path, quick: bool
) -> None:
    small = save_model(tmp_path / "small", num_hidden_layers=2)
    size = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 7}
    large = save_model(tmp_path / "large", **size)
    alone = plan(finetuning, small, None, quick)
    with_small = plan(finetuning, small, small, quick)
    with_large = plan(finetuning, small, large, quick)
    assert with_small.device_bytes == pytest.approx(alone.device_bytes, rel=0.02)
    weights = sum(file.stat().st_size for file in large.glob("*.safetensors"))
    extra = with_large.device_bytes - with_large.outside_bytes
    assert weights <= extra < 1.5 * weights
    assert "evaluation" in [peak.phase for peak in with_large.peaks]
    assert with_large.checkpoint_bytes == alone.checkpoint_bytes
