"""Settings of quantization, data, checkpoints, trackers, memory and profiling: the second half of
settings.py."""

import re
from typing import Annotated, Literal, NotRequired

from pydantic import AfterValidator, ConfigDict, Field, with_config
from pydantic.dataclasses import dataclass

# typing's own is not enough for pydantic before Python 3.12
from typing_extensions import TypedDict

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
    """Return the bytes that `5GB`, `200MB` or `1.5 TB` stand for, decimal units as the Hub counts
    them, or `80GiB`.

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
    days, hours, minutes, seconds = (
        (int(number or 0) for number in match.groups()) if match else (0, 0, 0, 0)
    )
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not 0 < total <= 366 * 24 * 3600:  # libraries overflow at some length
        raise ValueError("expected a time of up to a year, such as 3h50m, 45m or 90s")
    return total


Size = Annotated[str, AfterValidator(lambda text: text if parse_size(text) else "")]
Duration = Annotated[str, AfterValidator(lambda text: text if parse_duration(text) else "")]


@with_config(ConfigDict(extra="forbid", allow_inf_nan=False))
class DatasetPart(TypedDict):
    """One part of a dataset mixture. Every sample is taken weight times per epoch: with 2.5 each
    sample twice, and half of them, chosen by a hash of the sample, a third time."""

    path: Annotated[str, Field(min_length=1)]
    weight: NotRequired[Annotated[float, Field(gt=0, le=1000)]]
    split: NotRequired[str]


@dataclass(config=STRICT, kw_only=True)
class PreferenceConfig:
    """What is trained: answers, or preferences between answers. Names and defaults are TRL's."""

    objective: Literal["sft", "dpo", "ipo", "kto", "simpo", "orpo", "reward"] = "sft"
    """sft: supervised fine-tuning. kto learns from completions with a label, the others from pairs
    of a chosen and a rejected response. dpo, ipo and kto compare with a reference, which is the
    model before training unless reference_model names another. simpo and orpo have none. reward: a
    reward model, with a head that scores responses in the place of the LM head."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """dpo, ipo, kto: strength of the reference; with a lower beta the model moves further from it.
    simpo: factor on the margin. orpo: weight of the odds ratio."""

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """dpo, simpo: share of the pairs that are assumed to be the wrong way round."""

    reference_model: str | None = None
    """dpo, ipo, kto: directory or Hub name of another reference with the same tokenizer. It scores
    all samples before the model is loaded, and is then freed."""

    simpo_gamma: Annotated[float, Field(ge=0)] = 0.5
    """simpo: margin between the rewards of both responses that is aimed at."""

    desirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """kto: factor on the losses of desirable completions."""

    undesirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """kto: factor on the losses of undesirable completions."""

    center_rewards_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """reward: weight of the squared sum of both scores, which keeps scores around 0; such as
    0.01."""


@dataclass(config=STRICT, kw_only=True)
class DataConfig:
    """Training and validation data."""

    dataset: str | list[DatasetPart] = "demo"
    """A .jsonl, .json, .csv (also .gz, .zst) or .parquet file, a directory or glob of them, a URL
    (s3://, https://), a Hub name (org/name or org/name:configuration), path/to/file.py:function,
    llama-recipes' samsum, grammar or alpaca, or demo (Python's docstrings). A mixture: '[{path:
    a.jsonl, weight: 2.5}, {path: org/name, split: test}]'."""

    dataset_format: str = "auto"
    """alpaca: instruction, input, output. messages: a chat of role and content. sharegpt:
    conversations of from and value. prompt_completion. preference: chosen, rejected and perhaps
    prompt. unpaired_preference: prompt, completion, label. text: continued pre-training. tokenized:
    input_ids and perhaps labels. auto: found by the columns; preference or unpaired_preference
    where the objective is trained on them."""

    columns: list[str] = Field(default_factory=list)
    """Columns that have other names in the data than in the format, as
    question=Question,answer=Answer. question and answer stand for alpaca's instruction and output;
    such usual names need not be given."""

    repair_chats: bool = False
    """Repair chats: leave out what an assistant says before the first user message and what follows
    the last answer, merge neighboring messages of one role, and read LLaMA-Factory's
    function_call."""

    max_samples: CountOrZero = 0
    """Train on the first N samples only, of each part of a mixture; 0 = all."""

    dataset_split: str = "train"
    """Training split of data that have splits: Hub datasets (also train[:5%]), directories saved by
    datasets, and directories whose files are named by train, validation or test. train[:100] are
    the first 100 samples."""

    validation: str | None = None
    """The validation set: data like dataset, a fraction such as 0.05 of its samples, chosen by a
    hash of the sample, or one of its splits, such as test. A split called validation is used by
    default."""

    chat_template: str | None = None
    """A file with a Jinja chat template, or llama3, chatml, alpaca or mistral; if not given, the
    tokenizer's own."""

    labels: Literal["auto", "assistant", "completion", "all"] = "auto"
    """Tokens in the loss. assistant: every assistant response; completion: the last one; all: every
    token. auto: assistant for chats, completion for prompts, all for text; a message with weight 0
    is not in the loss."""

    reasoning_content: Literal["keep", "drop"] = "keep"
    """Reasoning content of chats: in reasoning_content (also reasoning, thinking) or <think> tags.
    keep: it is in the loss where the model writes it; drop: removed from all messages."""

    show_samples: CountOrZero = 0
    """Print N training samples token by token before training, colored by what is in the loss."""

    context_length: Annotated[int, Field(ge=2)] | None = None
    """Longest sample in tokens; if not given, the model's maximum, but at most 4096."""

    truncation: Literal["right", "left", "drop", "split"] = "right"
    """What happens to a longer sample. right and left: truncated at its end or beginning; drop:
    skipped; split: it becomes several samples."""

    batching_strategy: Literal["packing", "padding"] = "packing"
    """packing: samples share sequences of context_length tokens without seeing each other. padding:
    samples of a micro-batch are padded to the longest."""

    streaming: bool = False
    """Read and tokenize while training instead of before it: for data larger than the disk. Needs
    max_train_step."""

    shuffle_buffer: Count = 10_000
    """streaming: samples read ahead, among which they are shuffled and packed."""

    tokenize_processes: CountOrZero = 0
    """Processes that tokenize; 0 = one per core."""

    skip_bad_rows: bool = False
    """Skip and count samples that cannot be used, instead of stopping."""


