"""Datasets of the Hugging Face Hub, and llama-recipes' own ones."""

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from llama_ft.data.files import without_nulls
from llama_ft.data.formats import Row
from llama_ft.errors import RunFailure, UserError, reason

PROBE_SECONDS = 10.0


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
    """Load a dataset by `datasets`, from its cache if the Hub cannot be reached or another rank has just asked it.

    Args:
        name: org/name, or org/name:configuration.
        split: as datasets understands it (`train`, `train[:5%]`); None for all.
        streaming: rows come over the network as they are read; every rank asks the Hub for itself.

    Returns:
        A memory-mapped Dataset, or an IterableDataset to stream; for all splits a dict of them.

    Raises:
        UserError: there is no such dataset or split, no access to it, or it cannot be had now.
    """
    import datasets

    path, _, configuration = name.partition(":")
    before, refusal = datasets.config.HF_HUB_OFFLINE, "HF_HUB_OFFLINE is set"
    if not before:
        is_first = streaming or os.environ.get("LOCAL_RANK", "0") == "0"
        refusal = _unreachable(path) if is_first else "another rank has asked it"
    datasets.config.HF_HUB_OFFLINE = bool(refusal)  # it would try for 25 s
    try:
        if streaming and refusal:
            raise ConnectionError(refusal)
        return datasets.load_dataset(path, configuration or None, split=split, streaming=streaming)
    except Exception as error:  # of datasets, huggingface_hub, httpx, pyarrow...: all about this one dataset
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else None
        where = f"the cache, as the Hub was not asked ({refusal})" if refusal else "the Hub"
        what = f"no local data of this name, and it cannot be had from {where}: {reason(cause or error)}"
        raise UserError(f"{name}: {what}") from error
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def revision_of(name: str) -> str:
    """The commit that the Hub has of a dataset; only if it can be reached."""
    import huggingface_hub

    return str(huggingface_hub.dataset_info(name.partition(":")[0], timeout=PROBE_SECONDS).sha)


def rows_over_the_network(name: str, dataset: Any) -> Iterator[tuple[str, Row]]:
    """Yield (place, row) of an IterableDataset.

    Raises:
        RunFailure: the connection was lost, and `datasets` has given up.
    """
    number = 0
    try:
        for number, row in enumerate(dataset, start=1):
            yield f"{name} row {number}", without_nulls(row)
    except Exception as error:  # of any library between here and the Hub
        raise RunFailure(
            f"{name}: cannot be read after row {number}: {reason(error)}\n"
            "--resume auto continues from the last checkpoint."
        ) from error


@functools.cache
def _unreachable(path: str) -> str:
    """Why the Hub gives no answer; empty if it does, even if there is no such dataset."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    try:
        huggingface_hub.dataset_info(path, timeout=PROBE_SECONDS)
    except Exception as error:  # of httpx: no name, no route, no answer in time
        answered = isinstance(error, HfHubHTTPError) and error.response is not None
        return "" if answered and error.response.status_code < 500 else reason(error)  # type: ignore[attr-defined]
    return ""
