"""Check the files and folders a configuration names, without torch, before anything slow begins."""

import json
import os
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from llama_ft.config.data_names import NOT_REGULAR, data_problem, is_split_of, kind_of_data
from llama_ft.config.messages import nearest, nearest_file, subject
from llama_ft.config.output_dir import not_writable, output_dir_problem
from llama_ft.config.rules import SECRET_IN_URL, as_fraction, holds_secret
from llama_ft.errors import UserError, reason
from llama_ft.restarts import may_be_restarted

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

    def output_dir(directory: str | None) -> str | None:
        goes_on = _goes_on(values["resume"], directory)
        return output_dir_problem(directory, values["overwrite"], _inputs(values), goes_on)

    checks: dict[str, Callable[[Any], str | None]] = {
        "model_name": model_problem,
        "tokenizer_name": _tokenizer,
        "dataset": _data,
        "validation": lambda validation: _validation(validation, values["dataset"]),
        "from_peft_checkpoint": adapter_problem,
        "chat_template": _chat_template,
        "resume": checkpoint_problem,
        "output_dir": output_dir,
    }
    messages = []
    for name, problem_of in checks.items():
        value = values[name]
        if name in invalid or (value is None and name != "output_dir"):
            continue
        if holds_secret(value):
            messages.append(f"{subject(name, places)} {SECRET_IN_URL}")  # as its rule, which not all callers ask
        elif problem := _told(problem_of, value):
            shown = "" if value is None or isinstance(value, list) else f" {value}"
            messages.append(f"{subject(name, places)}{shown}: {problem}")
    return messages


def _inputs(values: Mapping[str, Any]) -> dict[str, str | None]:
    """Field name -> file or folder that the run reads; the parts of a mix one by one."""
    inputs = {name: values[name] for name in (*INPUTS, *(["resume"] if values["overwrite"] else []))}
    if isinstance(parts := inputs["dataset"], list):
        del inputs["dataset"]
        inputs.update({f"dataset[{index}].path": part["path"] for index, part in enumerate(parts)})
    return inputs


def _told(problem_of: Callable[[Any], str | None], value: Any) -> str | None:
    try:
        return problem_of(value)
    except (OSError, ValueError, RuntimeError) as error:  # no permission, a name too long, a null character, ~nobody
        return f"cannot be looked at: {reason(error)}."


def looks_safely(problem_of: Callable[[str], str | None]) -> Callable[[str], str | None]:
    """Have what says why a path is wrong say so too where it cannot be looked at."""
    return wraps(problem_of)(lambda name: _told(problem_of, name))


@looks_safely
def file_problem(name: str) -> str | None:
    """Say why `name` is no file that can be read."""
    file = Path(name).expanduser()
    if file.is_dir():
        return "is a folder; expected a file."
    if not file.exists():
        return f"no such file.{nearest_file(file)}"
    return None if file.is_file() else NOT_REGULAR


@looks_safely
def output_problem(name: str) -> str | None:
    """Say why no file `name` can be written; rank 0 alone asks, because it alone writes."""
    if os.environ.get("RANK", "0") != "0":
        return None
    file = Path(name).expanduser()
    if file.is_dir():
        return "is a folder; expected a file in it."
    if file.exists() and not file.is_file():
        return "is a device, a pipe or the like; expected a plain file."
    if file.exists():
        return None if os.access(file, os.W_OK) else "cannot be written to: Permission denied."
    return not_writable(file.parent)


def folder_problem(folder: Path, expected: str) -> str | None:
    """Say why there is no such folder, which is expected to be one of something."""
    if not folder.exists():
        return f"no such folder.{nearest_file(folder)}"
    return None if folder.is_dir() else f"is a file; expected {expected}."


