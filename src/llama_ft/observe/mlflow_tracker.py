"""MLflow: a run on a server or in a folder; no step waits for a server.

mlflow is imported inside the functions: it is optional, and takes some seconds. Its own asynchronous logging reports a
broken server with every batch and only at the end.
"""

import contextlib
import logging
import os
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
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

FINISH_TIMEOUT_SECONDS = 10.0  # with W&B's 10 s the 20 s that runtime/signals.py gives the trackers
METRICS_AT_ONCE, PARAMETERS_AT_ONCE, PARAMETER_LENGTH = 1000, 100, 500  # MLflow's limits, the last of older servers
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",  # it would tell its makers
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",  # its own 120 s, tried 7 times, are longer than most people wait
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_ALLOW_FILE_STORE": "true",  # else it takes databases only, which need more packages and no shared disk
}


def in_thread(call: Callable[[], object]) -> Future[object]:
    """Run `call` in a thread that does not keep the process alive, whatever server it waits for."""
    done = Future[object]()

    def run() -> None:
        try:
            done.set_result(call())
        except Exception as error:  # raised again by result
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


def check_mlflow(config: TrackingConfig, output_dir: Path) -> None:
    """Find out, without writing anything, whether MLflow is there and takes this run.

    Raises:
        UserError: the package is missing, the server does not answer or refuses, or the folder cannot be written to.
    """
    store = _store(config, output_dir)
    if store.startswith("file:") and (problem := not_writable(_folder(store))):
        raise UserError(f"--use_mlflow: {problem} Set another --mlflow_tracking_uri.")
    with _store_errors(store):
        client = _client(store)
        if store.startswith(("http", "databricks")):
            client.get_experiment_by_name(config.mlflow_experiment)


class MlflowTracker:
    """One MLflow run: settings as parameters, metrics with their steps, commit and tags; see start_trackers.

    Of a resumed run MLflow keeps what it has: neither steps that it has nor parameters are logged again. Where the
    store does not have it, a new one begins.
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
        self._waiting, self._first_step = list[Any](), 0  # metrics that are not sent yet
        self._sent = in_thread(lambda: None)
        with _store_errors(store):
            self._client = _client(store)
            resumed = self._resume(run_id)
            if not resumed:
                self._run_id = self._new_run(config, config.mlflow_name or output_dir.resolve().name, code)
                self._log_settings(settings)
        self.ids = {"mlflow": self._run_id}
        where = mask_secrets(store)
        if store.startswith("file:"):
            folder = shlex.quote(str(_folder(store)))
            where = f"MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {folder} shows it."
        log.info(f"MLflow: run {self._run_id}{' goes on' if resumed else ''}. {where}")

    def _resume(self, run_id: str | None) -> bool:
        """Whether the store has the run; then the first step that it lacks is known."""
        from mlflow.exceptions import MlflowException

        with contextlib.suppress(MlflowException):  # it is not there, or of another store
            run = self._client.get_run(run_id) if run_id is not None else None
            if run is not None and run.info.lifecycle_stage == "active":
                self._run_id = run_id = run.info.run_id
                self._client.update_run(run_id, status="RUNNING")
                keys = run.data.metrics.keys() & {"epoch", "train/loss", "eval/loss"}  # each step has one of them
                logged = [metric.step for key in keys for metric in self._client.get_metric_history(run_id, key)]
                self._first_step = max(logged, default=-1) + 1
                return True
        return False

    def _new_run(self, config: TrackingConfig, name: str, code: Mapping[str, Any] | None) -> str:
        tags = {name: value for name, _, value in (tag.partition("=") for tag in config.mlflow_tags)}
        if code is not None:
            tags |= {"mlflow.source.git.commit": code["commit"], "git.dirty": str(code["dirty"]).lower()}
        found = self._client.get_experiment_by_name(config.mlflow_experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(config.mlflow_experiment)
        return str(self._client.create_run(experiment, run_name=name, tags=tags).info.run_id)

    def _log_settings(self, settings: Mapping[str, Mapping[str, Any]]) -> None:
        from mlflow.entities import Param

        named = {f"{section}.{name}": value for section, own in settings.items() for name, value in own.items()}
        values = [Param(name, str(value)[:PARAMETER_LENGTH]) for name, value in named.items()]
        for first in range(0, len(values), PARAMETERS_AT_ONCE):
            self._client.log_batch(self._run_id, params=values[first : first + PARAMETERS_AT_ONCE])

    def log(self, metrics: Metrics, step: int) -> None:
        from mlflow.entities import Metric

        if step >= self._first_step:
            now = int(time.time() * 1000)
            self._waiting += [Metric(name, value, now, step) for name, value in one_series_per_rank(metrics).items()]
        if self._sent.done():
            self._sent.result()  # raises what has gone wrong
            self._sent = in_thread(self._send)

    def _send(self) -> None:
        while batch := self._waiting[:METRICS_AT_ONCE]:
            self._client.log_batch(self._run_id, metrics=batch)
            del self._waiting[: len(batch)]

    def log_samples(self, samples: list[dict[str, str]], step: int) -> None:
        """samples.json, which MLflow shows as a table."""
        columns = ["when", "question", "answer", "reference"]
        table = {"columns": columns, "data": [[sample[column] for column in columns] for sample in samples]}
        in_thread(partial(self._client.log_dict, self._run_id, table, "samples.json")).result(FINISH_TIMEOUT_SECONDS)

    def log_result(self, folder: Path, step: int, is_best: bool, base_model: str) -> None:
        self._client.log_artifacts(self._run_id, str(folder), artifact_path="model")
        for name, value in {"model.step": str(step), "model.best": str(is_best).lower()}.items():
            self._client.set_tag(self._run_id, name, value)
        log.info(f"MLflow: {folder} is in the run's artifacts.")

    def finish(self, exit_code: int, stopped: bool = False) -> None:
        """Send what is left and how the run ended, for 10 s at most."""

        status = "KILLED" if stopped else "FAILED" if exit_code else "FINISHED"
        in_thread(partial(self._end, status)).result(FINISH_TIMEOUT_SECONDS)

    def _end(self, status: str) -> None:
        try:
            self._sent.result()
            self._send()
        finally:
            self._client.set_terminated(self._run_id, status)


def _store(config: TrackingConfig, output_dir: Path) -> str:
    place = config.mlflow_tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    place = place or str(output_dir.expanduser().resolve().parent / "mlruns")
    is_path = "://" not in place and not place.startswith(("file:", "databricks"))
    return Path(place).expanduser().resolve().as_uri() if is_path else place


def _folder(store: str) -> Path:
    return Path(unquote(urlsplit(store).path))


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
    except ImportError as error:
        raise UserError(f"--use_mlflow: {reason(error)}.\npip install -e .[mlflow] installs it.") from error
    except Exception as error:  # of MLflow, its database or the network: whatever it is, there is no run
        raise UserError(
            f"--use_mlflow: {mask_secrets(store)} did not take the run: {mask_secrets(reason(error))}\n"
            "Check --mlflow_tracking_uri, or leave it and MLFLOW_TRACKING_URI out to write to the folder mlruns."
        ) from error
