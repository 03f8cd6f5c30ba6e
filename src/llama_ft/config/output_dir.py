"""May a run write into this directory? A run that is there already is never touched without being asked to."""

import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from llama_ft.restarts import attempt

# Marks a directory as a run's. Other programs write a metrics.jsonl or checkpoints/ too; none writes this.
RUN_MARKER = ".llama_ft-run"
# What a run writes into its directory, and so all that --overwrite may delete.
RUN_ENTRIES = (
    "status.json",
    "config.yaml",
    "metrics.jsonl",
    "checkpoints",
    "model",
    "facts.json",
    "plan.json",
    "report.html",
    "profile",
    "tensorboard",
    "wandb",
)
# Of checkpoints/, only these: set-aside-* and what other people put there stay.
CHECKPOINT_ENTRIES = re.compile(r"(\.writing-|\.removing-)?step-\d{6,}|\.?best\.json")
DEFAULT_PARENT = Path("output")
TOKENIZER_PATTERNS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template.*", "additional_chat_templates/*",
    "vocab.*", "merges.txt", "*.model", "*.tiktoken",
)  # fmt: skip


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
    return (
        f"holds {', '.join(held)} but no {RUN_MARKER}, which marks a run's directory, so nothing there is replaced. "
        "Choose another output_dir."
    )


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
    path = DEFAULT_PARENT if directory is None else Path(directory).expanduser()
    obstacle = not_writable(path)
    if obstacle or directory is None or not path.exists():
        return obstacle
    for name, value in inputs.items():
        if value and Path(value).expanduser().resolve() == path.resolve():
            return f"is what {name} reads. Choose another output_dir."
    if not any((path / entry).exists() for entry in RUN_ENTRIES):
        return None  # other people's files may stay: a run writes beside them
    goes_on = goes_on and not overwrite
    is_resumable = goes_on and any(path.glob("checkpoints/step-*/trainer.json"))  # earlier versions left no marker
    if (foreign := foreign_entries(path)) and not is_resumable:
        return foreign
    if goes_on:
        return None
    if not overwrite:
        return (
            "already holds a run. Choose another output_dir, go on with that run by --resume auto, or replace it with "
            "--overwrite."
        )
    return None if attempt() else deleted_input(run_entries(path), inputs)


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
