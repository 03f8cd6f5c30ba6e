"""Where metrics go besides metrics.jsonl: Weights & Biases and TensorBoard, behind one small interface."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import yaml

from llama_ft.config.sections import TrackingConfig
from llama_ft.observe.metrics import Metrics, one_series_per_rank
from llama_ft.observe.wandb_tracker import WandbTracker


class Tracker(Protocol):
    """Something that shows the metrics of a run. Its methods may raise: RunLog goes on without it then."""

    name: str
    ids: dict[str, str]  # by which a resumed run finds what it goes on with

    def log(self, metrics: Metrics, step: int) -> None:
        """Take what was measured at `step`, unless it is there already; a list holds one value per rank."""

    def finish(self, exit_code: int, stopped: bool = False) -> None:
        """Write out what is left; exit_code is not 0 when the run failed, stopped is true when it can be resumed."""


class TensorboardTracker:
    """Event files in output_dir/tensorboard; `tensorboard --logdir output` shows every run below it.

    Args:
        output_dir: the run's directory.
        resolved: the run's configuration, shown on the Text page.
        resume_step: the step that is resumed from; what earlier files have of later steps is not shown any more.
    """

    name = "TensorBoard"
    ids: dict[str, str] = {}

    def __init__(self, output_dir: Path, resolved: dict[str, Any], resume_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # 0.5 s that only its users pay

        folder = output_dir / "tensorboard"
        goes_on = resume_step is not None and any(folder.glob("events.out.tfevents.*"))
        self._first_step = resume_step + 1 if goes_on and resume_step is not None else 0
        self._writer = SummaryWriter(str(folder), purge_step=self._first_step)
        as_yaml = yaml.safe_dump(resolved, sort_keys=False)
        markdown = "    " + as_yaml.replace("\n", "\n    ")  # a code block
        self._writer.add_text("config", markdown, self._first_step)

    def log(self, metrics: Metrics, step: int) -> None:
        if step < self._first_step:
            return
        for series, value in one_series_per_rank(metrics).items():
            self._writer.add_scalar(series, value, step)
        self._writer.flush()  # what a kill takes away would be missing after a resume

    def finish(self, exit_code: int, stopped: bool = False) -> None:
        self._writer.close()


def start_trackers(
    config: TrackingConfig,
    output_dir: Path,
    resolved: dict[str, Any],
    resume_step: int | None = None,
    ids: Mapping[str, str] | None = None,
) -> list[Tracker]:
    """Start what the configuration asks for.

    Args:
        config: which trackers, and the settings of W&B.
        output_dir: the run's directory, which must exist.
        resolved: the run's configuration as plain values, logged with the run.
        resume_step: the step that is resumed from; None for a new run.
        ids: the `Tracker.ids` to go on with.

    Raises:
        UserError: W&B is to be used online and there is no key, or its server refuses or does not answer.
    """
    trackers: list[Tracker] = []
    if config.use_wandb:
        trackers.append(WandbTracker(config, output_dir, resolved, resume_step, (ids or {}).get("wandb")))
    if config.use_tensorboard:
        trackers.append(TensorboardTracker(output_dir, resolved, resume_step))
    return trackers
