"""Runs with --objective distill: their losses are those of a plain loop with a live teacher, packed
and padded, on one and two ranks, from stored probabilities and after a resume."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Finished, losses, metrics, run_cases, write_jsonl
from conftest import reproducible_metrics as facts
from extensions.rollouts.made_rounds import write_rounds
from models.test_architectures import rounded
from plain_losses import load_model, mean_loss, read_jsonl, write_tokenized
from safetensors.torch import load_file
from torch.nn import functional as F

VOCABULARY = 301
LEARNING_RATE = 3e-3
STEPS = 4  # one per epoch, so that the order of the samples is free
SAMPLES = 12
FSDP = "--enable_fsdp --low_cpu_fsdp"
PADDED = "--batching_strategy padding"
# the samples, weight, temperature and divergence of each run whose losses a plain loop has, too
SETTINGS = {
    "packed": ("rows", 0.5, 1.0, "forward"),
    "padded": ("rows", 1.0, 2.0, "forward"),
    "on-policy": ("answers", 1.0, 1.0, "reverse"),
}
# answers of the student itself: two to each prompt
ON_POLICY = (
    f"--dataset @answers --rollouts all --distill_divergence reverse --distill_top_k {VOCABULARY}"
)
RUNS = {
    "packed": f"--teacher_model @teacher --distill_top_k {VOCABULARY} --save_steps 2",
    "padded": f"{PADDED} --teacher_model @teacher --teacher_file @stored.safetensors "
    f"--distill_top_k {VOCABULARY} --distill_weight 1 --distill_temperature 2",
    "on-policy": f"{ON_POLICY} --teacher_model @teacher --distill_weight 1",
}
# k = 8, from a teacher and from the column that vLLM would write
TOP = "--distill_top_k 8 --distill_weight 0.7 --save_steps 2"
ONE_RANK = {
    **RUNS,
    # nothing but the file is needed
    "stored": RUNS["padded"].replace("--teacher_model @teacher", ""),
    "top": f"{TOP} --teacher_model @teacher",
    "column": f"{TOP} --dataset @column.jsonl",
}
QUANTIZED = {
    bits: f"--distill_top_k 8 --teacher_model @wide --teacher_quantization {bits}"
    for bits in ("8bit", "4bit")
}
Folder = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(tiny_model: Path, save_model: Folder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student, a larger teacher, and samples of tokens."""
    folder = tmp_path_factory.mktemp("distill")
    shutil.copytree(tiny_model, folder / "student")
    save_model(folder / "teacher", seed=5, num_hidden_layers=3, initializer_range=0.3)
    save_model(
        folder / "wide", seed=6, hidden_size=64, intermediate_size=128, initializer_range=0.3
    )
    lengths = [6 + 7 * number % 31 for number in range(SAMPLES)]
    write_tokenized(folder / "rows.jsonl", lengths, seed=1)
    write_tokenized(folder / "validation.jsonl", [9, 14, 20], seed=2)
    write_column(folder)
    write_answers(folder)
    return folder


