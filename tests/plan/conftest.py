"""Plans are made in this process: there is no process group in it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def same_plans() -> Iterator[Callable[..., Any]]:
    """A planner that takes each plan from its first time, also for llama_ft.plan.fit. Searches of
    one module try the same settings, and a plan takes a second of a core."""
    from llama_ft.plan import fit

    known: dict[str, Any] = {}
    predict = fit.predict

    def predict_once(request: Any, recipe: Any, quick: bool = False) -> Any:
        key = f"{quick} {request}"
        if key not in known:
            known[key] = predict(request, recipe, quick)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "predict", predict_once)
        yield predict_once


@pytest.fixture
def plan(finetuning: ModuleType) -> Callable[..., Any]:
    """Plan a run of a model folder with flags."""

    def planned(
        folder: Path,
        world_size: int,
        *flags: str,
        device: str = "cpu",
        quick: bool = False,
        media: Any = None,
    ) -> Any:
        from llama_ft.config import load
        from llama_ft.plan.predict import predict
        from llama_ft.plan.types import PlanRequest

        config, _ = load(["--model_name", str(folder), "--dataset", "demo", *flags], paths=False)
        ranks_of_a_node = min(8, world_size)
        request = PlanRequest(config, folder, world_size, ranks_of_a_node, device, media=media)  # type: ignore[arg-type]
        return predict(request, finetuning.RECIPE, quick)

    return planned
