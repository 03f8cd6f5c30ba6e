"""What the tests of observe share: the screen as text, and a small W&B server."""

import http.server
import io
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from llama_ft.runtime.console import configure_console, console


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What rank 0 prints, where the output is no terminal."""
    printed = io.StringIO()
    monkeypatch.setattr(console, "file", printed)
    configure_console(rank=0)
    return printed


@dataclass
class WandbServer:
    """Answers what wandb asks when a run starts, takes its metrics, and can fall silent or refuse every key."""

    url: str = ""
    requests: list[tuple[str, bytes]] = field(default_factory=list)
    refuses_keys: bool = False
    silent_after_start: bool = False
    closing: threading.Event = field(default_factory=threading.Event)

    def answer(self, path: str, body: bytes) -> tuple[int, dict[str, object]]:
        self.requests.append((path, body))
        if self.refuses_keys:
            return 401, {"data": None}
        if b"query Viewer" in body:
            viewer = {"id": "VXNlcjox", "entity": "team", "username": "me", "flags": "{}", "teams": {"edges": []}}
            return 200, {"data": {"viewer": viewer}}
        if b"mutation UpsertBucket" in body:
            run_id = json.loads(body)["variables"]["name"]
            project = {"id": "p", "name": "llama_ft", "entity": {"id": "e", "name": "team"}}
            bucket = {"id": "b", "name": run_id, "config": "{}", "historyLineCount": 0, "project": project}
            return 200, {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
        if self.silent_after_start:
            self.closing.wait()
        if b"mutation CreateRunFiles" in body:
            return 200, {"data": {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": []}}}
        return 200, {}


@pytest.fixture
def wandb_server() -> Iterator[WandbServer]:
    fake = WandbServer()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            status, reply = fake.answer(self.path, body)
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(reply).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_port}"
    yield fake
    fake.closing.set()
    server.shutdown()
    thread.join()
    server.server_close()
