"""What may be written, and what may be replaced: nothing that llama_ft did not write, and nothing unasked."""

import os
import re
import tempfile
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

from llama_ft.restarts import attempt

# Marks a directory as a run's. Other programs write a metrics.jsonl or checkpoints/ too; none writes this.
RUN_MARKER = ".llama_ft-run"
# What a run writes into its directory, and so all that --overwrite may delete.
RUN_ENTRIES = (
    "status.json", "config.yaml", "metrics.jsonl", "checkpoints", "model", "facts.json", "plan.json", "report.html",
    "profile", "tensorboard", "wandb",
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


def output_dir_problem(
    directory: str | None, overwrite: bool, inputs: Mapping[str, str | None], goes_on: bool = False
) -> str | None:
    """Say why a run cannot write into directory.

    Rank 0 alone asks, because it alone writes: on the others the answer would be about the run that it has begun.

    Args:
        directory: output_dir; None for the default, a new folder below output/.
        overwrite: whether a run that is there may be replaced.
        inputs: field name -> file or folder the run reads, which replacing a run must not delete.
        goes_on: whether a run that is there is to be continued.

    Returns:
        What is wrong, or None.
    """
    if os.environ.get("RANK", "0") != "0":
        return None
    path = Path(directory or "output").expanduser()
    obstacle = not_writable(path)
    if obstacle or directory is None or not path.exists():
        return obstacle
    for name, value in inputs.items():
        if value and Path(value).expanduser().resolve() == path.resolve():
            return f"is what {name} reads. Choose another output_dir."
    if not any((path / entry).exists() for entry in RUN_ENTRIES):
        return None  # other people's files may stay: a run writes beside them
    if foreign := foreign_entries(path):
        return foreign
    if not goes_on and not overwrite:
        return "already holds a run. Choose another output_dir, --resume auto to go on with it, or --overwrite."
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
        source = Path(value.rpartition(".py:")[0] or value).expanduser().resolve() if value else None
        for entry in entries:
            if source and source.is_relative_to(entry.resolve()):
                return f"--overwrite would delete {entry}, which {name} reads. Choose another output_dir."
    return None


def not_writable(path: Path) -> str | None:
    """Say why nothing can be written to path.

    Tries the nearest folder that exists: permission bits say yes to root even where nothing can be written.
    """
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists() or parent.is_symlink())
    if not existing.is_dir():
        return f"{existing} is not a folder."
    try:
        with tempfile.TemporaryDirectory(prefix=".llama_ft_", dir=existing):
            return None
    except OSError as error:
        return f"{existing} cannot be written to: {error.strerror}."
