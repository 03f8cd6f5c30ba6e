"""Trackers for metrics in addition to metrics.jsonl: Weights & Biases, TensorBoard and MLflow, with
one interface.

Their packages are imported inside functions: each import takes a second, and only runs that use it
should wait.
"""

import contextlib
import logging
import os
import shlex
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from llama_ft.config.settings.output_settings import TrackingConfig
from llama_ft.errors import UserError, reason
from llama_ft.masking import mask_secrets
from llama_ft.observe.run_metadata import git_commit, masked
from llama_ft.runtime.console import log

STOPPED_EXIT_CODE = 143  # with this code W&B shows a run as preempted, not as failed or finished
# Code, console output, git state, host, user, paths, arguments and package lists are not uploaded.
WANDB_PRIVATE: dict[str, Any] = {
    "silent": True,
    "console": "off",
    "save_code": False,
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "x_disable_meta": True,
    "host": "",  # x_disable_meta does not remove these two from the run's registration
    "program": "",
    "x_save_requirements": False,
    "init_timeout": 15.0,  # after the login, which takes at most 10 s: together below 30 s
    # metrics are sent at once, so little is left; a failed rank must end within 30 s
    "finish_timeout": 10.0,
    "finish_timeout_raises": True,
}
WANDB_HINT = "Check the network and the key (wandb login, or WANDB_API_KEY). --wandb_mode offline needs neither."
MLFLOW_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",  # no usage data to MLflow's developers
    # a step waits for two tries; the default is 7 tries of 120 s
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "4",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    # otherwise it takes only databases, which need more packages
    "MLFLOW_ALLOW_FILE_STORE": "true",
}


MLFLOW_LONGEST_VALUE = 500  # characters of a parameter, the limit of older servers


class TrackedRun(NamedTuple):
    """What a tracker is made from.

    Attributes:
        config: the settings of all trackers.
        output_dir: the run's directory.
        settings: all settings of the run, without secrets, and its git commit.
        resume_step: the run resumes after this step; None: it starts.
        run_id: the tracker's id of the resumed run, if there is one.
    """

    config: TrackingConfig
    output_dir: Path
    settings: dict[str, Any]
    resume_step: int | None
    run_id: str | None


class Tracker:
    """Interface of a metrics backend. Its methods may raise; RunLog then continues without it.

    Attributes:
        name: name in messages.
        key: name in checkpoints.
        run_id: with it a resumed run continues the tracker's run; None if the tracker needs no id.
        first_step: the tracker already has the steps before this one.
        uploads_result: a copy of the final model or adapter was requested.
        has_failed: set by RunLog.
    """

    name = ""
    key = ""
    run_id: str | None = None
    first_step = 0
    uploads_result = False
    has_failed = False

    def log(self, series: Mapping[str, float], step: int) -> None:
        """Store the values measured at `step`."""

    def log_result(self, folder: Path, step: int, is_best: bool) -> None:
        """Upload a model or adapter with the weights of `step`. Return when the upload is
        complete."""

    def finish(self, exit_code: int, stopped: bool) -> None:
        """Send everything that is left. exit_code is not 0 if the run failed; a `stopped` run can
        be resumed."""


class TensorboardTracker(Tracker):
    """Writes event files to output_dir/tensorboard. On resume, later steps than the resumed one are
    purged."""

    name = "TensorBoard"
    key = "tensorboard"

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.output_dir / "tensorboard"
        if run.resume_step is not None and any(folder.glob("events.out.tfevents.*")):
            self.first_step = run.resume_step + 1
        self._writer = SummaryWriter(str(folder), purge_step=self.first_step)
        # an indented block of Markdown
        code = textwrap.indent(yaml.safe_dump(run.settings, sort_keys=False), "    ")
        self._writer.add_text("config", code, self.first_step)

    def log(self, series: Mapping[str, float], step: int) -> None:
        for name, value in series.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # values lost by a kill would be missing after a resume

    def finish(self, exit_code: int, stopped: bool) -> None:
        self._writer.close()


