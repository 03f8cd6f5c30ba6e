"""Datasets of the Hugging Face hub, and llama-recipes' own ones as ready recipes."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from llama_ft.data.files import without_nulls
from llama_ft.data.formats import BadRow, Row
from llama_ft.errors import RunFailure, UserError, reason
from llama_ft.runtime.console import log

PROBE_SECONDS = 10.0


class ReadyDataset(NamedTuple):
    """A hub dataset whose columns become alpaca rows.

    Attributes:
        hub_name: as `--dataset` takes it.
        train, validation: its splits; validation is None where there is none.
        rows: the alpaca rows in one of its rows.
    """

    hub_name: str
    train: str
    validation: str | None
    rows: Callable[[Row | BadRow], list[Row | BadRow]]


def _dialogue(row: Any) -> list[Row | BadRow]:
    return [{"instruction": "Summarize this dialog.", "input": row["dialogue"], "output": row["summary"]}]


def _corrections(row: Any) -> list[Row | BadRow]:
    task = {"instruction": "Correct this to standard English.", "input": row["sentence"]}
    return [{**task, "output": correction} for correction in row["corrections"] if correction.strip()]


READY = {
    "samsum": ReadyDataset("knkarthick/samsum", "train", "validation", _dialogue),
    "grammar": ReadyDataset("jhu-clsp/jfleg", "validation", "test", _corrections),  # it has no split called train
    "alpaca": ReadyDataset("tatsu-lab/alpaca", "train", None, lambda row: [row]),
}


@functools.cache
def load_from_hub(name: str, split: str | None, streaming: bool = False) -> Any:
    """Load a dataset by `datasets`, from its cache where the hub cannot be reached or another rank has just asked it.

    Args:
        name: org/name, or org/name:configuration.
        split: as datasets understands it (`train`, `train[:5%]`); None for all.
        streaming: rows come over the network as they are read; every rank asks the hub for itself.

    Returns:
        A memory-mapped Dataset, or an IterableDataset to stream; for all splits a dict of them.

    Raises:
        UserError: there is no such dataset or split, no access to it, or it cannot be had now.
    """
    import datasets

    path, _, configuration = name.partition(":")
    unreachable = (
        f"{name}: no file or folder of this name here, and the hub could not be asked ({{}}).\n"
        "Give the path of local data, or try again when it can be reached."
    )
    if streaming and (refusal := _unreachable(path)):
        raise UserError(unreachable.format(refusal))
    with contextlib.nullcontext("") if streaming else _hub_or_cache(path) as offline:
        try:
            return datasets.load_dataset(path, configuration or None, split=split, streaming=streaming)
        except Exception as error:  # of datasets, huggingface_hub, httpx, pyarrow...: all about this one dataset
            if offline and isinstance(error, ConnectionError):
                raise UserError(unreachable.format(offline)) from error
            cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else None
            where = "its copy in the cache" if offline else "the hub"
            raise UserError(f"{name}: cannot be had from {where}: {reason(cause or error)}") from error


def revision_of(name: str) -> str:
    """The commit that the hub has of a dataset; only where it can be reached."""
    import huggingface_hub

    return str(huggingface_hub.dataset_info(name.partition(":")[0], timeout=PROBE_SECONDS).sha)


def rows_over_the_network(name: str, dataset: Any) -> Iterator[tuple[str, Row]]:
    """Yield (place, row) of what `stream_from_hub` returned.

    Raises:
        RunFailure: the connection was lost, and `datasets` has given up.
    """
    number = 0
    try:
        for number, row in enumerate(dataset, start=1):
            yield f"{name} row {number}", without_nulls(row)
    except Exception as error:  # of any library between here and the hub
        raise RunFailure(
            f"{name}: cannot be read on after row {number}: {reason(error)}\n"
            "--resume auto goes on from the last checkpoint."
        ) from error


@contextlib.contextmanager
def _hub_or_cache(path: str) -> Iterator[str]:
    """Tell why the hub is not to be asked, if so, and keep `datasets` from asking: it alone would try for 25 s."""
    import datasets

    refusal = "" if os.environ.get("LOCAL_RANK", "0") == "0" else "another rank has asked it"
    before, talks = datasets.config.HF_HUB_OFFLINE, datasets.logging.get_verbosity()
    if before:
        refusal = "HF_HUB_OFFLINE is set"
    elif not refusal and (refusal := _unreachable(path)):
        log.info(f"{path}: the hub cannot be reached ({refusal}); looking for a copy downloaded earlier")
    datasets.config.HF_HUB_OFFLINE = bool(refusal)
    if refusal:
        datasets.logging.set_verbosity_error()  # it would say on every rank, several times, that it uses its cache
    try:
        yield refusal
    finally:
        datasets.config.HF_HUB_OFFLINE = before
        datasets.logging.set_verbosity(talks)


@functools.cache
def _unreachable(path: str) -> str:
    """Why the hub gives no answer; nothing where it does, be it that there is no such dataset."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    try:
        huggingface_hub.dataset_info(path, timeout=PROBE_SECONDS)
    except HfHubHTTPError as error:
        server_failed = error.response is not None and error.response.status_code >= 500
        return reason(error) if server_failed else ""
    except Exception as error:  # of httpx: no name, no route, no answer in time
        return reason(error)
    return ""
