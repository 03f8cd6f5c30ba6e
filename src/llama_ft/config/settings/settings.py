"""All settings of a run: one dataclass per section, one docstring per field. Here are the sections
model, train, fsdp, peft and quantization; data_settings.py and output_settings.py have the others.

Flags, `--help`, the YAML keys, `configs/schema.json` and the error messages are made from these
declarations. A field is a flag by its own name (`--lr`) and by its dotted name (`--train.lr`), so
field names are unique across sections.
"""

import dataclasses
import types
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import Field
from pydantic.dataclasses import dataclass

from llama_ft import door
from llama_ft.config.objectives import LossType, PreferenceConfig
from llama_ft.config.settings.added_sections import check_names
from llama_ft.config.settings.data_settings import DataConfig, DatasetPart
from llama_ft.config.settings.output_settings import (
    CheckpointConfig,
    MemoryConfig,
    ProfileConfig,
    TrackingConfig,
)
from llama_ft.config.settings.structured_values import CheckedGroup, ParameterGroup, PeftOptions
from llama_ft.config.value_types import STRICT, Count, CountOrZero, Duration

Section = TypeVar("Section")
Rate = Annotated[float, Field(gt=0)]
# --optimizer -> its module and class. A new optimizer is a line here, such as
# "RMSprop": "torch.optim.RMSprop".
OPTIMIZERS = {
    "AdamW": "llama_ft.training.optimizer.AdamW",
    "anyprecision": "llama_ft.training.optimizers.anyprecision.AnyPrecisionAdamW",
    "AdamW8bit": "llama_ft.training.optimizers.adamw_8bit.AdamW8bit",
    "SGD": "llama_ft.training.optimizer.SGD",
    "Adafactor": "llama_ft.training.optimizers.adafactor.Adafactor",
}
if TYPE_CHECKING:
    Optimizer = str
    Score = str
else:
    OwnFunction = Annotated[str, Field(pattern=r"\.py:\w+$")]
    Optimizer = Literal[tuple(OPTIMIZERS)] | OwnFunction
    Score = Literal["exact", "contains", "json"] | OwnFunction


@dataclass(config=STRICT, kw_only=True)
class ModelConfig:
    """Which model, and how it computes."""

    model_name: str = "demo"
    """A local Hugging Face directory, a name on the Hugging Face Hub (meta-llama/Llama-3.1-8B), or
    demo: a small Llama built on this machine."""

    tokenizer_name: str | None = None
    """Directory or Hub name of another tokenizer; if not given, the model's own."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models whose code you have read."""

    attn_implementation: Literal[
        "auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"
    ] = "auto"
    """Attention kernel, as Transformers names it. auto is sdpa, or eager for the few architectures
    (Gemma 2, gpt-oss) without sdpa; flash_attention needs CUDA and the flash-attn package."""

    freeze_layers: bool = False
    """Full fine-tuning only: freeze the first num_freeze_layers decoder layers."""

    num_freeze_layers: Count = 1
    """Number of decoder layers that freeze_layers freezes, counted from the input."""

    train_vision: Literal["none", "projector", "all"] = "none"
    """Parts for images that are trained in addition to the text part, if samples have images:
    projector connects the tower to the text part; all: the tower, too. With use_peft, projectors are
    trained whole and saved with the adapter, and all is not supported."""

    freeze_LLM_only: bool = False
    """Full fine-tuning on images only: freeze the text part, and train the parts for images: all of
    them, or the projector with train_vision projector."""

    use_liger: bool | Literal["auto"] = "auto"
    """Liger's fused kernels for norms, MLPs and rotary embedding; needs CUDA and the liger-kernel
    package. auto: on CUDA without compile, if the package is installed and this is one of the
    common dense architectures. Without them, CUDA runs torch's fused RMSNorm."""

    compile: bool = False
    """torch.compile on every decoder layer; needs CUDA. The first step and the first evaluation
    take longer."""

    resize_embeddings: bool = False
    """Add embeddings for tokens that the tokenizer or the chat template has and the model lacks.
    They are trained, with LoRA too, and saved with the final model or adapter."""


