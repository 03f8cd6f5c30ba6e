"""recipes/inference.py as users run it: what a run has left answers as in plain transformers, on
one process and on two."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import QUESTIONS, REPOSITORY, run_cases, write_jsonl
from forked import ENVIRONMENT, Finished, forked

INFERENCE = REPOSITORY / "recipes" / "inference.py"
PIPED = Path(__file__).with_name("piped_job.py")
LONGEST = 16
PROMPTS = [f"{QUESTIONS[n % 4]}{' really' * (n % 5)}, number {n}?" for n in range(7)]


def inference(*flags: str | Path, ranks: int = 0) -> Finished:
    return forked(INFERENCE, *flags, "--device", "cpu", "--precision", "fp32", ranks=ranks)


@pytest.fixture(scope="module")
def runs(
    save_model: Callable[..., Path], rows16: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with a base model, a fully tuned run, a run with LoRA, and prompts."""
    folder = tmp_path_factory.mktemp("inference")
    save_model(folder / "base", hidden_size=64, intermediate_size=128)
    common = ["--device", "cpu", "--precision", "fp32", "--max_train_step", "3"]
    common += ["--model_name", f"{folder}/base", "--dataset", str(rows16)]
    lora = ["--use_peft", "--lora_dropout", "0", "--target_modules", "all-linear"]
    cases = [
        [*common, "--lr", "2e-3", "--output_dir", f"{folder}/full"],
        [*common, *lora, "--lr", "1e-2", "--output_dir", f"{folder}/lora"],
    ]
    # prompts and completions of text, although there is a chat template
    texts = [{"prompt": prompt, "completion": " It is a shard."} for prompt in PROMPTS]
    write_jsonl(folder / "texts.jsonl", texts)
    asked = ["--chat_template", "alpaca", "--sample_tokens", "8", "--sample_prompts", QUESTIONS[0]]
    text = ["--dataset", f"{folder}/texts.jsonl", "--output_dir", f"{folder}/text"]
    cases.append([*common, *lora, *asked, "--lr", "1e-2", *text])
    run_cases(folder, cases)
    write_jsonl(
        folder / "prompts.jsonl",
        [{"prompt": prompt, "id": f"sample {n}"} for n, prompt in enumerate(PROMPTS)],
    )
    return folder


def answers(runs: Path, place: Path, *flags: str, ranks: int = 0) -> list[str]:
    """What the recipe writes for the prompts, whose rows it must have kept."""
    file = runs / f"answers-{time.monotonic_ns()}.jsonl"
    common = [
        "--prompts",
        runs / "prompts.jsonl",
        "--output",
        file,
        "--max_new_tokens",
        str(LONGEST),
    ]
    finished = inference(place, *common, *flags, ranks=ranks)
    assert finished.exit_code == 0, finished.output
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["prompt"], row["id"]) for row in rows] == [
        (p, f"sample {n}") for n, p in enumerate(PROMPTS)
    ]
    return [row["answer"] for row in rows]


