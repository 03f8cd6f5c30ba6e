"""What may differ from the run that is resumed."""

import dataclasses

import pytest

from llama_ft.checkpoint.same_run import MAY_DIFFER, check_same_run
from llama_ft.config import load
from llama_ft.config.settings import SETTINGS
from llama_ft.errors import UserError


def run(line: str = "", model: str = "m1", rows: str = "d1", held_out: str = "v1") -> tuple[dict, dict[str, str]]:
    config, places = load(f"--model_name folder {line}".split(), paths=False)
    contents = {"model_name": model, "dataset": rows, "validation": held_out}
    return {"config": dataclasses.asdict(config), "contents": contents}, places


def check(now: str, allowed: list[str] | None = None, before: str = "", **contents: str) -> None:
    saved, _ = run(before)
    resumed, places = run(now, **contents)
    check_same_run(saved, resumed, allowed or [], places)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--enable_fsdp --sharding_strategy HYBRID_SHARD --activation_checkpointing full --batch_size_training 2",
        "--output_dir elsewhere --save_steps 5 --keep_last 2 --log_steps 7 --use_wandb --stop_after 3h50m",
        "--dataset moved/rows.jsonl --tokenizer_name moved",
    ],
)
def test_where_and_how_it_is_computed_may_differ(line: str) -> None:
    check(line)


def test_a_model_that_was_moved_is_the_same_model() -> None:
    saved, _ = run()
    moved, places = run()
    moved["config"]["model"]["model_name"] = "elsewhere"
    check_same_run(saved, moved, [], places)


def test_all_that_makes_another_run_is_told_old_and_new() -> None:
    with pytest.raises(UserError) as refused:
        check("--seed 7 --use_peft --peft.r 4 --optimizer SGD", before="--use_peft", rows="d2")
    lines = str(refused.value).splitlines()
    assert [line.strip() for line in lines[1:5]] == [
        "--optimizer is SGD, was AdamW",
        "--seed is 7, was 42",
        "--peft.r is 4, was 8",
        "data.dataset is demo, and holds something else now, or another tokenizer or chat template writes its rows",
    ]
    assert lines[-1].strip() == "With another r other parameters are trained than the checkpoint holds."
    with pytest.raises(UserError, match="\n *--resume_allow_changes optimizer,seed$"):
        check("--seed 7 --optimizer SGD")


def test_another_model_of_the_same_name_is_found_out() -> None:
    with pytest.raises(UserError, match="--model_name is folder, and holds something else now"):
        check("", model="m2")


def test_other_validation_rows_are_named_by_their_own_flag() -> None:
    with pytest.raises(UserError, match="--validation is 0.2, was 0.1"):
        check("--validation 0.2", before="--validation 0.1", held_out="v2")


def test_settings_are_compared_before_it_is_known_what_they_hold() -> None:
    saved, _ = run()
    now, places = run("--seed 7")
    del now["contents"]
    with pytest.raises(UserError, match="--seed is 7, was 42"):
        check_same_run(saved, now, [], places)


def test_an_adapter_that_was_gone_on_from_belongs_to_the_run() -> None:
    """It brings lora_alpha and dropout, which are in no checkpoint."""
    with pytest.raises(UserError, match="peft.from_peft_checkpoint is none, was adapter"):
        check("--use_peft", before="--use_peft --from_peft_checkpoint adapter")


def test_what_is_allowed_may_differ() -> None:
    check("--lr 3e-4 --num_epochs 5", allowed=["lr", "num_epochs"])
    with pytest.raises(UserError, match="--resume_allow_changes lr$"):
        check("--lr 3e-4 --num_epochs 5", allowed=["num_epochs"])


def test_a_setting_that_the_saved_run_did_not_have_is_at_its_default() -> None:
    saved, _ = run()
    now, places = run("--gamma 0.5 --lr_scheduler step")
    del saved["config"]["train"]["gamma"], saved["config"]["train"]["lr_scheduler"]
    with pytest.raises(UserError, match="--lr_scheduler is step, was cosine"):
        check_same_run(saved, now, [], places)


def test_what_may_differ_are_settings_and_what_changes_losses_is_not_among_them() -> None:
    assert MAY_DIFFER <= SETTINGS.keys()
    assert MAY_DIFFER.isdisjoint({"seed", "lr", "precision", "optimizer", "context_length", "r", "mode", "num_epochs"})
