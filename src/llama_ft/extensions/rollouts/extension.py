"""`llama-ft rollout` samples answers to prompts, scores them and writes them in rounds, which are
a dataset of the training recipe."""

import os
from pathlib import Path

from llama_ft.door import Extension, Verb


def holds_rounds(directory: Path) -> bool:
    """Return whether a directory is a round, or has rounds, perhaps in its subdirectory rollouts; also
    those whose answers are not scored yet. Their files are not read as other data, which have texts."""
    folder = directory if directory.name == "rollouts" else directory / "rollouts"
    is_round = os.path.isfile(directory / "round.json")  # False without permission to look
    return is_round or any(folder.glob("*/round.json"))


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
