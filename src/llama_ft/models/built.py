"""A model, and what the steps that build it tell each other and the rest of the run.

A building step changes modules of the model in place, and returns what others must know. Whoever
calls it assigns that to a field of `BuiltModel`: the recipe's `build_model`, from top to bottom. No
step sets a field. Nothing is stored on the model itself, except in the model's config.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.core_model_loading import WeightTransform
from transformers.modeling_utils import PreTrainedModel

from llama_ft.config import Config, QuantizationConfig
from llama_ft.models.base.source import StoredTensor, WeightSource
from llama_ft.phases import PhaseMonitor
from llama_ft.runtime.devices import PRECISIONS, Precision
from llama_ft.runtime.process_group import Ranks

if TYPE_CHECKING:
    from llama_ft.models.packing.packed_samples import TokenMixers


@dataclass(frozen=True)
class NewTokens:
    """Tokens to add to the model's vocabulary."""

    ids: list[int]  # ascending
    stored_rows: int  # rows of the model's embedding in the checkpoint
    rows: int  # rows that it needs; the same number if the tokens fit into spare rows


@dataclass(frozen=True)
class GrownRows:
    """Parameters of a model that have fewer rows in the checkpoint."""

    names: list[str]
    stored_rows: int
    rows: int


@dataclass(frozen=True)
class LeftOut:
    """The parts of a checkpoint's class that its text part lacks."""

    modules: list[str]  # names of the outermost ones, and of parameters outside the text decoder
    tensors: dict[str, int]  # their parameters and persistent buffers by name -> number of elements
    # name of the module that makes logits; the modules around it only pass arguments on
    causal: str = ""


@dataclass(frozen=True)
class ModelRequest:
    """What the recipe's `build_model` builds."""

    config: Config
    folder: Path  # directory of the base model
    model_config: PretrainedConfig
    new_tokens: NewTokens | None = None
    # train: the run's model; reference: frozen; read: to answer, evaluate or export
    purpose: Literal["train", "reference", "read"] = "train"
    is_sharded: bool = True  # False: without FSDP, each rank holds the whole model
    with_towers: bool = False  # samples have media, so all parts of a multimodal model are built
    # weights of a checkpoint to continue or to read, see load_weights
    trained: WeightSource | None = None
    storage: Precision | None = None  # None: that of the settings
    quantized_from: torch.dtype | None = None  # None: the dtype of frozen weights
    # by a plan, which reads no weights: opens a Loader, as `open_loader` does; None: that one
    open_loader: Callable[..., Any] | None = None

    @property
    def precision(self) -> Precision:
        return self.storage or PRECISIONS[self.config.train.precision]

    @property
    def has_frozen_base(self) -> bool:
        """Whether the weights of the base model are not trained, so that they can be quantized."""
        return self.config.peft.use_peft or self.purpose != "train"


def is_in(name: str, parts: list[str]) -> bool:
    """Return whether a parameter is one of `parts`, or belongs to a module among them."""
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def settings_to_read(config: Config, trust_remote_code: bool) -> Config:
    """Return a run's settings for its model when it is only read: without quantization, packing and
    whatever else changes only how training computes."""
    model = replace(
        config.model, trust_remote_code=trust_remote_code, compile=False, use_liger=False
    )
    train = replace(
        config.train,
        activation_checkpointing="off",
        router_aux_loss_coef=0.0,
        neftune_noise_alpha=0.0,
    )
    return replace(
        config,
        model=model,
        train=train,
        data=replace(config.data, batching_strategy="padding"),
        quantization=QuantizationConfig(),
    )


@dataclass(frozen=True)
class Adapter:
    """The adapter of a model: its config, and the names of its tensors."""

    config: Any  # PEFT's config, saved in adapter_config.json
    keys: dict[str, str]  # parameter name in the model -> tensor name in adapter_model.safetensors
    # name of each layer that has an adapter -> its adapter alone, unsharded, on meta
    layers: dict[str, nn.Module]
    # PiSSA trains only the first rows of each A and the first columns of each B; None: all of them
    trained_rank: int | None = None


