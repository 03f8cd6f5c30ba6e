"""Runs of the recipe whose ranks share packed sequences, against runs of one process."""

from pathlib import Path
from typing import Any

import pytest
from conftest import RECIPE, losses, run_cases, series
from forked import forked
from plain_losses import write_tokenized

STEPS = 4
RUNS = {
    "full": "--gradient_clipping --gradient_clipping_threshold 0.5",
    "qlora": "--use_peft --lora_dropout 0 --quantization 4bit",
}


@pytest.fixture(scope="module")
def folder(save_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each run on 2 ranks that share sequences and on one process; the first one is also resumed on
    2 ranks that do not share."""
    folder = tmp_path_factory.mktemp("shared")
    save_model(folder / "base", hidden_size=64, intermediate_size=128)  # for blocks of 64
    write_tokenized(folder / "train.jsonl", [20 + 5 * (n % 9) for n in range(30)], seed=1)
    write_tokenized(folder / "validation.jsonl", [9 + n for n in range(9)], seed=2)
    common = (
        f"--model_name {folder}/base --precision fp32 --context_length 90 --lr 0.01 --num_epochs 9"
    )
    common += f" --max_train_step {STEPS} --batch_size_training 1 --gradient_accumulation_steps 2"
    common += " --save_steps 2 --activation_checkpointing full --warmup_steps 0"
    cases = []
    alone = []
    for name, flags in RUNS.items():
        data = f"--dataset {folder}/train.jsonl --validation {folder}/validation.jsonl"
        whole = f"{common} {data} {flags} --eval_steps {STEPS}".split()
        shared = [*whole, "--enable_fsdp", "--sequence_parallel_size", "2"]
        cases.append([*shared, "--output_dir", f"{folder}/{name}"])
        alone.append([*whole, "--output_dir", f"{folder}/{name}-alone"])
    checkpoint = f"{folder}/full/checkpoints/step-000002"
    resumed = [*alone[0][:-2], "--enable_fsdp", "--resume", checkpoint]
    cases.append([*resumed, "--output_dir", f"{folder}/resumed"])
    run_cases(folder, cases, ranks=2, timeout=600)
    run_cases(folder, alone, timeout=600)
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_a_run_with_shared_sequences_has_the_losses_of_one_process(name: str, folder: Path) -> None:
    alone = folder / f"{name}-alone"
    assert len(losses(alone)) == STEPS
    # nf4 dequantizes in fp32, and rounds nothing else
    assert losses(folder / name) == pytest.approx(losses(alone), rel=2e-6)
    norms = series(folder / name, "train/grad_norm")
    assert norms == pytest.approx(series(alone, "train/grad_norm"), rel=2e-5)
    validation = series(folder / name, "eval/loss")
    assert validation == pytest.approx(series(alone, "eval/loss"), rel=2e-6)
    # each sample and token counts once
    assert series(folder / name, "tokens") == series(alone, "tokens")


def test_a_run_continues_on_ranks_that_share_no_sequences(folder: Path) -> None:
    resumed = folder / "resumed"
    assert not (resumed / "checkpoints" / "step-000002").exists()  # it begins after step 2
    assert (resumed / "checkpoints" / "step-000004").exists()
    assert losses(resumed) == pytest.approx(losses(folder / "full"), rel=2e-6)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--batching_strategy padding", "only packed sequences can be shared"),
        ("", "1 rank cannot be divided into groups of 2"),
    ],
)
def test_what_cannot_be_shared_is_one_message(flags: str, expected: str) -> None:
    finished = forked(RECIPE, "--sequence_parallel_size", "2", *flags.split())
    assert finished.exit_code == 2
    assert expected in finished.output
    assert "--sequence_parallel_size" in finished.output
    assert "Traceback" not in finished.output