def looks_local(name: str) -> bool:
    """Tell a folder's path from a hub name: org/name is the hub's unless a folder of that name exists."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith("/") or Path(name).exists()


@looks_safely
def model_problem(name: str) -> str | None:
    """Say why `name` is neither a folder with config.json and weights nor a hub name."""
    if name in BUILT_IN_MODELS or not looks_local(name):
        return None
    folder = Path(name).expanduser()
    if problem := folder_problem(folder, "a folder with config.json and *.safetensors"):
        return problem
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            return "holds an adapter, not a model. Use from_peft_checkpoint, with its base model as model_name."
        return f"holds no config.json.{_below(folder, 'config.json')}"
    if any(folder.glob("*.safetensors")):
        return None
    old = [file.name for pattern in ("*.bin", "*.pth", "*.pt", "*.gguf") for file in sorted(folder.glob(pattern))]
    if old:
        return f"holds {old[0]} but no *.safetensors, which are what is read here. {TO_SAFETENSORS}"
    return "holds config.json but no weights (*.safetensors)."


def adapter_problem(name: str) -> str | None:
    """Say why `name` is no folder as peft writes it."""
    folder = Path(name).expanduser()
    if problem := folder_problem(folder, "a folder with adapter_config.json and adapter_model.safetensors"):
        return problem
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / file).is_file():
            return f"holds no {file}, so no adapter.{_below(folder, file)}"
    return None


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
    if not name:
        raise UserError(f"{file}: names no base model.\n--base_model says what the adapter was trained on.")
    if revision not in (None, "main") and not looks_local(name):
        raise UserError(
            f"{file}: trained on revision {revision} of {name}.\nDownload that one, and name its folder with "
            "--base_model."
        )
    return str(name)


def _below(folder: Path, file: str) -> str:
    """Point at the one level further down where the file is, as it is in a run's directory."""
    return next((f" Did you mean {found.parent}?" for found in sorted(folder.glob(f"*/{file}"))), "")


def _tokenizer(name: str) -> str | None:
    if name in BUILT_IN_MODELS or not looks_local(name):
        return None
    folder = Path(name).expanduser()
    if problem := folder_problem(folder, "a folder with tokenizer.json"):
        return problem
    has_one = any((folder / file).is_file() for file in TOKENIZER_FILES)
    return None if has_one else f"holds no tokenizer ({', '.join(TOKENIZER_FILES)})."


def _chat_template(name: str) -> str | None:
    if name in BUILT_IN_TEMPLATES:
        return None
    match, problem = nearest(name, BUILT_IN_TEMPLATES), file_problem(name)
    hint = f" Did you mean {match}?" if match else ""
    return f"{problem}{hint} Built in are {', '.join(BUILT_IN_TEMPLATES)}." if problem else None


def _data(dataset: str | list[Any]) -> str | None:
    if isinstance(dataset, str):
        return data_problem(dataset)
    problems = ((part["path"], data_problem(part["path"])) for part in dataset)
    return next((f"{path}: {problem}" for path, problem in problems if problem), None)


def _validation(validation: str, dataset: Any) -> str | None:
    if as_fraction(validation) is not None or is_split_of(validation, dataset):
        return None
    problem = data_problem(validation)
    if problem and validation in ("validation", "test", "train") and kind_of_data(validation) == "file":
        return f"{problem}\nAs the name of a split it needs one dataset that has splits."
    return problem


def checkpoint_problem(resume: str) -> str | None:
    """Say why `resume` is neither auto nor a checkpoint nor a run with one. An attempt that torchrun may have started
    again need not find it: it goes on from the one before it, which may have pruned it."""
    folder = Path(resume).expanduser()
    signs = ("trainer.json", "checksums.txt", "checkpoints/step-*")
    if resume == "auto" or may_be_restarted() or any(any(folder.glob(sign)) for sign in signs):
        return None
    expected = "output/<run>/checkpoints/step-..., or auto"
    return folder_problem(folder, expected) or f"holds no checkpoint; expected {expected}."


def _goes_on(resume: str | None, directory: str | None) -> bool:
    """Whether a run that directory holds is continued: by --resume, or because torchrun may have started the ranks
    again; that, checkpoint/run_directory.py finds out before anything is written."""
    if resume == "auto" or may_be_restarted():
        return True
    if resume is None or directory is None:
        return False
    checkpoint, run = Path(resume).expanduser().resolve(), Path(directory).expanduser().resolve()
    return checkpoint == run or run / "checkpoints" == checkpoint.parent
