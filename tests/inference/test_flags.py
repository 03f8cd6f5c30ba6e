import json
import os
from pathlib import Path
from typing import Any

import pytest
from result_files import ADAPTER, MODEL, make

from llama_ft.errors import UserError
from llama_ft.evaluation.flags import read_evaluate_flags
from llama_ft.inference.flags import read_inference_flags


def read(*words: str | Path) -> Any:
    return read_inference_flags([str(word) for word in words], "Ask a model.")


def mistakes(*words: str | Path) -> str:
    with pytest.raises(UserError) as told:
        read(*words)
    return str(told.value)


def test_llama_recipes_names_say_what_is_loaded(tmp_path: Path) -> None:
    base, adapter = make(tmp_path / "base", *MODEL), make(tmp_path / "adapter", *ADAPTER)
    options = read("--model_name", base, "--peft_model", adapter, "--prompt", "Hi")
    assert (options.places[0], options.base_model) == (str(adapter), str(base))
    assert read("--model-name", base, "--prompt=Hi").places[0] == str(base)
    options = read(base, "--prompt", "Hi", "--do_sample", "False", "--stop", "#", "--stop", "User:")
    assert options.temperature == 0 and options.stop == ["#", "User:"] and options.mode == "one"
    told = mistakes(base, "--prompt", "Hi", "--use_auditnlg", "True", "--length_penalty", "1", "--promt", "Hi")
    assert "--use_auditnlg is not a flag here: answers are not judged here." in told
    assert "only beam search" in told and "Did you mean --prompt?" in told


def test_a_model_that_would_not_be_read_is_told(tmp_path: Path) -> None:
    base, whole = make(tmp_path / "base", *MODEL, "rows.jsonl"), make(tmp_path / "whole", *MODEL)
    adapter = make(tmp_path / "adapter", *ADAPTER)
    (base / "rows.jsonl").write_text('{"text": "Hi"}\n')
    rows = ["--dataset", str(base / "rows.jsonl")]
    for reader, flags in ((read_inference_flags, ["--prompt", "Hi"]), (read_evaluate_flags, rows)):
        for words, flag in {
            (str(whole), "--base_model", str(base)): "--base_model",
            ("--peft_model", str(whole), "--model_name", str(base)): "--model_name",
        }.items():
            with pytest.raises(UserError) as told:
                reader([*words, *flags], "")
            assert told.value.messages == (f"{flag} {base}: would not be read: {whole} is a whole model. Remove it.",)
        options = reader([str(adapter), "--base_model", str(base), *flags], "")
        assert getattr(options, "flags", options).base_model == str(base)
    (base / "config.json").write_text('{"hidden_size": 8}')
    with pytest.raises(UserError, match=r"config\.json: holds something other than results"):
        read_evaluate_flags([str(whole), *rows, "--output_file", f"{base}/config.json", "--overwrite"], "")
    compared = read_evaluate_flags([str(whole), "--base", "--base_model", str(base), *rows], "")
    assert compared.asked[0][1].place == str(base)
    assert read_evaluate_flags([str(whole), str(adapter), "--base_model", str(base), *rows], "").flags.base_model


def test_what_only_a_file_of_prompts_has_is_told_without_one_and_else_as_help_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = make(tmp_path, *MODEL, "rows.jsonl")
    told = mistakes(base, "--prompt", "Hi", "--batch_size", "3", "--output_key", "x")
    assert told.count("error: ") == 2 and "--batch_size: is for --prompts" in told and "--output_key: is for" in told
    options = read(base, "--prompts", base / "rows.jsonl")
    assert (options.batch_size, options.output_key) == (8, "answer")
    with pytest.raises(SystemExit):
        read("--help")
    words = " ".join(capsys.readouterr().out.split())
    assert "per rank. [default: 8]" in words and "the key of the answers. [default: answer]" in words
    assert "generation_config.json says, else 0 (with --do_sample 1), 1, 50 and 1" in words
    options = read(base, "--prompts", base / "rows.jsonl", "--batch_size", "3", "--output_key", "x")
    assert (options.batch_size, options.output_key) == (3, "x")


