"""Packed rows for token mixers that know nothing of them: Mamba, gated delta nets, short convolutions, and attention
that is not called through transformers' interface.

    sequence      a a a b b c c c c        norms, MLPs and experts compute all rows at once
    token mixer   a a a | b b | c c c c    one row after another, which is exact for any architecture

A token mixer is found by its arguments: to generate, whatever looks back along the sequence takes a cache. On CUDA its
kernels get the offsets of the rows, if they are installed. `check_packing` checks that they use them.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_utils import PreTrainedModel

from llama_ft.models.transformers_private import private
from llama_ft.runtime.console import log
from llama_ft.runtime.devices import sent

# What transformers' architectures call the cache of generation.
CACHES = {"past_key_values", "past_key_value", "layer_past", "cache_params", "past", "state", "cache"}
POSITIONS = "past_key_values_length"  # what position embeddings that count tokens themselves take (Bart's, RoBERTa's)
OF_FLASH_ATTENTION = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
MISSING_KERNEL = re.compile(r"without `([^`]+)`")


@dataclass(frozen=True)
class PackedRows:
    """Where the rows of a sequence begin and end."""

    lengths: tuple[int, ...]  # tokens of each row, on the host: reading them must not wait for the device
    offsets: torch.Tensor  # int32 [rows + 1], on the device: 0 and the end of each row
    longest: int  # tokens of the longest row. Compiled layers read this one number: of `lengths` each would be a guard
    are_alike: bool = False  # all rows have one length, which cuDNN's kernel is worth a plan for
    indices: torch.Tensor | None = None  # int32 [1, tokens], on the device: which row each token is of; for kernels

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> "PackedRows":
        """Rows of so many tokens, for a model that computes on `device`."""
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        return cls(tuple(lengths), sent(ends, device), max(lengths))

    def cut(self, size: int) -> "PackedRows":
        """Rows of at most `size` tokens: what attention in chunks keeps apart within each row."""
        if size >= self.longest:
            return self
        parts = [min(size, length - start) for length in self.lengths for start in range(0, length, size)]
        return PackedRows.of(parts, self.offsets.device)


_CURRENT: ContextVar[PackedRows | None] = ContextVar("packed rows", default=None)
current_rows = _CURRENT.get  # the rows of the sequence that is being computed; None: batches that are not packed
set_rows = _CURRENT.set


@contextmanager
def rows_of(rows: PackedRows | None) -> Iterator[None]:
    """In the block, token mixers compute these rows."""
    token = _CURRENT.set(rows)
    try:
        yield
    finally:
        _CURRENT.reset(token)


class _OfEachRow(tuple[Any, ...]):
    """What a mixer returns besides its output, such as an indexer's choice for the next layer, row by row."""


