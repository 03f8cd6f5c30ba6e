"""Bad input found at every moment of the real command's start: one message that names the thing,
the place and what to do, exit code 2, nothing written. All commands run once, some at a time. Other
bad input is tested where it is found: in config, data, models and runtime."""

import hashlib
import json
import os
import shlex
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import RECIPE, Finished, losses, recipe
from forked import forked

MODEL = "--model_name @model"
ROWS = "--dataset @rows.jsonl"
GOOD = f"{MODEL} {ROWS}"
LORA = f"{GOOD} --use_peft"


class Case(NamedTuple):
    """A command, where @name is a file of the folder `broken`, words of its message, and how many
    errors the message has."""

    flags: str
    words: tuple[str, ...]
    errors: int
    environment: dict[str, str]


def case(flags: str, *words: str, errors: int = 1, **environment: str) -> Case:
    return Case(flags, words, errors, environment)


CASES = {
    "missing tensor": case(
        f"--model_name @missing_tensor {ROWS}", "missing_tensor: ", "missing: model.layers.0"
    ),
    "no tokenizer": case(
        f"--model_name @no_tokenizer {ROWS}",
        "no_tokenizer: no usable tokenizer",
        "--tokenizer_name",
    ),
    "tokenizer of more ids than the model": case(
        f"--model_name @small_vocabulary {ROWS}", "token 300", "280", "--tokenizer_name"
    ),
    "sample prompt of more ids than the model": case(
        "--model_name @small_vocabulary --dataset @letters.jsonl --sample_tokens 4 "
        "--sample_prompts 'What is a shard'",
        '--sample_prompts "What is a shard": token 2',
        "outside the model's vocabulary of 280",
    ),
    "samples that a template rejects": case(
        f"{GOOD} --chat_template @refuses.jinja",
        "rows.jsonl:1: the chat template rejects this chat: no tools here",
        "--skip_bad_rows",
    ),
    "adapter of another model": case(
        f"{LORA} --from_peft_checkpoint @other_adapter",
        "other_adapter/adapter_model.safetensors",
        "--model_name",
        "another model",
    ),
    "group that matches nothing": case(
        f"{GOOD} --groups '[{{match: lm_heat, lr: 2x}}]'",
        '--groups: "lm_heat" matches no parameter',
        "Trained are model.embed_tokens.weight",
    ),
    "optimizer that is none": case(
        f"{GOOD} --optimizer @own.py:build", "own.py:build returned a dict; expected a torch.optim"
    ),
    "several at once": case(
        f"--model_name @modle {ROWS} --lrr 1 --num_epochs 0 --precision fp17",
        "modle",
        "--lrr",
        "--num_epochs 0",
        "fp17",
        "Did you mean fp16?",
        errors=4,
    ),
    "no checkpoint": case(f"{GOOD} --resume @a_run", "--resume", "a_run: no checkpoint there"),
    "W&B without a key": case(
        f"{GOOD} --use_wandb",
        "--use_wandb",
        "no W&B key",
        "wandb login",
        "--wandb_mode offline",
        WANDB_API_KEY="",
        NETRC="/nowhere",
    ),
}


def snapshot(folder: Path) -> dict[str, str]:
    """Every path below a folder, with a digest of what it holds."""
    found = {}
    for path in sorted(folder.rglob("*")):
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path.relative_to(folder))] = digest
    return found


@dataclass(frozen=True)
class Outcome:
    """What all commands did: to themselves, and to the files around them."""

    finished: dict[str, Finished]
    output_dirs: Path
    before: dict[str, str]
    after: dict[str, str]


def run_case(name: str, broken: Path, output_dirs: Path, home: Path) -> Finished:
    """Run a case with an output_dir of its own, unless it is about that."""
    words = shlex.split(CASES[name].flags.replace("@", f"{broken}/"))
    if "--output_dir" not in words:
        words += ["--output_dir", str(output_dirs / name.replace(" ", "_"))]
    homes = {"HOME": str(home), "HF_HOME": str(home / "hub")}
    return forked(RECIPE, *words, **homes, **CASES[name].environment)


