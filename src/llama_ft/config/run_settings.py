"""Settings of data, checkpoints, trackers, memory and profiling: the second half of settings.py."""

import re
from typing import Annotated, Literal, NotRequired

from pydantic import AfterValidator, ConfigDict, Field, with_config
from pydantic.dataclasses import dataclass
from typing_extensions import TypedDict  # typing's own is not enough for pydantic before Python 3.12

STRICT = ConfigDict(
    extra="forbid",
    use_attribute_docstrings=True,
    allow_inf_nan=False,
    coerce_numbers_to_str=True,
    validate_default=True,
)
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B", re.IGNORECASE)
SIZE_BYTES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
SIZE_BYTES |= {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the bytes that `5GB`, `200MB` or `1.5 TB` stand for, decimal units as the Hub counts them, or `80GiB`.

    Raises:
        ValueError: the text is no such size, or is zero.
    """
    match = SIZE.fullmatch(text.strip())
    size_bytes = int(float(match[1]) * SIZE_BYTES[(match[2] or "").upper()]) if match else 0
    if size_bytes == 0:
        raise ValueError("expected a size such as 5GB or 200MB")
    return size_bytes


def parse_duration(text: str) -> int:
    """Return the seconds that `3h50m`, `90s` or `1d` stand for.

    Raises:
        ValueError: the text is no such time, is zero, or longer than a year.
    """
    match = DURATION.fullmatch(text.replace(" ", ""))
    days, hours, minutes, seconds = (int(number or 0) for number in match.groups()) if match else (0, 0, 0, 0)
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not 0 < total <= 366 * 24 * 3600:  # libraries overflow at some length
        raise ValueError("expected a time of up to a year, such as 3h50m, 45m or 90s")
    return total


Size = Annotated[str, AfterValidator(lambda text: text if parse_size(text) else "")]
Duration = Annotated[str, AfterValidator(lambda text: text if parse_duration(text) else "")]


@with_config(ConfigDict(extra="forbid", allow_inf_nan=False))
class DatasetPart(TypedDict):
    """One part of a mix. Every row is taken weight times an epoch: of 2.5, each row twice and half of them, chosen by a
    hash of the row, once more; of 0.3, three tenths of them."""

    path: Annotated[str, Field(min_length=1)]
    weight: NotRequired[Annotated[float, Field(gt=0, le=1000)]]
    split: NotRequired[str]


@dataclass(config=STRICT, kw_only=True)
class DataConfig:
    """What is trained on."""

    dataset: str | list[DatasetPart] = "demo"
    """A .jsonl, .json, .csv (also .gz, .zst) or .parquet file, a folder or a glob of them; a URL of such a file
    (s3://, https://); a hub name (org/name or org/name:configuration); path/to/file.py:function returning a
    datasets.Dataset; llama-recipes' samsum, grammar or alpaca; demo: Python's docstrings as questions and answers; or
    a mix, '[{path: a.jsonl, weight: 2.5}, {path: org/name, split: test}]': 2.5 takes half of the rows a third time."""

    dataset_format: str = "auto"
    """alpaca: columns instruction, input, output. messages: chat turns of role and content. sharegpt: conversations,
    turns of from and value. prompt_completion: prompt, completion. text: continued pre-training. tokenized: input_ids
    and perhaps labels. auto: told by the columns."""

    dataset_split: str = "train"
    """Split that is trained on, of data that have splits: hub datasets (also train[:5%]), folders saved by datasets,
    and folders whose files are named by train, validation or test."""

    validation: str | None = None
    """Data like dataset, a fraction such as 0.05 of its rows, chosen by a hash of the row, or the name of one of its
    splits, such as test; a split called validation is taken by itself."""

    chat_template: str | None = None
    """How a chat is written: a file with a Jinja template, or llama3, chatml, alpaca or mistral; the tokenizer's own
    when not given."""

    labels: Literal["auto", "assistant", "completion", "all"] = "auto"
    """What is trained on. assistant: every assistant turn with its end-of-turn token. completion: the last one only.
    all: every token. auto: assistant for chats, completion for prompts, all for plain text; weight 0 on a message
    leaves it out."""

    show_samples: CountOrZero = 0
    """Show so many training rows token by token before training, coloured by what is trained on."""

    context_length: Annotated[int, Field(ge=2)] | None = None
    """Longest row in tokens; the model's maximum, but at most 4096, when not given."""

    truncation: Literal["right", "left", "drop", "split"] = "right"
    """What happens to a longer row. right: its end is cut off, left: its beginning; drop: it is left out; split: it
    becomes several rows."""

    batching_strategy: Literal["packing", "padding"] = "packing"
    """packing: rows share sequences of context_length tokens without seeing each other, and a micro-batch is
    batch_size_training such packs. padding: rows of a micro-batch are padded to the longest."""

    streaming: bool = False
    """Read and tokenize while training instead of before it: for data larger than the disk. Needs max_train_step."""

    shuffle_buffer: Count = 10_000
    """streaming: rows read ahead, among which they are shuffled and packed."""

    tokenize_processes: CountOrZero = 0
    """Processes that tokenize; 0 = as many as there are cores."""

    skip_bad_rows: bool = False
    """Leave rows out that cannot be used, and count them, instead of stopping."""


@dataclass(config=STRICT, kw_only=True)
class CheckpointConfig:
    """What is written, and where."""

    output_dir: str | None = None
    """The run's directory; output/<model>-<date-time> when not given."""

    overwrite: bool = False
    """Replace the run that output_dir already holds."""

    resume: str | None = None
    """Continue a run: auto takes output_dir's newest checkpoint, or begins anew where there is none; or a checkpoint's
    directory."""

    resume_allow_changes: list[str] = Field(default_factory=list)
    """Settings that may differ from those of the run that is resumed, such as lr,num_epochs."""

    save_model: bool = True
    """Write the result in Hugging Face format to output_dir/model, and checkpoints at the end, after every epoch and
    when stopped."""

    save_steps: CountOrZero = 0
    """Write a checkpoint every so many optimizer steps too; 0 = do not."""

    save_every_epoch: bool = True
    """Write a checkpoint after every epoch."""

    save_async: bool = True
    """Write checkpoints in the background: training waits only while they are copied to host memory."""

    keep_last: CountOrZero = 0
    """Keep only so many of the newest checkpoints, and the one with the best validation loss; 0 = all."""

    save_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of output_dir/model; auto: the checkpoint's own, tensor by tensor, and fp32 for adapters."""

    max_shard_size: Size = "5GB"
    """Largest safetensors file of output_dir/model."""


@dataclass(config=STRICT, kw_only=True)
class TrackingConfig:
    """Where metrics go besides output_dir/metrics.jsonl."""

    use_wandb: bool = False
    """Log to Weights & Biases."""

    wandb_project: str = "llama_ft"
    """W&B project."""

    wandb_entity: str | None = None
    """W&B team or user."""

    wandb_name: str | None = None
    """Name of the W&B run; the name of output_dir when not given."""

    wandb_tags: list[str] = Field(default_factory=list)
    """Tags of the W&B run."""

    wandb_mode: Literal["online", "offline"] | None = None
    """offline needs neither network nor key, and the run ends with the command that uploads it; when not given, what
    the environment's WANDB_MODE says, else online."""

    wandb_group: str | None = None
    """Group of the W&B run, for runs that belong together."""

    wandb_job_type: str | None = None
    """Job type of the W&B run, such as train."""

    wandb_notes: str | None = None
    """Notes on the W&B run."""

    wandb_log_model: bool = False
    """Upload output_dir/model to W&B at the end, as an artifact with the aliases latest, step-N and, where it has the
    lowest validation loss, best."""

    use_tensorboard: bool = False
    """Write TensorBoard event files to output_dir/tensorboard."""

    use_mlflow: bool = False
    """Log to MLflow; needs the package (pip install -e .[mlflow])."""

    mlflow_tracking_uri: str | None = None
    """MLflow server (https://...), folder, or sqlite:///file; when not given MLFLOW_TRACKING_URI, else the folder
    mlruns beside output_dir."""

    mlflow_experiment: str = "llama_ft"
    """MLflow experiment; made when there is none of that name."""

    mlflow_name: str | None = None
    """Name of the MLflow run; the name of output_dir when not given."""

    mlflow_tags: list[str] = Field(default_factory=list)
    """Tags of the MLflow run, as name=value."""

    mlflow_log_model: bool = False
    """Copy output_dir/model to the MLflow run's artifacts at the end."""


@dataclass(config=STRICT, kw_only=True)
class MemoryConfig:
    """Knowing what the run holds."""

    no_plan: bool = False
    """Do not plan the run's memory at its start, nor warn where it will not fit."""

    memory_snapshot: bool = False
    """Write torch's CUDA memory snapshot of the first steps, and of an out-of-memory error, to output_dir/memory; needs
    CUDA. Open it at https://pytorch.org/memory_viz."""


@dataclass(config=STRICT, kw_only=True)
class ProfileConfig:
    """Knowing where the time goes."""

    use_profiler: bool = False
    """Run torch.profiler over the run's steps 4 to 6, print the operators that take longest, and write each rank's
    trace to profiler_dir."""

    profiler_dir: str | None = None
    """Where the traces rank-0.json.gz, ... go; output_dir/profile when not given."""

    flop_counter: bool = False
    """Count the floating-point operations of one step as torch sees them, and print them beside the formula's."""

    flop_counter_start: Count = 3
    """The step flop_counter counts; of a resumed run the first that is not before it."""
