from pathlib import Path
from typing import Any

import pytest
from result_files import ADAPTER, MODEL, make

from llama_ft.errors import UserError
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
    assert (options.places, options.base_model) == ([str(adapter)], str(base))
    assert read("--model-name", base, "--prompt=Hi", "--do_sample", "False").places == [str(base)]
    told = mistakes(base, "--prompt", "Hi", "--use_auditnlg", "True", "--length_penalty", "1", "--promt", "Hi")
    assert "--use_auditnlg is not a flag here" in told and "--length_penalty is not a flag here" in told
    assert "Did you mean --prompt?" in told and told.count("error: ") == 3


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--repetition_penalty", "0"], "--repetition_penalty 0: must be greater than 0."),
        (["--top_p", "2"], "--top_p 2: must be at most 1."),
        (["--base_model", "/gone"], "--base_model /gone: no such"),
        (["--chat"], "--prompt and --chat: "),
        (["second"], ". and second: several models"),
        (["--prompts", "a.jsonl", "--output_file", "a.jsonl", "--overwrite"], "a.jsonl: is what --prompts reads"),
        (["--prompts", "a.jsonl", "--output_file", "./link.jsonl", "--overwrite"], "is what --prompts reads"),
        (["--prompts", "a.jsonl", "--output_file", "config.json"], "config.json: exists already. --overwrite"),
        (["--prompts", "a.jsonl", "--output_file", "/dev/null"], "/dev/null: is a device, a pipe or the like"),
        (["--prompts", "a.jsonl", "--output_file", "a.jsonl/b.jsonl"], "--output_file a.jsonl/b.jsonl: "),
    ],
)
def test_values_that_cannot_be_are_told_with_their_flag(
    flags: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make(tmp_path, *MODEL, "a.jsonl", "second/config.json", "second/model.safetensors"))
    Path("link.jsonl").symlink_to("a.jsonl")
    message = mistakes(".", *flags, *([] if "--prompts" in flags else ["--prompt", "Hi"]))
    assert told in message and message.count("error: ") == 1


def test_several_processes_share_prompts_or_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make(tmp_path, *MODEL, "rows.jsonl")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "--enable_fsdp shards the model" in mistakes(base, "--prompt", "Hi")
    assert read(base, "--prompt", "Hi", "--enable_fsdp").enable_fsdp
    assert read(base, "--prompts", base / "rows.jsonl").prompts
    assert "MODEL is needed" in mistakes("--prompts", base / "rows.jsonl")


@pytest.mark.parametrize("place", ["n" * 5000, "~nosuchuser/run"])
def test_a_model_that_cannot_be_looked_at_is_told(place: str) -> None:
    assert mistakes(place, "--prompt", "Hi", "--base_model", place).count(": cannot be looked at: ") == 2
