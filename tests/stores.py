"""Object stores on loopback, which the processes that a test starts find by their environment, and
runs that are killed while they upload to one."""

import logging
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import RECIPE
from forked import start_forked

from llama_ft.extensions.store.object_store import ObjectStore, with_retries

pytest.importorskip("s3fs")
boto3 = pytest.importorskip("boto3")
ThreadedMotoServer = pytest.importorskip("moto.server").ThreadedMotoServer

SECRET = "do-not-write-this"
AWS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
SECONDS_TO_START = 60


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process, and of those that it starts meanwhile."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def s3_server() -> Iterator[str]:
    """Yield the address of an S3 server with the empty bucket `runs`."""
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # not a line per request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    try:
        with environment({**AWS, "AWS_ENDPOINT_URL": address}):
            # objects outlive a server of the same process
            reset_all = urllib.request.Request(f"{address}/moto-api/reset", method="POST")
            urllib.request.urlopen(reset_all, timeout=30).close()
            boto3.client("s3").create_bucket(Bucket="runs")
            yield address
    finally:
        server.stop()


@contextmanager
def npm_server(command: str, port: int, *flags: str) -> Iterator[None]:
    """Run a server of an npm package, whose commands must be on PATH."""
    program = shutil.which(command)
    if program is None:
        pytest.skip(f"{command} is not on PATH: npm install it")
    process = subprocess.Popen(
        [program, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + SECONDS_TO_START
        while not is_open(port):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


class CuttingProxy:
    """Forwards connections to a port, and cuts each after a random number of bytes.

    Args:
        target: the port.
        most_bytes: before a cut.

    Attributes:
        port: where it listens.
        cuts: connections that it has cut so far.
        is_silent: if set, all connections stay open, and nothing is forwarded.
    """

    def __init__(self, target: int, most_bytes: int = 2**60) -> None:
        self.is_silent = False
        self.target = target
        self.most_bytes = most_bytes
        self.cuts = 0
        self._chance = random.Random(0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # it was closed
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self.target))
                left = [self._chance.randrange(1, self.most_bytes)]
                for source, sink in ((client, server), (server, client)):
                    pair = (source, sink, left)
                    threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, left: list[int]) -> None:
        """Forward in one direction. `left` are the bytes until the cut, of both directions."""
        with suppress(OSError):  # the other direction was cut
            while data := source.recv(65536):
                if self.is_silent:
                    continue
                sink.sendall(data[: left[0]])
                left[0] -= len(data)
                if left[0] <= 0:
                    self.cuts += 1
                    reset(source)
                    reset(sink)
                    return
            sink.shutdown(socket.SHUT_WR)


def reset(connection: socket.socket) -> None:
    """Close a connection as a lost peer does: with RST."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    # wakes the thread that reads from it
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RD)
    connection.close()


def download(url: str, folder: Path) -> Path:
    """Copy everything under a URL, which has the layout of a run directory."""
    store = ObjectStore(url, "")
    for name in store.sizes(""):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with_retries(partial(store.get_file, name, folder / name))
    return folder


def kill_when(happened: Callable[[], Any], words: list[str], log: Path) -> None:
    """Start the recipe on 2 ranks, and kill both at once at a moment, as by kill -9."""
    running = start_forked(RECIPE, *words, output=log, ranks=2)
    while running.is_alive() and not happened():
        time.sleep(0.03)  # the server that is asked runs in this process
    running.send(signal.SIGKILL)
    running.wait(30)
