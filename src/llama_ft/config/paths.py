"""Check the files and folders a configuration names, without torch, before anything slow begins."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from llama_ft.config.data_names import NOT_REGULAR, data_complaint, is_split_of, kind_of_data
from llama_ft.config.output_dir import not_writable, output_dir_complaint
from llama_ft.config.rules import SECRET_IN_URL, as_fraction, holds_secret
from llama_ft.config.wording import nearest, nearest_file, subject
from llama_ft.errors import UserError
from llama_ft.restarts import may_be_restarted

BUILT_IN_MODELS = ("demo",)
BUILT_IN_TEMPLATES = ("llama3", "chatml", "alpaca", "mistral")
INPUTS = ("model_name", "tokenizer_name", "dataset", "validation", "from_peft_checkpoint", "chat_template")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def check_paths(values: Mapping[str, Any], places: Mapping[str, str], invalid: set[str]) -> list[str]:
    """Return a message for each setting whose file or folder is not what it should be.

    Args:
        values: all settings by field name.
        places: field name -> where it was set.
        invalid: fields whose own value could not be read, which are left out.
    """
    checks: dict[str, Callable[[Any], str | None]] = {
        "model_name": model_complaint,
        "tokenizer_name": _tokenizer,
        "dataset": _data,
        "validation": lambda validation: _validation(validation, values["dataset"]),
        "from_peft_checkpoint": adapter_complaint,
        "chat_template": _chat_template,
        "resume": checkpoint_complaint,
        "output_dir": lambda directory: output_dir_complaint(
            directory,
            values["overwrite"],
            _inputs(values),
            _goes_on(values["resume"], directory),
        ),
    }
    messages = []
    for name, complaint_of in checks.items():
        value = values[name]
        if name in invalid or (value is None and name != "output_dir"):
            continue
        if holds_secret(value):
            messages.append(f"{subject(name, places)} {SECRET_IN_URL}")  # as its rule, which not all callers ask
            continue
        complaint = _told(complaint_of, value)
        if complaint:
            shown = "" if value is None or isinstance(value, list) else f" {value}"
            messages.append(f"{subject(name, places)}{shown}: {complaint}")
    return messages


def _inputs(values: Mapping[str, Any]) -> dict[str, str | None]:
    """Field name -> file or folder that the run reads; the parts of a mix one by one."""
    inputs = {name: values[name] for name in (*INPUTS, *(["resume"] if values["overwrite"] else []))}
    if isinstance(parts := inputs["dataset"], list):
        del inputs["dataset"]
        inputs.update({f"dataset[{index}].path": part["path"] for index, part in enumerate(parts)})
    return inputs


def _chat_template(name: str) -> str | None:
    path = Path(name).expanduser()
    if name in BUILT_IN_TEMPLATES or path.is_file():
        return None
    if path.is_dir():
        return f"is a folder; expected a file with a Jinja template, or {', '.join(BUILT_IN_TEMPLATES)}."
    meant = nearest(name, BUILT_IN_TEMPLATES)
    hint = f" Did you mean {meant}?" if meant else nearest_file(path)
    return f"no such file.{hint} Built in are {', '.join(BUILT_IN_TEMPLATES)}."


def _told(complaint_of: Callable[[Any], str | None], value: Any) -> str | None:
    try:
        return complaint_of(value)
    except (OSError, ValueError, RuntimeError) as error:  # no permission, a name too long, a null character, ~nobody
        return f"cannot be looked at: {failing(error)}."


def failing(error: Exception) -> str:
    """What is wrong with a path that cannot be looked at, without the path."""
    return str(getattr(error, "strerror", None) or error).rstrip(".")


def looks_safely(complaint_of: Callable[[str], str | None]) -> Callable[[str], str | None]:
    """Have what says why a path is wrong say so too where it cannot be looked at."""
    return wraps(complaint_of)(lambda name: _told(complaint_of, name))


@looks_safely
def file_complaint(name: str) -> str | None:
    """Say why `name` is no file that can be read."""
    file = Path(name).expanduser()
    if file.is_dir():
        return "is a folder; expected a file."
    if not file.exists():
        return f"no such file.{nearest_file(file)}"
    return None if file.is_file() else NOT_REGULAR


@looks_safely
def output_complaint(name: str) -> str | None:
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


def _goes_on(resume: str | None, directory: str | None) -> bool:
    """Whether a run that directory holds is continued: by --resume, or because torchrun may have started the ranks
    again; that, checkpoint/run_directory.py finds out before anything is written."""
    if resume == "auto" or may_be_restarted():
        return True
    if resume is None or directory is None:
        return False
    checkpoint, run = Path(resume).expanduser().resolve(), Path(directory).expanduser().resolve()
    return checkpoint == run or run / "checkpoints" == checkpoint.parent


def checkpoint_complaint(resume: str) -> str | None:
    """Say why `resume` is neither auto nor a checkpoint nor a run with one. An attempt that torchrun may have started
    again need not find it: it goes on from the one before it, which may have pruned it."""
    folder = Path(resume).expanduser()
    signs = ("trainer.json", "checksums.txt", "checkpoints/step-*")
    if resume == "auto" or may_be_restarted() or any(any(folder.glob(sign)) for sign in signs):
        return None
    if not folder.exists():
        return f"no such folder.{nearest_file(folder)}"
    return "holds no checkpoint; expected output/<run>/checkpoints/step-..., or auto."


def looks_local(name: str) -> bool:
    """Tell a folder's path from a hub name: org/name is the hub's unless a folder of that name exists."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith("/") or Path(name).exists()


