"""Read and write checkpoints by rows, if Transformers renames, stacks or splits their tensors while
loading.

Transformers has renamings and converters per architecture, which run operations on the tensors that
they collect (transformers/core_model_loading.py). The same objects are used here, on the requested
rows only:

    stored   experts.0.w1 [I, H]   experts.0.w3 [I, H]   experts.1.w1 ...     Mixtral: two tensors per expert
    model    experts.gate_up_proj [experts, 2 I, H]                           rows 2 and 3 need only experts 2 and 3
"""

import re
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    Interleave,
    MergeModulelist,
    Split,
    SplitModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    apply_converters,
    apply_renamings,
    dot_natural_key,
    rename_source_key,
)
from transformers.modeling_utils import PreTrainedModel

from llama_ft.errors import UserError, reason
from llama_ft.libraries.transformers_private import private
from llama_ft.models.adapters.names import ModelNames, index_names
from llama_ft.models.architecture.new_tokens import GrownSource
from llama_ft.models.architecture.score_head import ScoredSource
from llama_ft.models.base.source import StoredTensor, WeightSource
from llama_ft.models.built import BuiltModel
from llama_ft.models.published.sources import open_dequantized
from llama_ft.models.quantization.bitsandbytes_4bit import belongs_to_4bit

# Rotary frequencies. Llama 2's checkpoints have them per layer; models compute them.
RECOMPUTED = re.compile(r"inv_freq$")
# number of a decoder layer, and the first two names in it
IN_LAYER = re.compile(r"\blayers\.(\d+)\.([^.]+(?:\.[^.]+)?)")
# layers for multi-token prediction: their number in config.json, and modules of their own
COUNT_OF_UNUSED = re.compile("num.*(nextn|mtp)|(nextn|mtp).*num")
NAMED_LAYER = re.compile(r"(^|\.)(mtp|nextn)[^.]*\.")


class OpenedWeights(NamedTuple):
    """Weights that are open for reading."""

    source: WeightSource  # under the model's own names and in its shapes
    conversions: list[WeightTransform]  # those of `BuiltModel.conversions` that they need
    names: ModelNames


def open_model_weights(folder: Path, built: BuiltModel, seed: int = 0) -> OpenedWeights:
    """Open the weights of a model directory under the model's own names and in its shapes, reading
    headers only. `seed` is for the first values of a score head. Raises UserError if the weights are
    missing, unreadable or cannot be converted."""
    return convert_weights(open_dequantized(folder), built, index_names(built.model), seed)


def convert_weights(
    source: WeightSource, built: BuiltModel, names: ModelNames, seed: int = 0
) -> OpenedWeights:
    """Return the tensors of a source under the model's own names; see `open_model_weights`."""
    converted = ConvertedSource(source, built, names)
    if not converted.changes_nothing:
        source = converted
    if built.grown is not None:
        source = GrownSource(source, built.grown)
    if built.has_score:
        source = ScoredSource(source, built.model, seed)
    return OpenedWeights(source, converted.used, names)