@dataclass(config=STRICT, kw_only=True)
class TrainConfig:
    """The training loop."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to compute on; auto: CUDA if there is a GPU, else the CPU."""

    device_memory_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of a GPU's memory that its rank may use, such as 0.6; if not given, all of it."""

    precision: Literal["bf16_mixed", "bf16_pure", "fp32", "fp16"] = "bf16_mixed"
    """bf16_mixed: trained weights in fp32, computed in bf16, gradients reduced in fp32. bf16_pure:
    all bf16. fp16: as bf16_mixed, in fp16 with loss scaling, for GPUs without bf16."""

    batch_size_training: Count = 4
    """Micro-batch size per rank: packed sequences, or samples with batching_strategy=padding."""

    gradient_accumulation_steps: Count = 1
    """Micro-batches per optimizer step. Global batch = this x batch_size_training x ranks."""

    accumulate_unsharded: bool = False
    """Full fine-tuning: reduce gradients only after the last micro-batch. Less traffic, but every
    rank keeps fp32 gradients of the whole model; LoRA always does so, because its gradients are
    small."""

    num_epochs: Count = 3
    """Passes over the training data."""

    max_train_step: CountOrZero = 0
    """Largest number of optimizer steps; 0 = no limit."""

    max_train_time: Duration | None = None
    """Longest training time of one launch, such as 20m. Then the run ends normally: it evaluates
    and saves the final model. The learning rate still follows the full number of steps."""

    stop_after: Duration | None = None
    """Save and stop after this time, such as 3h50m, before a batch queue's limit; --resume auto
    continues."""

    collective_timeout: Duration = "30m"
    """Longest time a rank waits for the others; then the run ends and names the missing ranks."""

    lr: Rate = 1e-4
    """Peak learning rate."""

    lr_scheduler: Literal[
        "cosine", "linear", "constant", "step", "warmup_stable_decay", "inverse_sqrt"
    ] = "cosine"
    """After the warm-up: cosine or linear decay to zero; constant; step: times gamma after every
    epoch; warmup_stable_decay: constant, then cosine decay over decay_ratio of the run;
    inverse_sqrt: as 1 / sqrt(step)."""

    warmup_steps: CountOrZero = 0
    """Optimizer steps over which the learning rate rises linearly from 0 to lr. A run that is not
    longer uses 10% of its steps."""

    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Length of the warm-up as a share of all optimizer steps, instead of warmup_steps."""

    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate at which cosine, linear and warmup_stable_decay end."""

    decay_ratio: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Length of the decay of warmup_stable_decay as a share of all optimizer steps."""

    gamma: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Factor on the learning rate after every epoch with lr_scheduler=step."""

    optimizer: Optimizer = "AdamW"
    """AdamW: fused. anyprecision: AdamW with bf16 states, for bf16_pure. AdamW8bit: AdamW with
    8-bit states. Adafactor: factored states; its lr is relative to a weight's size, 1e-3 or
    more. path/to/file.py:function: gets the groups of named parameters and returns an optimizer of
    torch."""

    groups: list[CheckedGroup] = Field(default_factory=list)
    """Other settings for the parameters whose name a regular expression matches: '[{match:
    embed_tokens, lr: 0.1x}, {match: "norm|bias", weight_decay: 0}, {match: lm_head, freeze:
    true}]'. lr is a multiple of lr, or a peak learning rate. weight_decay applies to all matches,
    norms and biases, too."""

    use_kahan_summation: bool = False
    """anyprecision with bf16_pure: keep the rounding error of weights in a third bf16 state;
    otherwise weights are rounded stochastically."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """SGD's momentum; its state is as large as the trained weights."""

    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of AdamW's and AdamW8bit's mean of gradients."""

    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of AdamW's and AdamW8bit's mean of squared gradients."""

    adam_epsilon: Rate = 1e-8
    """Epsilon of AdamW and AdamW8bit: it keeps the denominator above 0."""

    loraplus_lr_ratio: Rate = 1.0
    """LoRA+: learning rate of the adapters' B matrices, as a multiple of lr; its authors use 16."""

    loss_type: LossType = "nll"
    """TRL's loss_type. sft: nll is the cross-entropy; dft, Dynamic Fine-Tuning, multiplies it by the
    token's probability, so that unlikely tokens change the model less. grpo: dapo, its
    default, is a mean over all tokens; grpo and dr_grpo are means over answers, of means and of sums."""

    label_smoothing_factor: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of a target's probability that is spread over the whole vocabulary; the validation loss
    has none."""

    neftune_noise_alpha: Annotated[float, Field(ge=0)] = 0.0
    """NEFTune: uniform noise on the input embeddings in training. Its size is this, divided by the
    square root of (tokens of the sample x hidden size); its authors use 5."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """The optimizer's weight decay; never applied to norms and biases."""

    gradient_clipping: bool = False
    """Clip the global gradient norm at gradient_clipping_threshold."""

    gradient_clipping_threshold: Rate = 1.0
    """Largest global gradient norm with gradient_clipping."""

    activation_checkpointing: Literal["off", "full", "every_k", "selective", "auto"] | None = None
    """Compute decoder layers again in the backward pass instead of keeping their activations: full: all;
    every_k: every k-th; selective: all but their matmuls and attention. auto: the first of off, selective
    and full that fits the memory. If not given: auto on CUDA, off on the CPU or without plan_memory."""

    activation_checkpointing_k: Count = 2
    """With every_k: layers 0, k, 2k, ... are checkpointed."""

    activation_offload: bool = False
    """Keep the inputs of checkpointed layers in pinned host memory; needs CUDA."""

    tiled_mlp: Literal["auto", "off"] | Count = "auto"
    """Tokens that MLPs and experts compute at a time. auto: off, but pieces if a long run would not fit."""

    router_aux_loss_coef: Annotated[float, Field(ge=0)] | None = None
    """MoE models: coefficient of the routers' load-balancing loss; 0 turns it off. If not given: as
    in config.json, if it sets output_router_logits."""

    seed: Annotated[int, Field(ge=0, le=1_000_000_000)] = 42
    """Seed of data order, LoRA initialization and dropout."""

    run_validation: bool = True
    """Evaluate after every epoch if there is a validation set."""

    val_batch_size: Count = 1
    """Evaluation micro-batch size per rank: packed sequences, or samples with batching_strategy=padding."""

    eval_steps: CountOrZero = 0
    """Evaluate also every N optimizer steps; 0 = after each epoch only."""

    max_eval_step: CountOrZero = 0
    """Largest number of evaluation micro-batches per rank; 0 = the whole validation set."""

    score: Score | None = None
    """Score generated answers to the validation samples: exact (the reference response), contains
    (it), json (the same value), or path/to/file.py:function, called with prompt, answer and
    reference. eval/score is the mean."""

    score_tokens: Count = 128
    """Maximum new tokens of a scored answer."""

    score_samples: CountOrZero = 0
    """Score the first N samples of each validation set only; 0 = all."""

    score_answers: Count = 1
    """Scored answers per sample. Several are sampled at temperature 1: eval/score is their mean, and
    eval/pass_at_K the share of samples with a right one (a score of 1) among K, without bias."""

    score_batch_size: Count = 4
    """Answers that are generated at once, per rank."""

    eval_tasks: list[str] = Field(default_factory=list)
    """Tasks of lm-evaluation-harness that the final model is asked after training, by name or as
    YAML files: hellaswag,my_tasks/arithmetic.yaml. It needs pip install -e '.[eval]'."""

    eval_tasks_limit: Annotated[float, Field(gt=0)] | None = None
    """Only the first N questions of each of eval_tasks, or a share below 1."""

    best_by: str = "eval/loss"
    """Metric that chooses the best checkpoint and that early stopping watches, such as
    eval/score."""

    early_stopping_patience: CountOrZero = 0
    """Stop if best_by does not improve for N evaluations, and take the best weights; 0 = never."""

    early_stopping_min_delta: Annotated[float, Field(ge=0)] = 0.0
    """Smallest change of best_by that counts as an improvement."""

    log_steps: Count = 1
    """Write metrics every N optimizer steps."""

    sample_tokens: CountOrZero = 0
    """Generate up to N tokens for a validation prompt, before and after training; 0 = off."""

    sample_prompts: list[str] | None = None
    """Prompts that sample_tokens answers instead. Quote those with commas: '["Hello, you?",
    "Who?"]'."""

    sample_images: list[str] | None = None
    """Image files of sample_prompts: one per prompt, or one for all."""

    sample_steps: CountOrZero = 0
    """Answer these prompts also every N optimizer steps; 0 = do not."""


