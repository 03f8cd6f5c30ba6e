"""`llama-ft rollout` samples answers to prompts, scores them and writes them in rounds, which are
a dataset of the training recipe."""

from pathlib import Path

from llama_ft.door import Extension, Verb


def holds_rounds(directory: Path) -> bool:
    """Return whether a directory, or its subdirectory rollouts, has complete rounds."""
    folder = directory if directory.name == "rollouts" else directory / "rollouts"
    return folder.is_dir() and any(folder.glob("[0-9]*/round.json"))


EXTENSION = Extension(
    holds_dataset=holds_rounds,
    dataset="llama_ft.extensions.rollouts.dataset:open_rounds",
    verbs={
        "rollout": Verb(
            "rollout",
            "Sample answers to prompts, with rewards. --nproc N: on N processes.",
            takes_nproc=True,
        )
    },
)
