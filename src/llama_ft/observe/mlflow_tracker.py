"""MLflow: a run on a server or in a folder, written from a thread of its own, so that no step waits for a server.

mlflow is imported inside the functions: it is optional, and takes some seconds.
"""

import contextlib
import importlib.util
import logging
import os
import queue
import re
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote, urlsplit

from llama_ft.config.output_dir import not_writable
from llama_ft.config.sections import TrackingConfig
from llama_ft.config.tracking_names import SCHEMES, store_complaint
from llama_ft.errors import UserError
from llama_ft.masking import mask_secrets
from llama_ft.network import no_answer
from llama_ft.observe.deadline import within
from llama_ft.observe.metrics import Metrics, one_series_per_rank
from llama_ft.runtime.console import log

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    from llama_ft.observe.facts import GitState
    from llama_ft.observe.trackers import Result, Samples

ANSWER_SECONDS = 10  # a server that is asked whether it takes the run
# With W&B's 10 s it is 20: what runtime/stopping.py gives the trackers of a rank that has failed.
FINISH_TIMEOUT_SECONDS, LAST_TRY_SECONDS = 7.0, 3.0
PARAMETERS_AT_ONCE = 100  # MLflow's limit, as the next one is
METRICS_AT_ONCE = 1000
PARAMETER_LENGTH = 500  # older servers take no more
STEP_KEYS = ("epoch", "train/loss", "eval/loss")  # what each line of metrics.jsonl has one of
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",  # it would tell its makers
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",  # its own 120 s, tried 7 times, are longer than most people wait
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_ALLOW_FILE_STORE": "true",  # else it takes databases only; see `_store`
}


