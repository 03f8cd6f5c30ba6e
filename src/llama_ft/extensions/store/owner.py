"""Which run writes to a prefix of a store: owner.json holds a token of the newest start.

Only another token is a take-over. An answer that is not an owner.json, or an older one, says nothing
about who writes there.
"""

import json
import os
import socket
import threading
import uuid
from datetime import datetime
from typing import Any, NamedTuple

from llama_ft.errors import RunFailure
from llama_ft.extensions.store.object_store import (
    OWNER_FILE,
    ObjectStore,
    store_reason,
    with_retries,
)
from llama_ft.runtime import log


class Takeover(NamedTuple):
    """A start that has taken over a prefix.

    Attributes:
        text: the content of owner.json that it has written.
        token: in that content.
        replaced: the token that was there before; "" if there was none.
    """

    text: str
    token: str
    replaced: str


def take_over(store: ObjectStore) -> Takeover:
    """Write a new token, and read it again: an earlier run stops before its next commit.

    Raises:
        Exception: it cannot be written; each package has its own errors.
    """
    replaced = ""
    try:
        replaced = _read_owner(store)["token"]
    except Exception as error:  # only needed to recognize late answers
        log.debug(f"{store.url}/{OWNER_FILE}: {store_reason(error)}")
    token = uuid.uuid4().hex
    owner = {
        "token": token,
        "host": socket.gethostname(),
        "process": os.getpid(),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    text = json.dumps(owner) + "\n"

    is_written = False

    def write() -> None:
        nonlocal is_written
        store.put_text(text, OWNER_FILE)
        is_written = True
        if store.get_text(OWNER_FILE) != text:
            raise RuntimeError(f"{OWNER_FILE} is not what was written")

    try:
        with_retries(write, must_exist=True)
    except Exception as error:  # each package has its own errors
        if not is_written:
            raise
        # every upload checks the owner, so nothing is replaced by mistake
        log.warning(f"{store.url}: cannot read the new {OWNER_FILE} ({store_reason(error)})")
    return Takeover(text, token, replaced)


def check_owner(store: ObjectStore, takeover: Takeover, given_up: threading.Event | None) -> None:
    """Check that no other run has taken over the prefix.

    Args:
        store: the prefix.
        takeover: of this run.
        given_up: ends the attempts; None: there is only one.

    Raises:
        RunFailure: another run has taken over.
        Exception: the owner cannot be read, so nothing should be written now.
    """

    def read() -> dict[str, Any]:
        owner = _read_owner(store)
        if owner["token"] == takeover.replaced:
            raise RuntimeError(f"{OWNER_FILE} is read as it was before this run")
        return owner

    def read_again() -> dict[str, Any]:
        return read() if given_up is None else with_retries(read, given_up, must_exist=True)

    try:
        owner = read_again()
        if owner["token"] != takeover.token:  # one wrong answer ends no run
            owner = read_again()
    except FileNotFoundError:
        if given_up is None or given_up.is_set():
            raise
        # another run would have written its own
        log.warning(f"{store.url}/{OWNER_FILE} is gone; it is written again.")
        store.put_text(takeover.text, OWNER_FILE)
        return
    if owner["token"] != takeover.token:
        by = (
            f"process {owner.get('process')} on {owner.get('host')}, started {owner.get('started')}"
        )
        raise RunFailure(
            f"--save_to {store.url}: another run has taken over ({by}), so this one stops.\n"
            "Its local checkpoints are complete. End one of the two, or give each its own --save_to."
        )


def _read_owner(store: ObjectStore) -> dict[str, Any]:
    """Return the content of owner.json. Raises ValueError if it is another object."""
    owner = json.loads(store.get_text(OWNER_FILE))
    if not isinstance(owner, dict) or not isinstance(owner.get("token"), str):
        raise ValueError(f"{OWNER_FILE} is corrupted")
    return owner
