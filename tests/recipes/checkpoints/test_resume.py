"""A resumed run is the run that was never stopped: bit for bit on the same ranks, to 1e-4 on
others."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import CASES, RECIPE, REPOSITORY, Finished, losses, metrics
from conftest import reproducible_metrics as facts
from forked import forked
from plain_losses import (
    load_model,
    loss_tokens,
    losses_per_sample,
    read_jsonl,
    write_pairs,
    write_tokenized,
)

from llama_ft.checkpoint import checkpoint_errors, complete_checkpoints

SINGLE = "model.safetensors"
ADAPTER = "adapter_model.safetensors"
EXPORT = REPOSITORY / "recipes" / "export.py"
FSDP = "--enable_fsdp --low_cpu_fsdp"
HYBRID = "--enable_fsdp --sharding_strategy HYBRID_SHARD --sharding_group_size"
PLAIN = "--gradient_accumulation_steps 2"
LORA = "--use_peft --lora_dropout 0.2 --target_modules all-linear"
EXPERTS = (
    "--model_name @experts --use_peft --lora_dropout 0 --router_aux_loss_coef 0.1 "
    "--target_parameters experts.gate_up_proj,experts.down_proj"
)
SHORT = "--max_train_step 4 --save_steps 2"
# No loss is 10 lower than the first: it stops after step 5, and takes the weights of step 1.
EARLY = "--eval_steps 1 --early_stopping_patience 4 --early_stopping_min_delta 10"
DPO = "--objective dpo --dataset @pairs.jsonl --validation 0.2"
# Samples of 6 to 36 tokens in packed sequences of 40. Each run is repeated from the middle of its
# first epoch. Every optimizer resumes bit for bit in training/test_optimizer.py.
EXACT = {
    "full": f"{FSDP} {PLAIN} --gradient_clipping --eval_steps 4 --seed 7",
    "nf4": f"--enable_fsdp {LORA} --quantization 4bit --use_tensorboard {SHORT}",
    "SGD": f"--optimizer SGD --momentum 0.9 --lr 0.1 {SHORT}",
    "padded": f"{FSDP} --batching_strategy padding --precision bf16_pure --optimizer anyprecision "
    f"{SHORT}",
    "early": f"{FSDP} {EARLY}",
    "experts": f"{FSDP} {EXPERTS} --activation_checkpointing full {SHORT}",
    "dpo": f"{FSDP} {DPO} {SHORT}",
}
# Slow: what is saved of them is proven apart, or by one of the others.
SLOW_EXACT = ("nf4", "SGD", "padded", "early", "experts")
FAST_EXACT = [name for name in EXACT if name not in SLOW_EXACT]
# 32 packed sequences per step: 256 samples are read ahead (a chunk, the least) and are 5 steps, the
# other 144 of an epoch are 3.
STREAMING = (
    "--streaming --shuffle_buffer 30 --max_train_step 10 --batch_size_training 16 "
    "--dataset @many.jsonl --validation @few.jsonl --eval_steps 5"
)
# Weights that do not change: the loss of a sample does not depend on when it is seen.
STILL = f"--optimizer SGD --lr 1e-30 --num_epochs 1 --validation @few.jsonl {PLAIN}"
# The same run on two ranks, sharded in another way.
LAYOUTS = {
    "no_shard": PLAIN,
    "hybrid": f"{PLAIN} {HYBRID} 1",
    "grad_op": f"{PLAIN} --enable_fsdp --sharding_strategy SHARD_GRAD_OP "
    "--activation_checkpointing full",
    "other_micro_batches": f"{FSDP} --batch_size_training 1 --gradient_accumulation_steps 4",
}
FAST_LAYOUTS = ("no_shard",)


@pytest.fixture(scope="module")
def folder(
    save_model: Callable[..., Path],
    save_tokenizer: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Three models, of dropout and of experts too, and rows: 5 steps of 8 packs to the epoch, the
    last of fewer."""
    from transformers import MixtralConfig, MixtralForCausalLM

    folder = tmp_path_factory.mktemp("resume")
    shape = {"hidden_size": 64, "intermediate_size": 130, "num_hidden_layers": 2}
    save_model(folder / "model", **shape)
    save_model(folder / "dropout", attention_dropout=0.2, **shape)
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 301,
        "router_jitter_noise": 0.1,
    }
    experts = MixtralConfig(**{**shape, **heads, "intermediate_size": 128, "num_local_experts": 3})
    MixtralForCausalLM(experts).save_pretrained(save_tokenizer(folder / "experts"))
    for name, count in (("rows", 70), ("many", 400), ("few", 5)):
        lengths = [6 + 7 * number % 31 for number in range(count)]
        write_tokenized(folder / f"{name}.jsonl", lengths, seed=count)
    write_pairs(folder / "pairs.jsonl", 24)
    return folder