def check_mlflow(config: TrackingConfig, output_dir: Path) -> None:
    """Find out whether MLflow is there and takes this run, so that it is told before a model is loaded.

    Writes nothing, and waits 10 s for a server.

    Raises:
        UserError: the package is missing, the server does not answer or refuses, or the folder cannot be written to.
    """
    if importlib.util.find_spec("mlflow") is None:
        raise UserError("--use_mlflow: the package mlflow is not installed.\npip install -e .[mlflow] installs it.")
    store = _store(config, output_dir)
    if complaint := store_complaint(_without_password(store)):
        raise UserError(f"--use_mlflow: MLFLOW_TRACKING_URI {complaint}")
    if folder := _local_folder(store):
        if complaint := not_writable(folder):
            raise UserError(f"--use_mlflow: {complaint} Set another --mlflow_tracking_uri.")
    if store.startswith("sqlite:") and importlib.util.find_spec("sqlalchemy") is None:
        raise UserError(
            "--mlflow_tracking_uri: SQLite needs more packages.\npip install sqlalchemy alembic, or use a folder."
        )
    if not store.startswith(("http", "databricks")):
        return
    asked = {"MLFLOW_HTTP_REQUEST_TIMEOUT": str(ANSWER_SECONDS), "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    before = {name: os.environ.get(name) for name in asked}
    os.environ.update(asked)
    try:
        with _told(store):
            _client(store).get_experiment_by_name(config.mlflow_experiment)
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


class MlflowTracker:
    """One MLflow run: settings as parameters, metrics with their steps, commit and tags, the result where asked for.

    Going on with a run, MLflow keeps what it has: steps that it has are not logged again, and parameters, which it does
    not change, get a tag `resumed.<name>` where they differ now.

    Args:
        config: store, experiment, name and tags.
        output_dir: the run's directory; its name is the run's name when none is given.
        settings: the run's configuration by section, without secrets.
        code: the commit that runs.
        run_id: the MLflow run to go on with; where the store does not have it, a new one begins.

    Raises:
        UserError: the store does not take the run.
    """

    name = "MLflow"

    def __init__(
        self,
        config: TrackingConfig,
        output_dir: Path,
        settings: Mapping[str, Mapping[str, Any]],
        code: "GitState | None" = None,
        run_id: str | None = None,
    ) -> None:
        check_mlflow(config, output_dir)
        self.takes_result = config.mlflow_log_model
        store = _store(config, output_dir)
        tags = dict(tag.split("=", 1) for tag in config.mlflow_tags)
        if code is not None:
            tags |= {"mlflow.source.git.commit": code["commit"], "git.dirty": str(code["dirty"]).lower()}
        with _told(store):
            self._client = _client(store)
            run = self._known_run(run_id)
            name = config.mlflow_name or output_dir.resolve().name
            self._run_id = run or self._new_run(config.mlflow_experiment, name)
            self._first_step = self._next_step() if run else 0
            self._log_settings(settings, tags)
        self.ids = {"mlflow": self._run_id}
        log.info(f"MLflow: run {self._run_id}{' goes on' if run else ''}. {_where_to_look(store)}")
        self._failure: Exception | None = None
        self._work: queue.Queue[list[Metric] | Callable[[], object] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._write, name="mlflow", daemon=True)  # a dead server holds nobody
        self._thread.start()

    def _known_run(self, run_id: str | None) -> str | None:
        from mlflow.exceptions import MlflowException

        if run_id is None:
            return None
        try:
            run = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            raise
        if run.info.lifecycle_stage == "deleted":
            return None
        self._client.update_run(run_id, status="RUNNING")
        return run_id

    def _new_run(self, experiment_name: str, name: str) -> str:
        from mlflow.exceptions import MlflowException

        experiment = self._client.get_experiment_by_name(experiment_name)
        if experiment is None:
            try:
                return self._client.create_run(
                    self._client.create_experiment(experiment_name), run_name=name
                ).info.run_id
            except MlflowException:  # another job was quicker
                experiment = self._client.get_experiment_by_name(experiment_name)
                if experiment is None:
                    raise
        if experiment.lifecycle_stage == "deleted":
            raise UserError(
                f"--mlflow_experiment: {experiment_name} was deleted in MLflow. Restore it there, or use another name."
            )
        return self._client.create_run(experiment.experiment_id, run_name=name).info.run_id

    def _next_step(self) -> int:
        """The first step that the run does not have."""
        known = self._client.get_run(self._run_id).data.metrics
        histories = [self._client.get_metric_history(self._run_id, key) for key in STEP_KEYS if key in known]
        return max((metric.step + 1 for history in histories for metric in history), default=0)

    def _log_settings(self, settings: Mapping[str, Mapping[str, Any]], tags: dict[str, str]) -> None:
        from mlflow.entities import Param, RunTag

        known = self._client.get_run(self._run_id).data.params
        values = {
            f"{section}.{name}": str(value)[:PARAMETER_LENGTH]
            for section, fields in settings.items()
            for name, value in fields.items()
        }
        new = [Param(name, value) for name, value in values.items() if name not in known]
        for first in range(0, len(new), PARAMETERS_AT_ONCE):
            self._client.log_batch(self._run_id, params=new[first : first + PARAMETERS_AT_ONCE])
        tags |= {f"resumed.{name}": value for name, value in values.items() if known.get(name, value) != value}
        self._client.log_batch(self._run_id, tags=[RunTag(name, value) for name, value in tags.items()])

    def log(self, metrics: Metrics, step: int) -> None:
        from mlflow.entities import Metric

        if self._failure is not None:
            raise self._failure
        if step >= self._first_step:
            now = int(time.time() * 1000)
            series = one_series_per_rank(metrics)
            self._work.put([Metric(name, value, now, step) for name, value in series.items()])

    def _write(self) -> None:
        """Send what `log` left; what has come together in the meantime goes in one request."""
        try:
            while (item := self._work.get()) is not None:
                if callable(item):
                    item()
                    continue
                while isinstance(self._work.queue[0] if self._work.queue else None, list):
                    item = item + cast("list[Metric]", self._work.get())
                for first in range(0, len(item), METRICS_AT_ONCE):
                    self._client.log_batch(self._run_id, metrics=item[first : first + METRICS_AT_ONCE])
        except Exception as error:  # told by the next `log`
            self._failure = ConnectionError(answer) if (answer := no_answer(error)) else error

    def log_samples(self, samples: "Samples", step: int) -> None:
        """samples.json, which MLflow shows as a table."""
        columns = ["when", "question", "answer", "reference"]
        table = {"columns": columns, "data": [[sample[column] for column in columns] for sample in samples]}
        self._work.put(lambda: self._client.log_dict(self._run_id, table, "samples.json"))

    def log_result(self, result: "Result") -> None:
        sent = threading.Event()
        self._work.put(sent.set)  # a folder's metrics cannot be read, as set_tag does, while they are written
        while self._thread.is_alive() and not sent.wait(0.1):
            pass
        self._client.log_artifacts(self._run_id, str(result.folder), artifact_path="model")
        self._client.set_tag(self._run_id, "model.step", str(result.step))
        self._client.set_tag(self._run_id, "model.best", str(result.is_best).lower())
        log.info(f"MLflow: {result.folder} is in the run's artifacts.")

    def finish(self, exit_code: int, stopped: bool = False) -> None:
        """Send what is left and how the run ended, for 10 s at most."""
        status = "KILLED" if stopped else "FAILED" if exit_code else "FINISHED"
        end = partial(self._client.set_terminated, self._run_id, status)
        self._work.put(end)
        self._work.put(None)
        self._thread.join(FINISH_TIMEOUT_SECONDS)
        if self._thread.is_alive():
            raise TimeoutError(f"not everything was sent within {FINISH_TIMEOUT_SECONDS:.0f} s; metrics.jsonl has it")
        if self._failure is not None:
            with contextlib.suppress(Exception):  # the server may be back
                within(LAST_TRY_SECONDS, end)
            raise self._failure


def _store(config: TrackingConfig, output_dir: Path) -> str:
    """Where the runs are kept.

    By default a folder, although MLflow takes databases for newer: a folder needs no package more, takes runs of many
    jobs at once and lies well on a shared disk, which SQLite does not; and making the database takes 5 s.
    """
    place = config.mlflow_tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    if place is None or place == "":
        return (output_dir.expanduser().resolve().parent / "mlruns").as_uri()
    is_path = not place.startswith(SCHEMES) and store_complaint(_without_password(place)) is None
    return Path(place).expanduser().resolve().as_uri() if is_path else place


def _without_password(store: str) -> str:
    return mask_secrets(re.sub(r"(?<=://)[^/\s]*@", "", store))


def _local_folder(store: str) -> Path | None:
    """The folder that runs are written to, where it is on this machine."""
    if store.startswith("file:"):
        return Path(unquote(urlsplit(store).path))
    return Path(store.removeprefix("sqlite:///")).parent if store.startswith("sqlite:///") else None


def _where_to_look(store: str) -> str:
    if store.startswith("file:"):
        folder = shlex.quote(str(_local_folder(store)))
        return f"MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {folder} shows it."
    if store.startswith("sqlite:"):
        return f"mlflow ui --backend-store-uri {shlex.quote(store)} shows it."
    return _without_password(store)


def _client(store: str) -> "MlflowClient":
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    logging.getLogger("mlflow").setLevel(logging.ERROR)
    return MlflowClient(store)


@contextlib.contextmanager
def _told(store: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of MLflow, its database or the network: whatever it is, there is no run
        first_line = mask_secrets(str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"--use_mlflow: {_without_password(store)} did not take the run: {no_answer(error) or first_line}\n"
            "Check --mlflow_tracking_uri, or leave it and MLFLOW_TRACKING_URI out to write to the folder mlruns."
        ) from error
