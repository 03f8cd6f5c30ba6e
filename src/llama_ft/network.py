"""What failed on the way to a server, in a few words."""

import socket
from collections.abc import Iterator


def no_answer(error: BaseException) -> str | None:
    """Say why no host answered, where that is what an exception of a network library comes from."""
    for cause in _causes(error):
        if isinstance(cause, socket.gaierror):
            return "the host does not answer (host not found)"
        if isinstance(cause, ConnectionRefusedError):
            return "the host does not answer (connection refused)"
        if isinstance(cause, TimeoutError):
            return "the host does not answer (timed out)"
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
