"""MLflow with a real local store, read back by MLflow; and a small local server for what goes over
the network."""

import contextlib
import io
import json
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from local_server import serve
from mlflow import MlflowClient

from llama_ft.config.settings.settings import TrackingConfig
from llama_ft.errors import UserError
from llama_ft.observe import ResumedLog, RunLog, check_trackers
from llama_ft.observe.run_metadata import git_commit

SOURCE = Path(__file__).parents[2] / "src"
SETTINGS = {
    "train": {"lr": 0.001, "seed": None},
    "data": {"dataset": "https://me:hunter2@host/rows", "mix": "x" * 900},
}


class Stopped(BaseException):
    exit_code = 143


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # for reading it back


def log_run(
    output_dir: Path,
    steps: range,
    loss: float = 1.0,
    tracking: TrackingConfig | None = None,
    error: BaseException | None = None,
    resumed: ResumedLog | None = None,
) -> dict[str, str]:
    """Run one attempt of a run and return the ids with which a later attempt continues."""
    output_dir.mkdir(parents=True, exist_ok=True)
    tracking = tracking or TrackingConfig(use_mlflow=True)
    with (
        contextlib.suppress(Stopped, ValueError),
        RunLog(output_dir, tracking, SETTINGS, 9, resumed=resumed) as run_log,
    ):
        with run_log.training():
            for step in steps:
                run_log.log_step(
                    step,
                    {"epoch": step / 9, "train/loss": loss, "memory/host_peak_bytes": [1.0, 2.0]},
                )
            if error is not None:
                raise error
        run_log.log_result(output_dir / "model", {"weights_of": steps[-1], "best_step": 0}, 60)
    return run_log.tracker_ids


def history(client: MlflowClient, run_id: str, key: str) -> list[tuple[int, float]]:
    return [(metric.step, metric.value) for metric in client.get_metric_history(run_id, key)]


def test_mlflow_reads_back_the_whole_run(
    tmp_path: Path, screen: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SOURCE / "mine.py")])  # whose checkout is the run's
    output_dir = tmp_path / "output" / "lora"
    (output_dir / "model").mkdir(parents=True)
    (output_dir / "model" / "adapter_model.safetensors").write_bytes(b"weights")
    tracking = TrackingConfig(
        use_mlflow=True,
        mlflow_experiment="my tuning",
        mlflow_tags=["team=a=b"],
        mlflow_log_model=True,
    )
    ids = log_run(output_dir, range(1, 4), 0.5, tracking)

    client = MlflowClient((tmp_path / "output" / "mlruns").as_uri())
    run = client.get_run(ids["mlflow"])
    assert client.get_experiment(run.info.experiment_id).name == "my tuning"
    assert (run.info.run_name, run.info.status) == ("lora", "FINISHED")
    assert history(client, ids["mlflow"], "train/loss") == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert history(client, ids["mlflow"], "memory/host_peak_bytes/rank1") == [
        (1, 2.0),
        (2, 2.0),
        (3, 2.0),
    ]
    parameters = {
        "train.lr": "0.001",
        "train.seed": "None",
        "data.dataset": "https://***@host/rows",
    }
    assert run.data.params == parameters | {"data.mix": "x" * 500, "git.commit": git_commit()}
    assert run.data.tags.get("mlflow.source.git.commit") == git_commit()
    assert {name: run.data.tags[name] for name in ("team", "model.step", "model.best")} == {
        "team": "a=b",
        "model.step": "3",
        "model.best": "false",
    }
    copy = client.download_artifacts(
        ids["mlflow"], "model/adapter_model.safetensors", str(tmp_path)
    )
    assert Path(copy).read_bytes() == b"weights"
    assert f"MLflow: run {ids['mlflow']} in file://{tmp_path}/output/mlruns" in screen.getvalue()


def test_a_resumed_run_continues_in_mlflow_with_each_step_once(
    tmp_path: Path, screen: io.StringIO
) -> None:
    client = MlflowClient((tmp_path / "mlruns").as_uri())
    output_dir = tmp_path / "run"
    ids = log_run(output_dir, range(1, 5), 1.0, error=Stopped())
    assert client.get_run(ids["mlflow"]).info.status == "KILLED"
    again = log_run(
        output_dir,
        range(3, 7),
        2.0,
        error=ValueError(),
        resumed=ResumedLog(2, output_dir, ids),
    )
    assert again == ids
    run = client.get_run(ids["mlflow"])
    assert run.info.status == "FAILED"
    assert history(client, ids["mlflow"], "train/loss") == [
        (1, 1.0),
        (2, 1.0),
        (3, 1.0),
        (4, 1.0),
        (5, 2.0),
        (6, 2.0),
    ]

    other = TrackingConfig(use_mlflow=True, mlflow_tracking_uri=str(tmp_path / "another store"))
    other_ids = log_run(output_dir, range(7, 8), 3.0, other, resumed=ResumedLog(6, output_dir, ids))
    assert other_ids != ids
    client = MlflowClient((tmp_path / "another store").as_uri())
    expected = [(1, 1.0), (2, 1.0), *((step, 2.0) for step in range(3, 7)), (7, 3.0)]
    assert history(client, other_ids["mlflow"], "train/loss") == expected, (
        "it gets the steps it lacks from metrics.jsonl"
    )


