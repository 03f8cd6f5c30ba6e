"""The planned memory in docs/guides/models.md is what the planner says."""

import gc
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from forked import REPOSITORY
from model_shapes import PUBLISHED, write_config

from llama_ft.config import load
from llama_ft.plan.predict import predict
from llama_ft.plan.types import PlanRequest

PAGE = (REPOSITORY / "docs" / "guides" / "models.md").read_text()
COMMAND = r"`llama-ft plan (.*) --quick`"
AS_STORED = r"^\| {name} \| ([\d.]+) \|$"
ROW = r"^\| {name}.* \| (\d+) \| ([\d.]+) \| ([\d.]+) MiB \|$"


def planned(
    name: str,
    ranks: int,
    finetuning: ModuleType,
    place: Path,
    quantization: str = "4bit",
) -> Any:
    """Plan a model with the page's command, or with another quantization."""
    command = re.search(COMMAND, PAGE)
    assert command is not None
    folder = write_config(place / "model", name)
    text = command[1].replace("--quantization 4bit", f"--quantization {quantization}")
    flags = [*text.split(), "--model_name", str(folder)]
    if ranks > 1:
        flags.append("--enable_fsdp")
    config, _ = load(flags, paths=False)
    request = PlanRequest(config, folder, ranks, min(ranks, 8), "cuda")
    plan = predict(request, finetuning.RECIPE, quick=True)
    gc.collect()
    return plan


LARGE = (
    "DeepSeek V3",
    "Kimi K2 Thinking",
    "gpt-oss-120b",
)  # hundreds of experts, up to minutes each


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.large) if name in LARGE else name for name in PUBLISHED],
)
def test_the_table_has_the_planned_memory(
    name: str, finetuning: ModuleType, tmp_path: Path
) -> None:
    row = re.search(ROW.format(name=re.escape(name)), PAGE, re.MULTILINE)
    assert row is not None
    plan = planned(name, int(row[1]), finetuning, tmp_path)
    assert plan.device_bytes / 2**30 == pytest.approx(float(row[2]), abs=0.051)
    assert plan.host_load_bytes / 2**20 == pytest.approx(float(row[3]), abs=0.51)


@pytest.mark.slow
@pytest.mark.parametrize(
    "title",
    [
        "Qwen3-8B-FP8",
        "Devstral Small 2 (24B)",
        "gpt-oss-20b",
        pytest.param("gpt-oss-120b", marks=pytest.mark.large),
        pytest.param("gpt-oss-120b, LoRA on attention only", marks=pytest.mark.large),
    ],
)
def test_the_table_has_the_planned_memory_of_weights_as_stored(
    title: str, finetuning: ModuleType, tmp_path: Path
) -> None:
    row = re.search(AS_STORED.format(name=re.escape(title)), PAGE, re.MULTILINE)
    assert row is not None
    name, _, only = title.partition(", ")
    attention = re.search("`(--target_modules .*?)`", PAGE)
    assert attention is not None
    flags = f"as_stored {attention[1]}" if only else "as_stored"
    plan = planned(name, 1, finetuning, tmp_path, flags)
    assert plan.device_bytes / 2**30 == pytest.approx(float(row[1]), abs=0.051)