@dataclass(config=STRICT, kw_only=True)
class FSDPConfig:
    """How parameters are sharded across ranks."""

    enable_fsdp: bool = False
    """Shard the model across ranks. Without it, several ranks are data parallel (DDP): each has the
    whole model."""

    low_cpu_fsdp: bool = False
    """Rank 0 alone reads the checkpoint and sends each rank its shard; otherwise every rank reads
    its own slices."""

    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"] = (
        "FULL_SHARD"
    )
    """FULL_SHARD: least memory. SHARD_GRAD_OP: faster, keeps weights all-gathered until the end of
    the backward pass. HYBRID_SHARD: shards within a node, with a copy per node. NO_SHARD: a copy
    per rank (DDP)."""

    sharding_group_size: Count | None = None
    """HYBRID_SHARD: ranks that share one copy of the model; if not given, the ranks of a node."""

    sequence_parallel_size: Count = 1
    """Ranks that share each packed sequence, for long context: activations per rank are divided by
    this number, and so is the global batch. It must divide the ranks and the attention heads."""

    fsdp_wrap_policy: Literal["transformer", "size", "hybrid"] = "hybrid"
    """FSDP units, all-gathered at once. transformer: each decoder layer; size: modules of
    min_num_params or more;
    hybrid: decoder layers by class, large embeddings and LM heads by size."""

    min_num_params: Count = 1_000_000
    """With size and hybrid: parameters from which a module becomes an FSDP unit."""

    fsdp_cpu_offload: bool = False
    """Keep parameters and optimizer state in pinned host memory and step there; a GPU then has only
    all-gathered FSDP units and activations. Needs a GPU."""


