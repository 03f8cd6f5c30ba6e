"""Requests to an OpenAI-compatible server over HTTP: JSON in, JSON out, errors in one sentence.

The key is the value of OPENAI_API_KEY. It is sent to the server of the URL only, because redirects
are not followed.
"""

import ipaddress
import json
import os
import time
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, OpenerDirector, ProxyHandler, Request, build_opener

from llama_ft.errors import UserError, reason
from llama_ft.masking import mask_secrets

KEY_VARIABLE = "OPENAI_API_KEY"
LARGEST_ANSWER = 2**26  # bytes; log-probabilities of a few hundred tokens are some kilobytes
CHUNK = 2**16
MODELS_SHOWN = 20
TEXT_SHOWN = 200  # characters of a server's own message
SEE_LOG = "The server's own log has the reason."


class Rejected(Exception):
    """The server understands HTTP and JSON but not this request. The message is its own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _NoRedirects(HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Follow nothing: urllib would send the key to any host."""


class Server:
    """A running server.

    Args:
        url: such as http://localhost:8000, with or without /v1.
        timeout_seconds: longest time of a request.
    """

    def __init__(self, url: str, timeout_seconds: float) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._timeout_seconds = timeout_seconds
        self._key = os.environ.get(KEY_VARIABLE, "").strip()
        self._opener = _opener(self.url)
        self._has_answered = False

    def get(self, path: str) -> dict[str, Any]:
        """Return what the server answers to a GET request. Errors: see `post`."""
        return self._ask(path, None)

    def post(self, path: str, content: dict[str, Any]) -> dict[str, Any]:
        """Return what the server answers to a POST request.

        Raises:
            Rejected: the server does not accept this request.
            UserError: there is no such server, or it fails.
        """
        return self._ask(path, json.dumps(content).encode())

    def send(self, path: str, content: dict[str, Any]) -> None:
        """Send a POST request whose answer is not used: it may be any text. Errors: see `post`."""
        self._fetch(path, json.dumps(content).encode())

    def _ask(self, path: str, content: bytes | None) -> dict[str, Any]:
        text = self._fetch(path, content)
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise self._no_api(self.url + path, text)
        self._has_answered = True
        return answer

    def _fetch(self, path: str, content: bytes | None) -> str:
        headers = {"Accept": "application/json"}
        if content is not None:
            headers["Content-Type"] = "application/json"
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        address = self.url + path
        deadline = time.monotonic() + self._timeout_seconds
        try:
            request = Request(address, content, headers)
            with self._opener.open(request, timeout=self._timeout_seconds) as response:
                return _read(response, deadline)
        except HTTPError as error:
            raise self._failure(address, error, deadline) from error
        except TimeoutError as error:
            raise self._too_slow(address) from error
        except (URLError, HTTPException, OSError, ValueError) as error:
            cause = error.reason if isinstance(error, URLError) else error
            if isinstance(cause, TimeoutError):
                raise self._too_slow(address) from error
            why = reason(cause) if isinstance(cause, BaseException) else str(cause)
            what = f"cannot be asked ({why})."
            if self._has_answered:
                what = f"has stopped answering ({why}). {SEE_LOG}"
            raise UserError(f"--server {self.url}: {what}") from error

    def _failure(self, address: str, error: HTTPError, deadline: float) -> UserError | Rejected:
        """Return the exception for an answer with an error code."""
        status = error.code
        if status in (401, 403):
            hint = f"{KEY_VARIABLE} has another key than the server."
            if not self._key:
                hint = f"Set {KEY_VARIABLE} to the server's key."
            return UserError(f"--server {self.url}: HTTP {status}. {hint}")
        if 300 <= status < 400:
            place = mask_secrets(error.headers.get("Location") or "another address")
            return UserError(f"--server {self.url}: redirects to {place}. Give that URL.")
        try:
            text = _read(error, deadline)
        except TimeoutError:
            return self._too_slow(address)
        except (HTTPException, OSError, ValueError):
            text = ""
        message = self._message_of(text)
        if status >= 500 and status != 501:
            shown = f" ({message})" if message else ""
            return UserError(
                f"--server {self.url}: {address} fails with HTTP {status}{shown}. {SEE_LOG}"
            )
        return Rejected(status, message or f"HTTP {status}")

    def _message_of(self, text: str) -> str:
        """Return a server's own error message on one line; "" if it has none."""
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            return ""
        message = answer
        for name in ("error", "message", "detail"):
            if isinstance(message, dict) and name in message:
                message = message[name]
        if not isinstance(message, str):
            return ""
        if self._key:
            message = message.replace(self._key, "***")
        return mask_secrets(" ".join(message.split()))[:TEXT_SHOWN].rstrip(".")

    def _too_slow(self, address: str) -> UserError:
        seconds = self._timeout_seconds
        return UserError(
            f"--server {self.url}: {address} does not answer within {seconds:g} s. "
            "--server_timeout allows more."
        )

    def _no_api(self, address: str, text: str) -> UserError:
        kind = "HTML" if text.lstrip()[:1] == "<" else "something else"
        return UserError(
            f"--server {self.url}: {address} answers with {kind}, not with JSON. "
            "Expected the URL of an OpenAI-compatible server, such as http://localhost:8000."
        )


def served_models(server: Server) -> dict[str, dict[str, Any]]:
    """Return what a server says about each of its models, by name.

    Raises:
        UserError: it has no list of models.
    """
    try:
        listed = server.get("/v1/models").get("data")
    except Rejected as error:
        raise UserError(
            f"--server {server.url}: has no /v1/models ({error}). Expected the URL of an OpenAI-compatible "
            "server, such as http://localhost:8000."
        ) from error
    entries = listed if isinstance(listed, list) else []
    return {str(entry.get("id")): entry for entry in entries if isinstance(entry, dict)}


def check_model(server: Server, model: str | None) -> str:
    """Return the name of the model to ask.

    Raises:
        UserError: the server does not have it, or has several and none was named.
    """
    names = list(served_models(server))
    if model is None and len(names) == 1:
        return names[0]
    shown = ", ".join(names[:MODELS_SHOWN]) or "none"
    if len(names) > MODELS_SHOWN:
        shown += f", ... and {len(names) - MODELS_SHOWN} more"
    if model is None:
        raise UserError(
            f"--model NAME is needed: which model of {server.url} is asked. It has: {shown}."
        )
    for name in (model, f"{model}:latest"):  # Ollama's default tag
        if name in names:
            return name
    raise UserError(f"--model {model}: {server.url} has no such model. It has: {shown}.")


def _read(response: HTTPResponse | HTTPError, deadline: float) -> str:
    """Return a whole answer. urllib's timeout is for each part of it.

    Raises:
        TimeoutError: the deadline is over.
        ValueError: it is too long.
    """
    parts = list[bytes]()
    size = 0
    while part := response.read1(CHUNK):
        parts.append(part)
        size += len(part)
        if size > LARGEST_ANSWER:
            raise ValueError(f"the answer is longer than {LARGEST_ANSWER >> 20} MiB")
        if time.monotonic() > deadline:
            raise TimeoutError
    return b"".join(parts).decode(errors="replace")


def _opener(url: str) -> OpenerDirector:
    """Return what opens URLs: by the proxy of the environment, but for this machine's addresses."""
    host = urlsplit(url).hostname or ""
    try:
        is_local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = host == "localhost"
    proxies = ProxyHandler({}) if is_local else ProxyHandler()
    return build_opener(_NoRedirects, proxies)
