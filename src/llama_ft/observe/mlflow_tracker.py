"""MLflow: a run on a server or in a folder. mlflow is imported inside the functions: it is optional and slow."""

import contextlib
import logging
import os
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llama_ft.config.settings import TrackingConfig
from llama_ft.errors import UserError, reason
from llama_ft.masking import mask_secrets
from llama_ft.observe.metrics import Metrics, one_series_per_rank
from llama_ft.runtime.console import log

PARAMETER_LENGTH = 500  # older servers take no more
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",  # it would tell its makers
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "4",  # a step waits for two tries at most: its own 120 s, 7 times, are too long
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_ALLOW_FILE_STORE": "true",  # else it takes databases only, which need more packages and no shared disk
}


def check_mlflow(config: TrackingConfig, output_dir: Path) -> Any:
    """Return an MlflowClient whose store answers.

    Raises:
        UserError: the package is missing, or the store does not answer.
    """
    store = _store(config, output_dir)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from mlflow import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.ERROR)
        client = MlflowClient(store)
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
    """One MLflow run: settings, metrics, commit and tags; see start_trackers. A resumed run goes on in the
    same one, if the store has it."""

    name = "MLflow"

    def __init__(
        self,
        config: TrackingConfig,
        output_dir: Path,
        settings: Mapping[str, Mapping[str, Any]],
        commit: str | None = None,
        run_id: str | None = None,
    ) -> None:
        self.takes_result = config.mlflow_log_model
        self._client = client = check_mlflow(config, output_dir)
        self._first_step = self._steps_of(run_id) if run_id else 0
        if not run_id or not self._first_step:
            from mlflow.entities import Param

            found = client.get_experiment_by_name(config.mlflow_experiment)
            experiment = found.experiment_id if found else client.create_experiment(config.mlflow_experiment)
            tags = {name: value for name, _, value in (tag.partition("=") for tag in config.mlflow_tags)}
            tags |= {"mlflow.source.git.commit": commit} if commit else {}
            name = config.mlflow_name or output_dir.resolve().name
            run_id = str(client.create_run(experiment, tags=tags, run_name=name).info.run_id)
            named = {f"{section}.{name}": value for section, own in settings.items() for name, value in own.items()}
            client.log_batch(run_id, params=[Param(name, str(it)[:PARAMETER_LENGTH]) for name, it in named.items()])
        self._run_id = run_id
        self.ids = {"mlflow": run_id}
        store = mask_secrets(_store(config, output_dir))
        hint = f"MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {shlex.quote(store)} shows it."
        where = store if store.startswith(("http", "databricks")) else hint
        log.info(f"MLflow: run {run_id}{' goes on' if self._first_step else ''}. {where}")

    def _steps_of(self, run_id: str) -> int:
        """One more than the last step that the run has; 0 without such a run."""
        from mlflow.exceptions import MlflowException

        with contextlib.suppress(MlflowException):
            if self._client.get_run(run_id).info.lifecycle_stage == "active":
                self._client.update_run(run_id, status="RUNNING")
                return max((metric.step for metric in self._client.get_metric_history(run_id, "epoch")), default=0) + 1
        return 0

    def log(self, metrics: Metrics, step: int) -> None:
        from mlflow.entities import Metric

        if step >= self._first_step:
            now = int(time.time() * 1000)
            series = [Metric(name, value, now, step) for name, value in one_series_per_rank(metrics).items()]
            self._client.log_batch(self._run_id, series)

    def log_result(self, folder: Path, step: int, is_best: bool) -> None:
        self._client.log_artifacts(self._run_id, str(folder), artifact_path="model")
        for name, value in {"model.step": str(step), "model.best": str(is_best).lower()}.items():
            self._client.set_tag(self._run_id, name, value)

    def finish(self, exit_code: int, stopped: bool = False) -> None:
        self._client.set_terminated(self._run_id, "KILLED" if stopped else "FAILED" if exit_code else "FINISHED")


def _store(config: TrackingConfig, output_dir: Path) -> str:
    place = config.mlflow_tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    return place or (output_dir.expanduser().resolve().parent / "mlruns").as_uri()
