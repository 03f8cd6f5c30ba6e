"""Runs of the recipe whose ranks share packed sequences, against runs of one process."""

import functools
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agents import SLOWED
from conftest import RECIPE, losses, run_cases, series, write_rows
from forked import forked, start_forked
from plain_losses import write_pairs, write_tokenized

STEPS = 4
RUNS = {
    "full": "--gradient_clipping --gradient_clipping_threshold 0.5",
    "qlora": "--use_peft --lora_dropout 0 --quantization 4bit",
}


@pytest.fixture(scope="module")
def folder(save_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and data."""
    folder = tmp_path_factory.mktemp("shared")
    save_model(folder / "base", hidden_size=64, intermediate_size=128)  # for blocks of 64
    write_tokenized(folder / "train.jsonl", [20 + 5 * (n % 9) for n in range(30)], seed=1)
    write_tokenized(folder / "validation.jsonl", [9 + n for n in range(9)], seed=2)
    return folder


@pytest.fixture(scope="module")
def launches(folder: Path) -> Callable[[str], None]:
    """Runs one of RUNS on 2 ranks that share sequences and on one process, once; the first one is
    also resumed on 2 ranks that do not share."""

    @functools.cache
    def launch(name: str) -> None:
        flags = f"--model_name {folder}/base --precision fp32 --context_length 90 --lr 0.01"
        flags += f" --num_epochs 9 --max_train_step {STEPS} --batch_size_training 1"
        flags += " --gradient_accumulation_steps 2 --save_steps 2 --warmup_steps 0"
        flags += " --activation_checkpointing full"
        flags += f" --dataset {folder}/train.jsonl --validation {folder}/validation.jsonl"
        whole = f"{flags} {RUNS[name]} --eval_steps {STEPS}".split()
        shared = [*whole, "--enable_fsdp", "--sequence_parallel_size", "2"]
        cases = [[*shared, "--output_dir", f"{folder}/{name}"]]
        if name == "full":
            checkpoint = f"{folder}/full/checkpoints/step-000002"
            resumed = [*whole, "--enable_fsdp", "--resume", checkpoint]
            cases.append([*resumed, "--output_dir", f"{folder}/resumed"])
        run_cases(folder, cases, ranks=2, timeout=600)
        run_cases(folder, [[*whole, "--output_dir", f"{folder}/{name}-alone"]], timeout=600)

    return launch


@pytest.mark.parametrize("name", ["full", pytest.param("qlora", marks=pytest.mark.slow)])
def test_a_run_with_shared_sequences_has_the_losses_of_one_process(
    name: str, folder: Path, launches: Callable[[str], None]
) -> None:
    launches(name)
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


def test_a_run_continues_on_ranks_that_share_no_sequences(
    folder: Path, launches: Callable[[str], None]
) -> None:
    launches("full")
    resumed = folder / "resumed"
    assert not (resumed / "checkpoints" / "step-000002").exists()  # it begins after step 2
    assert (resumed / "checkpoints" / "step-000004").exists()
    assert losses(resumed) == pytest.approx(losses(folder / "full"), rel=2e-6)


# Runs that compute another model first, read a stream, or generate, on pairs or samples.
MORE = {
    "dpo": "--dataset @pairs.jsonl --objective dpo --beta 0.3",
    "distill": "--dataset @train.jsonl --objective distill --distill_top_k 5 --teacher_model @other",
    "reward": "--dataset @pairs.jsonl --validation @pairs.jsonl --objective reward --eval_steps 2",
    "stream": "--dataset @train.jsonl --streaming --shuffle_buffer 8",
    "scored": "--dataset @texts.jsonl --validation @texts.jsonl --eval_steps 2 "
    "--score @score.py:letters --score_tokens 9 --sample_prompts Why? --sample_tokens 5",
}


@pytest.fixture(scope="module")
def more(save_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each of MORE on 2 ranks that share sequences and on one process."""
    folder = tmp_path_factory.mktemp("more")
    save_model(folder / "base", hidden_size=64, intermediate_size=128)
    save_model(folder / "other", seed=3)
    write_tokenized(folder / "train.jsonl", [20 + 5 * (n % 9) for n in range(30)], seed=1)
    write_pairs(folder / "pairs.jsonl", 24)
    write_rows(folder / "texts.jsonl", 16)
    # differs from answer to answer, also of a model that has learned nothing
    (folder / "score.py").write_text(
        "def letters(prompt, answer, reference): return len({*answer})"
    )
    common = f"--model_name {folder}/base --precision fp32 --context_length 128 --lr 1e-3"
    common += f" --max_train_step {STEPS} --batch_size_training 1 --gradient_accumulation_steps 2"
    common += " --activation_checkpointing full --warmup_steps 0"
    alone = []
    shared = []
    for name, flags in MORE.items():
        whole = f"{common} {flags}".replace("@", f"{folder}/").split()
        if name != "stream":
            whole += ["--num_epochs", "9"]
        alone.append([*whole, "--output_dir", f"{folder}/{name}-alone"])
        ranks = ["--enable_fsdp", "--sequence_parallel_size", "2"]
        shared.append([*whole, *ranks, "--output_dir", f"{folder}/{name}"])
    run_cases(folder, alone, timeout=600)
    run_cases(folder, shared, ranks=2, timeout=600)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_other_objectives_and_data_have_the_losses_of_one_process(name: str, more: Path) -> None:
    alone = more / f"{name}-alone"
    assert len(losses(alone)) == STEPS
    assert losses(more / name) == pytest.approx(losses(alone), rel=2e-6)
    assert series(more / name, "eval/loss") == pytest.approx(series(alone, "eval/loss"), rel=2e-6)
    assert series(more / name, "tokens") == series(alone, "tokens")


@pytest.mark.slow
def test_each_rank_answers_alone_and_the_scores_are_those_of_one_process(more: Path) -> None:
    scores = series(more / "scored-alone", "eval/score")
    assert len({*scores}) > 1
    assert series(more / "scored", "eval/score") == scores


@pytest.mark.slow
def test_a_run_is_killed_twice_and_resumed_by_more_ranks_that_share_each_sequence(
    save_model: Any, tmp_path: Path
) -> None:
    """4 ranks with sequences of their own, then 2 per sequence, then all."""
    save_model(tmp_path / "base")
    write_tokenized(tmp_path / "train.jsonl", [20 + 5 * (n % 9) for n in range(60)], seed=1)
    flags = f"--model_name {tmp_path}/base --dataset {tmp_path}/train.jsonl --precision fp32"
    flags += " --context_length 90 --lr 0.01 --num_epochs 9 --max_train_step 6 --save_steps 2"
    flags += " --batch_size_training 1 --warmup_steps 0 --enable_fsdp --no_plan"
    run_cases(tmp_path, [[*flags.split(), "--output_dir", f"{tmp_path}/whole"]], 4, timeout=600)
    run = tmp_path / "run"
    words = [*flags.split(), "--resume", "auto", "--output_dir", str(run)]
    for size, saved, last in ((1, 2, 3), (2, 4, 5)):
        log = tmp_path / f"log-{size}"
        shared = [*words, "--sequence_parallel_size", str(size)]
        running = start_forked(SLOWED, *shared, output=log, ranks=4, HOLD_AT=str(last + 1))
        checkpoint = run / "checkpoints" / f"step-{saved:06}"
        while running.is_alive() and not (checkpoint.exists() and steps_of(run) >= last):
            time.sleep(0.05)
        assert running.is_alive(), log.read_text()
        running.send(signal.SIGKILL)
        running.wait(30)
    finished = forked(RECIPE, *words, "--sequence_parallel_size", "4", ranks=4)
    assert finished.exit_code == 0, finished.output
    assert "Resuming from" in (tmp_path / "log-2").read_text()
    assert "step-000004" in finished.output.partition("Resuming from")[2].partition("\n")[0]
    assert losses(run) == pytest.approx(losses(tmp_path / "whole"), rel=2e-6)
    assert series(run, "tokens") == series(tmp_path / "whole", "tokens")


def steps_of(run: Path) -> float:
    """Steps that a run has logged."""
    if not (run / "metrics.jsonl").exists():
        return 0
    return max(series(run, "step"), default=0)


@pytest.mark.slow
def test_a_killed_run_continues_on_other_ranks_as_torchrun_starts_them(
    save_model: Any, tmp_path: Path
) -> None:
    """2 ranks that share sequences are killed; 3 cannot share them, 4 can."""
    save_model(tmp_path / "base")
    write_tokenized(tmp_path / "train.jsonl", [20 + 5 * (n % 9) for n in range(40)], seed=1)
    flags = (
        f"--model_name {tmp_path}/base --dataset {tmp_path}/train.jsonl --precision fp32 --lr 0.01"
    )
    flags += (
        " --context_length 90 --num_epochs 9 --max_train_step 6 --save_steps 2 --warmup_steps 0"
    )
    flags += " --batch_size_training 1 --gradient_accumulation_steps 4 --no_plan"
    whole = [*flags.split(), "--output_dir", f"{tmp_path}/whole"]
    run_cases(tmp_path, [whole], timeout=600)
    words = [*flags.split(), "--enable_fsdp", "--sequence_parallel_size", "2"]
    words += ["--output_dir", f"{tmp_path}/run"]
    error_file = tmp_path / "logs" / "attempt_0" / "0" / "error.json"  # as torchrun's agent sets it
    error_file.parent.mkdir(parents=True)
    agent = {"TORCHELASTIC_ERROR_FILE": str(error_file), "GROUP_WORLD_SIZE": "2"}
    log = tmp_path / "log"
    running = start_forked(SLOWED, *words, output=log, ranks=2, HOLD_AT="5", **agent)
    while running.is_alive() and steps_of(tmp_path / "run") < 4:
        time.sleep(0.05)
    assert running.is_alive(), log.read_text()
    running.send(signal.SIGKILL)
    running.wait(30)
    refused = forked(RECIPE, *words, ranks=3, **agent)
    assert refused.exit_code == 2
    assert "3 ranks cannot be divided into groups of 2" in refused.output
    finished = forked(RECIPE, *words, ranks=4, **agent)
    assert finished.exit_code == 0, finished.output
    assert "Resuming from" in finished.output
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=2e-6)
    assert series(tmp_path / "run", "tokens") == series(tmp_path / "whole", "tokens")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--batching_strategy padding", "only packed sequences can be shared"),
        ("--objective grpo --reward reward.py:score", "the answers of objective grpo are padded"),
        ("", "1 rank cannot be divided into groups of 2"),
    ],
)
def test_what_cannot_be_shared_is_one_message(flags: str, expected: str) -> None:
    finished = forked(RECIPE, "--sequence_parallel_size", "2", *flags.split())
    assert finished.exit_code == 2
    assert expected in finished.output
    assert "sequence_parallel_size" in finished.output
    assert "Traceback" not in finished.output
