"""Every setting of a run: one dataclass per section, one docstring per field.

Flags, `--help`, the YAML keys, `configs/schema.json` and the error messages are made from these declarations. A field
is a flag by its own name (`--lr`) and by its dotted name (`--train.lr`), so field names are unique across sections.
"""

import dataclasses
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import Field
from pydantic.dataclasses import dataclass

from llama_ft.config.run_settings import (
    STRICT,
    CheckpointConfig,
    Count,
    CountOrZero,
    DataConfig,
    DatasetPart,
    Duration,
    MemoryConfig,
    ProfileConfig,
    TrackingConfig,
)

Rate = Annotated[float, Field(gt=0)]


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

    stop_after: Duration | None = None
    """Save and stop after so long a time, such as 3h50m, to be done before a batch queue's limit; --resume auto goes
    on."""

    collective_timeout: Duration = "30m"
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

    peft_method: Literal["lora", "loha"] = "lora"
    """The kind of adapter. loha (Hadamard products of two low-rank ones) takes r, lora_alpha, target_modules and
    modules_to_save, and no quantized model."""

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

    init_lora_weights: Literal["default", "gaussian"] = "default"
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


Kind = Literal["switch", "whole number", "number", "choice", "text", "data", "names", "names or pattern"]


@dataclasses.dataclass(frozen=True)
class Setting:
    """One field of a dataclass of settings, as flags, help, messages and the schema need it.

    Attributes:
        section: its section in YAML; empty for the flags of a recipe that reads no YAML.
        name: its field, unique across sections.
        kind: what its value is.
        choices: the allowed values of a choice, else empty.
        optional: whether it may be none.
        default: its value when nobody sets it.
        meaning: the field's docstring, on one line.
    """

    section: str
    name: str
    kind: Kind
    choices: tuple[str, ...]
    optional: bool
    default: Any
    meaning: str

    @property
    def dotted(self) -> str:
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def flag(self) -> str:
        """As commands are printed. torchrun's parser looks at the script's flags too, and stops at an ambiguous
        beginning of its own: --r could be --role or --rdzv-id."""
        return {"mode": "--quantization", "r": "--peft.r"}.get(self.name, f"--{self.name}")


def settings_of(section_class: Any, section: str = "") -> dict[str, Setting]:
    """Return the settings that a pydantic dataclass declares, by field name."""
    annotations = get_type_hints(section_class)
    settings = {}
    for name, field in section_class.__pydantic_fields__.items():
        members = {member for member in _members(annotations[name]) if member is not types.NoneType}
        choices = next((get_args(member) for member in members if get_origin(member) is Literal), ())
        kind: Kind = "choice" if choices else KINDS[frozenset(members)]
        default = field.get_default(call_default_factory=True)
        optional = types.NoneType in _members(annotations[name])
        declared = [getattr(base, "__pydantic_fields__", {}).get(name) for base in section_class.__mro__]
        meaning = " ".join(next((it.description for it in declared if it and it.description), "").split())
        settings[name] = Setting(section, name, kind, choices, optional, default, meaning)
    return settings


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


KINDS: dict[frozenset[Any], Kind] = {
    frozenset({bool}): "switch",
    frozenset({int}): "whole number",
    frozenset({float}): "number",
    frozenset({str}): "text",
    frozenset({list[str]}): "names",
    frozenset({list[str], str}): "names or pattern",
    frozenset({list[DatasetPart], str}): "data",
}
SECTIONS: dict[str, Any] = get_type_hints(Config)
SETTINGS: dict[str, Setting] = {
    name: setting for section, cls in SECTIONS.items() for name, setting in settings_of(cls, section).items()
}


def values_of(config: Config) -> dict[str, Any]:
    """Return the values of all settings by field name, whatever the section."""
    return {name: getattr(getattr(config, setting.section), name) for name, setting in SETTINGS.items()}