@dataclass(config=STRICT, kw_only=True)
class CheckpointConfig:
    """What is written, and where."""

    output_dir: str | None = None
    """The run's directory; if not given, output/<model>-<date-time>."""

    overwrite: bool = False
    """Replace the run that output_dir already holds."""

    resume: str | None = None
    """Continue a run. auto: from output_dir's newest checkpoint, or from scratch if there is none;
    otherwise the directory of a checkpoint."""

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
    """Keep only the N newest checkpoints and the one with the best validation loss; 0 = all."""

    save_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of output_dir/model; auto: the base model's own, tensor by tensor, and fp32 for
    adapters."""

    max_shard_size: Size = "5GB"
    """Largest safetensors file of output_dir/model."""


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

    no_plan: bool = False
    """Do not plan the run's memory at its start, nor warn if it will not fit."""

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


@dataclass(config=STRICT, kw_only=True)
class QuantizationConfig:
    """Frozen weights in fewer bits."""

    mode: Literal["none", "8bit", "4bit"] = "none"
    """8bit or 4bit, through bitsandbytes, with use_peft: LoRA on an 8-bit base, or QLoRA.
    `--quantization` and `quantization:` are short for this field; the bare flag means 8bit."""

    quant_type: Literal["nf4", "fp4"] = "nf4"
    """4bit: the data type, sixteen values that a weight can have."""

    block_size: Annotated[int, Field(ge=32, le=4096)] = 64
    """4bit: neighboring weights of a matrix row that share a scale; a power of two."""

    compute_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """4bit: precision of the quantized layers' matmuls; auto: as precision says."""

    int8_threshold: Annotated[float, Field(ge=0)] = 6.0
    """8bit on CUDA: 0 also rounds the inputs to int8 and multiplies in int8. Otherwise, and on the
    CPU, weights are dequantized and inputs keep their precision."""

    skip_modules: list[str] | None = None
    """Linear layers that are not quantized, in addition to the LM head: names, ends of names or
    patterns."""
