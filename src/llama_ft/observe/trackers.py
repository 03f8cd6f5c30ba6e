"""Where metrics go besides metrics.jsonl: Weights & Biases and TensorBoard, behind one small interface."""

from pathlib import Path
from typing import Any, Protocol

import yaml

from llama_ft.config.sections import TrackingConfig
from llama_ft.observe.metrics import Metrics, one_series_per_rank
from llama_ft.observe.wandb_tracker import WandbTracker


class Tracker(Protocol):
    """Something that shows the metrics of a run. Its methods may raise: RunLog goes on without it then."""

    name: str

    def log(self, metrics: Metrics, step: int) -> None:
        """Take what was measured at `step`; a list holds one value per rank."""

    def finish(self, exit_code: int) -> None:
        """Write out what is left; exit_code is not 0 when the run failed."""


class TensorboardTracker:
    """Event files in output_dir/tensorboard; `tensorboard --logdir output` shows every run below it.

    Args:
        output_dir: the run's directory.
        resolved: the run's configuration, shown on the Text page.
    """

    name = "TensorBoard"

    def __init__(self, output_dir: Path, resolved: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter  # 0.5 s that only its users pay

        self._writer = SummaryWriter(str(output_dir / "tensorboard"), flush_secs=30)
        as_yaml = yaml.safe_dump(resolved, sort_keys=False)
        self._writer.add_text("config", "    " + as_yaml.replace("\n", "\n    "))  # markdown's code block

    def log(self, metrics: Metrics, step: int) -> None:
        for series, value in one_series_per_rank(metrics).items():
            self._writer.add_scalar(series, value, step)

    def finish(self, exit_code: int) -> None:
        self._writer.close()


def start_trackers(config: TrackingConfig, output_dir: Path, resolved: dict[str, Any]) -> list[Tracker]:
    """Start what the configuration asks for.

    Args:
        config: which trackers, and the settings of W&B.
        output_dir: the run's directory, which must exist.
        resolved: the run's configuration as plain values, logged with the run.

    Raises:
        UserError: W&B is to be used online and there is no key, or its server refuses or does not answer.
    """
    trackers: list[Tracker] = []
    if config.use_wandb:
        trackers.append(WandbTracker(config, output_dir, resolved))
    if config.use_tensorboard:
        trackers.append(TensorboardTracker(output_dir, resolved))
    return trackers
