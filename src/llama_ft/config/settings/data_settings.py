"""Settings of the data."""

from typing import Annotated, Literal, NotRequired

from pydantic import ConfigDict, Field, with_config
from pydantic.dataclasses import dataclass

# typing's own is not enough for pydantic before Python 3.12
from typing_extensions import TypedDict

from llama_ft.config.value_types import STRICT, Count, CountOrZero


@with_config(ConfigDict(extra="forbid", allow_inf_nan=False))
class DatasetPart(TypedDict):
    """One part of a dataset mixture. Every sample is taken weight times per epoch: with 2.5 each
    sample twice, and half of them, chosen by a hash of the sample, a third time."""

    path: Annotated[str, Field(min_length=1)]
    weight: NotRequired[Annotated[float, Field(gt=0, le=1000)]]
    split: NotRequired[str]


SetName = Annotated[str, Field(pattern=r"^[A-Za-z]\w*$")]
NamedSets = Annotated[dict[SetName, Annotated[str, Field(min_length=1)]], Field(min_length=1)]


@dataclass(config=STRICT, kw_only=True)
class DataConfig:
    """Training and validation data."""

    dataset: str | list[DatasetPart] = "demo"
    """A .jsonl, .json, .csv (also .gz, .zst) or .parquet file, a directory or glob of them, a directory
    of rollouts, a URL (s3://, https://), a Hub name (org/name or org/name:configuration),
    path/to/file.py:function, llama-recipes' samsum, grammar or alpaca, or demo (Python's docstrings).
    Several: a.jsonl,b.jsonl. A mixture:
    '[{path: a.jsonl, weight: 2.5}, {path: org/name, split: test}]'."""

    dataset_format: str = "auto"
    """alpaca: instruction, input, output. messages: a chat of role and content. sharegpt:
    conversations of from and value. prompt_completion. preference: chosen, rejected, optionally
    prompt. unpaired_preference: prompt, completion, label. text: continued pre-training. tokenized:
    input_ids, optionally labels. prompts: those of samples of any format, for grpo. auto: by the
    columns and the objective."""

    columns: list[str] = Field(default_factory=list)
    """Columns that have other names in the data than in the format, as
    question=Question,answer=Answer. Common names such as question and answer are recognized
    without it."""

    repair_chats: bool = False
    """Repair chats: leave out what an assistant says before the first user message and what follows
    the last answer, merge neighboring messages of one role, and read LLaMA-Factory's
    function_call."""

    max_samples: CountOrZero = 0
    """Use the first N samples only, of each part of a mixture; 0 = all."""

    rollouts: Literal["best", "all"] = "best"
    """Of a directory of rollouts, sft and distill train on the best answer to each prompt, or on all
    answers. dpo and others train on pairs of the best and the worst one, kto on all answers."""

    reward_threshold: float | None = None
    """Of a directory of rollouts, sft and distill train on answers with at least this reward only; for
    kto such answers are desirable, and the others undesirable."""

    deduplicate: bool = False
    """Leave out samples that have the same tokens and loss mask as an earlier one, in the training
    and in the validation set. Copies by the weight of a mixture's part stay."""

    dataset_split: str = "train"
    """Training split of data that have splits: Hub datasets (also train[:5%]), directories saved by
    datasets, and directories whose files are named by train, validation or test. train[:100] are
    the first 100 samples."""

    validation: str | NamedSets | None = None
    """The validation set: data as in dataset, a fraction of the samples (0.05, chosen by a hash),
    or the name of a split (test). A split called validation is used by default. Several sets by
    name: '{chat: a.jsonl, code: b.jsonl}'."""

    validation_output: str | None = None
    """Write the samples that a fraction keeps out of training to this .jsonl file, which another
    run can name as its validation."""

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
    """Maximum tokens per sample; if not given, the model's maximum, but at most 4096."""

    truncation: Literal["right", "left", "drop", "split"] = "right"
    """What happens to a longer sample. right and left: truncated at its end or beginning; drop:
    skipped; split: it becomes several samples."""

    max_pixels: Count | None = None
    """Images of more pixels than this, width times height, are reduced to it before the model's
    processor gets them; if not given, only the processor's own limits."""

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