@looks_safely
def model_complaint(name: str) -> str | None:
    """Say why `name` is neither a folder with config.json and weights nor a hub name."""
    if name in BUILT_IN_MODELS or not looks_local(name):
        return None
    folder = Path(name).expanduser()
    if not folder.exists():
        return f"no such folder.{nearest_file(folder)}"
    if not folder.is_dir():
        return "is a file; expected a folder with config.json and *.safetensors."
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            return "holds an adapter, not a model. Use from_peft_checkpoint, with its base model as model_name."
        return f"holds no config.json.{_below(folder, 'config.json')}"
    if any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin")):
        return None
    old = [file.name for pattern in ("*.bin", "*.pth", "*.pt", "*.gguf") for file in sorted(folder.glob(pattern))]
    if old:
        return (
            f"holds {old[0]} but neither *.safetensors nor pytorch_model.bin, which are what is read here. "
            "transformers converts it:\nmodel.save_pretrained(folder) after AutoModelForCausalLM.from_pretrained(...)"
        )
    return "holds config.json but no weights (*.safetensors)."


def _tokenizer(name: str) -> str | None:
    if name in BUILT_IN_MODELS or not looks_local(name):
        return None
    folder = Path(name).expanduser()
    if not folder.exists():
        return f"no such folder.{nearest_file(folder)}"
    if not folder.is_dir():
        return "is a file; expected a folder with tokenizer.json."
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        return f"holds no tokenizer ({', '.join(TOKENIZER_FILES)})."
    return None


def adapter_complaint(name: str) -> str | None:
    """Say why `name` is no folder as peft writes it."""
    folder = Path(name).expanduser()
    if not folder.exists():
        return f"no such folder.{nearest_file(folder)}"
    if not folder.is_dir():
        return "is a file; expected a folder with adapter_config.json and adapter_model.safetensors."
    if not (folder / "adapter_config.json").is_file():
        return f"holds no adapter_config.json, so no adapter.{_below(folder, 'adapter_config.json')}"
    if not (folder / "adapter_model.safetensors").is_file():
        old = (folder / "adapter_model.bin").is_file()
        hint = (
            " peft converts its adapter_model.bin: PeftModel.from_pretrained(...).save_pretrained(...)" if old else ""
        )
        return f"holds no adapter_model.safetensors.{hint}"
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
    for child in _folders(folder):
        if (child / file).is_file():
            return f" Did you mean {child}?"
    return ""


def _folders(folder: Path) -> Iterator[Path]:
    return (child for child in sorted(folder.iterdir()) if child.is_dir())


def _data(dataset: str | list[Any]) -> str | None:
    if isinstance(dataset, str):
        path = Path(dataset).expanduser()
        is_empty = kind_of_data(dataset) == "file" and path.is_file() and path.stat().st_size == 0
        return "is empty." if is_empty else data_complaint(dataset)
    complaints = ((part["path"], _data(part["path"])) for part in dataset)
    return next((f"{path}: {complaint}" for path, complaint in complaints if complaint), None)


def _validation(validation: str, dataset: Any) -> str | None:
    if as_fraction(validation) is not None or is_split_of(validation, dataset):
        return None
    complaint = _data(validation)
    if complaint and validation in ("validation", "test", "train") and kind_of_data(validation) == "file":
        return f"{complaint}\nAs the name of a split it needs one dataset that has splits."
    return complaint
