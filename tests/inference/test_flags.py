from pathlib import Path
from typing import Any

import pytest
from result_files import ADAPTER, MODEL, make

from llama_ft.errors import UserError
from llama_ft.inference.flags import read_inference_flags


def read(*words: str | Path) -> Any:
    return read_inference_flags([str(word) for word in words], "Ask a model.")


def test_llama_recipes_names_say_what_is_loaded(tmp_path: Path) -> None:
    base, adapter = make(tmp_path / "base", *MODEL), make(tmp_path / "adapter", *ADAPTER)
    options = read("--model_name", base, "--peft_model", adapter, "--prompt", "Hi")
    assert (options.places, options.base_model) == ([str(adapter)], str(base))
    assert read("--model-name", base, "--prompt=Hi", "--do_sample", "False").places == [str(base)]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--promt", "Hi"], "--promt is not a flag. Did you mean --prompt?"),
        (["--top_p", "2"], "--top_p 2: must be at most 1."),
        (["--base_model", "/gone"], "--base_model /gone: no such"),
        (["--chat"], "--prompt and --chat: "),
        (["second"], ". and second: cannot be combined"),
        (["--prompts", "a.jsonl", "--output_file", "./link.jsonl", "--overwrite"], "is what --prompts reads"),
        (["--prompts", "a.jsonl", "--output_file", "config.json"], "config.json: exists already. --overwrite"),
        (["--prompts", "a.jsonl", "--output_file", "/dev/null"], "/dev/null: is not a plain file"),
        (["--prompts", "a.jsonl", "--output_file", "a.jsonl/b.jsonl"], "--output_file a.jsonl/b.jsonl: "),
    ],
)
def test_values_that_cannot_be_are_told_with_their_flag(
    flags: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make(tmp_path, *MODEL, "a.jsonl", "second/config.json", "second/model.safetensors"))
    Path("link.jsonl").symlink_to("a.jsonl")
    with pytest.raises(UserError) as refusal:
        read(".", *flags, *([] if "--prompts" in flags else ["--prompt", "Hi"]))
    [message] = refusal.value.messages
    assert told in message