class ConvertedSource(WeightSource):
    """The tensors of another source under the model's names and in its shapes. Opening reads
    headers only, and raises UserError if tensors do not fit together.

    Attributes:
        used: those of `built.conversions` that this checkpoint needs.
    """

    def __init__(self, source: WeightSource, built: BuiltModel, names: ModelNames) -> None:
        self._source = source
        self._context = _context(built.model, names)
        self.used: list[WeightTransform] = []
        # the model's name -> the stored name, if nothing else changes
        self.renamed: dict[str, str] = {}
        self._left_out: list[str] = []  # stored names of tensors that the model's text part lacks
        self._ignored: list[str] = []  # stored names of tensors that Transformers skips
        self._dropped: list[str] = []  # stored names of biases that have no meaning
        self._groups: dict[str, _ConvertedTensors] = {}
        # the last group that was converted as a whole
        self._whole: tuple[str, dict[str, torch.Tensor]] | None = None
        self.tensors = {}

        def header(name: str) -> torch.Tensor:
            stored = source.tensors[name]
            return torch.empty(stored.shape, dtype=stored.dtype, device="meta")

        for target, converter, collected in self._collect(built, names.known_keys()):
            group = _ConvertedTensors(target, converter, collected, self._context)
            file = source.tensors[next(iter(collected.values()))[0]].file
            try:
                group.results.update(group.convert(header))
            except RuntimeError as error:  # torch's, of tensors that cannot be stacked
                counts = ", ".join(
                    f"{len(names)} of {pattern}" for pattern, names in collected.items()
                )
                raise UserError(
                    f"{file}: the tensors for {target} do not fit each other: {counts} ({reason(error)}).\n"
                    f"Download the model again."
                ) from error
            for name, tensor in group.results.items():
                self._groups[name] = group
                self.tensors[name] = StoredTensor(file, tuple(tensor.shape), tensor.dtype)
        for name, stored in self.renamed.items():
            self.tensors[name] = source.tensors[stored]
        for name in self._left_out:
            self.tensors[name] = replace(source.tensors[name], is_left_out=True)
        for name in self._ignored:
            self.tensors[name] = replace(source.tensors[name], is_ignored=True)
        same_names = all(name == stored for name, stored in self.renamed.items())
        others = self._left_out or self._ignored or self._dropped
        self.changes_nothing = same_names and not self._groups and not others

    def _collect(
        self, built: BuiltModel, known: dict[str, bool]
    ) -> list[tuple[str, WeightConverter, dict[str, list[str]]]]:
        """Rename every stored tensor as Transformers does. Return the groups that converters take
        together. `known`: the names that the model has."""
        model = built.model
        left_out = dict.fromkeys(built.left_out.tensors, True)
        all_known = known | left_out
        transforms = deepcopy(built.conversions)
        renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
        converters = [
            transform for transform in transforms if isinstance(transform, WeightConverter)
        ]
        # model's name -> pattern of the converter -> stored names
        taken = dict[str, dict[str, list[str]]]()
        unused = _UnusedLayers(model, self._source.tensors)
        for stored in sorted(self._source.tensors, key=dot_natural_key):
            name, pattern = rename_source_key(
                stored, renamings, converters, model.base_model_prefix, all_known
            )
            if name not in known and stored in known:
                name, pattern = rename_source_key(stored, [], [], model.base_model_prefix, known)
            if name in left_out or belongs_to_4bit(name, left_out):
                self._left_out.append(stored)
            elif name not in known:
                if is_ignored(model, name) or unused.hold(stored):
                    self._ignored.append(stored)
                elif _is_added_bias(self._source, stored):
                    self._dropped.append(stored)
                else:  # account_for reports it. Experts of an unknown layer share one `name`.
                    self.renamed[name if pattern is None else stored] = stored
            elif pattern is not None:
                by_pattern = taken.setdefault(name, {})
                by_pattern.setdefault(pattern, []).append(stored)
            elif name in self.renamed:
                raise UserError(
                    f"two tensors, {self.renamed[name]} and {stored}, map to the same parameter {name}."
                )
            else:
                self.renamed[name] = stored
        self.used = [transform for transform in transforms if transform.was_used()]
        converter_of = _by_pattern(converters)
        groups = []
        for name, collected in taken.items():
            any_pattern = next(iter(collected))
            groups.append((name, converter_of[any_pattern], collected))
        return groups

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read rows [start, stop) in the stored dtype. Experts are read singly, other groups once
        as a whole."""
        if name not in self._groups:
            return self._source.read_rows(self.renamed.get(name, name), start, stop)
        group = self._groups[name]
        if group.by_expert:
            return group.convert(self._source.read, slice(start, stop))[name]
        if self._whole is None or self._whole[0] != group.target:
            self._whole = None  # free it before the next group
            self._whole = (group.target, group.convert(self._source.read))
        return self._whole[1][name][start:stop]


def _is_added_bias(source: WeightSource, name: str) -> bool:
    """Return whether a tensor is a bias of zeros of a dequantized weight. Libraries of GPTQ store
    one also for layers without a bias (https://github.com/AutoGPTQ/AutoGPTQ/issues/555)."""
    if not name.endswith(".bias"):
        return False
    weight = source.tensors.get(f"{name.removesuffix('bias')}weight")
    return weight is not None and weight.is_dequantized and not source.read(name).any()


def is_ignored(model: PreTrainedModel, name: str) -> bool:
    """Return whether Transformers skips a tensor of a checkpoint that the model lacks. An export
    copies it."""
    patterns = private(model, "_keys_to_ignore_on_load_unexpected") or ()
    return not RECOMPUTED.search(name) and any(re.search(pattern, name) for pattern in patterns)


class _UnusedLayers:
    """Layers of a checkpoint for multi-token prediction that Transformers does not list by their
    number (`_keys_to_ignore_on_load_unexpected`): it ignores every tensor that a model lacks. Here a
    decoder layer that config.json does not count stays an error.

    Args:
        model: the skeleton.
        stored: names of tensors in the checkpoint.
    """

    def __init__(self, model: PreTrainedModel, stored: Iterable[str]) -> None:
        config = model.config.get_text_config()
        self._first = getattr(config, "num_hidden_layers", None)
        if self._first is None:
            return
        counts = [
            value
            for key, value in config.to_dict().items()
            if COUNT_OF_UNUSED.search(key) and isinstance(value, int)
        ]
        self._end = self._first + max(counts, default=0)
        in_layers = [match for name in stored if (match := IN_LAYER.search(name))]
        # such as self_attn.q_proj
        in_decoder = {match[2] for match in in_layers if int(match[1]) < self._first}
        # those with a weight that no decoder layer has, such as eh_proj
        self._others = {int(match[1]) for match in in_layers if match[2] not in in_decoder}

    def hold(self, stored: str) -> bool:
        """Whether a tensor that the model lacks belongs to such a layer."""
        match = IN_LAYER.search(stored)
        if match and self._first is not None and int(match[1]) >= self._first:
            return int(match[1]) < self._end or int(match[1]) in self._others
        return bool(NAMED_LAYER.search(stored))


@dataclass(frozen=True)
class SavedTensors:
    """Parameters that are saved together, in the checkpoint's layout."""

    parameters: list[str]  # their names
    tensors: dict[str, tuple[int, ...]]  # name -> shape of the saved tensors, in this order
    converted: "_ConvertedTensors | None" = None  # None: only names change
    by_row: bool = False  # each row of the only parameter becomes separate tensors

    def convert(self, values: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the saved tensors of these parameters (by_row: of one row), in the order of
        `tensors`."""
        assert self.converted is not None
        return list(self.converted.convert(values.__getitem__).values())


def saved_layout(
    model: PreTrainedModel,
    names: ModelNames,
    conversions: list[WeightTransform],
    tensors: dict[str, torch.Tensor],
) -> list[SavedTensors]:
    """Return the layout in which Transformers' revert_weight_conversion would save `tensors`, the
    parameters and persistent buffers of a loaded model: all `conversions` of its checkpoint are
    undone. Only shapes are used."""
    transforms = [transform.reverse_transform() for transform in reversed(conversions)]
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    converter_of = _by_pattern(converters)
    context = _context(model, names)
    groups = dict[str, _ConvertedTensors | str]()
    for name in tensors if not converters else sorted(tensors, key=dot_natural_key):
        target, pattern = apply_converters(name, converters)
        if pattern is None:
            groups[apply_renamings(name, renamings)] = name
        else:
            new_group = _ConvertedTensors(target, converter_of[pattern], {}, context)
            group = groups.setdefault(target, new_group)
            assert isinstance(group, _ConvertedTensors)
            group.collected.setdefault(pattern, []).append(name)
    layout = []
    for target, group in groups.items():
        if isinstance(group, str):
            shape = tuple(tensors[group].shape)
            layout.append(SavedTensors([group], {target: shape}))
        else:
            layout.append(_reverted(group, tensors, renamings))
    return layout


def _by_pattern(converters: list[WeightConverter]) -> dict[str, WeightConverter]:
    """Return the converter of each pattern of names."""
    by_pattern = dict[str, WeightConverter]()
    for converter in converters:
        by_pattern |= dict.fromkeys(converter.source_patterns, converter)
    return by_pattern


def _reverted(
    group: "_ConvertedTensors", tensors: dict[str, torch.Tensor], renamings: list[WeightRenaming]
) -> SavedTensors:
    def empty(name: str) -> torch.Tensor:
        return torch.empty(tensors[name].shape, device="meta")

    shapes = dict[str, tuple[int, ...]]()
    for name, tensor in group.convert(empty).items():
        shapes[apply_renamings(name, renamings)] = tuple(tensor.shape)
    parameters = group.in_order()
    operations = group.converter.operations
    splits_rows = isinstance(operations[-1], SplitModulelist) and operations[-1].dim == 0
    if not splits_rows or not _keeps_rows(operations[:-1]) or len(parameters) != 1:
        return SavedTensors(parameters, shapes, group)
    # Transformers writes all experts' w1, then all experts' w3. Here rows arrive expert by expert.
    names = list(shapes)
    experts = tensors[parameters[0]].shape[0]
    by_expert = {}
    for expert in range(experts):
        for name in names[expert::experts]:
            by_expert[name] = shapes[name]
    return SavedTensors(parameters, by_expert, group, by_row=True)


@dataclass(frozen=True)
class _ConvertedTensors:
    """Tensors that one converter of Transformers takes together."""

    target: str  # name of the first tensor that it makes
    converter: WeightConverter  # empty; copied for each use
    # pattern of the converter -> names of matching tensors, in order
    collected: dict[str, list[str]]
    context: dict[str, Any]  # information for operations
    results: dict[str, torch.Tensor] = field(
        default_factory=dict
    )  # name -> result on the meta device

    @property
    def by_expert(self) -> bool:
        """Whether a row of the result needs only the tensors of one expert."""
        first, *others = self.converter.operations
        return isinstance(first, MergeModulelist) and first.dim == 0 and _keeps_rows(others)

    def in_order(self) -> list[str]:
        """All collected tensors, in the order of the converter's patterns."""
        return [
            name
            for pattern in self.converter.source_patterns
            for name in self.collected.get(pattern, [])
        ]

    def convert(
        self, take: Callable[[str], torch.Tensor], chosen: slice = slice(None)
    ) -> dict[str, torch.Tensor]:
        """Run the operations on `take(name)` of the collected tensors, or on a part of those of
        each pattern."""
        converter = deepcopy(self.converter)
        for pattern, names in self.collected.items():
            for name in names[chosen]:
                converter.add_tensor(self.target, name, pattern, take(name))  # type: ignore[arg-type]
        results = converter.convert(self.target, **self.context)
        # Transformers returns some tensors in a list of one.
        tensors = {}
        for name, tensor in results.items():
            tensors[name] = tensor[0] if isinstance(tensor, list) else tensor
        return tensors


def _context(model: PreTrainedModel, names: ModelNames) -> dict[str, Any]:
    """Return what operations are given. They ask the model for shapes of weights."""
    shapes = {key: weight.shape for weight in names.weights.values() for key in weight.keys}

    def get_parameter(key: str) -> torch.Tensor:
        return torch.empty(shapes[key], device="meta")

    return {"model": SimpleNamespace(get_parameter=get_parameter), "config": model.config}


def _keeps_rows(operations: Iterable[ConversionOps]) -> bool:
    """Return whether every operation keeps the rows of dimension 0 separate."""

    def keeps_rows(operation: ConversionOps) -> bool:
        if isinstance(operation, Transpose):
            return min(operation.dim0, operation.dim1) > 0 and not operation.check_dims
        return isinstance(operation, (Concatenate, Chunk, Split, Interleave)) and operation.dim > 0

    return all(keeps_rows(operation) for operation in operations)