def test_every_mistake_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make(tmp_path / "base", *MODEL, "prompts.csv", "rows.jsonl")
    told = mistakes(
        base, "--prompts", base / "prompts.csv", "--no_chat_template", "--system_prompt", "x", "--overwrite",
        "--do_sample", "True", "--temperature", "0", "--base_model", "/gone",
    )  # fmt: skip
    for part in (
        "expected .txt", "--no_chat_template: a system prompt", "--do_sample True: --temp", "/gone: no such",
    ):  # fmt: skip
        assert part in told
    assert told.count("error: ") == 4
    assert "MODEL is needed" in mistakes("--prompt", "Hi")
    assert "--prompt and --chat: one of them" in mistakes(base, "--prompt", "Hi", "--chat")
    assert "name one of them" in mistakes(base, "--peft_model", base)
    assert "--top_p 2: must be at most 1." in mistakes(base, "--top_p", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "--enable_fsdp shards the model" in mistakes(base, "--prompt", "Hi")
    assert read(base, "--prompts", base / "rows.jsonl").mode == "many"


LONG = "n" * 5000


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--repetition_penalty", "0"], "--repetition_penalty 0: must be greater than 0."),
        (["--max_new_tokens", "9" * 5000], "--max_new_tokens 999"),
        (["--temperature", "0", "--top_p", "0.5"], "--top_p: nothing is sampled"),
        (["--do_sample", "False", "--top_k", "5"], "--top_k: nothing is sampled"),
        (["--stop", "#", "--stop", ""], "--stop: the value is empty"),
        (["--prompt", "a\udcff"], "--prompt: is not UTF-8."),
        (["--system_prompt", "\ud800"], "--system_prompt: is not UTF-8."),
        (["second"], ". and second: name one of them"),
        (["--prompts", "~nosuchuser/a.txt"], "--prompts ~nosuchuser/a.txt: cannot be looked at: "),
        (["--prompts", f"{LONG}.txt"], "nnn... (5004 characters): cannot be looked at: File name too long."),
        (["--prompts", "folder.txt"], "--prompts folder.txt: is a folder; expected a file."),
        (["--prompts", "a.jsonl", "--output_file", "a.jsonl", "--overwrite"], "a.jsonl: is what --prompts reads"),
        (["--prompts", "a.jsonl", "--output_file", "./link.jsonl"], "link.jsonl: is what --prompts reads"),
        (["--prompts", "a.jsonl", "--output_file", "folder.txt"], "--output_file folder.txt: is a folder"),
        (["--prompts", "a.jsonl", "--output_file", "config.json"], "config.json: is there already. --overwrite"),
        (["--prompts", "a.jsonl", "--output_file", "/dev/null"], "/dev/null: is a device, a pipe or the like"),
        (["--prompts", "pipe.jsonl"], "--prompts pipe.jsonl: is not a regular file"),
        (["--prompt_file", "/dev/zero"], "--prompt_file /dev/zero: is not a regular file"),
        (["--prompts", "a.jsonl", "--output_file", "a.jsonl/b.jsonl"], "--output_file a.jsonl/b.jsonl: "),
        (["--prompts", "a.jsonl", "--output_file", "~nosuchuser/b"], "--output_file ~nosuchuser/b: cannot be looked"),
    ],
)
def test_values_that_cannot_be_are_told_with_their_flag(
    flags: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make(tmp_path, *MODEL, "a.jsonl", "folder.txt/b"))
    Path("link.jsonl").symlink_to("a.jsonl")
    Path("config.json").write_text("{}")
    os.mkfifo("pipe.jsonl")
    prompt = [] if {"--prompts", "--prompt", "--prompt_file"} & set(flags) else ["--prompt", "Hi"]
    message = mistakes(".", *flags, *prompt)
    assert told in message and message.count("error: ") == 1 and len(message) < 400


@pytest.mark.parametrize("place", [LONG, "~nosuchuser/run"])
def test_a_model_that_cannot_be_looked_at_is_told(place: str) -> None:
    message = mistakes(place, "--prompt", "Hi", "--base_model", place)
    assert message.count(": cannot be looked at: ") == 2 and len(message) < 600


def test_an_adapter_whose_base_is_gone_says_so(tmp_path: Path) -> None:
    run = make(tmp_path / "run" / "model", *ADAPTER).parent
    make(tmp_path / "base1", *MODEL)
    (run / "model" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": f"{tmp_path}/base"}))
    message = mistakes(run, "--prompt", "Hi")
    assert f"error: {run}: its base model {tmp_path}/base: no such folder. Did you mean {tmp_path}/base1?" in message
    assert read(run, "--prompt", "Hi", "--base_model", tmp_path / "base1").places[0] == str(run)