def flags(folder: Path, name: str, model: str, *more: str) -> list[str]:
    """Flags of a run. Those of `more` replace the defaults, and @ is the folder."""
    words = " ".join(more).split()
    defaults = {
        "--model_name": f"@{model}",
        "--dataset": "@rows.jsonl",
        "--validation": "0.1",
        "--context_length": "40",
        "--output_dir": f"@{name}",
        "--batch_size_training": "2",
        "--lr": "1e-3",
        "--precision": "fp32",
        "--save_steps": "3",
    }
    if "--streaming" not in words:
        defaults["--num_epochs"] = "2"
    kept = [word for flag, value in defaults.items() if flag not in words for word in (flag, value)]
    return [word.replace("@", f"{folder}/") for word in [*kept, *words]]


def launch(folder: Path, cases: list[list[str]], ranks: int) -> Finished:
    """All cases in the processes of one launch."""
    file = folder / f"cases{ranks}-{len(cases)}.json"
    file.write_text(json.dumps(cases))
    return forked(CASES, file, ranks=ranks if ranks > 1 else 0, timeout=400)


def checkpoint(folder: Path, name: str, step: int) -> str:
    return f"--resume {folder}/{name}/checkpoints/step-{step:06d}"


def exact_cases(folder: Path, name: str) -> list[list[str]]:
    """A run, and the same resumed in its first epoch."""
    settings = EXACT[name]
    whole = flags(folder, name, "dropout", settings)
    resume = checkpoint(folder, name, 2 if SHORT in settings else 3)
    return [whole, flags(folder, f"{name}-resumed", "dropout", settings, resume)]


def layout_case(folder: Path, name: str) -> list[str]:
    return flags(folder, name, "model", LAYOUTS[name], checkpoint(folder, "plain", 3))


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> Path:
    """The folder, with the runs of the fast tests."""
    cases = []
    for name in FAST_EXACT:
        cases += exact_cases(folder, name)
    cases.append(flags(folder, "plain", "model", FSDP, PLAIN))
    cases += [layout_case(folder, name) for name in FAST_LAYOUTS]
    cases.append(flags(folder, "streaming", "model", FSDP, STREAMING))
    resume = checkpoint(folder, "streaming", 6)  # in the middle of the second window
    cases.append(flags(folder, "streaming-resumed", "model", FSDP, STREAMING, resume))
    cases.append(flags(folder, "still", "model", STILL))
    finished = launch(folder, cases, 2)
    assert finished.exit_code == 0, finished.output
    return folder


@pytest.fixture(scope="module")
def further(two_ranks: Path) -> Finished:
    """The runs of the slow tests on two ranks, in the same folder."""
    cases = []
    for name in SLOW_EXACT:
        cases += exact_cases(two_ranks, name)
    resume = checkpoint(two_ranks, "padded", 2)
    cases.append(flags(two_ranks, "padded", "dropout", EXACT["padded"], resume))
    cases += [layout_case(two_ranks, name) for name in LAYOUTS.keys() - {*FAST_LAYOUTS}]
    finished = launch(two_ranks, cases, 2)
    assert finished.exit_code == 0, finished.output
    return finished


def check_exact(folder: Path, name: str) -> None:
    whole = facts(folder / name)
    resumed = facts(folder / f"{name}-resumed")
    assert len(whole) >= 5 and whole == resumed
    values = losses(folder / name)
    assert (name == "experts") == any("train/router_aux_loss" in line for line in whole)
    assert len(values) == len(set(values)), "dropout and weights change the loss at every step"


