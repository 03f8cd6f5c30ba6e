"""Rollouts as data: rounds of answers with rewards."""

from pathlib import Path

from llama_ft.door import Extension


def holds_rounds(directory: Path) -> bool:
    """Return whether a directory, or its subdirectory rollouts, has complete rounds."""
    folder = directory if directory.name == "rollouts" else directory / "rollouts"
    return folder.is_dir() and any(folder.glob("[0-9]*/round.json"))


EXTENSION = Extension(
    holds_dataset=holds_rounds,
    dataset="llama_ft.extensions.rollouts.dataset:open_rounds",
)
