"""Settings of the data and of the objective that is trained on them."""

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
class PreferenceConfig:
    """Supervised fine-tuning, distillation, preferences or a reward model; TRL's names and
    defaults."""

    objective: Literal["sft", "distill", "dpo", "ipo", "kto", "simpo", "orpo", "reward"] = "sft"
    """sft: supervised fine-tuning. distill: learn from a teacher's probabilities, too. kto learns
    from completions with a label, the others from pairs of a chosen and a rejected response. dpo,
    ipo and kto compare with a reference, which is the model before training unless reference_model
    names another. simpo and orpo have none. reward: a reward model, with a head that scores
    responses in place of the LM head."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """dpo, ipo, kto: strength of the reference; with a lower beta the model moves further from it.
    simpo: factor on the margin. orpo: weight of the odds ratio."""

    dpo_label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """dpo, simpo: assumed share of pairs whose responses are swapped (TRL's label_smoothing)."""

    rpo_alpha: Annotated[float, Field(ge=0)] = 0.0
    """dpo, ipo, simpo: weight of the mean cross-entropy of the chosen response's tokens, which is
    added to the loss of a pair, such as 1 (RPO; for simpo TRL's cpo_alpha)."""

    reference_model: str | None = None
    """dpo, ipo, kto: directory or Hub name of another reference with the same tokenizer. It is
    evaluated once before training, then freed."""

    precompute_ref_log_probs: bool = False
    """dpo, ipo, kto with a new LoRA adapter: compute the reference's log-probabilities once, before
    training, instead of in each step. Worthwhile from the second epoch on. Without a new adapter they
    are always computed once."""

    teacher_model: str | None = None
    """distill: directory or Hub name of the teacher, with the same tokenizer. It runs once over the
    training samples, before the student is built. Without it, samples of tokens have its
    probabilities in a column logprobs."""

    teacher_file: str | None = None
    """distill: file for the teacher's probabilities, which other runs can use. By default it is in the
    run's directory. If it exists, the teacher is not run."""

    teacher_quantization: Literal["none", "8bit", "4bit"] = "none"
    """distill: quantization of the teacher."""

    distill_top_k: Count = 64
    """distill: number of the teacher's most likely tokens that are stored per token in the loss; 8
    bytes each."""

    distill_weight: Annotated[float, Field(gt=0, le=1)] = 0.5
    """distill: weight of the KL divergence from the teacher; the cross-entropy has the rest."""

    distill_temperature: Annotated[float, Field(gt=0)] = 1.0
    """distill: temperature of teacher and student in the KL divergence."""

    simpo_gamma: Annotated[float, Field(ge=0)] = 0.5
    """simpo: target margin between the rewards of both responses (gamma)."""

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
    llama-recipes' samsum, grammar or alpaca, or demo (Python's docstrings). Several: a.jsonl,b.jsonl. A
    mixture: '[{path: a.jsonl, weight: 2.5}, {path: org/name, split: test}]'."""

    dataset_format: str = "auto"
    """alpaca: instruction, input, output. messages: a chat of role and content. sharegpt:
    conversations of from and value. prompt_completion. preference: chosen, rejected, optionally
    prompt. unpaired_preference: prompt, completion, label. text: continued pre-training. tokenized:
    input_ids, optionally labels. auto: by the columns and the objective."""

    columns: list[str] = Field(default_factory=list)
    """Columns that have other names in the data than in the format, as
    question=Question,answer=Answer. Common names such as question and answer are recognized
    without it."""

    repair_chats: bool = False
    """Repair chats: leave out what an assistant says before the first user message and what follows
    the last answer, merge neighboring messages of one role, and read LLaMA-Factory's
    function_call."""

    max_samples: CountOrZero = 0
    """Train on the first N samples only, of each part of a mixture; 0 = all."""

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