def by_transformers(model: Any, folder: Path) -> list[str]:
    """Greedy answers of a model to the prompts, one by one, by transformers alone."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = []
    for prompt in PROMPTS:
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            tokens = model.generate(**ids, max_new_tokens=LONGEST, do_sample=False, pad_token_id=0)
        texts.append(
            tokenizer.decode(tokens[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        )
    assert len(set(texts)) > 3
    return texts


def load(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def full_answers(runs: Path) -> list[str]:
    return by_transformers(load(runs / "full" / "model"), runs / "full" / "model")


def test_a_run_on_texts_is_asked_without_the_chat_template(runs: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoTokenizer

    folder = runs / "text" / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template
    model = PeftModel.from_pretrained(load(runs / "base"), folder).eval()
    ends = [model.config.eos_token_id, tokenizer.eos_token_id]
    model.generation_config.eos_token_id = ends

    def by_text(prompt: str, most: int) -> str:
        ids = tokenizer(prompt, return_tensors="pt")
        with torch.no_grad():
            tokens = model.generate(**ids, max_new_tokens=most, do_sample=False, pad_token_id=0)
        written = tokens[0, ids["input_ids"].shape[1] :]
        return str(tokenizer.decode(written, skip_special_tokens=True))

    expected = [by_text(prompt, LONGEST) for prompt in PROMPTS]
    assert answers(runs, runs / "text") == expected
    samples = json.loads((runs / "text" / "facts.json").read_text())["samples"]
    assert samples[-1]["answer"] == by_text(QUESTIONS[0], 8).strip()
    # the checkpoint knows it, too
    checkpoint = max((runs / "text" / "checkpoints").glob("step-*"))
    one = inference(checkpoint, "--prompt", PROMPTS[0], "--max_new_tokens", str(LONGEST))
    assert expected[0] in one.output
    assert "asked as text without the chat template" in one.output


def held(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_full_fine_tuning_run_answers_as_in_transformers_and_its_directory_is_not_changed(
    runs: Path, full_answers: list[str]
) -> None:
    before = held(runs / "full") | held(runs / "base")
    assert answers(runs, runs / "full", "--batch_size", "4") == full_answers
    assert held(runs / "full") | held(runs / "base") == before


def test_an_adapter_answers_as_with_peft(runs: Path) -> None:
    from peft import PeftModel

    with_adapter = PeftModel.from_pretrained(load(runs / "base"), runs / "lora" / "model").eval()
    assert answers(runs, runs / "lora") == by_transformers(with_adapter, runs / "lora" / "model")


@pytest.mark.parametrize(
    "flags",
    [["--enable_fsdp"], pytest.param([], marks=pytest.mark.slow)],
    ids=["sharded", "whole on each"],
)
def test_two_ranks_answer_as_one_process(
    flags: list[str], runs: Path, full_answers: list[str]
) -> None:
    assert answers(runs, runs / "full", "--batch_size", "2", *flags, ranks=2) == full_answers


def test_two_ranks_print_one_answer(runs: Path, full_answers: list[str]) -> None:
    flags = ["--prompt", PROMPTS[0], "--max_new_tokens", str(LONGEST), "--enable_fsdp"]
    finished = inference(runs / "full", *flags, ranks=2)
    assert finished.exit_code == 0 and finished.output.count(full_answers[0]) == 1, finished.output
    assert "sharded across 2 ranks" in finished.output


def test_a_quantized_model_answers_the_same_sharded(runs: Path) -> None:
    alone = answers(runs, runs / "lora", "--quantization", "8bit")
    assert answers(runs, runs / "lora", "--quantization", "8bit", "--enable_fsdp", ranks=2) == alone


def command(*flags: str | Path) -> list[str]:
    return [
        sys.executable,
        str(INFERENCE),
        *map(str, flags),
        "--device",
        "cpu",
        "--precision",
        "fp32",
    ]


def test_a_prompt_is_read_from_stdin_and_only_the_answer_goes_to_stdout(
    runs: Path, full_answers: list[str], tmp_path: Path
) -> None:
    (tmp_path / "stdin").write_text(f"{PROMPTS[0]}\n")
    words = [tmp_path / "stdin", tmp_path / "stdout", INFERENCE, runs / "full"]
    settings = ["--max_new_tokens", str(LONGEST), "--device", "cpu", "--precision", "fp32"]
    finished = forked(PIPED, *words, *settings)
    assert finished.exit_code == 0, finished.output
    assert (tmp_path / "stdout").read_text() == f"{full_answers[0]}\n"
    assert f"{runs}/full/model, fp32, cpu" in finished.output


@pytest.mark.slow
def test_encodings_of_a_pipe_do_not_matter(runs: Path, full_answers: list[str]) -> None:
    number = next(at for at, answer in enumerate(full_answers) if not answer.isascii())
    finished = subprocess.run(
        command(runs / "full", "--max_new_tokens", str(LONGEST)),
        input=f"\ufeff{PROMPTS[number]}\n",
        encoding="utf-8",
        capture_output=True,
        timeout=240,
        env={**os.environ, **ENVIRONMENT, "PYTHONIOENCODING": "ascii"},
    )
    assert (finished.returncode, finished.stdout) == (
        0,
        f"{full_answers[number]}\n",
    ), finished.stderr
    assert (
        f"{runs}/full/model, fp32, cpu" in finished.stderr and "temperature 0, " in finished.stderr
    )


def test_ctrl_c_while_libraries_are_imported_prints_one_line(runs: Path) -> None:
    process = subprocess.Popen(
        command(runs / "full", "--prompt", "Hi"),
        env={**os.environ, **ENVIRONMENT},
        stderr=subprocess.PIPE,
        text=True,
    )
    maps = Path(f"/proc/{process.pid}/maps")
    deadline = time.monotonic() + 60
    while "libtorch" not in maps.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert (
        process.communicate(timeout=60) == (None, "stopped by Ctrl-C\n")
        and process.returncode == 130
    )
