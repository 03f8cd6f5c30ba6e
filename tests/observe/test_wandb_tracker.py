"""W&B offline, with its files read back; W&B online, in a separate process with a small local
server."""

import contextlib
import io
import json
import os
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from forked import Finished, forked
from local_server import serve
from wandb.proto.wandb_internal_pb2 import Record

from llama_ft.config.settings import TrackingConfig
from llama_ft.errors import UserError
from llama_ft.observe.run_log import RunLog
from llama_ft.observe.run_metadata import git_commit
from llama_ft.observe.trackers import start_trackers, wandb_mode

RESOLVED = {"train": {"lr": 0.001, "num_epochs": 2}, "model": {"model_name": "demo"}}
SOURCE = Path(__file__).parents[2] / "src"

PROJECT = {"id": "p", "name": "llama_ft", "entity": {"id": "e", "name": "team"}}

ONLINE_RUN = """
import sys
from pathlib import Path
from llama_ft.config.settings import TrackingConfig
from llama_ft.errors import UserError
from llama_ft.observe import RunLog, check_trackers
from llama_ft.runtime.console import configure_console

configure_console(0)
tracking = TrackingConfig(use_wandb=True)
try:
    check_trackers(tracking, sys.argv[1])
    with RunLog(Path(sys.argv[1]), tracking, {"train": {"lr": 0.001}}, 2) as run_log:
        for step in (1, 2):
            run_log.log_step(step, {"train/loss": 6.0 / step})
except UserError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""


@dataclass
class WandbServer:
    """Answers what wandb asks when a run starts, takes its metrics, and can refuse every key.

    A resumed run gets what the server has of it: `history` holds the lines by run and position.
    """

    url: str = ""
    requests: list[tuple[str, bytes]] = field(default_factory=list)
    history: dict[str, dict[int, str]] = field(default_factory=dict)
    ends: list[dict[str, object]] = field(default_factory=list)
    refuses_keys: bool = False

    def answer(self, path: str, authorization: str, body: bytes) -> tuple[int, dict[str, object]]:
        self.requests.append((path, body))
        if self.refuses_keys:
            return 401, {"data": None}
        if b"query Viewer" in body:
            viewer = {
                "id": "VXNlcjox",
                "entity": "team",
                "username": "me",
                "flags": "{}",
                "teams": {"edges": []},
            }
            return 200, {"data": {"viewer": viewer}}
        if b"mutation UpsertBucket" in body:
            run_id = json.loads(body)["variables"]["name"]
            self.history.setdefault(run_id, {})
            bucket = {
                "id": "b",
                "name": run_id,
                "config": "{}",
                "historyLineCount": 0,
                "project": PROJECT,
            }
            return 200, {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
        if b"mutation CreateRunFiles" in body:
            return 200, {
                "data": {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": []}}
            }
        if b"query RunResumeStatus" in body:
            return 200, {
                "data": {
                    "model": PROJECT | {"bucket": self.known(json.loads(body)["variables"]["name"])}
                }
            }
        if path.endswith("/file_stream"):
            self.take(path.split("/")[-2], json.loads(body))
        return 200, {}

    def known(self, run_id: str) -> dict[str, object] | None:
        lines = self.history.get(run_id)
        if lines is None:
            return None
        tail = json.dumps([lines[max(lines)]] if lines else [])
        counts = {"historyLineCount": len(lines), "eventsLineCount": 0, "logLineCount": 0}
        texts = {
            "config": "{}",
            "summaryMetrics": "{}",
            "eventsTail": "[]",
            "wandbConfig": '{"t": 1}',
        }
        return (
            {"id": "b", "name": run_id, "displayName": "run", "historyTail": tail, "tags": []}
            | counts
            | texts
        )

    def take(self, run_id: str, stream: dict[str, Any]) -> None:
        lines = stream.get("files", {}).get("wandb-history.jsonl", {"offset": 0, "content": []})
        self.history[run_id] |= dict(enumerate(lines["content"], lines["offset"]))
        self.ends += [{key: stream[key] for key in ("preempting", "exitcode") if key in stream}]

    def losses(self, run_id: str) -> list[tuple[int, float]]:
        records = [json.loads(line) for _, line in sorted(self.history[run_id].items())]
        return [(record["_step"], record["train/loss"]) for record in records]


@pytest.fixture
def wandb_server() -> Iterator[WandbServer]:
    fake = WandbServer()
    with serve(fake.answer) as fake.url:
        yield fake


def offline_records(run_dir: Path) -> Iterator[Record]:
    """W&B's transaction log: a 7 byte header, then records of crc, length, type and data in blocks
    of 32 KiB."""
    data = next(run_dir.glob("*.wandb")).read_bytes()
    position = 7
    whole = b""
    while position + 7 <= len(data):
        if 2**15 - position % 2**15 < 7:
            position += 2**15 - position % 2**15
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # complete, or the last part
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def offline_history(run_dir: Path) -> list[dict[str, str]]:
    records = [record.history for record in offline_records(run_dir) if record.HasField("history")]
    return [
        {"/".join(i.nested_key) or i.key: i.value_json for i in record.item} for record in records
    ]


def run_online(tmp_path: Path, **environment: str) -> Finished:
    """One online run in a process with a fresh home, and nothing to type on."""
    home = tmp_path / "home"
    output_dir = tmp_path / "run"
    script = tmp_path / "private_script.py"
    home.mkdir()
    output_dir.mkdir()
    script.write_text(ONLINE_RUN)
    return forked(
        script, output_dir, "--private-argument", timeout=180, HOME=str(home), **environment
    )


def test_wandb_offline_keeps_everything_but_machine_user_and_code_and_says_how_to_sync(
    tmp_path: Path, screen: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setattr(sys, "argv", [str(SOURCE / "mine.py")])  # whose checkout is the run's
    names = {
        "wandb_project": "docstrings",
        "wandb_entity": "my-team",
        "wandb_name": "first",
        "wandb_group": "sweep",
    }
    more = {
        "wandb_job_type": "train",
        "wandb_notes": "the first of three",
        "wandb_tags": ["lora", "8b"],
    }
    config = TrackingConfig(
        use_wandb=True, wandb_mode="offline", wandb_log_model=True, **names, **more
    )  # type: ignore[arg-type]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "adapter_model.safetensors").write_bytes(b"weights")
    with RunLog(tmp_path, config, RESOLVED, 2) as run_log:
        for step in (1, 2):
            run_log.log_step(step, {"train/loss": 6.0 / step, "memory/host_peak_bytes": [10, 20]})
        run_log.log_result(tmp_path / "model", {"weights_of": 2, "best_step": 2}, 60)

    (run_dir,) = (tmp_path / "wandb").glob("offline-run-*")
    assert f"wandb sync {run_dir} uploads this run" in screen.getvalue()
    records = list(offline_records(run_dir))
    (run, *_) = runs = [record.run for record in records if record.HasField("run")]
    assert (run.project, run.entity, run.display_name) == ("docstrings", "my-team", "first")
    assert list(run.tags) == ["lora", "8b"]
    assert (run.run_group, run.job_type, run.notes) == ("sweep", "train", "the first of three")
    settings = {
        item.key or "/".join(item.nested_key): item.value_json for item in run.config.update
    }
    assert json.loads(settings["git"])["commit"] == git_commit()
    assert '{"lr":0.001,"num_epochs":2}' in [item.value_json for item in run.config.update]
    history = offline_history(run_dir)
    assert [float(row["train/loss"]) for row in history] == [6.0, 3.0]
    assert [float(row["memory/host_peak_bytes/rank1"]) for row in history] == [20.0, 20.0]
    assert [row["_step"] for row in history] == ["1", "2"]

    (model,) = [record.artifact for record in records if record.HasField("artifact")]
    assert (model.type, set(model.aliases)) == ("model", {"latest", "step-2", "best"})
    assert [file.path for file in model.manifest.contents] == ["adapter_model.safetensors"]

    assert {(run.host, run.git.remote_url, run.git.commit) for run in runs} == {("", "", "")}
    kept = next(run_dir.glob("*.wandb")).read_bytes()
    for path in (sys.executable, sys.argv[0], __file__):
        assert path.encode() not in kept
    assert not [path for path in (run_dir / "files").rglob("*") if path.is_file()]


def test_wandb_mode_of_the_environment_decides_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = TrackingConfig(use_wandb=True)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert start_trackers(asked, tmp_path, RESOLVED, None, {}) == [] and not list(
        tmp_path.iterdir()
    )
    assert wandb_mode(TrackingConfig(use_wandb=True, wandb_mode="online")) == "online"
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(UserError, match="W&B did not accept the run: "):
        start_trackers(
            TrackingConfig(use_wandb=True, wandb_tags=["x" * 65]), tmp_path, RESOLVED, None, {}
        )
    (tracker,) = start_trackers(asked, tmp_path, RESOLVED, None, {})
    tracker.finish(0, stopped=False)
    (run_dir,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    names = [
        record.run.display_name
        for record in offline_records(run_dir.parent)
        if record.HasField("run")
    ]
    assert names[0] == tmp_path.name


def test_wandb_with_a_rejected_key_gives_a_user_error(
    tmp_path: Path, wandb_server: WandbServer
) -> None:
    wandb_server.refuses_keys = True
    done = run_online(tmp_path, WANDB_BASE_URL=wandb_server.url, WANDB_API_KEY="a" * 40)
    assert done.exit_code == 2
    assert done.output.startswith(
        f"error: --use_wandb: Failed to authenticate with {wandb_server.url}"
    ), done.output
    assert "wandb login" in done.output and "--wandb_mode offline" in done.output
    assert "Traceback" not in done.output


def test_wandb_online_sends_metrics_and_nothing_about_the_machine(
    tmp_path: Path, wandb_server: WandbServer
) -> None:
    login = {"WANDB_BASE_URL": wandb_server.url, "WANDB_API_KEY": "a" * 40}
    private = {
        "WANDB_HOST": "private-host",
        "WANDB_USERNAME": "private-user",
        "SOME_TOKEN": "private-token",
    }
    done = run_online(tmp_path, **login, **private)
    assert done.exit_code == 0, done.output
    assert f"W&B: {wandb_server.url}/team/llama_ft/runs/" in done.output
    assert "wandb:" not in done.output
    sent = b"".join(body for _, body in wandb_server.requests)
    assert b'\\"train/loss\\":3' in sent
    assert b"private" not in sent
    assert sys.executable.encode() not in sent
    assert not [path for path, _ in wandb_server.requests if "otel" in path]


class Stopped(BaseException):
    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code


@dataclass
class Attempt:
    """Attempts of one run in this process, each with losses of its own to tell them apart."""

    output_dir: Path
    tracking: TrackingConfig
    ids: dict[str, str] = field(default_factory=dict)

    def run(
        self,
        first: int,
        last: int,
        loss: float,
        resume_step: int | None = None,
        stop: int | None = None,
    ) -> None:
        self.output_dir.mkdir(exist_ok=True)
        with contextlib.suppress(Stopped):
            with RunLog(
                self.output_dir, self.tracking, {}, 9, resume_step=resume_step, tracker_ids=self.ids
            ) as run_log:
                self.ids = run_log.tracker_ids
                for step in range(first, last + 1):
                    run_log.log_step(step, {"train/loss": loss})
                if stop is not None:
                    raise Stopped(stop)


@pytest.fixture
def login(tmp_path: Path, wandb_server: WandbServer, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "WANDB_BASE_URL": wandb_server.url,
        "WANDB_API_KEY": "a" * 40,
        "HOME": str(tmp_path),
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)


def test_wandb_online_continues_its_run(
    tmp_path: Path, wandb_server: WandbServer, login: None, screen: io.StringIO
) -> None:
    run = Attempt(tmp_path / "run", TrackingConfig(use_wandb=True))
    run.run(0, 4, 1.0, stop=143)
    run_id = run.ids["wandb"]
    assert {"preempting": True} in wandb_server.ends
    assert wandb_server.ends[-1] == {"exitcode": 143}
    del wandb_server.history[run_id][4]  # as if W&B had been killed before it sent that step

    run.run(3, 5, 2.0, resume_step=2, stop=0)  # W&B has step 3 already
    assert run.ids == {"wandb": run_id}
    assert wandb_server.losses(run_id) == [
        (0, 1.0),
        (1, 1.0),
        (2, 1.0),
        (3, 1.0),
        (4, 2.0),
        (5, 2.0),
    ]
    assert f"/runs/{run_id}" in screen.getvalue()
    assert wandb_server.ends[-1] == {"exitcode": 143}  # stopped in time: not finished yet

    del wandb_server.history[run_id][5]
    run.run(6, 6, 3.0, resume_step=5)
    expected = [(0, 1.0), (1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 3.0)]
    assert wandb_server.losses(run_id) == expected
    assert wandb_server.ends[-1] == {"exitcode": 0}
    told = [
        offline_history(run_dir)
        for run_dir in sorted((tmp_path / "run" / "wandb").glob("run-*"), key=os.path.getctime)
    ]
    assert [[row["_step"] for row in rows] for rows in told] == [
        ["0", "1", "2", "3", "4"],
        ["4", "5"],
        ["5", "6"],
    ]
