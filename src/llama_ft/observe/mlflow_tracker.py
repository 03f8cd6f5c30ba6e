"""MLflow: a run on a server or in a folder, written from a thread of its own, so that no step waits for a server.

mlflow is imported inside the functions: it is optional, and takes some seconds. Its own asynchronous logging reports a
broken server with every batch and only at the end.
"""

import contextlib
import importlib.util
import logging
import os
import queue
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from llama_ft.config.output_dir import not_writable
from llama_ft.config.settings import TrackingConfig
from llama_ft.errors import UserError, reason
from llama_ft.masking import mask_secrets
from llama_ft.observe.metrics import Metrics, one_series_per_rank
from llama_ft.runtime.console import log

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from llama_ft.observe.trackers import Result, Samples

FINISH_TIMEOUT_SECONDS = 10.0  # with W&B's 10 s the 20 s that runtime/signals.py gives the trackers
AT_ONCE = 100  # MLflow's limit of parameters in a request; of metrics it takes 1,000
PARAMETER_LENGTH = 500  # older servers take no more
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",  # it would tell its makers
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",  # its own 120 s, tried 7 times, are longer than most people wait
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_ALLOW_FILE_STORE": "true",  # else it takes databases only; see `_store`
}


def check_mlflow(config: TrackingConfig, output_dir: Path) -> None:
    """Find out whether MLflow is there and takes this run, so that it is told before a model is loaded.

    Writes nothing, and waits half a minute for a server.

    Raises:
        UserError: the package is missing, the server does not answer or refuses, or the folder cannot be written to.
    """
    if importlib.util.find_spec("mlflow") is None:
        raise UserError("--use_mlflow: the package mlflow is not installed.\npip install -e .[mlflow] installs it.")
    store = _store(config, output_dir)
    if (folder := _local_folder(store)) and (problem := not_writable(folder)):
        raise UserError(f"--use_mlflow: {problem} Set another --mlflow_tracking_uri.")
    if store.startswith(("http", "databricks")):
        with _store_errors(store):
            _client(store).get_experiment_by_name(config.mlflow_experiment)


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
        code: Mapping[str, Any] | None = None,
        run_id: str | None = None,
    ) -> None:
        check_mlflow(config, output_dir)
        self.takes_result = config.mlflow_log_model
        store = _store(config, output_dir)
        tags = {name: value for name, _, value in (tag.partition("=") for tag in config.mlflow_tags)}
        if code is not None:
            tags |= {"mlflow.source.git.commit": code["commit"], "git.dirty": str(code["dirty"]).lower()}
        with _store_errors(store):
            self._client = _client(store)
            known = self._known_run(run_id)
            self._run_id = (
                known
                or self._client.create_run(
                    self._experiment_id(config.mlflow_experiment),
                    run_name=config.mlflow_name or output_dir.resolve().name,
                ).info.run_id
            )
            self._first_step = self._next_step() if known else 0
            self._log_settings(settings, tags)
        self.ids = {"mlflow": self._run_id}
        folder = _local_folder(store)
        command = f"MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {shlex.quote(str(folder))} shows it."
        log.info(
            f"MLflow: run {self._run_id}{' goes on' if known else ''}. {command if folder else mask_secrets(store)}"
        )
        self._failure: Exception | None = None
        self._work: queue.Queue[Callable[[], object] | str] = queue.Queue()
        self._thread = threading.Thread(target=self._send, name="mlflow", daemon=True)  # a dead server holds nobody
        self._thread.start()

    def _known_run(self, run_id: str | None) -> str | None:
        from mlflow.exceptions import MlflowException

        with contextlib.suppress(MlflowException):  # it is not there, or of another store
            if run_id is not None and self._client.get_run(run_id).info.lifecycle_stage == "active":
                self._client.update_run(run_id, status="RUNNING")
                return run_id
        return None

    def _experiment_id(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(name)
        return experiment.experiment_id if experiment else self._client.create_experiment(name)

    def _next_step(self) -> int:
        """The first step that the run does not have, by what each line of metrics.jsonl has one of."""
        keys = self._client.get_run(self._run_id).data.metrics.keys() & {"epoch", "train/loss", "eval/loss"}
        histories = [self._client.get_metric_history(self._run_id, key) for key in keys]
        return max((metric.step + 1 for history in histories for metric in history), default=0)

    def _log_settings(self, settings: Mapping[str, Mapping[str, Any]], tags: dict[str, str]) -> None:
        from mlflow.entities import Param, RunTag

        known = self._client.get_run(self._run_id).data.params
        values = {
            f"{section}.{name}": str(value)[:PARAMETER_LENGTH]
            for section, fields in settings.items()
            for name, value in fields.items()
        }
        self._log_batches("params", [Param(name, value) for name, value in values.items() if name not in known])
        tags |= {f"resumed.{name}": value for name, value in values.items() if known.get(name, value) != value}
        self._log_batches("tags", [RunTag(name, value) for name, value in tags.items()])

    def _log_batches(self, kind: str, entries: list[Any]) -> None:
        for first in range(0, len(entries), AT_ONCE):
            some: dict[str, Any] = {kind: entries[first : first + AT_ONCE]}
            self._client.log_batch(self._run_id, **some)

    def _send(self) -> None:
        """Send what the other methods left, until something fails; and in any case how the run ended."""
        while not isinstance(send := self._work.get(), str):
            try:
                if self._failure is None:
                    send()
            except Exception as error:  # raised by the next `log`
                self._failure = error
            self._work.task_done()
        try:
            self._client.set_terminated(self._run_id, send)
        except Exception as error:
            self._failure = self._failure or error

    def log(self, metrics: Metrics, step: int) -> None:
        from mlflow.entities import Metric

        if self._failure is not None:
            raise self._failure
        if step >= self._first_step:
            now = int(time.time() * 1000)
            series = [Metric(name, value, now, step) for name, value in one_series_per_rank(metrics).items()]
            self._work.put(partial(self._log_batches, "metrics", series))

    def log_samples(self, samples: "Samples", step: int) -> None:
        """samples.json, which MLflow shows as a table."""
        columns = ["when", "question", "answer", "reference"]
        table = {"columns": columns, "data": [[sample[column] for column in columns] for sample in samples]}
        self._work.put(partial(self._client.log_dict, self._run_id, table, "samples.json"))

    def log_result(self, result: "Result") -> None:
        self._work.put(partial(self._client.log_artifacts, self._run_id, str(result.folder), artifact_path="model"))
        for name, value in {"model.step": str(result.step), "model.best": str(result.is_best).lower()}.items():
            self._work.put(partial(self._client.set_tag, self._run_id, name, value))
        self._work.join()
        if self._failure is not None:
            raise self._failure
        log.info(f"MLflow: {result.folder} is in the run's artifacts.")

    def finish(self, exit_code: int, stopped: bool = False) -> None:
        """Send what is left and how the run ended, for 10 s at most."""
        self._work.put("KILLED" if stopped else "FAILED" if exit_code else "FINISHED")
        self._thread.join(FINISH_TIMEOUT_SECONDS)
        if self._thread.is_alive():
            raise TimeoutError(f"not everything was sent within {FINISH_TIMEOUT_SECONDS:.0f} s; metrics.jsonl has it")
        if self._failure is not None:
            raise self._failure


def _store(config: TrackingConfig, output_dir: Path) -> str:
    """Where the runs are kept.

    By default a folder, although MLflow takes databases for newer: a folder needs no package more, takes runs of many
    jobs at once and lies well on a shared disk, which SQLite does not; and making the database takes 5 s.
    """
    place = config.mlflow_tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not place:
        return (output_dir.expanduser().resolve().parent / "mlruns").as_uri()
    is_path = "://" not in place and not place.startswith(("file:", "databricks"))
    return Path(place).expanduser().resolve().as_uri() if is_path else place


def _local_folder(store: str) -> Path | None:
    """The folder that runs are written to, if it is one."""
    return Path(unquote(urlsplit(store).path)) if store.startswith("file:") else None


def _client(store: str) -> "MlflowClient":
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    logging.getLogger("mlflow").setLevel(logging.ERROR)
    return MlflowClient(store)


@contextlib.contextmanager
def _store_errors(store: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of MLflow, its database or the network: whatever it is, there is no run
        raise UserError(
            f"--use_mlflow: {mask_secrets(store)} did not take the run: {mask_secrets(reason(error))}\n"
            "Check --mlflow_tracking_uri, or leave it and MLFLOW_TRACKING_URI out to write to the folder mlruns."
        ) from error
