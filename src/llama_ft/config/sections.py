"""Every setting of a run: one dataclass a section, one docstring a field.

This file is the only place a setting is declared. Flags, `--help`, the YAML keys, `configs/schema.json` and the error
messages are made from it. A field is a flag by its own name (`--lr`) and by its dotted name (`--train.lr`); field
names are therefore unique across sections.
"""

from typing import Annotated, Literal, NotRequired

from pydantic import ConfigDict, Field, with_config
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
Rate = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


@dataclass(config=STRICT, kw_only=True)
class ModelConfig:
    """Which model, and how it computes."""

    model_name: str = "demo"
    """A local Hugging Face folder, a hub name (meta-llama/Llama-3.1-8B), or demo: a small Llama built on this
    machine."""

    tokenizer_name: str | None = None
    """Folder or hub name of another tokenizer; the model's own when not given."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models whose code you have read."""

    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "auto"
    """Attention kernel, as transformers names them. auto is sdpa, or eager for the few architectures (Gemma 2, gpt-oss)
    that have no sdpa. flash_attention needs CUDA and the flash-attn package."""

    freeze_layers: bool = False
    """Full fine-tuning only: keep the first num_freeze_layers decoder layers as they are."""

    num_freeze_layers: Count = 1
    """How many decoder layers freeze_layers keeps as they are, counted from the input."""

    use_liger: bool = False
    """Liger's fused kernels for norms, MLPs and rotary embedding; needs CUDA and the liger-kernel package."""

    compile: bool = False
    """torch.compile on every decoder layer; needs CUDA. The first step and the first evaluation compile, and say for
    how long."""

    resize_embeddings: bool = False
    """Add rows to the embeddings for tokens that the tokenizer or the chat template has and the model lacks; they are
    trained, with LoRA too, and saved with the result."""


