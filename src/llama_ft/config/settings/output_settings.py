"""Settings of what a run writes and reports: checkpoints, trackers, the memory plan and profiles."""

from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from llama_ft.config.value_types import STRICT, Count, CountOrZero, Size


@dataclass(config=STRICT, kw_only=True)
class CheckpointConfig:
    """What is written, and where."""

    output_dir: str | None = None
    """The run's directory; if not given, output/<model>-<date-time>."""

    overwrite: bool = False
    """Replace the run that output_dir already holds."""

    save_to: str | None = None
    """Also upload checkpoints, the final model and the report to this URL, such as s3://bucket/run.
    --resume auto continues from there on any machine. Credentials come from the environment."""

    resume: str | None = None
    """Continue a run. auto: from the newest checkpoint in output_dir or save_to, or from scratch if
    there is none; otherwise the directory of a checkpoint, or a run's URL."""

    resume_allow_changes: list[str] = Field(default_factory=list)
    """Settings that may differ from those of the resumed run, such as lr,num_epochs."""

    save_model: bool = True
    """Write the final model or adapter in Hugging Face format to output_dir/model, and checkpoints
    at the end, after every epoch and when stopped."""

    save_steps: CountOrZero = 0
    """Write a checkpoint also every N optimizer steps; 0 = do not."""

    save_every_epoch: bool = True
    """Write a checkpoint after every epoch."""

    save_async: bool = True
    """Write checkpoints in the background: training waits only while they are copied to host
    memory."""

    keep_last: CountOrZero = 0
    """Keep only the N newest checkpoints and the one with the best validation loss, in output_dir
    and in save_to; 0 = all."""

    save_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of output_dir/model; auto: the base model's own, tensor by tensor, and fp32 for
    adapters."""

    max_shard_size: Size = "5GB"
    """Maximum size of one safetensors file of output_dir/model."""


@dataclass(config=STRICT, kw_only=True)
class TrackingConfig:
    """Where metrics go in addition to output_dir/metrics.jsonl, and how much is printed."""

    quiet: bool = False
    """Print only warnings, validation losses and the summary at the end."""

    use_wandb: bool = False
    """Log to Weights & Biases."""

    wandb_project: str = "llama_ft"
    """W&B project."""

    wandb_entity: str | None = None
    """W&B team or user."""

    wandb_name: str | None = None
    """Name of the W&B run; if not given, the name of output_dir."""

    wandb_tags: list[str] = Field(default_factory=list)
    """Tags of the W&B run."""

    wandb_mode: Literal["online", "offline"] | None = None
    """offline needs neither network nor key, and the run ends with the command that uploads it. If
    not given: WANDB_MODE of the environment, else online."""

    wandb_group: str | None = None
    """Group of the W&B run, for runs that belong together."""

    wandb_job_type: str | None = None
    """Job type of the W&B run, such as train."""

    wandb_notes: str | None = None
    """Notes on the W&B run."""

    wandb_log_model: bool = False
    """Upload output_dir/model to W&B at the end, as an artifact with the aliases latest, step-N
    and, if it has the lowest validation loss, best."""

    use_tensorboard: bool = False
    """Write TensorBoard event files to output_dir/tensorboard."""

    use_mlflow: bool = False
    """Log to MLflow; needs the package (pip install -e .[mlflow])."""

    mlflow_tracking_uri: str | None = None
    """MLflow server (https://...), directory, or sqlite:///file; if not given, MLFLOW_TRACKING_URI,
    else the directory mlruns next to output_dir."""

    mlflow_experiment: str = "llama_ft"
    """MLflow experiment; created if there is none of that name."""

    mlflow_name: str | None = None
    """Name of the MLflow run; if not given, the name of output_dir."""

    mlflow_tags: list[str] = Field(default_factory=list)
    """Tags of the MLflow run, as name=value."""

    mlflow_log_model: bool = False
    """Copy output_dir/model to the MLflow run's artifacts at the end."""


@dataclass(config=STRICT, kw_only=True)
class MemoryConfig:
    """Memory: the plan and snapshots."""

    plan_memory: bool = True
    """Plan the run's memory at its start, and warn if it will not fit. `--no_plan` skips it."""

    memory_snapshot: bool = False
    """Write torch's CUDA memory snapshot of the first steps, and of an out-of-memory error, to
    output_dir/memory; needs CUDA. Open it at https://pytorch.org/memory_viz."""


@dataclass(config=STRICT, kw_only=True)
class ProfileConfig:
    """Where the time goes."""

    use_profiler: bool = False
    """Run torch.profiler over the run's steps 4 to 6, print the slowest operators, and write each
    rank's trace to profiler_dir."""

    profiler_dir: str | None = None
    """Directory of the traces rank-0.json.gz, ...; if not given, output_dir/profile."""

    flop_counter: bool = False
    """Count the floating-point operations of one step as torch sees them, and print them next to
    the formula's."""

    flop_counter_start: Count = 3
    """Step that flop_counter counts; in a resumed run, the first step from there on."""
