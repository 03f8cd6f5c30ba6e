from pathlib import Path
from typing import Any

import pytest

from llama_ft.errors import UserError
from llama_ft.plan.flags import read_plan_flags

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"


def read(*words: str) -> Any:
    return read_plan_flags(list(words), QUICKSTART)


def mistakes(*words: str) -> str:
    with pytest.raises(UserError) as told:
        read(*words)
    return str(told.value)


def test_flags_of_the_plan_stand_among_those_of_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config, places, options = read("--lr", "1e-5", "--nproc=4", "--model_name", str(tmp_path), "--quick", "--use-peft")
    assert (options.nproc, options.nproc_per_node, options.quick, options.json) == (4, 4, True, False)
    assert config.train.lr == 1e-5 and config.peft.use_peft
    assert places["train.lr"] == "--lr"


@pytest.mark.parametrize(("nproc", "node"), [(1, 1), (8, 8), (64, 8), (12, 6), (20, 5), (11, 1)])
def test_nodes_are_as_large_as_they_divide_the_ranks(nproc: int, node: int) -> None:
    assert read("--nproc", str(nproc))[2].nproc_per_node == node


def test_neither_weights_nor_data_have_to_be_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config, _, _ = read("--model_name", str(tmp_path), "--dataset", "not/there.jsonl", "--output_dir", str(tmp_path))
    assert config.data.dataset == "not/there.jsonl"


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    told = mistakes("--nproc", "0", "--nproc_per_node", "x", "--lr", "fast", "--quick", "--quick", "--fit_out", "here")
    assert "--nproc 0: must be at least 1." in told
    assert "--nproc_per_node x: " in told
    assert "--quick: given twice." in told
    assert "--fit_out: nothing is searched without --fit." in told
    assert "--lr fast" in told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nproc"], "--nproc needs a value"),
        (["--nproc", "4097"], "--nproc 4097: must be at most 4096"),
        (["--json", "now"], "--json now: "),
        (["--nproc", "8", "--nproc_per_node", "3"], "--nproc_per_node 3: 8 ranks"),
        (["--nprocs=8"], "--nprocs is not a flag. Did you mean --nproc?"),
        (["--lrr", "1"], "Did you mean --lr?"),
        (["--model_name", "/nowhere/model"], "--model_name /nowhere/model: no such"),
        (["--fit", "a1000"], "--fit a1000"),
        (["--fitt", "80GiB"], "--fitt is not a flag. Did you mean --fit?"),
    ],
)
def test_a_mistake_is_named(words: list[str], said: str) -> None:
    assert said in mistakes(*words)


def test_a_folder_without_config_json_is_no_model(tmp_path: Path) -> None:
    assert "holds no config.json" in mistakes("--model_name", str(tmp_path))
