"""Names of a model's parameters: in its checkpoint, and those that PEFT's adapters add."""

from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

from llama_ft.models.adapters.adapter_config import METHODS

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
