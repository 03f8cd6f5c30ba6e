"""Muon for the matrices of the decoder layers, AdamW for everything else, as one optimizer:
`--optimizer examples/muon.py:muon`. See docs/guides/training-options.md."""

from typing import Any

import torch

Group = dict[str, Any]


def muon(groups: list[Group]) -> torch.optim.Optimizer:
    """Return the optimizer of a run.

    Args:
        groups: those of torch.optim, with `params` (pairs of a name and a parameter), `lr` (the
            peak, which the schedule multiplies) and `weight_decay`.
    """
    matrices = [only(group, takes_muon) for group in groups]
    others = [only(group, lambda name, weight: not takes_muon(name, weight)) for group in groups]
    return MuonAndAdamW(
        [group for group in matrices if group["params"]],
        [group for group in others if group["params"]],
    )


def takes_muon(name: str, weight: torch.Tensor) -> bool:
    """Muon's author leaves embeddings and the LM head to AdamW."""
    return weight.ndim == 2 and ".layers." in name


def only(group: Group, chosen: Any) -> Group:
    """Return a group with the chosen parameters."""
    return {**group, "params": [pair for pair in group["params"] if chosen(*pair)]}


class MuonAndAdamW(torch.optim.Optimizer):
    """Two optimizers of torch that share `state` and `param_groups`, so that both are saved."""

    def __init__(self, matrices: list[Group], others: list[Group]) -> None:
        parts: list[torch.optim.Optimizer] = []
        if matrices:
            # the learning rate and weight decay of AdamW fit
            parts.append(torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw"))
        if others:
            parts.append(torch.optim.AdamW(others))
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        first = 0
        for part in self.parts:
            last = first + len(part.param_groups)
            part.param_groups = self.param_groups[first:last]
            part.state = self.state
            part.step()
            first = last
