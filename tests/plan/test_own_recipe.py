"""A plan runs the functions of the recipe: what a copy of it changes is planned."""

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import RECIPE, load_script

from llama_ft.config import load
from llama_ft.plan.predict import predict
from llama_ft.plan.types import Plan, PlanRequest

MIB = 2**20
STEP = "    count = step.target_tokens if objective.counts_tokens else step.samples\n"
OBJECTIVE = "    return training.build_objective(config)\n"
# a megabyte that lives as long as the step, and one that lives as long as the objective
KEEP_IN_STEP = f"    extra = torch.zeros({MIB // 4})\n"
KEEP_IN_OBJECTIVE = f"""\
    objective = training.build_objective(config)
    objective.extra = torch.zeros({MIB // 4})
    return objective
"""
KEEP_BOTH_EXAMPLES = """\
    objective = training.build_objective(config)
    objective.examples_per_sample = 2
    return objective
"""


@pytest.fixture
def plan_with(tiny_model: Path, tmp_path: Path) -> Callable[[str, str], Plan]:
    """Plan a run by a copy of the recipe in which a line is replaced."""

    def planned(line: str, changed: str) -> Plan:
        text = RECIPE.read_text()
        assert text.count(line) == 1
        copy = tmp_path / "mine.py"
        copy.write_text(text.replace(line, changed))
        flags = f"--model_name {tiny_model} --dataset demo --context_length 64 --precision fp32"
        config, _ = load(flags.split(), paths=False)
        request = PlanRequest(config, tiny_model, 2, 2, "cuda")
        return predict(request, load_script(copy).RECIPE)

    return planned


def bytes_of(plan: Plan) -> dict[str, int]:
    return {peak.phase: peak.bytes for peak in plan.peaks}


def test_a_tensor_that_a_changed_train_step_keeps_is_planned(
    plan_with: Callable[[str, str], Plan],
) -> None:
    before = bytes_of(plan_with(STEP, STEP))
    after = bytes_of(plan_with(STEP, KEEP_IN_STEP + STEP))
    for phase in ("forward", "backward", "optimizer step"):
        assert after[phase] == before[phase] + MIB
    assert after["load"] == before["load"]
    assert after["evaluation"] == before["evaluation"]


def test_an_objective_that_a_recipe_builds_itself_is_planned(
    plan_with: Callable[[str, str], Plan],
) -> None:
    before = plan_with(OBJECTIVE, OBJECTIVE)
    after = plan_with(OBJECTIVE, KEEP_IN_OBJECTIVE)
    for phase in ("forward", "backward", "optimizer step", "evaluation"):
        assert bytes_of(after)[phase] == bytes_of(before)[phase] + MIB
    assert plan_with(OBJECTIVE, KEEP_BOTH_EXAMPLES).tokens == 2 * before.tokens