@dataclass(config=STRICT, kw_only=True)
class TrainConfig:
    """The training loop."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where to compute: auto takes CUDA when there is a GPU, else the CPU."""

    device_memory_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Largest share of its GPU's memory that each rank may take, such as 0.6; all of it when not given."""

    precision: Literal["bf16_mixed", "bf16_pure", "fp32", "fp16"] = "bf16_mixed"
    """bf16_mixed: trained weights kept in fp32, computed in bf16, gradients reduced in fp32. bf16_pure: all bf16.
    fp16: as bf16_mixed, computed in fp16 with loss scaling, for GPUs without bf16."""

    batch_size_training: Count = 4
    """Packs of context_length tokens, with padding rows, in one micro-batch of one rank."""

    gradient_accumulation_steps: Count = 1
    """Micro-batches per optimizer step. Global batch = this x batch_size_training x ranks."""

    accumulate_unsharded: bool = False
    """Reduce gradients only after the last micro-batch in full fine-tuning too: less traffic, but every rank then holds
    a whole model's gradients in fp32. LoRA always does so, its gradients being small."""

    num_epochs: Count = 3
    """Passes over the training data."""

    max_train_step: CountOrZero = 0
    """Stop after so many optimizer steps; 0 = no limit."""

    stop_after: str | None = None
    """Save and stop after so long a time, such as 3h50m, to be done before a batch queue's limit; --resume auto goes
    on."""

    collective_timeout: str = "30m"
    """How long a rank waits for the others before the run ends naming those that did not arrive."""

    lr: Rate = 1e-4
    """Peak learning rate."""

    lr_scheduler: Literal["cosine", "linear", "constant", "step"] = "cosine"
    """After the warm-up: cosine or linear decay to zero, constant, or step: times gamma after every epoch."""

    warmup_steps: CountOrZero = 0
    """Optimizer steps over which the learning rate rises linearly from 0 to lr."""

    gamma: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Factor on the learning rate after every epoch with lr_scheduler=step."""

    optimizer: Literal["AdamW", "anyprecision", "AdamW8bit", "SGD", "Adafactor"] = "AdamW"
    """AdamW: fused. anyprecision: AdamW with bf16 states, made for bf16_pure. AdamW8bit: AdamW with 8-bit states. SGD.
    Adafactor: a row and a column of states a matrix; its lr is relative to the size of a weight, 1e-3 or more."""

    use_kahan_summation: bool = False
    """anyprecision with bf16_pure: keep what the rounding of a weight loses, in a third bf16 state; otherwise weights
    are rounded stochastically."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """SGD's momentum; its state is as large as the trained weights."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """The optimizer's weight decay; never applied to norms and biases."""

    gradient_clipping: bool = False
    """Clip the global gradient norm at gradient_clipping_threshold."""

    gradient_clipping_threshold: Rate = 1.0
    """Largest global gradient norm with gradient_clipping."""

    activation_checkpointing: Literal["off", "full", "every_k", "selective", "auto"] = "off"
    """Recompute decoder layers in the backward pass instead of keeping their activations: all of them, every k-th, or
    selective: all but their matrix products and attention, whose outputs are kept. auto: off if that fits the memory
    there is, by the run's plan, else selective, else full."""

    activation_checkpointing_k: Count = 2
    """With every_k: layer 0, k, 2k, ... are recomputed."""

    activation_offload: bool = False
    """Keep the inputs of recomputed layers in pinned host memory; needs CUDA."""

    seed: Annotated[int, Field(ge=0, le=1_000_000_000)] = 42
    """Seed of data order, LoRA initialisation and dropout."""

    run_validation: bool = True
    """Evaluate after every epoch when there is validation data."""

    val_batch_size: Count = 1
    """Packs, with padding rows, in one evaluation batch of one rank."""

    eval_steps: CountOrZero = 0
    """Evaluate every so many optimizer steps too; 0 = after each epoch only."""

    max_eval_step: CountOrZero = 0
    """Use only so many evaluation batches; 0 = all of the validation data."""

    early_stopping_patience: CountOrZero = 0
    """Stop when the validation loss has not improved for so many evaluations, and take the best weights; 0 = never."""

    early_stopping_min_delta: Annotated[float, Field(ge=0)] = 0.0
    """How much lower the validation loss must be to count as improved."""

    log_steps: Count = 1
    """Write metrics every so many optimizer steps."""

    sample_tokens: CountOrZero = 0
    """Answer one validation question before and after tuning with so many new tokens; 0 = do not."""


@dataclass(config=STRICT, kw_only=True)
class FSDPConfig:
    """How parameters are laid over the ranks."""

    enable_fsdp: bool = False
    """Shard the model over the ranks. Without it several ranks are plain data parallel: a whole model on each."""

    low_cpu_fsdp: bool = False
    """Rank 0 alone reads the checkpoint and sends each rank its shard; otherwise every rank reads its own slices."""

    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"] = "FULL_SHARD"
    """FULL_SHARD frees gathered weights after use, SHARD_GRAD_OP keeps them until the backward pass is done,
    HYBRID_SHARD shards within groups of sharding_group_size and replicates over groups, NO_SHARD replicates."""

    sharding_group_size: Count | None = None
    """Ranks that share one copy of the model with HYBRID_SHARD; the ranks of one node when not given."""

    fsdp_wrap_policy: Literal["transformer", "size", "hybrid"] = "hybrid"
    """Units gathered at once: transformer: each decoder layer; size: modules of min_num_params or more;
    hybrid: decoder layers by class, big embeddings and heads by size."""

    min_num_params: Count = 1_000_000
    """With size and hybrid: parameters from which a module becomes a unit of its own."""

    fsdp_cpu_offload: bool = False
    """Keep parameters and optimizer state in pinned host memory and step there: a GPU then holds gathered units and
    activations only. Needs a GPU."""