class WandbTracker(Tracker):
    """One W&B run. Its files are in output_dir/wandb.

    Online, a resumed run keeps its steps in W&B and does not send them again. Offline, W&B does not
    know what the server has. So each attempt logs the whole run under the same id, and uploading
    the last one replaces the others.
    """

    name = "W&B"
    key = "wandb"

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        config = run.config
        self.uploads_result = config.wandb_log_model
        self._offline = wandb_mode(config) == "offline"
        continues = bool(run.run_id) and run.resume_step is not None and not self._offline
        try:
            self._run = wandb.init(
                project=config.wandb_project,
                entity=config.wandb_entity,
                job_type=config.wandb_job_type,
                notes=masked(config.wandb_notes),
                tags=masked(config.wandb_tags),
                name=masked(config.wandb_name) or run.output_dir.resolve().name,
                group=config.wandb_group,
                dir=str(run.output_dir),
                config=run.settings,
                id=run.run_id,
                resume="allow" if continues else None,
                settings=wandb.Settings(mode=wandb_mode(config), **WANDB_PRIVATE),
            )
        except (wandb.Error, ValueError) as error:  # ValueError: a tag is too long
            raise UserError(
                f"--use_wandb: W&B did not accept the run: {reason(error)}\n{WANDB_HINT}"
            ) from error
        self.run_id = self._run.id
        self.first_step = self._run.starting_step
        if not self._offline:
            log.info(f"W&B: {self._run.url}")

    def log(self, series: Mapping[str, float], step: int) -> None:
        self._run.log(dict(series), step=step)

    def log_result(self, folder: Path, step: int, is_best: bool) -> None:
        aliases = ["latest", f"step-{step}"]
        if is_best:
            aliases.append("best")
        artifact = self._run.log_artifact(
            str(folder), f"model-{self._run.id}", "model", aliases=aliases
        )
        if not self._offline:  # offline, `wandb sync` uploads it
            artifact.wait()

    def finish(self, exit_code: int, stopped: bool) -> None:
        import wandb

        folder = shlex.quote(str(self._run.settings.sync_dir))
        sync = f"wandb sync {folder}" if self._offline else f"wandb sync --include-online {folder}"
        try:
            if stopped:
                self._run.mark_preempting()
                exit_code = exit_code or STOPPED_EXIT_CODE
            self._run.finish(exit_code=exit_code)
            if self._offline:
                log.info(f"W&B: {sync} uploads this run.")
        except Exception as error:
            log.warning(f"W&B did not get everything ({reason(error)}). {sync} sends the rest.")
        # ends wandb's process; at exit, a broken one would print a traceback
        with contextlib.suppress(Exception):
            wandb.teardown(exit_code)


class MlflowTracker(Tracker):
    """One MLflow run. Long parameters are truncated (MLFLOW_LONGEST_VALUE). A resumed run
    continues in the same MLflow run, if the store still has it."""

    name = "MLflow"
    key = "mlflow"

    def __init__(self, run: TrackedRun) -> None:
        self.uploads_result = run.config.mlflow_log_model
        self._client = connect_mlflow(run.config, run.output_dir)
        from mlflow.exceptions import MlflowException

        run_id = run.run_id
        logged = list[Any]()
        if run_id:
            with contextlib.suppress(MlflowException):  # the store may not have the run
                logged = self._client.get_metric_history(run_id, "epoch")
        self.first_step = max((metric.step for metric in logged), default=-1) + 1
        if logged:
            self._client.update_run(run_id, status="RUNNING")
            # parameters cannot change in MLflow
            changes = "\n".join(run.settings.get("resumes", []))
            self._client.set_tag(run_id, "resumes", changes[:MLFLOW_LONGEST_VALUE])
        else:
            run_id = self._create_run(run)
        self.run_id = run_id
        store = mlflow_store(run.config, run.output_dir)
        log.info(f"MLflow: run {run_id} in {mask_secrets(store)}")

    def _create_run(self, run: TrackedRun) -> str:
        """Create a run with tags and parameters, and return its id."""
        from mlflow.entities import Param

        config = run.config
        client = self._client
        existing = client.get_experiment_by_name(config.mlflow_experiment)
        if existing:
            experiment = existing.experiment_id
        else:
            experiment = client.create_experiment(config.mlflow_experiment)
        tags = dict[str, str]()
        for tag in config.mlflow_tags:
            name, _, value = tag.partition("=")
            tags[name] = value
        tags["mlflow.source.git.commit"] = run.settings["git"]["commit"]
        run_name = config.mlflow_name or run.output_dir.resolve().name
        created = client.create_run(experiment, tags=tags, run_name=run_name)
        run_id = str(created.info.run_id)
        parameters = []
        for section, values in run.settings.items():
            named = values if isinstance(values, dict) else {}
            for name, value in named.items():
                text = str(value)[:MLFLOW_LONGEST_VALUE]
                parameters.append(Param(f"{section}.{name}", text))
        client.log_batch(run_id, params=parameters)
        return run_id

    def log(self, series: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)  # milliseconds
        metrics = [Metric(name, value, now, step) for name, value in series.items()]
        self._client.log_batch(self.run_id, metrics)

    def log_result(self, folder: Path, step: int, is_best: bool) -> None:
        self._client.log_artifacts(self.run_id, str(folder), artifact_path="model")
        self._client.set_tag(self.run_id, "model.step", str(step))
        self._client.set_tag(self.run_id, "model.best", str(is_best).lower())

    def finish(self, exit_code: int, stopped: bool) -> None:
        if stopped:
            status = "KILLED"
        else:
            status = "FAILED" if exit_code else "FINISHED"
        self._client.set_terminated(self.run_id, status)


