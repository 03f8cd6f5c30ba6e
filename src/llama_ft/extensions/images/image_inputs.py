"""Arguments of a model for a micro-batch with images: what the processor made, and positions.

Qwen-VL numbers tokens in three dimensions: those of an image by row and column. The rule is the
model's own method `get_rope_index`. It runs here, on the host, on the examples as a padded batch, so
that a packed sequence gets the positions that its samples have alone. Other models count from 0.
"""

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from llama_ft.data import Batch
from llama_ft.extensions.images.towers.image_numbers import NUMBERS, ImageNumbers, numbers_of
from llama_ft.runtime.devices import sent


@dataclass
class ImageTensors:
    """What a processor makes of a micro-batch, in addition to tokens, by its own names."""

    # int64, with the shape of the batch's input_ids: which tokens stand for images
    per_token: dict[str, torch.Tensor]
    # pixels, and numbers per image
    others: dict[str, torch.Tensor]
    # of the images of each example; empty of one without images
    checksums: list[bytes] = field(default_factory=list)
    # for the lengths of the examples; None: not yet
    _prepared: "_Prepared | None" = None

    def prepare(
        self, model: nn.Module, batch: Batch, lengths: list[int], device: torch.device
    ) -> None:
        """Make ahead of time what `arguments` needs, in a thread. Pixels for a GPU are copied to pinned
        memory."""
        if device.type == "cuda":
            for name, values in self.others.items():
                self.others[name] = values.pin_memory()
        self._prepared = self._prepare(model, batch, lengths)

    def arguments(
        self, model: nn.Module, batch: Batch, lengths: list[int], device: torch.device
    ) -> dict[str, Any]:
        """Return the further arguments of a model, on the device, see `MediaTensors.arguments`."""
        prepared = self._prepared
        if prepared is None or prepared.lengths != lengths:
            prepared = self._prepare(model, batch, lengths)
        arguments: dict[str, Any] = {}
        for name, values in prepared.tensors.items():
            arguments[name] = sent(values, device)
        if prepared.numbers is not None:
            arguments[NUMBERS] = prepared.numbers.sent(device)
        return arguments

    def _prepare(self, model: nn.Module, batch: Batch, lengths: list[int]) -> "_Prepared":
        per_token = self.per_token
        if batch.is_packed:
            added = sum(lengths) - batch.input_ids.shape[1]
            per_token = {
                name: nn.functional.pad(values, (0, added)) for name, values in per_token.items()
            }
        taken = taken_arguments(model)
        tensors = {}
        for name, values in (per_token | self.others).items():
            if name in taken:
                tensors[name] = values
        numbers = numbers_of(model, tensors)
        if numbers is not None:
            for name in numbers.replaced:
                tensors.pop(name, None)
        rule = _position_rule(model)
        if rule is not None:
            tensors["position_ids"] = _positions(rule, batch, per_token, self.others, lengths)
        return _Prepared(lengths, tensors, numbers)

    def without_values(self, copies: int) -> list[torch.Tensor]:
        """Replace pixels by tensors without storage, see `MediaTensors.without_values`."""
        waiting = []
        for name, values in self.others.items():
            if not values.is_floating_point():
                continue  # numbers of patches are read by the model's code
            self.others[name] = torch.empty(values.shape, dtype=values.dtype)
            waiting += [torch.empty(values.shape, dtype=values.dtype) for _ in range(copies)]
        return waiting


@dataclass(frozen=True)
class _Prepared:
    """Arguments of a model for a micro-batch, on the host.

    Attributes:
        lengths: tokens of each example.
        tensors: the arguments, for the device.
        numbers: see `image_numbers`.
    """

    lengths: list[int]
    tensors: dict[str, torch.Tensor]
    numbers: ImageNumbers | None


def taken_arguments(model: Any) -> set[str]:
    """Return the names of the arguments of the model and of what it calls first."""
    names = set(inspect.signature(model.forward).parameters)
    return names | set(inspect.signature(model.base_model.forward).parameters)


def _position_rule(model: nn.Module) -> Any:
    """Return the model's method that numbers tokens in several dimensions; None without one."""
    for module in model.modules():
        rule = getattr(module, "get_rope_index", None)
        if rule is not None:
            return rule
    return None


def _positions(
    rule: Any,
    batch: Batch,
    per_token: dict[str, torch.Tensor],
    others: dict[str, torch.Tensor],
    lengths: list[int],
) -> torch.Tensor:
    """Return position ids, int64 [dimensions, samples, length], or [dimensions, 1, tokens] of a
    packed sequence."""
    padded = dict(per_token)
    input_ids = batch.input_ids
    if batch.is_packed:
        filled = nn.functional.pad(input_ids, (0, sum(lengths) - input_ids.shape[1]))
        input_ids = _padded(filled, lengths)
        padded = {name: _padded(values, lengths) for name, values in per_token.items()}
    counts = torch.tensor(lengths).unsqueeze(1)
    mask = (torch.arange(input_ids.shape[1]) < counts).long()
    known = inspect.signature(rule).parameters
    arguments = {name: value for name, value in (padded | others).items() if name in known}
    positions: torch.Tensor = rule(input_ids=input_ids, attention_mask=mask, **arguments)[0]
    if not batch.is_packed:
        return positions
    rows = [positions[:, number, :length] for number, length in enumerate(lengths)]
    return torch.cat(rows, dim=1).unsqueeze(1)


def _padded(sequence: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Return the examples of a packed sequence [1, tokens] as a padded batch [examples, length]."""
    return pad_sequence(list(sequence[0].split(lengths)), batch_first=True)
