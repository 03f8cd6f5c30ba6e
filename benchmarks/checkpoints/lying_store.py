"""An S3 server that gives wrong answers, for benchmarks and tests of --save_to."""

import random
import re
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import parse_qs

from benchmarks.shared.moto_server import Application, start_s3_server

ERRORS = {
    "403": ("403 Forbidden", "AccessDenied"),
    "404": ("404 Not Found", "NoSuchKey"),
    "500": ("500 Internal Server Error", "InternalError"),
}
HTML = b"<html><body>Please log in to the network</body></html>"
NO_LISTING = b'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><KeyCount>0</KeyCount></ListBucketResult>'
# kind of lie -> the requests that it is possible for
KINDS = {
    "empty": ("LIST", "GET", "PUT", "DELETE"),
    "stale": ("LIST", "GET", "HEAD"),
    "truncated": ("LIST", "GET"),
    "html": ("LIST", "GET", "PUT", "DELETE"),
    "403": ("LIST", "HEAD", "GET", "PUT", "DELETE"),
    "404": ("LIST", "HEAD", "GET", "PUT", "DELETE"),
    "500": ("LIST", "HEAD", "GET", "PUT", "DELETE"),
    "etag": ("HEAD", "GET", "PUT"),
}

# A start and three checkpoints send about so many requests.
MOST_BEFORE = {"LIST": 6, "HEAD": 12, "GET": 20, "PUT": 20, "DELETE": 2}


class Lie(NamedTuple):
    """A wrong answer.

    Attributes:
        kind: of KINDS. empty: no entries, no content, or an object that is not written or deleted;
            stale: the answer of the first time; truncated: the first half; etag: of other content.
        request: LIST, HEAD, GET, PUT or DELETE.
        times: number of wrong answers; then all are right.
        names: a pattern of the objects' names.
        after: number of right answers before.
    """

    kind: str
    request: str
    times: int
    names: str = ""
    after: int = 0


class Answer(NamedTuple):
    """An answer over HTTP."""

    status: str
    headers: list[tuple[str, str]]
    body: bytes


class LyingServer:
    """An S3 server with the bucket `runs`, which this process and those that it starts find.

    Attributes:
        lies: how many wrong answers it has given since `tell`.
    """

    def __init__(self) -> None:
        self.lies = 0
        self._lock = threading.Lock()
        self._lie: Lie | None = None
        self._asked = 0  # requests that the lie is about
        self._first = dict[str, Answer]()  # request -> its first right answer
        start_s3_server(lambda application: partial(self._serve, application))

    def tell(self, lie: Lie | None) -> None:
        """Answer wrongly from now on; None: rightly."""
        with self._lock:
            self._lie = lie
            self._asked = 0
            self.lies = 0

    def _serve(
        self, application: Application, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        request = request_kind(environ)
        what = f"{environ['PATH_INFO']}?{environ['QUERY_STRING']}"
        with self._lock:
            lie = self._lie
            is_lie = False
            if lie is not None and lie.request == request and re.search(lie.names, what):
                self._asked += 1
                is_lie = lie.after < self._asked <= lie.after + lie.times
            self.lies += is_lie
        if lie is not None and is_lie:
            answer = self._wrong(lie.kind, request, application, environ)
        else:
            answer = right_answer(application, environ)
            self._remember(request, environ["PATH_INFO"], environ["QUERY_STRING"], answer)
        headers = [pair for pair in answer.headers if pair[0].lower() != "content-length"]
        length = str(len(answer.body))
        if request == "HEAD":
            length = dict(answer.headers).get("Content-Length", length)
        start_response(answer.status, [*headers, ("Content-Length", length)])
        return [b"" if request == "HEAD" else answer.body]

    def _remember(self, request: str, path: str, query: str, answer: Answer) -> None:
        with self._lock:
            self._first.setdefault(f"{request} {path}?{prefix_of(query)}", answer)

    def _wrong(
        self, kind: str, request: str, application: Application, environ: dict[str, Any]
    ) -> Answer:
        xml = [("Content-Type", "application/xml")]
        if request in ("PUT", "DELETE"):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if kind in ERRORS:
            status, code = ERRORS[kind]
            text = (
                f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>a lie</Message></Error>"
            )
            return Answer(status, xml, text.encode())
        if kind == "html":
            return Answer("200 OK", [("Content-Type", "text/html")], HTML)
        if kind == "empty":
            return Answer("200 OK", xml, NO_LISTING if request == "LIST" else b"")
        if request == "PUT":  # another ETag, and nothing is written
            return Answer("200 OK", [("ETag", f'"{"0" * 32}"')], b"")
        answer = right_answer(application, environ)
        if kind == "stale":
            key = f"{request} {environ['PATH_INFO']}?{prefix_of(environ['QUERY_STRING'])}"
            missing = Answer(ERRORS["404"][0], xml, b"")
            first = Answer("200 OK", xml, NO_LISTING) if request == "LIST" else missing
            return self._first.get(key, first)
        if kind == "etag":
            headers = [pair for pair in answer.headers if pair[0].lower() != "etag"]
            return answer._replace(headers=[*headers, ("ETag", f'"{"0" * 32}"')])
        return answer._replace(body=first_half(request, answer.body))


def request_kind(environ: dict[str, Any]) -> str:
    """Return LIST for a listing of objects, otherwise the method, "" for requests about a bucket."""
    query = parse_qs(environ["QUERY_STRING"], keep_blank_values=True)
    if "list-type" in query:
        return "LIST"
    is_object = environ["PATH_INFO"].strip("/").count("/") > 0
    return str(environ["REQUEST_METHOD"]) if is_object else ""


def prefix_of(query: str) -> str:
    """Return what a listing is of."""
    return "".join(parse_qs(query).get("prefix", ()))


def first_half(request: str, body: bytes) -> bytes:
    """Return the first half of a listing's entries, or of a content."""
    if request != "LIST":
        return body[: len(body) // 2]
    entries = re.findall(rb"<Contents>.*?</Contents>", body, re.DOTALL)
    for entry in entries[len(entries) // 2 :]:
        body = body.replace(entry, b"")
    return body


def right_answer(application: Application, environ: dict[str, Any]) -> Answer:
    """Return the server's own answer."""
    kept = list[Any]()

    def start(status: str, headers: list[tuple[str, str]], error: Any = None) -> None:
        kept.extend((status, headers))

    body = b"".join(application(environ, start))
    return Answer(kept[0], kept[1], body)


def random_lies(number: int, seed: int) -> list[Lie]:
    """Return so many lies, all kinds and requests equally often."""
    chance = random.Random(seed)
    pairs = [(kind, request) for kind, requests in KINDS.items() for request in requests]
    found = list[Lie]()
    while len(found) < number:
        chance.shuffle(pairs)
        for kind, request in pairs:
            after = chance.randint(0, MOST_BEFORE[request])
            found.append(Lie(kind, request, chance.randint(1, 4), after=after))
    return found[:number]