@dataclass(config=STRICT, kw_only=True)
class PeftConfig:
    """LoRA adapters, through peft, by peft's own names."""

    use_peft: bool = False
    """Train adapters and freeze the model's own weights."""

    peft_method: Literal["lora", "loha"] = "lora"
    """Kind of adapter. loha (Hadamard products of low-rank matrices) uses r, lora_alpha,
    target_modules and modules_to_save, and no quantized model."""

    from_peft_checkpoint: str | None = None
    """Directory of a saved adapter to continue from. Its own r, target_modules and so on are used."""

    r: Count = 8
    """Rank of the adapter matrices. Under torchrun write --peft.r: it takes --r for a flag of its
    own."""

    lora_alpha: Annotated[float, Field(gt=0)] = 32
    """The adapter's output is scaled by lora_alpha / r."""

    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapter's input."""

    target_modules: list[str] | str = "all-linear"
    """Names of the linear layers that get an adapter, such as q_proj,v_proj, or all-linear: all but
    the LM head, and experts without lora_dropout and use_dora."""

    target_parameters: list[str] | None = None
    """Names of parameters that get an adapter too, such as experts.gate_up_proj, in which the
    experts of a layer are stacked; without lora_dropout and use_dora."""

    bias: Literal["none", "all", "lora_only"] = "none"
    """Bias parameters that are trained too."""

    use_rslora: bool = False
    """Scale by lora_alpha / sqrt(r) instead (rank-stabilized LoRA)."""

    use_dora: bool = False
    """Train magnitudes separately from directions (DoRA)."""

    modules_to_save: list[str] | None = None
    """Modules that are trained whole and saved with the adapter, such as lm_head."""

    init_lora_weights: Literal["default", "gaussian", "pissa", "pissa_niter_16"] = "default"
    """default: A Kaiming uniform, B zero. gaussian: A normal with deviation 1/r, B zero. pissa: the
    r largest singular values of the weight, exact or by 16 subspace iterations; the adapter is
    saved as plain LoRA of rank 2r."""

    options: PeftOptions = Field(default_factory=PeftOptions)
    """Further fields of PEFT's config, passed to it unchanged: rank_pattern, alpha_pattern,
    exclude_modules, layers_to_transform and layers_pattern. '{rank_pattern: {q_proj: 16},
    exclude_modules: [o_proj]}'."""


@dataclass(config=STRICT, kw_only=True)
class QuantizationConfig:
    """Frozen weights in fewer bits."""

    mode: Literal["none", "8bit", "4bit", "as_stored"] = "none"
    """8bit or 4bit, through bitsandbytes, with use_peft: LoRA on an 8-bit base, or QLoRA. as_stored:
    LoRA on a checkpoint published in FP8 or MXFP4, whose weights stay so. `--quantization` and
    `quantization:` are short for this field; the bare flag means 8bit."""

    quant_type: Literal["nf4", "fp4"] = "nf4"
    """4bit: the data type, sixteen values that a weight can have."""

    block_size: Annotated[int, Field(ge=32, le=4096)] = 64
    """4bit: neighboring weights of a matrix row that share a scale; a power of two."""

    double_quant: bool = False
    """4bit: store the scales of the blocks in 8 bits, too: 4.13 bits per weight instead of 4.5, and
    a slower forward and backward pass."""

    compute_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """4bit: precision of the quantized layers' matmuls; auto: as precision says."""

    int8_threshold: Annotated[float, Field(ge=0)] = 6.0
    """8bit on CUDA: 0 also rounds the inputs to int8 and multiplies in int8. Otherwise, and on the
    CPU, weights are dequantized and inputs keep their precision."""

    skip_modules: list[str] | None = None
    """Linear layers that are not quantized, in addition to the LM head: names, ends of names or
    patterns."""


