"""One step seen from the FSDP units: what each gathers, and the memory at its begin and end."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves


class StepTrace:
    """Hooks on the units, from its making to `stop`.

    Args:
        model: sharded; what it computes does not change.
        phase: the present one.
        read: memory in use now.

    Attributes:
        gathered: unit -> most bytes of its parameters that were there whole when its forward began.
        layers: unit -> decoder layers those belong to.
        moments: memory over the last micro-batch and what came after it.
    """

    def __init__(self, model: nn.Module, phase: Callable[[], str | None], read: Callable[[], int]) -> None:
        from llama_ft.models.skeleton import decoder_layers  # seconds that only those who train pay

        self.gathered: dict[str, int] = {}
        self.layers: dict[str, int] = {}
        self.moments: list[dict[str, str | int]] = []
        self._phase, self._read = phase, read
        self._layers = decoder_layers(model)
        self._used_as_stored = {id(p) for p in model.parameters() if not isinstance(p, DTensor)}  # no unit is gathered
        self._hooks = []
        units = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
        for name, module in cast(dict[str, nn.Module], units).items():
            # FSDP's own hooks are there already: these find parameters gathered before forward, and freed after.
            begin, end = partial(self._forward_begins, name), partial(self._forward_ends, name)
            self._hooks.append(module.register_forward_pre_hook(begin, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(end))

    def note(self, label: str) -> None:
        """Memory now."""
        self.moments.append({"label": label, "bytes": self._read()})

    def begin_micro_batch(self) -> None:
        """Only the last one is shown: gradients of the others are there by then."""
        self.moments = []

    def stop(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _forward_begins(self, name: str, module: nn.Module, inputs: Any, keywords: Any) -> None:
        if self._phase() != "forward":  # an answer or an evaluation
            return
        self.note(f"forward {name or 'model'}")
        self.gathered[name] = max(self.gathered.get(name, 0), sum(map(self._gathered_bytes, module.parameters())))
        within = set(module.modules())
        self.layers[name] = sum(
            any(self._gathered_bytes(p) for p in layer.parameters()) for layer in self._layers if layer in within
        )
        # What its gradient arrives at last, while the unit is still gathered. (Module backward hooks would put an
        # operator around every unit, and do not take transformers' output classes.)
        self._note_gradient((inputs, keywords), f"backward {name or 'model'} ends")

    def _forward_ends(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._phase() == "forward":
            self.note(f"forward {name or 'model'} ends")
            self._note_gradient(output, f"backward {name or 'model'}")

    def _note_gradient(self, tensors: Any, label: str) -> None:
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda gradient: self.note(label))
                return

    def _gathered_bytes(self, parameter: torch.Tensor) -> int:
        """Of a parameter that is there whole; 0 of a shard, where its storage is freed, and where it always is."""
        if isinstance(parameter, DTensor) or id(parameter) in self._used_as_stored:
            return 0
        return min(parameter.nbytes, parameter.untyped_storage().nbytes())