@dataclass(frozen=True)
class StoredModel:
    """What an export must know of the checkpoint that a model was loaded from."""

    dtypes: dict[str, torch.dtype]  # of the model's parameters and stored buffers, by their names
    # tensors that are not part of the model, by their names in the checkpoint; copied unchanged
    untouched: dict[str, StoredTensor]
    # those of `BuiltModel.conversions` that the checkpoint needs; an export undoes them
    conversions: list[WeightTransform] = field(default_factory=list)


@dataclass(frozen=True)
class FsdpUnit:
    """An FSDP unit: parameters that are all-gathered, used and freed together."""

    name: str  # name of its module; "" is the root, which holds all other parameters
    kind: str  # class of that module
    parameters: int  # number; each tied weight once
    # unsharded: quantized weights as stored, others in the compute dtype; without those used as
    # stored
    bytes: int


@dataclass(frozen=True)
class Sharding:
    """How FSDP shards a model."""

    units: list[FsdpUnit] = field(default_factory=list)
    # modules whose unit stays unsharded between the micro-batches of a step
    kept_unsharded: list[nn.Module] = field(default_factory=list)
    # those whose unit is freed after its forward pass
    resharded: list[nn.Module] = field(default_factory=list)

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of all units."""
        return sum(unit.bytes for unit in self.units)


@dataclass
class BuiltModel:
    """A model, from the meta device to its loaded shards. Each field is the result of the step that
    is named there.

    A plain model of Transformers can be wrapped as it is: the defaults are those of a model without
    new tokens, score head, packing, adapter and chunked loss.
    """

    model: PreTrainedModel
    # directory of the base model, for its weights and its other files
    folder: Path = Path()
    # By build_on_meta, up to has_score: how Transformers converts the tensors of the checkpoint's
    # class
    conversions: list[WeightTransform] = field(default_factory=list)
    left_out: LeftOut = LeftOut([], {})  # what the text part of a multimodal model lacks
    # Names of the outermost modules and parameters of a multimodal model outside of its text part:
    # towers and projector. Empty unless they are built, because samples have media.
    towers: list[str] = field(default_factory=list)
    # By build_requested: those among them, or within them, that are trained
    trained_towers: list[str] = field(default_factory=list)
    grown: GrownRows | None = None  # parameters with fewer rows in the checkpoint
    has_score: bool = False  # a reward model's head in place of the LM head
    # By the steps of the same names
    mixers: "TokenMixers | None" = (
        None  # use_packed_attention; None: the model is called with padding
    )
    router_coefficient: float = 0.0  # use_router_loss; 0: the loss is not computed
    adapter: Adapter | None = None  # inject_lora
    has_chunked_loss: bool = False  # use_chunked_loss; check_packing may find that it differs
    sharding: Sharding = Sharding()  # apply_fsdp
    stored: StoredModel = StoredModel({}, {})  # load_weights
    # By open_run: whether units stay unsharded while answers are generated, as planned; None: there is no
    # plan, so free memory decides
    keeps_units: bool | None = None

    @property
    def trained_tower_weights(self) -> list[nn.Parameter]:
        """The trained parameters of `trained_towers`."""
        weights = []
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and is_in(name, self.trained_towers):
                weights.append(parameter)
        return weights

    @property
    def tower_modules(self) -> list[nn.Module]:
        """The modules among `towers`."""
        modules = dict(self.model.named_modules())
        return [modules[name] for name in self.towers if name in modules]


class BuildModel(Protocol):
    """The recipe's `build_model`: the only list of building steps. Plans, references, answers,
    evaluations and exports get it as an argument."""

    def __call__(
        self, request: ModelRequest, ranks: Ranks | None, memory: PhaseMonitor
    ) -> BuiltModel:
        """Build, shard and load a model. All ranks call it together.

        Args:
            request: the model, and what it is for.
            ranks: the ranks that share its weights; None: it stays on the meta device.
            memory: informed when loading begins.
        """