@pytest.mark.parametrize("name", FAST_EXACT)
def test_a_run_resumed_mid_epoch_logs_the_same_metrics(two_ranks: Path, name: str) -> None:
    check_exact(two_ranks, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_EXACT)
def test_further_runs_resumed_mid_epoch_log_the_same_metrics(
    two_ranks: Path, further: Finished, name: str
) -> None:
    check_exact(two_ranks, name)


def test_a_stream_resumed_in_the_middle_of_a_window_has_the_same_metrics(two_ranks: Path) -> None:
    whole = facts(two_ranks / "streaming")
    assert facts(two_ranks / "streaming-resumed") == whole
    assert len(losses(two_ranks / "streaming")) == 10
    assert whole[-1]["epoch"] == 1.0
    assert "eval/loss" in whole[-1]
    saved = two_ranks / "streaming" / "checkpoints" / "step-000006" / "trainer.json"
    position = json.loads(saved.read_text())["progress"]["position"]
    assert position["window"] == 1
    assert position["step_in_window"] == 1


def check_same_model(folder: Path, name: str, file: str) -> None:
    from safetensors.torch import load_file

    whole = load_file(folder / name / "model" / file)
    resumed = load_file(folder / f"{name}-resumed" / "model" / file)
    assert whole.keys() == resumed.keys()
    assert all(whole[key].equal(resumed[key]) for key in whole)


def test_the_result_of_a_resumed_run_is_the_same_model(two_ranks: Path) -> None:
    check_same_model(two_ranks, "full", SINGLE)


@pytest.mark.slow
def test_the_results_of_further_resumed_runs_are_the_same_models(
    two_ranks: Path, further: Finished
) -> None:
    for name, file in (("nf4", ADAPTER), ("experts", ADAPTER), ("early", SINGLE)):
        check_same_model(two_ranks, name, file)


@pytest.mark.slow
def test_a_run_resumed_in_another_directory_finds_the_best_weights_of_the_first(
    two_ranks: Path, further: Finished
) -> None:
    """The best weights are of a step before the branch, and are taken in both."""
    best = json.loads((two_ranks / "early" / "checkpoints" / "best.json").read_text())
    assert (
        best["step"] < 3
        and not (two_ranks / "early-resumed" / "checkpoints" / best["checkpoint"]).exists()
    )
    found = f"model of step {best['step']}: {two_ranks}/early"
    assert further.output.count(found) == 2


@pytest.mark.slow
def test_resuming_an_earlier_step_moves_newer_checkpoints_to_set_aside(
    two_ranks: Path, further: Finished
) -> None:
    run_dir = two_ranks / "padded"
    assert (run_dir / "checkpoints" / "set-aside-1-step-000004").is_dir()
    assert (run_dir / "set-aside-1-model").is_dir() and (run_dir / "model").is_dir()


@pytest.mark.parametrize("name", FAST_LAYOUTS)
def test_resuming_with_another_sharding_keeps_the_losses(two_ranks: Path, name: str) -> None:
    assert losses(two_ranks / name) == pytest.approx(losses(two_ranks / "plain"), rel=1e-4)


@pytest.mark.slow
def test_resuming_with_further_shardings_keeps_the_losses(
    two_ranks: Path, further: Finished
) -> None:
    for name in LAYOUTS:
        assert losses(two_ranks / name) == pytest.approx(losses(two_ranks / "plain"), rel=1e-4), (
            name
        )


@pytest.fixture(scope="module")
def one_rank(two_ranks: Path) -> Finished:
    """From two ranks to one; then, with a finished run, a setting that makes another one."""
    cases = [flags(two_ranks, "one", "model", PLAIN, checkpoint(two_ranks, "plain", 3))]
    cases.append(
        flags(two_ranks, "one-streaming", "model", STREAMING, checkpoint(two_ranks, "streaming", 6))
    )
    cases.append(flags(two_ranks, "one-still", "model", STILL, checkpoint(two_ranks, "still", 3)))
    cases.append(
        flags(two_ranks, "one-dpo", "dropout", DPO, "--batching_strategy", "padding", SHORT)
    )
    cases.append(flags(two_ranks, "plain", "model", PLAIN, "--seed", "8", "--resume", "auto"))
    return launch(two_ranks, cases, 1)


