"""Try the object store of --save_to from every rank: put, get and delete one small object."""

import re
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from llama_ft.door import Trial
from llama_ft.extensions.store.object_store import ObjectStore, store_reason

# texts of S3, Google and Azure, and of their packages
WRONG_CREDENTIALS = re.compile(
    r"credential|access key|signature|token|authenticat|unauthorized|\b401\b", re.IGNORECASE
)
NO_ACCESS = re.compile(r"denied|forbidden|not authorized|permission|\b403\b", re.IGNORECASE)


TITLE = "put, get, delete in the store"


@dataclass(frozen=True)
class StoreTrial:
    """What one rank found.

    Attributes:
        kind: why the store cannot be used by this rank, in a few words; "" if it can.
        reason: the store's own message; "" if it can.
        put_seconds: of the first request, which also opens the connection.
        get_seconds: of reading the object.
        delete_seconds: of deleting it.
    """

    kind: str
    reason: str = ""
    put_seconds: float = 0.0
    get_seconds: float = 0.0
    delete_seconds: float = 0.0


def try_store(flags: Any) -> Trial | None:
    """Try the store of --save_to, if there is one, for recipes/check.py.

    Raises:
        UserError: the URL's package is missing.
    """
    if flags.save_to is None:
        return None
    trial = try_url(flags.save_to)
    if trial.kind:
        return Trial(TITLE, trial.kind, f"--save_to {flags.save_to}: {trial.kind} ({trial.reason})")
    times = (trial.put_seconds, trial.get_seconds, trial.delete_seconds)
    return Trial(TITLE, ", ".join(f"{1000 * seconds:,.0f} ms" for seconds in times))


def try_url(url: str) -> StoreTrial:
    """Try a store, with an object whose name nobody else has. It is deleted in any case.

    Raises:
        UserError: the URL's package is missing.
    """
    name = f".llama_ft-check-{uuid.uuid4().hex}"
    content = uuid.uuid4().hex
    step = "write"
    store = ObjectStore(url, "--save_to")
    seconds = []
    try:
        started = time.perf_counter()
        store.put_text(content, name)
        seconds.append(time.perf_counter() - started)

        step = "read"
        started = time.perf_counter()
        text = store.get_text(name)
        seconds.append(time.perf_counter() - started)
        if text != content:
            return StoreTrial("other content", "the object that was read differs from the written")

        step = "delete"
        started = time.perf_counter()
        store.delete(name)
        seconds.append(time.perf_counter() - started)
        return StoreTrial("", "", *seconds)
    except Exception as error:  # each package has its own errors
        return StoreTrial(_kind(error, step), store_reason(error))
    finally:
        if step == "read":
            with suppress(Exception):
                store.delete(name)


def _kind(error: Exception, step: str) -> str:
    """Name what is wrong. `step` is what was tried."""
    text = f"{type(error).__name__} {error}"
    if isinstance(error, FileNotFoundError):
        return "no bucket" if step == "write" else f"cannot {step}"
    if WRONG_CREDENTIALS.search(text):
        return "wrong credentials"
    if isinstance(error, PermissionError) or NO_ACCESS.search(text):
        return f"no {step} access"
    return f"cannot {step}"
