"""Features of images while `generate` answers prompts with a sharded model."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers.modeling_utils import PreTrainedModel

from llama_ft.libraries.evidence import IMAGE_FEATURES


@contextmanager
def towers_in_root(model: PreTrainedModel) -> Iterator[None]:
    """In the block, `generate` computes features of images inside of the hooks of the root unit, which
    has weights of the towers. It calls the model's `get_image_features` before the first forward
    pass."""
    inner = model.base_model
    if not isinstance(model, FSDPModule) or not hasattr(inner, IMAGE_FEATURES):
        yield
        return
    compute = getattr(inner, IMAGE_FEATURES)
    setattr(model, IMAGE_FEATURES, compute)
    register_fsdp_forward_method(model, IMAGE_FEATURES)
    with_hooks = getattr(model, IMAGE_FEATURES)

    @wraps(compute)  # generate() reads the names of its parameters
    def in_root(*args: Any, **kwargs: Any) -> Any:
        return with_hooks(*args, **kwargs)

    setattr(inner, IMAGE_FEATURES, in_root)
    try:
        yield
    finally:
        for module in {model, inner}:
            del vars(module)[IMAGE_FEATURES]