def test_resuming_on_one_rank_keeps_the_losses(two_ranks: Path, one_rank: Finished) -> None:
    assert losses(two_ranks / "one") == pytest.approx(losses(two_ranks / "plain"), rel=1e-4)
    assert losses(two_ranks / "one-streaming") == pytest.approx(
        losses(two_ranks / "streaming"), rel=1e-4
    )


def test_reference_log_probabilities_do_not_depend_on_ranks_or_batching(
    two_ranks: Path, one_rank: Finished
) -> None:
    """Packed on two sharded ranks, and padded on one. A checkpoint holds what its run does."""
    from safetensors.torch import load_file

    runs = ("dpo", "one-dpo", "dpo/checkpoints/step-000002", "dpo-resumed/checkpoints/step-000004")
    sharded, single, *later = (load_file(two_ranks / run / "reference.safetensors") for run in runs)
    assert (
        sharded["reference.keys"].equal(single["reference.keys"])
        and len(single["reference.keys"]) >= 40
    )
    for name, numbers in sharded.items():
        torch.testing.assert_close(numbers, single[name], rtol=1e-5, atol=1e-5)
        assert all(other[name].equal(numbers) for other in later)


def flip_a_bit(file: Path) -> None:
    """In place, as a bad block does: all hard links to the file would change."""
    with open(file, "r+b") as opened:
        opened.seek(-3, os.SEEK_END)
        (byte,) = opened.read(1)
        opened.seek(-3, os.SEEK_END)
        opened.write(bytes([byte ^ 1]))


@pytest.fixture(scope="module")
def without_references(two_ranks: Path, one_rank: Finished) -> Finished:
    """Runs resumed after the file of the run was corrupted, or that of the checkpoint, too."""
    other = "--reference_model @model"
    finished = launch(
        two_ranks, [flags(two_ranks, "dpo_other", "dropout", FSDP, DPO, SHORT, other)], 2
    )
    assert finished.exit_code == 0, finished.output
    cases = []
    for name, settings in (("dpo", ""), ("dpo", ""), ("dpo_other", other)):
        copied = f"{name}-{len(cases)}"
        run_dir = shutil.copytree(two_ranks / name, two_ranks / copied)
        flip_a_bit(run_dir / "reference.safetensors")
        if cases:
            flip_a_bit(run_dir / "checkpoints" / "step-000002" / "reference.safetensors")
        step_2 = checkpoint(two_ranks, copied, 2)
        cases.append(flags(two_ranks, copied, "dropout", FSDP, DPO, SHORT, settings, step_2))
    return launch(two_ranks, cases, 2)


@pytest.mark.slow
def test_a_corrupted_reference_file_of_a_run_leaves_those_of_its_checkpoints_valid(
    two_ranks: Path, without_references: Finished
) -> None:
    files = [*(two_ranks / "dpo").rglob("reference.safetensors")]
    assert len(files) >= 3 and {file.stat().st_nlink for file in files} == {1}
    assert without_references.exit_code == 0, without_references.output
    assert facts(two_ranks / "dpo-0") == facts(two_ranks / "dpo")


@pytest.mark.slow
def test_a_reference_without_a_valid_file_is_computed_again(
    two_ranks: Path, without_references: Finished
) -> None:
    assert without_references.exit_code == 0, without_references.output
    again = "warning: The log-probabilities of the reference are computed again."
    assert without_references.output.count(again) == 2
    for whole, resumed in (("dpo", "dpo-1"), ("dpo_other", "dpo_other-2")):
        assert facts(two_ranks / resumed) == facts(two_ranks / whole)
        contents = {
            (two_ranks / run / "reference.safetensors").read_bytes()
            for run in (whole, resumed, f"{resumed}/checkpoints/step-000004")
        }
        assert len(contents) == 1


