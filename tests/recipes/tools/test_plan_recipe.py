"""recipes/plan.py as users run it, and the plan that a run makes of itself."""

import json
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
from forked import REPOSITORY, forked
from model_shapes import write_llama

PLAN = REPOSITORY / "recipes" / "plan.py"
RECIPE = REPOSITORY / "recipes" / "finetuning.py"


def plan_flags(folder: Path) -> list[str | Path]:
    model = write_llama(folder, vocab_size=500, intermediate_size=128, num_hidden_layers=2)
    return ["--model_name", model, "--enable_fsdp", "--nproc", "64", "--fit"]


def test_a_plan_needs_only_config_json(tmp_path: Path) -> None:
    """And the exit code says whether it fits: 0 as it is, 3 with changes, 4 not."""
    flags = plan_flags(tmp_path)
    finished = forked(PLAN, *flags, "h100", "--price", "2")
    assert finished.exit_code == 0, finished.output
    for said in (
        "activation_checkpointing auto: off (planned",
        "Rank 0 of 64 ranks (CUDA)",
        "logits and loss",
        "A GPU needs",
        "It fits 79.10 GiB as it is",
        "for 1 million tokens. Cost of these: ",
    ):
        assert said in finished.output
    finished = forked(PLAN, *flags, "8MB", "--device", "cpu", "--json")
    assert finished.exit_code == 3, finished.output
    assert "activation_checkpointing auto" not in finished.output  # it is off on the CPU
    answer = json.loads(finished.output.strip().rpartition("\n")[2])
    assert answer["fits"][0]["flags"] == ["--activation_checkpointing full"]
    plan = answer["plan"]
    assert plan["world_size"] == 64
    phases = ["load", "forward", "backward", "optimizer step", "evaluation", "save"]
    assert [peak["phase"] for peak in plan["peaks"]] == phases


@pytest.mark.slow
def test_a_plan_that_no_change_makes_fit_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    lean = (
        "--use_peft --quantization 4bit --activation_checkpointing full --batch_size_training 1"
    ).split()
    finished = forked(PLAN, *plan_flags(tmp_path), "1MB", *lean, "--enable_fsdp", "False")
    assert finished.exit_code == 4, finished.output
    assert "warning: each of the 64 ranks will hold the whole model" in finished.output


@pytest.mark.slow
def test_an_error_in_an_edited_step_is_named_with_its_line(tmp_path: Path) -> None:
    recipes = tmp_path / "recipes"
    copytree(REPOSITORY / "recipes", recipes, ignore=ignore_patterns("__pycache__"))
    text = (recipes / "finetuning.py").read_text()
    failing, rest = text.split("    losses = []\n")
    edited = f"{failing}    raise ValueError('mine')\n{rest}"
    (recipes / "finetuning.py").write_text(edited)
    finished = forked(recipes / "plan.py", *plan_flags(tmp_path / "model"), "h100")
    assert finished.exit_code == 1, finished.output
    line = len(failing.splitlines()) + 1
    place = f"({recipes}/finetuning.py:{line})"
    assert f"could not be planned: ValueError: mine {place}" in finished.output


def test_a_run_plans_its_memory_and_saves_the_plan(
    tiny_model: Path, rows16: Path, tmp_path: Path
) -> None:
    flags = f"--model_name {tiny_model} --dataset {rows16} --device cpu --max_train_step 1".split()
    flags += ["--enable_fsdp", "--save_model", "False", "--output_dir", str(tmp_path / "run")]
    finished = forked(RECIPE, *flags, ranks=2)
    assert finished.exit_code == 0, finished.output
    assert finished.output.count("Planned peak: ") == 1
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert (plan["world_size"], plan["device"]) == (2, "cpu")
