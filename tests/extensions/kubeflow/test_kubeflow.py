"""Progress for Kubeflow Trainer, sent to an HTTPS server with a certificate of its own."""

import datetime
import ipaddress
import json
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llama_ft import door
from llama_ft.config import Config, TrackingConfig
from llama_ft.observe.run_log import RunLog

pytest.importorskip("cryptography")
TOKEN = "do-not-write-this"


class StatusServer(ThreadingHTTPServer):
    """What the controller's status server takes: a token and a JSON body.

    Attributes:
        received: the bodies.
        status: of its answers.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.received = list[dict[str, Any]]()
        self.status = 200
        self.arrived = threading.Event()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Answer(BaseHTTPRequestHandler):
    server: StatusServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Authorization"] == f"Bearer {TOKEN}":
            self.server.received.append(json.loads(body)["trainerStatus"])
        self.send_response(self.server.status)
        self.end_headers()
        self.server.arrived.set()

    def log_message(self, *_: object) -> None:
        pass


def write_certificate(certificate: Path, key: Path) -> None:
    """Write a certificate for 127.0.0.1 that is its own authority."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "status server")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    builder = x509.CertificateBuilder(name, name, private.public_key(), 1)
    builder = builder.not_valid_before(now - datetime.timedelta(days=1))
    builder = builder.not_valid_after(now + datetime.timedelta(days=1))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
    builder = builder.add_extension(x509.SubjectAlternativeName([address]), False)
    signed = builder.sign(private, hashes.SHA256())
    certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    key.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StatusServer]:
    certificate = tmp_path / "ca.crt"
    write_certificate(certificate, tmp_path / "key")
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    started = StatusServer(certificate, tmp_path / "key")
    url = f"https://127.0.0.1:{started.server_port}/status"
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", url)
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(certificate))
    yield started
    started.shutdown()
    started.server_close()


def run_of(folder: Path) -> RunLog:
    """Return the log of a run of 8 steps with the part of Kubeflow."""
    folder.mkdir()
    log = RunLog(folder, TrackingConfig(quiet=True), {}, total_steps=8)
    ranks = SimpleNamespace(is_main=True)
    batches = SimpleNamespace(total_steps=8)
    run = SimpleNamespace(ranks=ranks, log=log, batches=batches, resumed=None)
    for make_part in door.parts(Config()):
        if "kubeflow" not in make_part.__module__:
            continue
        make_part(SimpleNamespace(ranks=ranks), None).opened(run)
    return log


def test_without_the_variable_of_the_controller_nothing_is_sent(
    server: StatusServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_URL")
    with run_of(tmp_path / "run") as run:
        run.log_step(1, {"train/loss": 1.5})
    assert server.received == []


def test_the_train_job_gets_the_newest_step_and_the_end(
    server: StatusServer, tmp_path: Path
) -> None:
    started = time.monotonic()
    with run_of(tmp_path / "run") as run:
        run.log_step(2, {"train/loss": 1.5, "perf/tokens_per_second": 9.0})
        assert server.arrived.wait(60)
        for step in range(3, 9):
            run.log_step(step, {"train/loss": 1.5})
    first, last = server.received[0], server.received[-1]
    assert first["progressPercentage"] == 25 and first["estimatedRemainingSeconds"] >= 0
    assert first["metrics"] == [
        {"name": "step", "value": "2"},
        {"name": "train/loss", "value": "1.5"},
    ]
    assert last["progressPercentage"] == 100 and last["metrics"][0]["value"] == "8"
    seconds = time.monotonic() - started
    assert len(server.received) <= 2 + seconds // 5  # at most one in 5 s, and the end
    datetime.datetime.fromisoformat(last["lastUpdatedTime"])


@pytest.mark.parametrize("problem", ["server", "token", "certificate"])
def test_a_server_that_does_not_take_it_is_one_warning(
    server: StatusServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    problem: str,
) -> None:
    from llama_ft.runtime import log

    if problem == "server":
        server.status = 500
    elif problem == "token":
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "nothing"))
    else:
        monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_CA_CERT")
    monkeypatch.setattr(log, "propagate", True)
    monkeypatch.setattr(log, "handlers", [])  # pytest 9.2 adds its own: each line would count twice
    with run_of(tmp_path / "run") as run:
        for step in range(1, 9):
            run.log_step(step, {"train/loss": 1.5})
    warnings = [line for line in caplog.messages if "Kubeflow Trainer" in line]
    assert len(warnings) == 1 and TOKEN not in warnings[0]
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 8
