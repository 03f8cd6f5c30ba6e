"""Datasets of the Hugging Face Hub, and llama-recipes' own ones."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from llama_ft.data.formats import Row
from llama_ft.errors import UserError, reason


class ReadyDataset(NamedTuple):
    """A Hub dataset, its splits (validation: None if it has none) and the alpaca rows in one of its rows."""

    hub_name: str
    train: str
    validation: str | None
    rows: Callable[[Any], list[Row]]


def _summaries(row: Any) -> list[Row]:
    return [{"instruction": "Summarize this dialog.", "input": row["dialogue"], "output": row["summary"]}]


def _corrections(row: Any) -> list[Row]:
    task = {"instruction": "Correct this to standard English.", "input": row["sentence"]}
    return [{**task, "output": correction} for correction in row["corrections"] if correction.strip()]


READY = {
    "samsum": ReadyDataset("knkarthick/samsum", "train", "validation", _summaries),
    "grammar": ReadyDataset("jhu-clsp/jfleg", "validation", "test", _corrections),  # it has no split called train
    "alpaca": ReadyDataset("tatsu-lab/alpaca", "train", None, lambda row: [row]),
}


@functools.cache
def load_from_hub(name: str, split: str | None, streaming: bool = False) -> Any:
    """Load a dataset by `datasets`, which takes it from its cache if the Hub cannot be reached.

    Args:
        name: org/name, or org/name:configuration.
        split: as datasets understands it (`train`, `train[:5%]`); None for a dict of all.
        streaming: samples come over the network as they are read.

    Raises:
        UserError: there is no such dataset or split, no access to it, or the Hub cannot be reached.
    """
    import datasets

    path, _, configuration = name.partition(":")
    try:
        return datasets.load_dataset(path, configuration or None, split=split, streaming=streaming)
    except Exception as error:  # of datasets, huggingface_hub, httpx, pyarrow...: all about this one dataset
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else None
        raise UserError(
            f"{name}: no local data of this name, and `datasets` cannot load it: {reason(cause or error)}"
        ) from error
