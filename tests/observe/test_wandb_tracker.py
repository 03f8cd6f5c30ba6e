"""W&B offline, with the files that it uploads later read back; and a server that rejects the
key."""

import contextlib
import io
import json
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import forked
from local_server import serve
from wandb.proto.wandb_internal_pb2 import Record

from llama_ft.config.settings.settings import TrackingConfig
from llama_ft.errors import UserError
from llama_ft.observe.run_log import ResumedLog, RunLog
from llama_ft.observe.run_metadata import git_commit
from llama_ft.observe.trackers import start_trackers, wandb_mode

RESOLVED = {"train": {"lr": 0.001, "num_epochs": 2}, "model": {"model_name": "demo"}}
SOURCE = Path(__file__).parents[2] / "src"

CHECK_KEY = """
import sys
from llama_ft.config.settings.settings import TrackingConfig
from llama_ft.errors import UserError
from llama_ft.observe import check_trackers
from llama_ft.runtime.console import configure_console

configure_console(0)
tracking = TrackingConfig(use_wandb=True)
try:
    check_trackers(tracking, sys.argv[1])
except UserError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""


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
    """What was logged, a dictionary per step."""
    steps = []
    for record in offline_records(run_dir):
        if record.HasField("history"):
            items = record.history.item
            steps.append({"/".join(item.nested_key) or item.key: item.value_json for item in items})
    return steps


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
    runs = [record.run for record in records if record.HasField("run")]
    run = runs[0]
    assert (run.project, run.entity, run.display_name) == ("docstrings", "my-team", "first")
    assert list(run.tags) == ["lora", "8b"]
    assert (run.run_group, run.job_type, run.notes) == ("sweep", "train", "the first of three")
    settings = {
        item.key or "/".join(item.nested_key): item.value_json for item in run.config.update
    }
    assert json.loads(settings["git"])["commit"] == git_commit()
    assert '{"lr":0.001,"num_epochs":2}' in [item.value_json for item in run.config.update]
    history = offline_history(run_dir)
    assert [float(line["train/loss"]) for line in history] == [6.0, 3.0]
    assert [float(line["memory/host_peak_bytes/rank1"]) for line in history] == [20.0, 20.0]
    assert [line["_step"] for line in history] == ["1", "2"]

    (model,) = [record.artifact for record in records if record.HasField("artifact")]
    assert (model.type, set(model.aliases)) == ("model", {"latest", "step-2", "best"})
    assert [file.path for file in model.manifest.contents] == ["adapter_model.safetensors"]

    assert {(run.host, run.git.remote_url, run.git.commit) for run in runs} == {("", "", "")}
    kept = next(run_dir.glob("*.wandb")).read_bytes()
    # of the machine, the user and the code
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


def test_wandb_with_a_rejected_key_gives_a_user_error(tmp_path: Path) -> None:
    """In a process with a home directory of its own, and without a terminal."""
    home = tmp_path / "home"
    home.mkdir()
    script = tmp_path / "online.py"
    script.write_text(CHECK_KEY)
    with serve(lambda *_: (401, {"data": None})) as url:
        login = {"WANDB_BASE_URL": url, "WANDB_API_KEY": "a" * 40, "HOME": str(home)}
        done = forked(script, tmp_path / "run", timeout=180, **login)
    assert done.exit_code == 2
    message = f"error: --use_wandb: Failed to authenticate with {url}"
    assert done.output.startswith(message), done.output
    assert "wandb login" in done.output and "--wandb_mode offline" in done.output
    assert "Traceback" not in done.output


class Stopped(BaseException):
    exit_code = 143


def log_losses(
    output_dir: Path,
    steps: range,
    loss: float,
    resume_step: int | None = None,
    ids: dict[str, str] | None = None,
    error: BaseException | None = None,
) -> dict[str, str]:
    """One attempt of a run, offline, with losses that tell it from others. Return the ids with
    which a later attempt continues."""
    tracking = TrackingConfig(use_wandb=True, wandb_mode="offline")
    output_dir.mkdir(exist_ok=True)
    resumed = None
    if resume_step is not None:
        resumed = ResumedLog(resume_step, output_dir, ids or {})
    with (
        contextlib.suppress(Stopped),
        RunLog(output_dir, tracking, {}, 9, resumed=resumed) as run_log,
    ):
        for step in steps:
            run_log.log_step(step, {"train/loss": loss})
        if error is not None:
            raise error
    return run_log.tracker_ids


def test_wandb_offline_logs_the_whole_resumed_run_under_its_first_id(
    tmp_path: Path, screen: io.StringIO
) -> None:
    output_dir = tmp_path / "run"
    ids = log_losses(output_dir, range(5), 1.0, error=Stopped())
    assert log_losses(output_dir, range(3, 6), 2.0, resume_step=2, ids=ids) == ids

    attempts = sorted((output_dir / "wandb").glob("offline-run-*"), key=os.path.getctime)
    found = []
    for attempt in attempts:
        history = offline_history(attempt)
        found.append([(int(line["_step"]), float(line["train/loss"])) for line in history])
    first = [(step, 1.0) for step in range(5)]
    second = [(step, 1.0 if step < 3 else 2.0) for step in range(6)]
    assert found == [first, second]
    stopped, finished = [list(offline_records(attempt)) for attempt in attempts]
    assert [record.exit.exit_code for record in stopped if record.HasField("exit")] == [143]
    assert any(record.HasField("preempting") for record in stopped)
    assert [record.exit.exit_code for record in finished if record.HasField("exit")] == [0]
    assert not any(record.HasField("preempting") for record in finished)
    for records in (stopped, finished):
        runs = [record.run.run_id for record in records if record.HasField("run")]
        assert set(runs) == {ids["wandb"]}
