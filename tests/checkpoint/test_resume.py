"""What may differ from the run that is resumed."""

import dataclasses

import pytest

from llama_ft.checkpoint.resume import MAY_DIFFER, SECTIONS_THAT_MAY_DIFFER, check_same_run
from llama_ft.config import load
from llama_ft.config.settings.settings import SETTINGS
from llama_ft.errors import UserError


def run(
    line: str = "", model: str = "m1", rows: str = "d1", held_out: str = "v1"
) -> tuple[dict, dict[str, str]]:
    config, places = load(f"--model_name folder {line}".split(), paths=False)
    contents = {"model_name": model, "dataset": rows, "validation": held_out}
    return {"config": dataclasses.asdict(config), "contents": contents}, places


def check(now: str, allowed: list[str] | None = None, before: str = "", **contents: str) -> None:
    saved, _ = run(before)
    resumed, places = run(now, **contents)
    check_same_run(saved, resumed, allowed or [], places)


def test_paths_and_parallelism_may_differ() -> None:
    check(
        "--enable_fsdp --sharding_strategy HYBRID_SHARD --activation_checkpointing full --batch_size_training 2"
    )
    check(
        "--output_dir elsewhere --save_steps 5 --keep_last 2 --log_steps 7 --use_wandb --stop_after 3h50m"
    )
    check("--dataset moved/rows.jsonl --tokenizer_name moved")


def test_settings_that_make_another_run_are_reported_with_old_and_new_values() -> None:
    with pytest.raises(UserError) as refused:
        check("--seed 7 --use_peft --peft.r 4 --optimizer SGD", before="--use_peft", rows="d2")
    lines = str(refused.value).splitlines()
    expected = ["--optimizer is SGD, was AdamW", "--seed is 7, was 42", "--peft.r is 4, was 8"]
    assert [line.strip() for line in lines[1:4]] == expected
    assert "data.dataset is demo, as before, but its content" in lines[4]
    assert "do not fit another optimizer" in lines[5] and "--model_name FOLDER" in lines[6]
    with pytest.raises(UserError, match="--resume_allow_changes seed,r,dataset$"):
        check("--seed 7 --use_peft --peft.r 4", before="--use_peft", rows="d2")
    with pytest.raises(UserError, match="another optimizer"):
        check("--optimizer SGD", allowed=["optimizer"])
    check("--lr 3e-4 --num_epochs 5", allowed=["lr", "num_epochs"])
    with pytest.raises(UserError, match="--resume_allow_changes lr$"):
        check("--lr 3e-4 --num_epochs 5", allowed=["num_epochs"])
    with pytest.raises(UserError, match="--model_name is folder, as before, but its content"):
        check("", model="m2")
    with pytest.raises(UserError, match="--validation is 0.2, was 0.1"):
        check("--validation 0.2", before="--validation 0.1", held_out="v2")


def test_settings_are_compared_without_contents_and_with_defaults_if_not_saved() -> None:
    saved, _ = run()
    now, places = run("--gamma 0.5 --lr_scheduler step")
    del now["contents"], saved["config"]["train"]["gamma"], saved["config"]["train"]["lr_scheduler"]
    with pytest.raises(UserError, match="--lr_scheduler is step, was cosine"):
        check_same_run(saved, now, [], places)


def test_settings_that_change_losses_may_not_differ() -> None:
    assert MAY_DIFFER <= SETTINGS.keys()
    assert MAY_DIFFER.isdisjoint(
        {"seed", "lr", "precision", "optimizer", "context_length", "r", "mode", "num_epochs"}
    )
    changes_losses = {"model", "train", "preference", "peft", "quantization", "data"}
    assert {
        setting.section for setting in SETTINGS.values()
    } == changes_losses | SECTIONS_THAT_MAY_DIFFER


# Checkpoints of earlier versions have `packing`, which is None with padding, or no entry.
@pytest.mark.parametrize(
    ("before", "now", "is_other"),
    [
        ({"batches": 1}, {"batches": 2}, True),
        ({"packing": 1}, {"batches": 2}, True),
        ({"packing": 2}, {"batches": 2}, False),
        ({"packing": None}, {"batches": 2}, True),
        ({}, {"batches": 2}, True),
        ({"batches": 2}, {"batches": 2}, False),
        ({"batches": 2}, {}, False),
    ],
    ids=["older", "packed", "packed alike", "padded", "not recorded", "the same", "not known yet"],
)
def test_a_version_that_puts_other_samples_into_a_step_does_not_resume(
    before: dict[str, int | None], now: dict[str, int], is_other: bool
) -> None:
    saved, _ = run()
    resumed, places = run()
    saved |= before
    resumed |= now
    if is_other:
        with pytest.raises(UserError, match=r"other batches.*\n.*\n +--resume_allow_changes batch"):
            check_same_run(saved, resumed, [], places)
    check_same_run(saved, resumed, [] if not is_other else ["batching_strategy"], places)