@pytest.mark.slow
def test_a_checkpoint_with_a_corrupted_reference_can_be_exported(
    two_ranks: Path, tmp_path: Path
) -> None:
    run_dir = shutil.copytree(two_ranks / "dpo", tmp_path / "run")
    for file in run_dir.rglob("reference.safetensors"):
        flip_a_bit(file)
    newest = complete_checkpoints(run_dir)[0]
    assert checkpoint_errors(newest) == []
    exported = forked(EXPORT, run_dir, tmp_path / "model")
    assert exported.exit_code == 0, exported.output
    assert (tmp_path / "model" / SINGLE).read_bytes() == (run_dir / "model" / SINGLE).read_bytes()


def test_a_run_resumed_mid_epoch_sees_each_remaining_sample_once(
    two_ranks: Path, one_rank: Finished
) -> None:
    """With weights that stay, the loss sums of an epoch, begun on two ranks and ended on one, are
    those of each of its samples, once, in plain transformers. A sample seen twice, or instead of
    another, would show as 1e-4 and more."""
    file = two_ranks / "rows.jsonl"
    alone = sum(losses_per_sample(load_model(two_ranks / "model"), file))
    targets = sum(loss_tokens(sample) for sample in read_jsonl(file))
    lines = [line for line in metrics(two_ranks / "one-still") if "train/loss" in line]
    seen = 0
    total = 0.0
    for line in lines:
        total += line["train/loss"] * (line["tokens"] - seen)
        seen = line["tokens"]
    assert len(lines) > 4 and seen == targets
    assert total == pytest.approx(alone, rel=1e-6)


def test_resuming_with_another_seed_is_rejected(two_ranks: Path, one_rank: Finished) -> None:
    assert one_rank.exit_code == 2
    assert (
        "--seed is 8, was 42" in one_rank.output
        and "--resume_allow_changes seed" in one_rank.output
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.large)])
def test_resuming_on_more_ranks_and_back_keeps_the_losses(
    two_ranks: Path, one_rank: Finished, ranks: int
) -> None:
    more = checkpoint(two_ranks, "plain", 3)
    groups = "2" if ranks == 4 else "1"
    cases = {f"{ranks}": flags(two_ranks, f"{ranks}", "model", FSDP, PLAIN, more)}
    stream = checkpoint(two_ranks, "streaming", 3)
    streamed = flags(two_ranks, f"{ranks}-streaming", "model", FSDP, STREAMING, stream)
    cases[f"{ranks}-hybrid"] = flags(
        two_ranks, f"{ranks}-hybrid", "model", HYBRID, groups, PLAIN, more
    )
    finished = launch(two_ranks, [*cases.values(), streamed], ranks)
    assert finished.exit_code == 0, finished.output
    assert losses(two_ranks / f"{ranks}-streaming") == pytest.approx(
        losses(two_ranks / "streaming"), rel=1e-4
    )
    back = {
        f"{name}-back": flags(
            two_ranks,
            f"{name}-back",
            "model",
            "--enable_fsdp",
            PLAIN,
            checkpoint(two_ranks, name, 6),
        )
        for name in ([*cases, "one"] if ranks == 4 else cases)
    }
    finished = launch(two_ranks, list(back.values()), 2)
    assert finished.exit_code == 0, finished.output
    for name in [*cases, *back]:
        assert losses(two_ranks / name) == pytest.approx(losses(two_ranks / "plain"), rel=1e-4), (
            name
        )


def test_resume_auto_takes_the_newest_valid_checkpoint(two_ranks: Path) -> None:
    """A corrupted newest checkpoint is reported and moved to set-aside-*, and the run resumes from
    the one before."""
    run_dir = shutil.copytree(two_ranks / "full", two_ranks / "auto")
    newest, before, *_ = complete_checkpoints(run_dir)
    shard = newest / "shard-00002-model-00001-of-00001.safetensors"
    flip_a_bit(shard)
    settings = flags(two_ranks, "auto", "dropout", EXACT["full"], "--resume", "auto")
    finished = forked(RECIPE, *settings, ranks=2)
    assert finished.exit_code == 0, finished.output
    assert f"{newest.name} is corrupted and not used" in finished.output
    assert shard.name in finished.output and f"{before.name}" in finished.output
    assert facts(run_dir) == facts(two_ranks / "full")
    assert (run_dir / "checkpoints" / f"set-aside-1-{newest.name}").is_dir()
