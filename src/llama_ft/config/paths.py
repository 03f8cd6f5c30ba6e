"""Check the files and folders a configuration names, without torch, before anything slow begins: what is read, and what
may be written and replaced, which is nothing that llama_ft did not write, and nothing unasked."""

import json
import re
import tempfile
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from llama_ft.config.data_names import NOT_REGULAR, data_problem, is_split_of
from llama_ft.config.messages import nearest_file, subject
from llama_ft.config.rules import SECRET, as_fraction
from llama_ft.errors import UserError, rank, reason
from llama_ft.masking import is_url_with_secret
from llama_ft.processes import attempt, may_be_restarted

BUILT_IN_TEMPLATES = ("llama3", "chatml", "alpaca", "mistral")
INPUTS = (
    "model_name", "tokenizer_name", "reference_model", "dataset", "validation", "from_peft_checkpoint", "chat_template",
)  # fmt: skip
TO_SAFETENSORS = "Convert it with Transformers:\nAutoModelForCausalLM.from_pretrained(...).save_pretrained(folder)"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
# Marks a directory as a run's. Other programs write a metrics.jsonl or checkpoints/ too; none writes this.
RUN_MARKER = ".llama_ft-run"
REFERENCE_FILE = "reference.safetensors"  # of a run and of each of its checkpoints; see training/reference.py
# What a run writes into its directory, and so all that --overwrite may delete.
RUN_ENTRIES = (
    "status.json", "config.yaml", "metrics.jsonl", "checkpoints", "model", "facts.json", "plan.json", "report.html",
    "profile", "tensorboard", "wandb", REFERENCE_FILE,
)  # fmt: skip
# Of checkpoints/, only these: set-aside-* and what other people put there stay.
CHECKPOINT_ENTRIES = re.compile(r"(\.writing-|\.removing-)?step-\d{6,}|\.?best\.json")
# All that an exported model's or adapter's folder holds, and so all that --overwrite may delete there. The base model's
# Python files are not in it: they cannot be told from the user's.
MODEL_PATTERNS = (
    "config.json", "generation_config.json", "model.safetensors", "model-[0-9]*-of-[0-9]*.safetensors",
    "model.safetensors.index.json", "adapter_config.json", "adapter_model.safetensors", "README.md", "tokenizer.json",
    "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "additional_chat_templates/*.jinja", "vocab.json", "vocab.txt", "merges.txt", "spiece.model",
    "sentencepiece.bpe.model", "*.tiktoken",
)  # fmt: skip
CARD_TAG = "\n- llama_ft\n"  # in the header of every model card that checkpoint/export.py writes


def check_paths(values: Mapping[str, Any], places: Mapping[str, str], invalid: set[str]) -> list[str]:
    """Return a message for each setting whose file or folder is not what it should be.

    Args:
        values: all settings by field name.
        places: field name -> where it was set.
        invalid: fields whose own value could not be read, which are left out.
    """

    def validation(name: str) -> str | None:
        is_data = as_fraction(name) is None and not is_split_of(name, values["dataset"])
        return data_problem(name) if is_data else None

    def output_dir(name: str) -> str | None:
        return output_dir_problem(name, values["overwrite"], values["resume"], inputs)

    parts, inputs = values["dataset"], {name: values[name] for name in INPUTS}
    names = [part["path"] for part in parts] if isinstance(parts, list) else [parts]
    inputs |= {"resume": values["resume"] if values["overwrite"] else None, "dataset": None}
    inputs |= {f"dataset {name}": name for name in names}
    checks: list[tuple[str, Any, Callable[[Any], str | None]]] = [
        ("model_name", values["model_name"], model_problem),
        ("tokenizer_name", values["tokenizer_name"], lambda name: _folder(name) if looks_local(name) else None),
        ("reference_model", values["reference_model"], model_problem),
        *(("dataset", name, data_problem) for name in names),
        ("validation", values["validation"], validation),
        ("from_peft_checkpoint", values["from_peft_checkpoint"], lambda name: _folder(name, *ADAPTER_FILES)),
        ("chat_template", values["chat_template"], lambda it: None if it in BUILT_IN_TEMPLATES else file_problem(it)),
        ("output_dir", values["output_dir"] or "output/<model>", output_dir),
    ]
    messages = []
    for name, value, problem_of in checks:
        if name in invalid or value is None:
            continue
        try:
            problem = SECRET if is_url_with_secret(value) else problem_of(value)
        except (OSError, ValueError) as error:  # no permission, a name that is too long
            problem = f"cannot be accessed: {reason(error)}."
        if problem:
            messages.append(f"{subject(name, places)} {problem if problem == SECRET else f'{value}: {problem}'}")
    return messages


def file_problem(name: str) -> str | None:
    """Say why `name` is no file that can be read."""
    file = Path(name).expanduser()
    if not file.exists():
        return f"no such file.{nearest_file(file)}"
    return None if file.is_file() else "is a directory; expected a file." if file.is_dir() else NOT_REGULAR


def folder_problem(folder: Path, expected: str) -> str | None:
    """Say why there is no such directory, which is expected to be one of something."""
    if not folder.exists():
        return f"no such directory.{nearest_file(folder)}"
    return None if folder.is_dir() else f"is a file; expected {expected}."


def looks_local(name: str) -> bool:
    """Tell a folder's path from a hub name: org/name is the hub's unless a folder of that name exists."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith("/") or Path(name).exists()


def model_problem(name: str) -> str | None:
    """Say why `name` is neither a folder with config.json and weights nor a hub name."""
    if name == "demo" or not looks_local(name):
        return None
    has_weights = any(Path(name).expanduser().glob("*.safetensors"))
    return _folder(name, "config.json") or (None if has_weights else f"holds no *.safetensors. {TO_SAFETENSORS}")


def _folder(name: str, *files: str) -> str | None:
    """Say why `name` is no folder with these files."""
    folder = Path(name).expanduser()
    if problem := folder_problem(folder, f"a directory with {' and '.join(files) or 'files'}"):
        return problem
    return next((f"holds no {file}." for file in files if not (folder / file).is_file()), None)


def base_model_of(adapter: str) -> str:
    """The model that a saved adapter says it was trained with: a folder or hub name.

    Raises:
        UserError: it does not say, or means a revision of its own.
    """
    file = Path(adapter).expanduser() / "adapter_config.json"
    try:
        settings = json.loads(file.read_text())
        name, revision = settings["base_model_name_or_path"], settings.get("revision") or "main"
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{file}: cannot be read as an adapter's settings ({error}).") from error
    if not name or (revision != "main" and not looks_local(name)):
        raise UserError(f"{file}: the base model is {name}, revision {revision}. Set --base_model to its directory.")
    return str(name)


def run_entries(directory: Path) -> list[Path]:
    """Return what a run wrote into directory, which is what `--overwrite` deletes; nothing if it is no run's.

    Args:
        directory: an output_dir; it need not exist.
    """
    if not (directory / RUN_MARKER).is_file():
        return []
    own = [directory / entry for entry in RUN_ENTRIES if entry != "checkpoints"]
    own += [path for path in (directory / "checkpoints").glob("*") if CHECKPOINT_ENTRIES.fullmatch(path.name)]
    return [path for path in own if path.exists()]


def foreign_entries(directory: Path) -> str | None:
    """Say which entries of directory are named as a run's but cannot be told from other people's files."""
    held = [entry for entry in RUN_ENTRIES if (directory / entry).exists()]
    if not held or (directory / RUN_MARKER).is_file():
        return None
    return f"holds {', '.join(held)} but no {RUN_MARKER}, which marks a run's directory. Choose another output_dir."


def output_dir_problem(directory: str, overwrite: bool, resume: str | None, inputs: Mapping[str, Any]) -> str | None:
    """Say why a run cannot write into directory.

    Rank 0 alone asks, because it alone writes: on the others the answer would be about the run that it has begun.

    Args:
        directory: output_dir.
        overwrite: whether a run that is there may be replaced.
        resume: what the run continues, if anything.
        inputs: field name -> file or folder the run reads, which replacing a run must not delete.

    Returns:
        What is wrong, or None.
    """
    path = Path(directory).expanduser()
    obstacle = not_writable(path) if rank() == 0 else None
    if obstacle or rank() != 0 or not any((path / entry).exists() for entry in RUN_ENTRIES):
        return obstacle  # other people's files may stay
    # torchrun may have started the ranks again; checkpoint/run_directory.py finds that out before anything is written.
    goes_on = resume == "auto" or may_be_restarted()
    goes_on = goes_on or (resume is not None and Path(resume).expanduser().resolve().is_relative_to(path.resolve()))
    if foreign := foreign_entries(path):
        return foreign
    if not goes_on and not overwrite:
        return "already holds a run. Choose another output_dir, --resume auto to continue it, or --overwrite."
    return deleted_input(run_entries(path), inputs) if overwrite and not attempt() else None


def model_dir_problem(directory: str, overwrite: bool, inputs: Mapping[str, str | None]) -> str | None:
    """Say why a model cannot be written into directory, a folder of its own. See `output_dir_problem`."""
    path = Path(directory).expanduser()
    obstacle = not_writable(path)
    if obstacle or not path.exists() or not any(path.iterdir()):
        return obstacle
    files = [str(file.relative_to(path)) for file in sorted(path.rglob("*")) if not file.is_dir()]
    if others := [name for name in files if not any(fnmatch(name, known) for known in MODEL_PATTERNS)]:
        return f"holds more than a model ({', '.join(others[:5])}). Choose another output_dir."
    card = path / "README.md"
    if not (card.is_file() and CARD_TAG in card.read_text(errors="replace")):
        return "holds a model that llama_ft did not write (no README.md tagged llama_ft). Choose another output_dir."
    if not overwrite:
        return "already holds a model. Choose another output_dir, or replace that model with --overwrite."
    return deleted_input([path], inputs)


def deleted_input(entries: list[Path], inputs: Mapping[str, str | None]) -> str | None:
    """Say which input lies in one of the entries, which are to be deleted."""
    for name, value in inputs.items():
        source = Path((value or "").rpartition(".py:")[0] or value or "/").expanduser().resolve()
        if held := next((entry for entry in entries if source.is_relative_to(entry.resolve())), None):
            return f"--overwrite would delete {held}, which {name} reads. Choose another output_dir."
    return None


def not_writable(path: Path) -> str | None:
    """Say why nothing can be written to path.

    Tries the nearest folder that exists: permission bits say yes to root even where nothing can be written.
    """
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists() or parent.is_symlink())
    if not existing.is_dir():
        return f"{existing} is not a directory."
    try:
        with tempfile.TemporaryDirectory(prefix=".llama_ft_", dir=existing):
            return None
    except OSError as error:
        return f"{existing} cannot be written to: {error.strerror}."