@pytest.fixture(scope="module")
def outcome(broken: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    output_dirs = tmp_path_factory.mktemp("outputs")
    home = tmp_path_factory.mktemp("home")
    before = snapshot(broken)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        results = pool.map(lambda name: run_case(name, broken, output_dirs, home), CASES)
        finished = dict(zip(CASES, results, strict=True))
    return Outcome(finished, output_dirs, before, snapshot(broken))


@pytest.mark.parametrize("name", CASES)
def test_bad_input_gives_one_message(name: str, outcome: Outcome) -> None:
    finished = outcome.finished[name]
    expected = CASES[name]
    message = finished.output[finished.output.find("error: ") :]
    assert finished.exit_code == 2, finished.output
    assert "Traceback" not in finished.output and "\x1b" not in finished.output
    assert message.count("error: ") == expected.errors, message
    # nothing after it
    assert all(line.startswith(("error: ", "       ")) for line in message.splitlines()), message
    for words in expected.words:
        assert words in message


def test_bad_input_leaves_nothing_behind(outcome: Outcome, cache: Path) -> None:
    assert list(outcome.output_dirs.iterdir()) == []
    assert outcome.after == outcome.before
    assert [path for path in cache.rglob(".*") if path.is_dir()] == []  # half-built data


@pytest.mark.parametrize(
    ("flags", "expected", "by_torchrun"),
    [
        (f"{GOOD} --lrr 1e-4", "error: --lrr is not a flag. Did you mean --lr?", True),
        (f"{MODEL} --dataset @malformed.jsonl", "malformed.jsonl:3: malformed JSON", False),
        (
            f"--model_name @truncated {ROWS} --enable_fsdp --low_cpu_fsdp",
            "missing or corrupted",
            False,
        ),
    ],
    ids=["before torch", "while the other rank waits", "on the one rank that reads"],
)
def test_two_ranks_print_a_user_error_once(
    flags: str, expected: str, by_torchrun: bool, broken: Path, tmp_path: Path
) -> None:
    words = [*shlex.split(flags.replace("@", f"{broken}/")), "--output_dir", str(tmp_path / "run")]
    if by_torchrun:
        finished = recipe(*words, processes=2)
        # torchrun's, and its closing report
        assert finished.exit_code == 1 and "failed (exitcode" in finished.output
    else:
        finished = forked(RECIPE, *words, ranks=2)
        assert finished.exit_code == 2
    printed = finished.output.partition("failed (exitcode")[0]
    assert printed.count("error: ") == printed.count(expected) == 1, finished.output
    assert "Traceback" not in printed
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_bad_sample_in_the_middle_of_a_stream_ends_the_run_on_all_ranks(
    broken: Path, tmp_path: Path
) -> None:
    """Rank 0 tokenizes it, while rank 1 trains; two windows of samples come before it."""
    flags = f"{MODEL} --dataset @late.jsonl --streaming --shuffle_buffer 10 --max_train_step 99"
    flags += " --batch_size_training 4 --context_length 128 --enable_fsdp --save_steps 5"
    words = flags.replace("@", f"{broken}/").split()
    output_dir = ["--precision", "fp32", "--output_dir", tmp_path / "run"]
    finished = forked(RECIPE, *words, *output_dir, ranks=2)
    assert finished.exit_code == 2, finished.output
    printed = finished.output[finished.output.index("error: ") :]
    assert printed.count("error: ") == 1 and "Traceback" not in finished.output, printed
    assert 'late.jsonl:601: "output" is [3]' in printed and "--skip_bad_rows" in printed
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 2)
    assert len(losses(tmp_path / "run")) >= 5
    assert (tmp_path / "run" / "checkpoints" / "step-000005").is_dir()


def test_overwrite_replaces_the_run_and_keeps_other_files(broken: Path, tmp_path: Path) -> None:
    shutil.copytree(broken / "a_run", tmp_path / "run")
    words = shlex.split(
        f"{GOOD} --max_train_step 1 --no_plan --overwrite".replace("@", f"{broken}/")
    )
    finished = forked(RECIPE, *words, "--output_dir", tmp_path / "run")
    assert finished.exit_code == 0, finished.output
    assert losses(tmp_path / "run") != [2.5]
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
