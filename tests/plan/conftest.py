"""Plans are made in this process: there is no process group in it."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def plan(finetuning: ModuleType) -> Callable[..., Any]:
    """Plan a run of a model folder with flags."""

    def planned(
        folder: Path, world_size: int, *flags: str, device: str = "cpu", quick: bool = False
    ) -> Any:
        from llama_ft.config import load
        from llama_ft.plan.predict import predict
        from llama_ft.plan.types import PlanRequest

        config, _ = load(["--model_name", str(folder), "--dataset", "demo", *flags], paths=False)
        request = PlanRequest(config, folder, world_size, min(8, world_size), device)  # type: ignore[arg-type]
        return predict(request, finetuning.build_model, quick)

    return planned
