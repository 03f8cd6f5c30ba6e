"""Names of a model's parameters: in its checkpoint, and those that PEFT's adapters add."""

from collections import defaultdict
from dataclasses import dataclass

from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING
from transformers.modeling_utils import PreTrainedModel

from llama_ft.models.adapters.adapter_config import METHODS
from llama_ft.models.quantization.layers import Scheme, quantized_weights

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."  # PEFT's prefix for the names of a wrapped model
# prefixes of the names of an adapter's parameters
ADAPTER_PARTS = (
    ".trainable_tokens_delta.",
    *(f".{PEFT_TYPE_TO_PREFIX_MAPPING[method]}" for method in METHODS),
)


def is_adapter_weight(name: str) -> bool:
    """Return whether PEFT has added a parameter, so that the model's own checkpoint does not have
    it."""
    return any(part in name for part in ADAPTER_PARTS)


def checkpoint_key(name: str) -> str:
    """Return the name of a parameter in the model's own checkpoint, without PEFT's wrappers."""
    # these can be one within another
    key = name.replace("token_adapter.", "").replace("base_layer.", "")
    return key.replace(".original_module.", ".").replace(".modules_to_save.default.", ".")


@dataclass(frozen=True)
class QuantizedName:
    """How a weight is quantized, and the name of its scales in the model."""

    scheme: Scheme
    scale: str
    is_prequantized: bool  # the checkpoint holds it in bitsandbytes' 4 bits


@dataclass(frozen=True)
class WeightNames:
    """Where a weight of the model is in its checkpoint."""

    keys: list[str]  # its names there: a tied weight has several, of which one may be stored
    tied_keys: list[str]  # names of the weights that Transformers ties it to
    shape: tuple[int, ...]  # in weights, also if it is quantized
    quantized: QuantizedName | None


@dataclass(frozen=True)
class ModelNames:
    """The names of a complete model in its checkpoint. Whoever opens, loads or exports weights makes
    this index once, when the model has its adapters."""

    # name of a parameter -> its weight, in the model's order, tied ones once; without adapters and
    # scales of quantized weights
    weights: dict[str, WeightNames]
    buffers: dict[str, str]  # name -> name in the checkpoint
    # each name of a parameter in the checkpoint -> all names of this parameter there
    aliases: dict[str, list[str]]

    def known_keys(self) -> dict[str, bool]:
        """Return the names that parameters and buffers may have in the checkpoint, each -> True."""
        return dict.fromkeys([*self.aliases, *self.buffers.values()], True)


def index_names(model: PreTrainedModel) -> ModelNames:
    """Return the names of a model."""
    first_names = dict[int, str]()  # id of a parameter -> its name in the model
    keys = defaultdict[int, list[str]](list)
    shapes = dict[int, tuple[int, ...]]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        number = id(parameter)
        first_names.setdefault(number, name)
        shapes[number] = tuple(parameter.shape)
        if not is_adapter_weight(name):
            keys[number].append(checkpoint_key(name))
    quantized = dict[int, QuantizedName]()
    scales = set[int]()
    for weight in quantized_weights(model):
        number = id(weight.weight)
        shapes[number] = weight.shape
        scales.add(id(weight.scale))
        scale = first_names[id(weight.scale)]
        quantized[number] = QuantizedName(weight.scheme, scale, weight.is_prequantized)
    ties = model.all_tied_weights_keys
    weights = dict[str, WeightNames]()
    for number, name in first_names.items():
        if number not in scales and not is_adapter_weight(name):
            tied_keys = [ties[key] for key in keys[number] if key in ties]
            weights[name] = WeightNames(
                keys[number], tied_keys, shapes[number], quantized.get(number)
            )
    buffers = {name: checkpoint_key(name) for name, _ in model.named_buffers()}
    aliases = {key: own for own in keys.values() for key in own}
    return ModelNames(weights, buffers, aliases)