def write_answers(folder: Path) -> None:
    """Answers as a directory of rounds, and as samples for the plain loop."""
    totals = [[None, 0.5]] * (SAMPLES // 2)  # distillation needs no rewards
    [made] = write_rounds(folder / "answers", folder / "student", totals)
    samples = []
    for prompt, group in zip(made.prompts, made.answers, strict=True):
        for answer in group:
            token_ids = answer.token_ids.tolist()
            ids = prompt.token_ids + token_ids
            samples.append({"input_ids": ids, "labels": [-100] * len(prompt.token_ids) + token_ids})
    write_jsonl(folder / "answers.jsonl", samples)


def write_column(folder: Path) -> None:
    """The samples with what vLLM's prompt_logprobs has: nothing for the first token, and for each
    other one the ten most likely tokens, with the token itself."""
    teacher = load_model(folder / "teacher")
    samples = read_jsonl(folder / "rows.jsonl")
    for number, sample in enumerate(samples):
        entries: list[Any] = [None]
        for token, log_p in zip(
            sample["input_ids"][1:], log_probabilities(teacher, sample), strict=True
        ):
            ids = [*log_p.topk(10).indices.tolist(), token]
            values = {str(one): log_p[one].item() for one in ids}
            as_server = {one: {"logprob": value, "rank": 1} for one, value in values.items()}
            entries.append(as_server if number % 2 else values)
        sample["logprobs"] = entries
    write_jsonl(folder / "column.jsonl", samples)


@torch.no_grad()
def log_probabilities(model: Any, sample: dict[str, list[int]]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([sample["input_ids"]])).logits[0, :-1]
    return logits.log_softmax(-1)


def flags(folder: Path, name: str, more: str) -> list[str]:
    words = more.split()
    defaults = {
        "--model_name": "@student",
        "--objective": "distill",
        "--dataset": "@rows.jsonl",
        "--validation": "@validation.jsonl",
        "--context_length": "40",
        "--output_dir": f"@{name}",
        "--num_epochs": str(STEPS),
        "--precision": "fp32",
        "--lr": str(LEARNING_RATE),
        "--lr_scheduler": "constant",
        "--batch_size_training": "1",
        "--gradient_accumulation_steps": str(SAMPLES),
    }
    kept = [word for flag, value in defaults.items() if flag not in words for word in (flag, value)]
    return [word.replace("@", f"{folder}/") for word in [*kept, *words]]


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> Finished:
    return run_cases(folder, [flags(folder, name, more) for name, more in ONE_RANK.items()])


@pytest.fixture(scope="module")
def quantized(folder: Path) -> Finished:
    return run_cases(folder, [flags(folder, name, more) for name, more in QUANTIZED.items()])


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> Finished:
    cases = []
    for name, more in RUNS.items():
        more = more.replace("@stored", "@stored-by-two")
        cases.append(flags(folder, f"two-{name}", f"{more} {FSDP} --val_batch_size 1"))
    return run_cases(folder, cases, ranks=2)


def plain_losses(
    folder: Path, samples_name: str, weight: float, temperature: float, divergence: str
) -> list[float]:
    """AdamW in one process, sample by sample, in Transformers."""
    teacher = load_model(folder / "teacher")
    student = load_model(folder / "student")
    optimizer = torch.optim.AdamW(student.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    samples = read_jsonl(folder / f"{samples_name}.jsonl")
    found = []
    for _ in range(STEPS):
        total = torch.zeros(())
        count = 0
        for sample in samples:
            ids = torch.tensor([sample["input_ids"]])
            labels = torch.tensor(sample["labels"][1:])
            logits = student(input_ids=ids).logits[0, :-1][labels != -100]
            with torch.no_grad():
                theirs = teacher(input_ids=ids).logits[0, :-1][labels != -100]
            labels = labels[labels != -100]
            ours = (logits / temperature).log_softmax(-1)
            target = (theirs / temperature).log_softmax(-1)
            pair = (ours, target) if divergence == "forward" else (target, ours)
            total = total + weight * F.kl_div(*pair, log_target=True, reduction="sum")
            total = total + (1 - weight) * F.cross_entropy(logits, labels, reduction="sum")
            count += len(labels)
        loss = total / count
        found.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("name", RUNS)
def test_a_run_has_the_losses_of_a_plain_loop_with_a_live_teacher(
    one_rank: Finished, two_ranks: Finished, folder: Path, name: str
) -> None:
    expected = plain_losses(folder, *SETTINGS[name])
    for run in (name, f"two-{name}"):
        assert losses(folder / run)[0] == pytest.approx(expected[0], rel=1e-6)
    assert losses(folder / name) == pytest.approx(expected, rel=2e-5)
    assert losses(folder / f"two-{name}") == pytest.approx(expected, rel=2e-5)


def test_the_validation_loss_is_the_cross_entropy(one_rank: Finished, folder: Path) -> None:
    expected = mean_loss(load_model(folder / "student"), folder / "validation.jsonl")
    assert metrics(folder / "packed")[0]["eval/loss"] == pytest.approx(expected, rel=1e-5)


def test_the_file_has_the_most_likely_tokens_of_each_target(
    one_rank: Finished, two_ranks: Finished, folder: Path
) -> None:
    """In the order of the data, whatever the ranks and the layout, and readable by safetensors."""
    teacher = load_model(folder / "teacher")
    expected = []
    for sample in read_jsonl(folder / "rows.jsonl"):
        labels = torch.tensor(sample["labels"][1:])
        expected.append(log_probabilities(teacher, sample)[labels != -100].topk(8).values)
    top = load_file(folder / "top" / "teacher.safetensors")
    torch.testing.assert_close(top["log_probabilities"], torch.cat(expected), rtol=1e-4, atol=1e-4)
    assert top["ends"].tolist() == [
        sum(len(part) for part in expected[: count + 1]) for count in range(SAMPLES)
    ]
    for one, other in (
        ("packed/teacher", "two-packed/teacher"),
        ("stored", "stored-by-two"),
    ):
        ours = load_file(folder / f"{one}.safetensors")
        theirs = load_file(folder / f"{other}.safetensors")
        assert ours["keys"].equal(theirs["keys"]) and ours["ends"].equal(theirs["ends"])
        name = "log_probabilities"
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("bits", QUANTIZED)
def test_a_quantized_teacher_is_the_one_of_bitsandbytes(
    quantized: Finished, folder: Path, bits: str
) -> None:
    """The linear layers of its decoder layers have the weights that bitsandbytes gives back."""
    teacher = load_model(folder / "wide")
    linears = [m for m in teacher.model.layers.modules() if isinstance(m, torch.nn.Linear)]
    plain = [linear.weight.detach().clone() for linear in linears]
    expected = []
    for is_rounded in (False, True):
        for linear, weight in zip(linears, plain, strict=True):
            linear.weight.data = rounded(weight, bits == "4bit").float() if is_rounded else weight
        values = []
        for sample in read_jsonl(folder / "rows.jsonl"):
            labels = torch.tensor(sample["labels"][1:])
            values.append(log_probabilities(teacher, sample)[labels != -100].topk(8).values)
        expected.append(torch.cat(values))
    found = load_file(folder / bits / "teacher.safetensors")["log_probabilities"]
    difference = (found - expected[1]).norm()
    assert difference < 0.1 * (expected[0] - expected[1]).norm()


def test_a_stored_file_gives_the_same_run(one_rank: Finished, folder: Path) -> None:
    assert facts(folder / "stored") == facts(folder / "padded")
    assert not (folder / "stored" / "teacher.safetensors").exists()


def test_the_column_of_vllm_gives_the_run_of_the_teacher(one_rank: Finished, folder: Path) -> None:
    assert losses(folder / "column") == pytest.approx(losses(folder / "top"), rel=1e-5)


def test_a_run_resumes_bit_for_bit_without_its_teacher(one_rank: Finished, folder: Path) -> None:
    check_resumed(folder, "top")


@pytest.mark.slow
def test_a_run_with_the_column_of_vllm_resumes_bit_for_bit(
    one_rank: Finished, folder: Path
) -> None:
    check_resumed(folder, "column")


def check_resumed(folder: Path, name: str) -> None:
    """Resume a run after its second step, while its teacher is not there."""
    moved = (folder / "teacher").rename(folder / "absent")
    try:
        step_2 = f"--resume {folder}/{name}/checkpoints/step-000002"
        run_cases(folder, [flags(folder, f"{name}-resumed", f"{ONE_RANK[name]} {step_2}")])
    finally:
        moved.rename(folder / "teacher")
    assert facts(folder / f"{name}-resumed") == facts(folder / name)
    content = (folder / f"{name}-resumed" / "teacher.safetensors").read_bytes()
    assert content == (folder / name / "teacher.safetensors").read_bytes()
