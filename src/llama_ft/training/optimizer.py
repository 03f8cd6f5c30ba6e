"""The optimizer and its learning rate."""

import math

import torch
from torch import nn

from llama_ft.config import TrainConfig


def build_optimizer(model: nn.Module, train: TrainConfig) -> torch.optim.AdamW:
    """AdamW over the trained parameters, fused into one kernel; no weight decay on parameters of one dimension."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": train.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=train.lr, fused=True)


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """The optimizer's groups in a line."""
    counts = {group["weight_decay"]: sum(p.numel() for p in group["params"]) for group in optimizer.param_groups}
    decayed = [f"weight decay {decay:g} on {count:,} parameters" for decay, count in counts.items() if decay]
    return f"{type(optimizer).__name__} (fused), {', '.join(decayed) or 'no weight decay'}; none on norms and biases"


def learning_rate(train: TrainConfig, step: int, total_steps: int, epoch: int) -> float:
    """The learning rate of optimizer step `step` (0-based): a function of position only, so nothing has to be saved.

    Args:
        train: lr, lr_scheduler, warmup_steps, gamma.
        step: optimizer step, 0 <= step < total_steps.
        total_steps: optimizer steps of the whole run, where cosine and linear reach zero.
        epoch: 0-based; step multiplies by gamma after each, as torch's StepLR(step_size=1) per epoch does.
    """
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    done = (step - train.warmup_steps) / max(1, total_steps - train.warmup_steps)
    factors = {
        "cosine": (1 + math.cos(math.pi * done)) / 2,
        "linear": 1 - done,
        "constant": 1.0,
        "step": train.gamma**epoch,
    }
    return train.lr * factors[train.lr_scheduler]
