"""Liger's fused Triton kernels in place of a model's norms, MLPs and rotary embedding."""

from transformers.modeling_utils import PreTrainedModel

from llama_ft.config import TrainConfig
from llama_ft.errors import UserError


def apply_liger(model: PreTrainedModel, train: TrainConfig) -> None:
    """Patch the `forward` methods of the skeleton with Liger's own function for its architecture, before adapters and
    sharding. Liger's losses stay out: ours is a sum over target tokens. A UserError without liger-kernel, or if it does
    not know this architecture.
    """
    try:
        from liger_kernel.transformers import monkey_patch
    except ImportError as error:
        raise UserError(f"--use_liger: pip install liger-kernel; it cannot be imported ({error}).") from error
    known = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
    if model.config.model_type not in known:
        raise UserError(f"--use_liger: no kernels for {model.config.model_type}, only {', '.join(sorted(known))}.")
    # Liger rotates queries and keys where they lie. Those that selective keeps would be rotated again when the layer is
    # recomputed, and the gradients wrong without a message.
    kernels = {"rope": False} if train.activation_checkpointing == "selective" else {}
    monkey_patch._apply_liger_kernel_to_instance(
        model, cross_entropy=False, fused_linear_cross_entropy=False, **kernels
    )
