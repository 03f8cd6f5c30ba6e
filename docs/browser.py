"""A headless Chromium, driven over a pipe by its DevTools protocol, with the standard library alone.

`report_picture.py` makes pictures with it, and a slow test looks at the report for errors.
Protocol: https://chromedevtools.github.io/devtools-protocol/
"""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = [
    "--headless",
    "--remote-debugging-pipe",  # commands on descriptor 3, answers on 4, separated by zero bytes
    "--no-sandbox",  # the pages are our own files; in a container the sandbox does not start
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
]
ANSWER_SECONDS = 120
LEAST_DESCRIPTOR = 10  # so that copying to 3 and 4 replaces none of our own


def find_browser() -> str | None:
    """Return the path of a Chromium or Chrome, or None if none is installed."""
    paths = [shutil.which(name) for name in NAMES]
    return next(filter(None, paths), None)


class Browser:
    """A page in a browser. A context manager: the browser ends with it.

    Attributes:
        errors: script errors and violations of the page's security policy since `open`.
    """

    def __init__(self, program: str) -> None:
        self.errors = list[str]()
        self._profile = tempfile.mkdtemp(prefix="browser-")
        child_reads, self._writes = _pipe()
        self._reads, child_writes = _pipe()
        actions = [
            (os.POSIX_SPAWN_DUP2, child_reads, 3),
            (os.POSIX_SPAWN_DUP2, child_writes, 4),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        ]
        arguments = [program, *FLAGS, f"--user-data-dir={self._profile}"]
        self._process = os.posix_spawn(
            program, arguments, os.environ, file_actions=actions, setpgroup=0
        )
        os.close(child_reads)
        os.close(child_writes)
        self._received = b""
        self._count = 0
        self._loaded = False
        self._session: dict[str, str] = {}
        target = self.command("Target.createTarget", url="about:blank")
        session = self.command("Target.attachToTarget", flatten=True, **target)
        self._session = session
        for domain in ("Page", "Runtime", "Log"):
            self.command(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(RuntimeError, OSError):
            self._session = {}
            self.command("Browser.close")
            while True:  # until the pipe ends, with the browser and its processes
                self._receive()
        os.close(self._writes)
        os.close(self._reads)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        shutil.rmtree(self._profile, ignore_errors=True)

    def open(self, page: Path, width: int, height: int, is_dark: bool = False) -> None:
        """Load a file in a window of this size."""
        self.errors.clear()
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded = False
        self.command("Page.navigate", url=page.resolve().as_uri())
        while not self._loaded:
            self._receive()

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression on the page."""
        answer = self.command("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def move_pointer(self, x: float, y: float) -> None:
        """Move the pointer to a position in the window."""
        self.command("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, width: int, height: int) -> bytes:
        """Return the page's upper left part as PNG."""
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        answer = self.command("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(answer["data"])

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the browser's answer to a command of the protocol."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters} | self._session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._count:
                break
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._reads], [], [], ANSWER_SECONDS)
            received = os.read(self._reads, 2**20) if ready else b""
            if not received:
                raise RuntimeError("the browser has ended or does not answer")
            self._received += received
        text, _, self._received = self._received.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        method = message.get("method")
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(message["params"]["exceptionDetails"]))
        elif method == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.errors.append(message["params"]["entry"]["text"])
        return message


def _pipe() -> tuple[int, int]:
    """Return a pipe's ends to read and to write, which no other process inherits."""
    ends = list[int]()
    for end in os.pipe():
        ends.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, LEAST_DESCRIPTOR))
        os.close(end)
    return ends[0], ends[1]