def test_a_store_that_breaks_is_reported_once_and_training_continues(
    tmp_path: Path, screen: io.StringIO
) -> None:
    output_dir = tmp_path / "run"
    output_dir.mkdir()
    with RunLog(output_dir, TrackingConfig(use_mlflow=True), SETTINGS, 400) as run_log:
        shutil.rmtree(tmp_path / "mlruns")
        (tmp_path / "mlruns").write_text("no folder any more")
        for step in range(1, 4):
            run_log.log_step(step, {"train/loss": 1.0})
    assert len((output_dir / "metrics.jsonl").read_text().splitlines()) == 3
    assert screen.getvalue().count("gets no more metrics") == 1


def test_without_the_package_the_command_that_installs_it_is_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UserError, match=re.escape("pip install -e .[mlflow]")):
        check_trackers(TrackingConfig(use_mlflow=True), None)


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("file", "{tmp}/file did not accept the run"),
        (
            "http://me:hunter2@127.0.0.1:{port}",
            "http://***@127.0.0.1:{port} did not accept the run",
        ),
        (
            "http://127.0.0.1:9",
            "did not accept the run: the host does not answer (connection refused)\n",
        ),
        (
            "http://no-such-host.invalid",
            "did not accept the run: the host does not answer (host not found)\n",
        ),
    ],
)
def test_a_store_that_cannot_be_used_is_reported_within_30_seconds(
    place: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # takes connections and never answers
        known = {"port": silent.getsockname()[1], "tmp": tmp_path}
        place = str(tmp_path / "file") if place == "file" else place.format(**known)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", place)
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
        start = time.monotonic()
        with pytest.raises(UserError) as refusal:
            check_trackers(TrackingConfig(use_mlflow=True), str(tmp_path / "run"))
    assert time.monotonic() - start < 30
    assert expected.format(**known) in str(refusal.value)
    assert "hunter2" not in str(refusal.value)
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing is written"


@dataclass
class MlflowServer:
    """What a tracking server answers to a run's requests, and what it was sent."""

    url: str = ""
    # path, authorization, body
    sent: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)

    def answer(self, path: str, authorization: str, body: bytes) -> tuple[int, object]:
        path = path.partition("/api/2.0/mlflow/")[2].partition("?")[0]
        self.sent.append((path, authorization, json.loads(body or b"{}")))
        info = {"run_id": "r1", "run_uuid": "r1", "experiment_id": "1", "status": "RUNNING"}
        info["lifecycle_stage"] = "active"
        run = {"run": {"info": info, "data": {}}}
        experiment = {"experiment_id": "1", "name": "llama_ft", "lifecycle_stage": "active"}
        known = {
            "experiments/get-by-name": {"experiment": experiment},
            "runs/create": run,
            "runs/get": run,
        }
        return 200, known.get(path, {})


@pytest.fixture
def server() -> Iterator[MlflowServer]:
    fake = MlflowServer()
    with serve(fake.answer) as fake.url:
        yield fake


def test_a_server_gets_the_run_and_the_password_is_sent_nowhere_else(
    tmp_path: Path, server: MlflowServer, screen: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url.replace("://", "://me:hunter2@"))
    (tmp_path / "run").mkdir()
    log_run(tmp_path / "run", range(1, 4), 0.5)
    sent = [
        metric
        for path, _, body in server.sent
        if path == "runs/log-batch"
        for metric in body.get("metrics", [])
    ]
    assert [(m["step"], m["value"]) for m in sent if m["key"] == "train/loss"] == [
        (1, 0.5),
        (2, 0.5),
        (3, 0.5),
    ]
    assert [body["status"] for path, _, body in server.sent if path == "runs/update"] == [
        "FINISHED"
    ]
    assert all(authorization.startswith("Basic ") for _, authorization, _ in server.sent)
    assert "hunter2" not in screen.getvalue() + json.dumps([body for _, _, body in server.sent])
    assert not [
        path for path in tmp_path.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()
    ]
    assert f"MLflow: run r1 in {server.url.replace('://', '://***@')}" in screen.getvalue()