def wandb_mode(config: TrackingConfig) -> str:
    """Return online, offline or disabled: the setting, else WANDB_MODE, else online."""
    return config.wandb_mode or os.environ.get("WANDB_MODE", "").lower() or "online"


def mlflow_store(config: TrackingConfig, output_dir: Path) -> str:
    """Return the address of MLflow's server, database or directory."""
    address = config.mlflow_tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    if address:
        return address
    folder = output_dir.expanduser().resolve().parent / "mlruns"
    return folder.as_uri()


def check_trackers(config: TrackingConfig, output_dir: str | None) -> None:
    """Check before the model is loaded that W&B and MLflow accept a run with this `output_dir`.

    Raises:
        UserError: the key or the package is missing, the server does not answer, or the directory
            cannot be written.
    """
    # sends no error reports with stack traces to W&B
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    if config.use_wandb and wandb_mode(config) == "online":
        import wandb

        wandb.setup(wandb.Settings(mode="online", silent=True))
        try:
            # never asks for a key at the terminal
            logged_in = wandb.login(prompt=False, verify=True)
        except wandb.Error as error:
            raise UserError(f"--use_wandb: {reason(error)}\n{WANDB_HINT}") from error
        if not logged_in:
            raise UserError(f"--use_wandb: this machine has no W&B key.\n{WANDB_HINT}")
    if config.use_mlflow:
        connect_mlflow(config, Path(output_dir or "output/run"))


def connect_mlflow(config: TrackingConfig, output_dir: Path) -> Any:
    """Return an MlflowClient after its store has answered.

    Raises:
        UserError: the package is missing, or the store does not answer.
    """
    store = mlflow_store(config, output_dir)
    for name, value in MLFLOW_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from mlflow import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.ERROR)
        client = MlflowClient(store)
        client.get_experiment_by_name(config.mlflow_experiment)
        return client
    except ImportError as error:
        raise UserError(
            f"--use_mlflow: {reason(error)}.\npip install -e .[mlflow] installs it."
        ) from error
    except Exception as error:  # of MLflow, its database or the network
        raise UserError(
            f"--use_mlflow: {mask_secrets(store)} did not accept the run: {mask_secrets(reason(error))}\n"
            "Check --mlflow_tracking_uri. Without it and MLFLOW_TRACKING_URI, MLflow writes to the directory mlruns."
        ) from error


def start_trackers(
    config: TrackingConfig,
    output_dir: Path,
    resolved: dict[str, Any],
    resume_step: int | None,
    ids: Mapping[str, str],
) -> list[Tracker]:
    """Start the requested trackers; see RunLog for the arguments. `ids`: `Tracker.key` -> the run
    id to continue.

    Raises:
        UserError: W&B or MLflow cannot be used, or its server rejects the run or does not answer.
    """
    settings = masked(resolved) | {"git": {"commit": git_commit()}}
    kinds = list[type[WandbTracker] | type[TensorboardTracker] | type[MlflowTracker]]()
    if config.use_wandb and wandb_mode(config) != "disabled":
        kinds.append(WandbTracker)
    if config.use_tensorboard:
        kinds.append(TensorboardTracker)
    if config.use_mlflow:
        kinds.append(MlflowTracker)
    trackers = list[Tracker]()
    for kind in kinds:
        run = TrackedRun(config, output_dir, settings, resume_step, ids.get(kind.key))
        trackers.append(kind(run))
    return trackers
