"""An objective is added to a copy of the tree, by changing as few files as the pages say."""

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REPOSITORY, write_rows
from edited_copy import EditedCopy
from pages import Page

PAGES = REPOSITORY / "docs" / "development"
# argv: a name, and a setting that it does not have
LOAD = """
import sys
from llama_ft.config import load
from llama_ft.errors import UserError
from llama_ft.training import build_objective
name, other = sys.argv[1:]
flags = ["--objective", name, "--model_name", "demo", "--dataset", "demo"]
config, _ = load(flags, paths=False)
objective = build_objective(config)
for more in ([f"--{other}", "0.3"], ["--streaming", "--max_train_step", "3"]):
    try:
        load([*flags, *more], paths=False)
    except UserError as error:
        print(error.messages)
    else:
        raise SystemExit(f"{more} is not rejected")
"""
HINGE = """
from types import SimpleNamespace
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from llama_ft.config import Config, PeftConfig, PreferenceConfig
from llama_ft.data import Batch
from llama_ft.models import BuiltModel
torch.manual_seed(0)
shape = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
model = LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=1, vocab_size=20)).train()
ids = torch.arange(10).view(2, 5)
settings = PreferenceConfig(objective="hinge", beta=0.5)
objective = build_objective(Config(preference=settings))
reference = torch.tensor([-2.0, -9.0])
objective.reference = SimpleNamespace(log_probabilities=lambda *_: reference)
batch = Batch(ids, ids, [5, 5], False, ["a", "b"])
found = objective.loss(BuiltModel(model), batch, SimpleNamespace(device=ids.device)).loss
logits = model(ids).logits.log_softmax(-1)
scores = logits[:, :-1].gather(2, ids[:, 1:, None]).sum((1, 2)) - reference
torch.testing.assert_close(found, torch.relu(1 - 0.5 * (scores[0] - scores[1])))
"""
WITH_PASS = """
from llama_ft.config.paths import RUN_ENTRIES
assert objective.first_pass(config).flag == "--teacher_model"
assert "scored.safetensors" in RUN_ENTRIES
"""


@pytest.fixture
def copy(tmp_path: Path) -> EditedCopy:
    return EditedCopy(tmp_path)


def add_pair_loss(copy: EditedCopy) -> None:
    [diff] = [block for block in Page(PAGES / "add-a-loss.md").blocks("diff") if "hinge" in block]
    copy.apply(diff)


def add_objective(copy: EditedCopy) -> None:
    page = Page(PAGES / "add-an-objective.md")
    [diff] = page.blocks("diff")
    [file] = page.blocks("python")
    copy.apply(diff)
    copy.write("src/llama_ft/training/objectives/scored.py", file)


@pytest.mark.parametrize("add", [add_pair_loss, add_objective])
def test_an_objective_of_the_pages_changes_two_files(
    add: Callable[[EditedCopy], None], copy: EditedCopy
) -> None:
    add(copy)
    assert len(copy.touched()) == 2


def test_the_pair_loss_of_the_page_has_the_loss_of_its_formula(
    copy: EditedCopy, tmp_path: Path
) -> None:
    add_pair_loss(copy)
    script = tmp_path / "check.py"
    script.write_text(LOAD + HINGE)
    copy.run(script, "hinge", "simpo_gamma")


@pytest.mark.slow
def test_the_objective_of_the_page_trains_after_its_pass_over_another_model(
    copy: EditedCopy, tiny_model: Path, tmp_path: Path
) -> None:
    add_objective(copy)
    script = tmp_path / "check.py"
    script.write_text(LOAD + WITH_PASS)
    copy.run(script, "scored", "beta")
    write_rows(tmp_path / "rows.jsonl", 8)
    flags = f"--model_name {tiny_model} --dataset {tmp_path}/rows.jsonl --context_length 64"
    flags += f" --objective scored --teacher_model {tiny_model} --device cpu --max_train_step 1"
    recipe = copy.folder / "recipes" / "finetuning.py"
    output = copy.run(recipe, *flags.split(), "--no_plan", "--output_dir", tmp_path / "run")
    assert f"Scores: {tiny_model}" in output
    assert "step 1/1" in output
