"""A small local server that a test answers for."""

import contextlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def serve(answer: Callable[[str, str, bytes], tuple[int, object]]) -> Iterator[str]:
    """A server at the address that is yielded: path, authorization and body of a request -> status
    and JSON, or bytes that are sent as they are."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            status, reply = answer(self.path, self.headers.get("Authorization", ""), body)
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.end_headers()
            content = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            with contextlib.suppress(ConnectionError):  # the client may have left
                self.wfile.write(content)

        do_GET = do_PATCH = do_POST

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
