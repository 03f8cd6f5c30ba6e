"""The planned memory in docs/guides/models.md is what the planner says."""

import gc
import re
from pathlib import Path
from types import ModuleType

import pytest
from forked import REPOSITORY
from model_shapes import PUBLISHED, write_config

from llama_ft.config import load
from llama_ft.plan.predict import predict
from llama_ft.plan.types import PlanRequest

PAGE = (REPOSITORY / "docs" / "guides" / "models.md").read_text()
COMMAND = r"`recipes/plan.py (.*) --quick`"
ROW = r"^\| {name}.* \| (\d+) \| ([\d.]+) \| ([\d.]+) MiB \|$"


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_table_has_the_planned_memory(
    name: str, finetuning: ModuleType, tmp_path: Path
) -> None:
    command = re.search(COMMAND, PAGE)
    row = re.search(ROW.format(name=re.escape(name)), PAGE, re.MULTILINE)
    assert command is not None and row is not None
    ranks = int(row[1])
    folder = write_config(tmp_path / "model", name)
    flags = [*command[1].split(), "--model_name", str(folder)]
    if ranks > 1:
        flags.append("--enable_fsdp")
    config, _ = load(flags, paths=False)
    request = PlanRequest(config, folder, ranks, min(ranks, 8), "cuda")
    plan = predict(request, finetuning.build_model, quick=True)
    gc.collect()
    assert plan.device_bytes / 2**30 == pytest.approx(float(row[2]), abs=0.051)
    assert plan.host_load_bytes / 2**20 == pytest.approx(float(row[3]), abs=0.51)
