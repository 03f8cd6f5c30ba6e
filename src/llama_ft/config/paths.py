"""Check the files and folders a configuration names, without torch, before anything slow begins."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llama_ft.config.data_names import NOT_REGULAR, data_problem, is_split_of
from llama_ft.config.messages import nearest_file, subject
from llama_ft.config.output_dir import not_writable, output_dir_problem
from llama_ft.config.rules import SECRET, as_fraction, holds_secret
from llama_ft.errors import UserError, reason
from llama_ft.processes import may_be_restarted

BUILT_IN_MODELS = ("demo",)
BUILT_IN_TEMPLATES = ("llama3", "chatml", "alpaca", "mistral")
INPUTS = ("model_name", "tokenizer_name", "dataset", "validation", "from_peft_checkpoint", "chat_template")
TO_SAFETENSORS = "transformers converts it:\nAutoModelForCausalLM.from_pretrained(...).save_pretrained(folder)"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def check_paths(values: Mapping[str, Any], places: Mapping[str, str], invalid: set[str]) -> list[str]:
    """Return a message for each setting whose file or folder is not what it should be.

    Args:
        values: all settings by field name.
        places: field name -> where it was set.
        invalid: fields whose own value could not be read, which are left out.
    """

    def dataset(value: str | list[dict[str, str]]) -> str | None:
        if isinstance(value, str):
            return data_problem(value)
        return next((f"{part['path']}: {why}" for part in value if (why := data_problem(part["path"]))), None)

    def output_dir(name: str | None) -> str | None:
        return output_dir_problem(name, values["overwrite"], inputs, _goes_on(values["resume"], name))

    def validation(name: str) -> str | None:
        is_data = as_fraction(name) is None and not is_split_of(name, values["dataset"])
        return data_problem(name) if is_data else None

    inputs = {name: values[name] for name in (*INPUTS, *(["resume"] if values["overwrite"] else []))}
    if isinstance(parts := inputs["dataset"], list):
        inputs = {**inputs, **{f"dataset[{i}].path": part["path"] for i, part in enumerate(parts)}, "dataset": None}
    checks: dict[str, Callable[[Any], str | None]] = {
        "model_name": model_problem,
        "tokenizer_name": lambda name: _folder(name) if name not in BUILT_IN_MODELS and looks_local(name) else None,
        "dataset": dataset,
        "validation": validation,
        "from_peft_checkpoint": lambda name: _folder(name, "adapter_config.json", "adapter_model.safetensors"),
        "chat_template": lambda name: None if name in BUILT_IN_TEMPLATES else file_problem(name),
        "output_dir": output_dir,
    }
    messages = []
    for name, problem_of in checks.items():
        value = values[name]
        if name in invalid or (value is None and name != "output_dir"):
            continue
        if holds_secret(value):
            messages.append(f"{subject(name, places)} {SECRET}")  # as its rule, which not all callers ask
            continue
        try:
            problem = problem_of(value)
        except (OSError, ValueError) as error:  # no permission, a name that is too long
            problem = f"cannot be looked at: {reason(error)}."
        if problem:
            shown = "" if value is None or isinstance(value, list) else f" {value}"
            messages.append(f"{subject(name, places)}{shown}: {problem}")
    return messages


def file_problem(name: str) -> str | None:
    """Say why `name` is no file that can be read."""
    file = Path(name).expanduser()
    if file.is_file():
        return None
    if file.exists():
        return "is a folder; expected a file." if file.is_dir() else NOT_REGULAR
    return f"no such file.{nearest_file(file)}"


def output_problem(name: str) -> str | None:
    """Say why no file `name` can be written; rank 0 alone asks, because it alone writes."""
    file = Path(name).expanduser()
    if os.environ.get("RANK", "0") != "0":
        return None
    return not_writable(file.parent) if file.is_file() or not file.exists() else "is not a plain file."


def folder_problem(folder: Path, expected: str) -> str | None:
    """Say why there is no such folder, which is expected to be one of something."""
    if not folder.exists():
        return f"no such folder.{nearest_file(folder)}"
    return None if folder.is_dir() else f"is a file; expected {expected}."


def looks_local(name: str) -> bool:
    """Tell a folder's path from a hub name: org/name is the hub's unless a folder of that name exists."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith("/") or Path(name).exists()


def model_problem(name: str) -> str | None:
    """Say why `name` is neither a folder with config.json nor a hub name."""
    if name in BUILT_IN_MODELS or not looks_local(name):
        return None
    has_weights = any(Path(name).expanduser().glob("*.safetensors"))
    no_weights = None if has_weights else f"holds no weights in *.safetensors. {TO_SAFETENSORS}"
    return _folder(name, "config.json") or no_weights


def _folder(name: str, *files: str) -> str | None:
    """Say why `name` is no folder with these files."""
    folder = Path(name).expanduser()
    if problem := folder_problem(folder, f"a folder with {' and '.join(files) or 'files'}"):
        return problem
    return next((f"holds no {file}." for file in files if not (folder / file).is_file()), None)


def base_model_of(adapter: str) -> str:
    """The model that a saved adapter says it was trained beside: a folder or hub name.

    Raises:
        UserError: it does not say, or means a revision of its own.
    """
    file = Path(adapter).expanduser() / "adapter_config.json"
    try:
        settings = json.loads(file.read_text())
        name, revision = settings["base_model_name_or_path"], settings.get("revision")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{file}: cannot be read as an adapter's settings ({error}).") from error
    if not name or (revision not in (None, "main") and not looks_local(name)):
        held = f"names revision {revision} of {name}" if name else "names no base model"
        raise UserError(f"{file}: {held}.\n--base_model names the folder of what the adapter was trained on.")
    return str(name)


def _goes_on(resume: str | None, directory: str | None) -> bool:
    """Whether a run that directory holds is continued: by --resume, or because torchrun may have started the ranks
    again; that, checkpoint/run_directory.py finds out before anything is written."""
    if resume == "auto" or may_be_restarted():
        return True
    if resume is None or directory is None:
        return False
    checkpoint, run = Path(resume).expanduser().resolve(), Path(directory).expanduser().resolve()
    return checkpoint == run or run / "checkpoints" == checkpoint.parent