@dataclass(config=STRICT, kw_only=True)
class Config:
    """All settings of a run."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    fsdp: FSDPConfig = Field(default_factory=FSDPConfig)
    peft: PeftConfig = Field(default_factory=PeftConfig)
    quantization: QuantizationConfig = Field(default_factory=QuantizationConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    preference: PreferenceConfig = Field(default_factory=PreferenceConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)
    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    profile: ProfileConfig = Field(default_factory=ProfileConfig)

    def section(self, cls: type[Section]) -> Section:
        """Return the section of an extension, by its class."""
        return next(value for value in vars(self).values() if isinstance(value, cls))


def with_sections(sections: dict[str, Any]) -> Any:
    """Return `Config` with further sections: name -> dataclass."""
    check_names(get_type_hints(Config), sections)
    fields = {name: Field(default_factory=cls) for name, cls in sections.items()}
    about = {"__annotations__": sections, "__module__": __name__, "__doc__": Config.__doc__}
    return dataclass(config=STRICT, kw_only=True)(type("Config", (Config,), {**about, **fields}))


if not TYPE_CHECKING and door.settings_sections():
    Config = with_sections(door.settings_sections())


Kind = Literal[
    "switch",
    "whole number",
    "number",
    "choice",
    "text",
    "data",
    "names",
    "names or pattern",
    "groups",
    "options",
    "data or sets",
]


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
        """As commands are printed. torchrun's parser looks at the script's flags too, and stops at
        an ambiguous beginning of its own: --r could be --role or --rdzv-id. A field whose name is a
        word of Python, such as for, ends in _."""
        other_names = {"mode": "--quantization", "r": "--peft.r"}
        return other_names.get(self.name, f"--{self.name.removesuffix('_')}")


def settings_of(section_class: Any, section: str = "") -> dict[str, Setting]:
    """Return the settings that a pydantic dataclass declares, by field name."""
    annotations = get_type_hints(section_class)
    settings = {}
    for name, field in section_class.__pydantic_fields__.items():
        members = set(_members(annotations[name]))
        optional = types.NoneType in members
        members.discard(types.NoneType)
        choices = _choices(members)
        settings[name] = Setting(
            section=section,
            name=name,
            kind=_kind(members, choices),
            choices=choices,
            optional=optional,
            default=field.get_default(call_default_factory=True),
            meaning=_meaning(section_class, name),
        )
    return settings


def _members(annotation: Any) -> tuple[Any, ...]:
    is_union = get_origin(annotation) in (Union, types.UnionType)
    return get_args(annotation) if is_union else (annotation,)


def _choices(members: set[Any]) -> tuple[str, ...]:
    """Return the values of a Literal, and true and false if the setting is also a switch."""
    for member in members:
        if get_origin(member) is Literal:
            values = get_args(member)
            return (*values, "true", "false") if bool in members else values
    return ()


def _kind(members: set[Any], choices: tuple[str, ...]) -> Kind:
    if bool in members:
        return "switch"
    if choices:
        return "choice"
    return KINDS[frozenset(members)]


def _meaning(section_class: Any, name: str) -> str:
    """Return the docstring of a field, on one line. A field that a subclass declares again, with
    another default, keeps the docstring of its base."""
    for base in section_class.__mro__:
        fields = getattr(base, "__pydantic_fields__", {})
        if name in fields and fields[name].description:
            return " ".join(fields[name].description.split())
    return ""


KINDS: dict[frozenset[Any], Kind] = {
    frozenset({int}): "whole number",
    frozenset({float}): "number",
    frozenset({str}): "text",
    frozenset({list[str]}): "names",
    frozenset({list[str], str}): "names or pattern",
    frozenset({list[DatasetPart], str}): "data",
    frozenset({list[ParameterGroup]}): "groups",
    frozenset({PeftOptions}): "options",
    frozenset({dict[str, str], str}): "data or sets",
}
SECTIONS: dict[str, Any] = get_type_hints(Config)
SETTINGS: dict[str, Setting] = {
    name: setting
    for section, cls in SECTIONS.items()
    for name, setting in settings_of(cls, section).items()
}


def values_of(config: Config) -> dict[str, Any]:
    """Return the values of all settings by field name, whatever the section."""
    values = {}
    for name, setting in SETTINGS.items():
        section = getattr(config, setting.section)
        values[name] = getattr(section, name)
    return values
