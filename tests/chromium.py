"""A headless Chromium that a test asks about a page, over the pipe of its DevTools protocol: no network is needed."""

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
]
SECONDS = 60.0


def find_chromium() -> str | None:
    """Where it is installed and starts: Ubuntu's package may be a script that only names another way to install it."""
    for path in filter(None, map(shutil.which, NAMES)):
        if subprocess.run([path, "--version"], capture_output=True).returncode == 0:
            return path
    return None


class Page:
    """One tab.

    Attributes:
        requests: addresses that the page asked for since `open`.
        problems: what the browser logged since then: violations of the content security policy, errors in scripts.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from, self._buffer, self._number, self._session = to_browser, from_browser, b"", 0, ""
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.requests: list[str] = []
        self.problems: list[str] = []
        for domain in ("Page", "Network", "Log", "Runtime"):
            self._ask(f"{domain}.enable")

    def open(self, file: Path, theme: str, width: int) -> None:
        """Load a file as a reader with that theme and so wide a screen sees it."""
        self._ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        self._ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 500
        )
        self.requests, self.problems = [], []
        self._ask("Page.navigate", url=file.absolute().as_uri())
        while self.run("document.readyState") != "complete" or self.run("location.href") == "about:blank":
            time.sleep(0.05)

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._number, "method": method, "params": parameters, **session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            if answer.get("method") == "Network.requestWillBeSent":
                self.requests.append(answer["params"]["request"]["url"])
            elif answer.get("method") == "Log.entryAdded":
                self.problems.append(answer["params"]["entry"]["text"])
            elif answer.get("method") == "Runtime.exceptionThrown":
                self.problems.append(str(answer["params"]["exceptionDetails"]))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._from], [], [], SECONDS)[0]:
                raise TimeoutError("Chromium does not answer")
            if not (more := os.read(self._from, 1 << 20)):
                raise EOFError("Chromium has ended")
            self._buffer += more
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))


@contextmanager
def chromium_page(program: str, profile: Path) -> Iterator[Page]:
    """A browser with one tab; it ends with the block.

    Args:
        program: of `find_chromium`.
        profile: an empty folder.
    """
    (theirs_in, to_browser), (from_browser, theirs_out) = os.pipe(), os.pipe()
    command = [program, *FLAGS, f"--user-data-dir={profile}"]
    # The protocol's pipes are file descriptors 3 and 4.
    shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
    browser = subprocess.Popen(
        ["bash", "-c", shell, "-", *command],
        pass_fds=(theirs_in, theirs_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Page(to_browser, from_browser)
    finally:
        os.close(to_browser)
        os.close(from_browser)
        browser.terminate()
        browser.wait(20)