@dataclass(config=STRICT, kw_only=True)
class PeftConfig:
    """LoRA adapters, through peft, by peft's own names."""

    use_peft: bool = False
    """Train adapters and keep the model's own weights as they are."""

    peft_method: Literal["lora"] = "lora"
    """The kind of adapter."""

    from_peft_checkpoint: str | None = None
    """Folder of a saved adapter to continue from; its own settings (r, target_modules, ...) are used."""

    r: Count = 8
    """Rank of the adapter matrices. Under torchrun write --peft.r: it takes --r for a flag of its own."""

    lora_alpha: Annotated[float, Field(gt=0)] = 32
    """The adapter's output is scaled by lora_alpha / r."""

    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Dropout on the adapter's input."""

    target_modules: list[str] | str = Field(default_factory=lambda: ["q_proj", "v_proj"])
    """Names of the linear layers that get an adapter, or all-linear."""

    bias: Literal["none", "all", "lora_only"] = "none"
    """Which bias parameters are trained too."""

    use_rslora: bool = False
    """Scale by lora_alpha / sqrt(r) instead (rank-stabilized LoRA)."""

    use_dora: bool = False
    """Train magnitudes apart from directions (DoRA)."""

    modules_to_save: list[str] | None = None
    """Modules trained in full and saved with the adapter, such as lm_head."""

    init_lora_weights: Literal["default", "gaussian", "pissa", "olora"] = "default"
    """default: A Kaiming uniform, B zero. gaussian: A normal with deviation 1/r, B zero."""


@dataclass(config=STRICT, kw_only=True)
class QuantizationConfig:
    """Frozen weights in fewer bits."""

    mode: Literal["none", "8bit", "4bit"] = "none"
    """8bit or 4bit, through bitsandbytes, with use_peft: adapters are trained beside the quantized weights.
    `--quantization` and `quantization:` are short for this field; the bare flag means 8bit."""

    quant_type: Literal["nf4", "fp4"] = "nf4"
    """4bit: the sixteen values a weight can have."""

    block_size: Annotated[int, Field(ge=32, le=4096)] = 64
    """4bit: neighbouring weights of a row that share a scale; a power of two."""

    compute_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """4bit: what the quantized layers compute in; auto: as the others, which precision says."""

    int8_threshold: Annotated[float, Field(ge=0)] = 6.0
    """8bit on CUDA: 0 rounds the inputs to int8 too and multiplies in int8. Otherwise, and on the CPU, the weights are
    dequantized and no input is rounded, whatever its size."""

    skip_modules: list[str] | None = None
    """Linear layers that are not quantized, besides the output head: names, ends of names or patterns."""


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
    """A .jsonl, .json, .csv (also .gz, .zst), .parquet or .arrow file, a folder or a glob of them; a URL of such a file
    (s3://, https://); a hub name (org/name or org/name:configuration); path/to/file.py:function returning a
    datasets.Dataset; llama-recipes' samsum, grammar or alpaca; demo: questions about Python's standard library,
    answered by its docstrings; or a mix, '[{path: a.jsonl, weight: 2}, {path: org/name, weight: 0.3, split: test}]': a
    weight of 2.5 takes each row twice an epoch and half of them, chosen by a hash of the row, once more."""

    dataset_format: Literal["auto", "alpaca", "messages", "sharegpt", "prompt_completion", "text", "tokenized"] = "auto"
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

    max_shard_size: str = "5GB"
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

    wandb_per_rank: bool = False
    """A W&B run for every rank, in one group, each with its own memory and machine load; else one run, rank 0's."""

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


@dataclass(config=STRICT, kw_only=True)
class Config:
    """A whole recipe."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    fsdp: FSDPConfig = Field(default_factory=FSDPConfig)
    peft: PeftConfig = Field(default_factory=PeftConfig)
    quantization: QuantizationConfig = Field(default_factory=QuantizationConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)
    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    profile: ProfileConfig = Field(default_factory=ProfileConfig)
