"""What a planned run writes, and what it pins in host memory."""

import torch
from transformers.modeling_utils import PreTrainedModel

from llama_ft.config import Config
from llama_ft.export import save_dtype
from llama_ft.models import BuiltModel
from llama_ft.models.base.shards import local_shard


def saves_copies(config: Config, is_validated: bool) -> bool:
    """Return whether a checkpoint on the CPU may be written from copies, because training continues
    meanwhile. The last one is not. In the first epoch, one before it follows an evaluation."""
    settings = config.checkpoint
    train = config.train
    by_epoch = train.num_epochs > 1 and (settings.save_every_epoch or is_validated)
    by_loss = is_validated and train.eval_steps > 0
    in_training = settings.save_steps > 0 or (settings.save_model and (by_epoch or by_loss))
    return settings.save_async and in_training


def result_bytes_of(config: Config, built: BuiltModel) -> int:
    """Return the bytes of the final model."""
    if not config.checkpoint.save_model:
        return 0
    chosen_dtype = save_dtype(config.checkpoint.save_dtype)
    is_lora = config.peft.use_peft
    parameters = built.model.named_parameters()
    total = 0
    largest_itemsize = 0
    for name, parameter in parameters:
        if is_lora and not parameter.requires_grad:
            continue
        saved_dtype = torch.float32
        if not is_lora:
            saved_dtype = built.stored.dtypes.get(name, parameter.dtype)
        itemsize = (chosen_dtype or saved_dtype).itemsize
        total += parameter.numel() * itemsize
        largest_itemsize = max(largest_itemsize, itemsize)
    if not is_lora:
        # By the model: a quick plan drops layers of towers from the headers.
        total += sum(built.left_out.tensors.values()) * largest_itemsize
        untouched = built.stored.untouched.values()
        total += sum(header.nbytes for header in untouched if header.is_ignored)
    return total


def pinned_excess_of(model: PreTrainedModel) -> int:
    """Return the bytes that offloaded weights and gradients take beyond their own: torch rounds each
    pinned tensor up to a power of two."""
    excess = 0
    for parameter in model.parameters():
        nbytes = local_shard(parameter).nbytes
        rounded = 1 << max(0, nbytes - 1).bit_length()
        tensors = 2 if parameter.requires_grad else 1
        excess += tensors * (rounded - nbytes)
    return excess
