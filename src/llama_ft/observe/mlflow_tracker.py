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
from collections.abc import Callable, Mapping
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
PARAMETER_LENGTH = 500  # older servers take no more
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


def check_mlflow(config: TrackingConfig, output_dir: Path) -> "MlflowClient":
    """Find out, without writing anything, whether MLflow is there and takes this run.

    Raises:
        UserError: the package is missing, the server does not answer or refuses, or the folder cannot be written to.
    """
    store = _store(config, output_dir)
    if store.startswith("file:") and (problem := not_writable(Path(unquote(urlsplit(store).path)))):
        raise UserError(f"--use_mlflow: {problem} Set another --mlflow_tracking_uri.")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from mlflow import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.ERROR)
        client = MlflowClient(store)
        if store.startswith(("http", "databricks")):
            client.get_experiment_by_name(config.mlflow_experiment)
        return client
    except ImportError as error:
        raise UserError(f"--use_mlflow: {reason(error)}.\npip install -e .[mlflow] installs it.") from error
    except Exception as error:  # of MLflow, its database or the network: whatever it is, there is no run
        raise UserError(
            f"--use_mlflow: {mask_secrets(store)} did not take the run: {mask_secrets(reason(error))}\n"
            "Check --mlflow_tracking_uri, or leave it and MLFLOW_TRACKING_URI out to write to the folder mlruns."
        ) from error


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
        self.takes_result = config.mlflow_log_model
        self._client = client = check_mlflow(config, output_dir)
        from mlflow.entities import Param, RunTag

        self._waiting = list[Any]()  # metrics
        self._sent = in_thread(lambda: None)  # those before
        resumed = self._find(run_id)
        if resumed is None:
            found = client.get_experiment_by_name(config.mlflow_experiment)
            experiment = found.experiment_id if found else client.create_experiment(config.mlflow_experiment)
            run = client.create_run(experiment, run_name=config.mlflow_name or output_dir.resolve().name)
            named = {f"{section}.{name}": value for section, own in settings.items() for name, value in own.items()}
            tags = {name: value for name, _, value in (tag.partition("=") for tag in config.mlflow_tags)}
            if code is not None:
                tags |= {"mlflow.source.git.commit": code["commit"], "git.dirty": str(code["dirty"]).lower()}
            parameters = [Param(name, str(value)[:PARAMETER_LENGTH]) for name, value in named.items()]
            client.log_batch(run.info.run_id, params=parameters, tags=[RunTag(*tag) for tag in tags.items()])
        self._run_id: str = run_id if resumed is not None and run_id else run.info.run_id
        self._first_step = resumed or 0
        self.ids = {"mlflow": self._run_id}
        store = mask_secrets(_store(config, output_dir))
        hint = f"MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {shlex.quote(store)} shows it."
        where = hint if store.startswith("file:") else store
        log.info(f"MLflow: run {self._run_id}{'' if resumed is None else ' goes on'}. {where}")

    def _find(self, run_id: str | None) -> int | None:
        """The first step that the run lacks; None where the store does not have the run."""
        from mlflow.exceptions import MlflowException

        with contextlib.suppress(MlflowException):
            run = self._client.get_run(run_id) if run_id is not None else None
            if run_id is not None and run is not None and run.info.lifecycle_stage == "active":
                self._client.update_run(run_id, status="RUNNING")
                keys = run.data.metrics.keys() & {"epoch", "train/loss", "eval/loss"}  # each step has one of them
                logged = [metric.step for key in keys for metric in self._client.get_metric_history(run_id, key)]
                return max(logged, default=-1) + 1
        return None

    def log(self, metrics: Metrics, step: int) -> None:
        from mlflow.entities import Metric

        if step >= self._first_step:
            now = int(time.time() * 1000)
            self._waiting += [Metric(name, value, now, step) for name, value in one_series_per_rank(metrics).items()]
        if self._sent.done():
            self._sent.result()  # raises what has gone wrong
            self._sent = in_thread(self._rest())

    def _rest(self) -> Callable[[], object]:
        batch, self._waiting = self._waiting, []
        return partial(self._client.log_batch, self._run_id, metrics=batch)

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
        status, rest = "KILLED" if stopped else "FAILED" if exit_code else "FINISHED", self._rest()

        def end() -> None:
            try:
                self._sent.result()
                rest()
            finally:
                self._client.set_terminated(self._run_id, status)

        in_thread(end).result(FINISH_TIMEOUT_SECONDS)


def _store(config: TrackingConfig, output_dir: Path) -> str:
    place = config.mlflow_tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    place = place or str(output_dir.expanduser().resolve().parent / "mlruns")
    is_path = "://" not in place and not place.startswith(("file:", "databricks"))
    return Path(place).expanduser().resolve().as_uri() if is_path else place
