"""Where metrics go besides metrics.jsonl: Weights & Biases, TensorBoard and MLflow, behind one small interface."""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import yaml

from llama_ft.config.settings import TrackingConfig
from llama_ft.observe.metrics import Metrics, one_series_per_rank
from llama_ft.observe.mlflow_tracker import MlflowTracker, check_mlflow
from llama_ft.observe.run_metadata import git_commit, masked
from llama_ft.observe.wandb_tracker import WandbTracker, check_wandb_login, wandb_mode


class Tracker(Protocol):
    """Something that shows the metrics of a run. Its methods may raise: RunLog goes on without it then."""

    name: str
    ids: dict[str, str]  # by which a resumed run finds what it goes on with
    takes_result: bool  # whether it was asked for a copy of the final model or adapter

    def log(self, metrics: Metrics, step: int) -> None:
        """Take what was measured at `step`, unless it is there already; a list holds one value per rank."""

    def log_result(self, folder: Path, step: int, is_best: bool) -> None:
        """Take a copy of a model or adapter with the weights of `step`; return when it has arrived."""

    def finish(self, exit_code: int, stopped: bool = False) -> None:
        """Write out what is left; exit_code is not 0 when the run failed, stopped is true when it can be resumed."""


class TensorboardTracker:
    """Event files in output_dir/tensorboard; those of steps after the one that is resumed from are purged."""

    name = "TensorBoard"
    ids: dict[str, str] = {}
    takes_result = False

    def __init__(self, output_dir: Path, resolved: dict[str, Any], resume_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # 0.5 s that only its users pay

        folder = output_dir / "tensorboard"
        has_earlier = any(folder.glob("events.out.tfevents.*"))
        self._first_step = resume_step + 1 if resume_step is not None and has_earlier else 0
        self._writer = SummaryWriter(str(folder), purge_step=self._first_step)
        as_yaml = yaml.safe_dump(resolved, sort_keys=False)
        self._writer.add_text("config", textwrap.indent(as_yaml, "    "), self._first_step)  # a code block

    def log(self, metrics: Metrics, step: int) -> None:
        if step >= self._first_step:
            for series, value in one_series_per_rank(metrics).items():
                self._writer.add_scalar(series, value, step)
            self._writer.flush()  # what a kill takes away would be missing after a resume

    def log_result(self, folder: Path, step: int, is_best: bool) -> None:
        """TensorBoard keeps no files."""

    def finish(self, exit_code: int, stopped: bool = False) -> None:
        self._writer.close()


def check_trackers(config: TrackingConfig, output_dir: str | None) -> None:
    """Find out before a model is loaded whether W&B and MLflow will take this run into its `output_dir`.

    Raises:
        UserError: no key, no package, no server that answers within seconds, or no place to write to.
    """
    if config.use_wandb:
        check_wandb_login(config)
    if config.use_mlflow:
        check_mlflow(config, Path(output_dir or "output/run"))


def start_trackers(
    config: TrackingConfig,
    output_dir: Path,
    resolved: dict[str, Any],
    resume_step: int | None,
    ids: Mapping[str, str],
) -> list[Tracker]:
    """Start what the configuration asks for; see RunLog. `ids` are the `Tracker.ids` to go on with.

    Raises:
        UserError: W&B or MLflow cannot be used, or its server refuses or does not answer.
    """
    trackers, settings, commit = list[Tracker](), masked(resolved), git_commit()
    if config.use_wandb and wandb_mode(config) != "disabled":
        with_commit = settings | {"git": {"commit": commit}}
        trackers.append(WandbTracker(config, output_dir, with_commit, resume_step, ids.get("wandb")))
    if config.use_tensorboard:
        trackers.append(TensorboardTracker(output_dir, settings, resume_step))
    if config.use_mlflow:
        trackers.append(MlflowTracker(config, output_dir, settings, commit, ids.get("mlflow")))
    return trackers