class TokenMixers:
    """The token mixers of a model, and which of them compute the rows of a packed sequence one after another.

    Args:
        model: on the meta device or loaded; the `forward` of such mixers is replaced.

    Attributes:
        attention: mixers that call an attention function of transformers' interface, and hold no other mixer. None if
            others call one as well.
        by_row: those that run row by row.
        with_kernels: those whose kernels get the offsets of the rows.
        needs_scope: whether rows reach some mixer only by `rows_of`, and not by an argument.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._wrapped = model, set[nn.Module]()
        self._layers, found = _layers_and_mixers(model)
        self._positions = [it for it in model.modules() if POSITIONS in _parameters(type(it).forward)]
        others = [it for it in found if not _calls_interface(it) or any(map(_looks_back, _inside(it)))]
        if any(map(_calls_interface, others)):  # with an indexer or convolutions, which need transformers' own masks
            others = found
        self.attention = [it for it in found if it not in others]
        self.by_row, self.with_kernels, self.needs_scope = set[nn.Module](), set[nn.Module](), False
        # Llama 4 counts a row's positions itself, and scales attention by them.
        if others := [*others, *(it for it in self.attention if hasattr(it, "attn_temperature_tuning"))]:
            self._run_by_row(others)
        if torch.cuda.is_initialized():  # a plan has no CUDA
            takes_more = [it for it in others if "kwargs" in _parameters(type(it).forward)]
            self.with_kernels = {it for it in takes_more if missing_kernels(it) == set()}
            self.by_row -= self.with_kernels
        self.needs_scope |= not private(model, "_supports_attention_backend")

    def run_more_by_row(self) -> bool:
        """Run the next larger part of the model row by row: mixers with kernels, position embeddings, all mixers, whole
        layers. False if all is already, or compiled; or if FSDP units lie within, which ranks with fewer rows would
        all-gather less often."""
        is_compiled = any(isinstance(layer.forward, partial) for layer in self._layers)
        for more in (list(self.with_kernels), self._positions, self.attention, self._layers):
            new = [it for it in more if it not in self.by_row]
            within = [part for it in new for part in _inside(it)]
            if not new or is_compiled or any(isinstance(part, FSDPModule) for part in within):
                continue
            self.with_kernels -= set(new)
            if more in (self.attention, self._layers):  # each row gets its part of transformers' own mask of all tokens
                config = self._model.config
                attends = private(config, "_attn_implementation") or ""
                config._attn_implementation = attends.removeprefix("packed_")
            self._run_by_row(new)
            return True
        return False

    def keep_rows_for_recomputation(self) -> None:
        """Have recomputed layers see the rows that they saw in the forward pass."""
        for module in self._model.modules():
            function = vars(module).get("_gradient_checkpointing_func")
            if function is not None and getattr(function, "func", None) is not _checkpointed:
                module._gradient_checkpointing_func = partial(_checkpointed, function)  # type: ignore[assignment]

    def names(self) -> str:
        """The classes that run row by row, for people."""
        return ", ".join(sorted({_own_type(it).__name__ for it in self.by_row}))

    def _run_by_row(self, mixers: list[nn.Module]) -> None:
        self.by_row |= set(mixers)
        self.needs_scope = True
        for mixer in set(mixers) - self._wrapped:
            self._wrap(mixer)
        self._wrapped |= set(mixers)
        self.keep_rows_for_recomputation()

    def _wrap(self, mixer: nn.Module) -> None:
        plain = mixer.forward

        @wraps(plain)
        @torch.compiler.disable(reason="a graph would hold for one tuple of lengths")
        def forward(*args: Any, **kwargs: Any) -> Any:
            rows = current_rows()
            if rows is None or not (mixer in self.by_row or mixer in self.with_kernels):
                return plain(*args, **kwargs)
            if mixer in self.with_kernels:
                return plain(*args, **kwargs | {"cu_seq_lens_q": rows.offsets, "seq_idx": rows.indices})
            dropped = {"position_ids"} if mixer in self._positions else OF_FLASH_ATTENTION
            kwargs = {name: value for name, value in kwargs.items() if name not in dropped}
            outputs, start, total = [], 0, sum(rows.lengths)
            for number, length in enumerate(rows.lengths):
                part = _Part(number, start, length, total)
                alone = PackedRows.of([length], rows.offsets.device) if mixer in self.attention else None
                with rows_of(alone):
                    outputs.append(plain(*part.of(args), **part.of(kwargs)))
                start += length
            return _joined(outputs)

        mixer.forward = forward


def has_token_mixers(model: nn.Module) -> bool:
    """Whether `use_packed_attention` has prepared this model."""
    return hasattr(model, "_token_mixers")


def token_mixers(model: nn.Module) -> TokenMixers:
    """The token mixers of a model that `use_packed_attention` has prepared."""
    return cast(TokenMixers, model._token_mixers)


def runs_rows_apart(model: nn.Module) -> bool:
    """Whether some token mixer of a model computes packed rows one after another, or reads them from `rows_of`."""
    return has_token_mixers(model) and token_mixers(model).needs_scope


def _checkpointed(checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any) -> Any:
    if torch.compiler.is_compiling():  # rows are an argument there
        return checkpoint(function, *args)
    return checkpoint(partial(_with_rows, current_rows(), function), *args)


def _with_rows(rows: PackedRows | None, function: Callable[..., Any], *args: Any) -> Any:
    with rows_of(rows):
        return function(*args)


@dataclass(frozen=True)
class _Part:
    """One row of a packed sequence."""

    number: int
    start: int
    length: int
    total: int  # tokens of the sequence

    def of(self, value: Any) -> Any:
        """Its part of what a module is called with: of tensors the tokens, of masks [.., tokens, tokens] both."""
        if isinstance(value, PackedRows):
            return None  # see rows_of
        if isinstance(value, _OfEachRow):
            return value[self.number]
        if isinstance(value, dict):
            return {name: self.of(each) for name, each in value.items()}
        if isinstance(value, torch.Size):
            return torch.Size(self.length if size == self.total else size for size in value)
        if type(value) in (tuple, list):
            return type(value)(self.of(each) for each in value)
        if not isinstance(value, torch.Tensor):
            return value
        ahead = [dim for dim in (1, 2, 3, 0) if dim < value.ndim and value.shape[dim] == self.total]
        is_mask = value.ndim in (2, 4) and value.shape[-2:] == (self.total, self.total)
        for dim in (-2, -1) if is_mask else ahead[:1]:
            value = value.narrow(dim, self.start, self.length)
        return value


def _joined(outputs: list[Any]) -> Any:
    """Of what rows return, the first tensors [.., tokens, width] one after another."""
    if isinstance(outputs[0], torch.Tensor):
        return torch.cat(outputs, dim=-2)
    first, *others = zip(*outputs, strict=True)
    return torch.cat(first, dim=-2), *(it[0] if all(one is it[0] for one in it) else _OfEachRow(it) for it in others)


def missing_kernels(mixer: nn.Module) -> set[str] | None:
    """Packages without which transformers computes a mixer by torch's own operations; None if it knows no kernels of
    it. Its functions say so themselves when they get packed rows, before they look at anything else."""
    forward = inspect.unwrap(type(mixer).forward)
    named = [forward.__globals__.get(name) for name in forward.__code__.co_names]
    answers = [_answer(function) for function in named if hasattr(function, "__wrapped__")]
    found = [MISSING_KERNEL.search(answer) for answer in answers]
    return {match[1].replace("_", "-") for match in found if match} if answers else None


def _answer(function: Callable[..., Any]) -> str:
    try:
        function(seq_idx=True)
    except (TypeError, ValueError) as error:  # TypeError: a kernel, of which all other arguments are missing
        return str(error)
    return ""


def report_missing_kernels(model: nn.Module, device: torch.device) -> None:
    """Say once, on CUDA, which layers compute without their kernels, and what to install."""
    mixers = [it for it in model.modules() if device.type == "cuda" and _looks_back(it)]
    slow = {_own_type(it).__name__: missing for it in mixers if (missing := missing_kernels(it))}
    if slow:
        packages = " ".join(sorted(set[str]().union(*slow.values())))
        log.warning(
            f"{', '.join(sorted(slow))}: PyTorch's own operations compute these layers, several times slower than "
            f"their kernels. Install them: pip install {packages}"
        )


def _layers_and_mixers(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Decoder layers, and the outermost modules in them that look back; those before the layers too (an embedding of
    n-grams). What only hands its cache on to attention is looked into."""
    lists = [it for it in model.modules() if isinstance(it, nn.ModuleList)]
    stacks = [it for it in lists if any(map(_looks_back, it.modules()))] or lists
    inside = {part for stack in stacks for part in _inside(stack)}
    layers = {layer: _own_type(layer) for stack in stacks if stack not in inside for layer in stack}
    around = {module for module in model.modules() if not layers.keys().isdisjoint(module.modules())}

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            hands_on = not _calls_interface(child) and any(map(_calls_interface, _inside(child)))
            if _looks_back(child) and child not in around and not hands_on:
                yield child
            else:
                yield from visit(child)

    mixers = list(dict.fromkeys(visit(model)))
    with_mixers = {kind for layer, kind in layers.items() if not set(mixers).isdisjoint(layer.modules())}
    alone = [layer for layer, kind in layers.items() if kind not in with_mixers]
    return list(layers), mixers + [layer for layer in alone if _looks_back(layer) or not mixers]


def _inside(module: nn.Module) -> list[nn.Module]:
    return list(module.modules())[1:]


def _looks_back(module: nn.Module) -> bool:
    takes_cache = not CACHES.isdisjoint(_parameters(type(module).forward))
    return takes_cache or any(isinstance(child, nn.Conv1d) for child in module.children())


@cache
def _parameters(forward: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(forward).parameters)


def _calls_interface(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _own_type(module: nn.Module) -> type[Any]:
    """Its class as it was written; fully_shard derives one from it."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))
