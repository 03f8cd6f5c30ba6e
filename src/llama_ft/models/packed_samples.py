"""Packed sequences for token mixers that do not support them: Mamba, gated delta nets, short
convolutions, and attention outside of Transformers' attention interface. A "row" in names here is
one sample of a packed sequence.

    sequence      a a a b b c c c c        norms, MLPs and experts compute all samples at once
    token mixer   a a a | b b | c c c c    one sample after another, which is exact for any architecture

A token mixer is found by its arguments: a module that looks back along the sequence takes a cache
for generation. On CUDA its kernels get the offsets of the samples, if they are installed.
`check_packing` checks that they use them.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_utils import PreTrainedModel

from llama_ft.models.transformers_private import private
from llama_ft.runtime.console import log
from llama_ft.runtime.devices import sent

# Names of the generation cache in the architectures of Transformers.
CACHES = {
    "past_key_values",
    "past_key_value",
    "layer_past",
    "cache_params",
    "past",
    "state",
    "cache",
}
# argument of position embeddings that count tokens themselves (Bart's, RoBERTa's)
POSITIONS = "past_key_values_length"
# argument of those among them that look up the position_ids that they get (Marian's, Pegasus')
LOOKED_UP = "input_ids_shape"
FLASH_ATTENTION_ARGUMENTS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
MISSING_KERNEL = re.compile(r"without `([^`]+)`")


@dataclass(frozen=True)
class PackedSamples:
    """The positions of samples in a packed sequence."""

    # tokens of each sample, on the host: reading them must not synchronize with the device
    lengths: tuple[int, ...]
    offsets: torch.Tensor  # int32 [samples + 1], on the device: 0 and the end of each sample
    # tokens of the longest sample; for compiled layers: reading `lengths` would add a guard per
    # sample
    longest: int
    equal_length: bool = False  # all samples have one length, so a plan of cuDNN's kernel pays off
    # int32 [1, tokens], on the device: the sample of each token; for kernels
    indices: torch.Tensor | None = None

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> "PackedSamples":
        """Create it from the tokens of each sample, for a model that computes on `device`."""
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        return cls(tuple(lengths), sent(ends, device), max(lengths))

    def positions(self) -> torch.Tensor:
        """Return the position of each token in its sample, int64 [tokens], on the device."""
        total = sum(self.lengths)
        starts = torch.repeat_interleave(self.offsets[:-1], self.offsets.diff(), output_size=total)
        return torch.arange(total, device=self.offsets.device) - starts

    def cut(self, size: int) -> "PackedSamples":
        """Split samples into parts of at most `size` tokens, for chunked attention."""
        if size >= self.longest:
            return self
        parts = [
            min(size, length - start) for length in self.lengths for start in range(0, length, size)
        ]
        return PackedSamples.of(parts, self.offsets.device)


_CURRENT: ContextVar[PackedSamples | None] = ContextVar("packed rows", default=None)
current_samples = _CURRENT.get  # samples of the current sequence; None if it is not packed
set_samples = _CURRENT.set


@contextmanager
def samples_of(samples: PackedSamples | None) -> Iterator[None]:
    """In the block, token mixers compute the samples `samples`."""
    token = _CURRENT.set(samples)
    try:
        yield
    finally:
        _CURRENT.reset(token)


class _PerSample(tuple[Any, ...]):
    """Further outputs of a mixer per sample, such as an indexer's choice for the next layer."""


class TokenMixers:
    """The token mixers of a model, and which of them compute the samples of a packed sequence one
    after another.

    Args:
        model: on the meta device or loaded. The `forward` of mixers that run sample by sample is
            replaced.

    Attributes:
        attention: mixers that call Transformers' attention interface and contain no other mixer.
            None if other mixers call it, too.
        per_sample: mixers that run sample by sample.
        with_kernels: mixers whose kernels get the offsets of the samples.
        needs_scope: some mixer gets the samples only from `samples_of`, not as an argument.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._wrapped = set[nn.Module]()
        self._layers, found = _layers_and_mixers(model)
        self._positions = [
            it for it in model.modules() if POSITIONS in _parameters(type(it).forward)
        ]
        others = [
            it for it in found if not _calls_interface(it) or any(map(_looks_back, _inside(it)))
        ]
        # an indexer or convolutions, which need Transformers' own masks
        if any(map(_calls_interface, others)):
            others = found
        self.attention = [it for it in found if it not in others]
        self.per_sample = set[nn.Module]()
        self.with_kernels = set[nn.Module]()
        self.needs_scope = False
        # Llama 4 counts positions inside the attention, and scales by them.
        if others := [
            *others,
            *(it for it in self.attention if hasattr(it, "attn_temperature_tuning")),
        ]:
            self._run_per_sample(others)
        if torch.cuda.is_initialized():  # False in a plan for GPUs
            takes_more = [it for it in others if "kwargs" in _parameters(type(it).forward)]
            self.with_kernels = {it for it in takes_more if missing_kernels(it) == set()}
            self.per_sample -= self.with_kernels
        self.needs_scope |= not private(model, "_supports_attention_backend")

    def run_more_per_sample(self) -> bool:
        """Run the next larger part of the model sample by sample: mixers with kernels, position
        embeddings, all mixers, whole layers. Return False if there is none, if layers are compiled,
        or if the part contains FSDP units (ranks with fewer samples would all-gather less
        often)."""
        is_compiled = any(isinstance(layer.forward, partial) for layer in self._layers)
        for more in (list(self.with_kernels), self._positions, self.attention, self._layers):
            new = [it for it in more if it not in self.per_sample]
            within = [part for it in new for part in _inside(it)]
            if not new or is_compiled or any(isinstance(part, FSDPModule) for part in within):
                continue
            self.with_kernels -= set(new)
            # each sample gets its part of Transformers' mask
            if more in (self.attention, self._layers):
                config = self._model.config
                attends = private(config, "_attn_implementation") or ""
                config._attn_implementation = attends.removeprefix("packed_")
            self._run_per_sample(new)
            return True
        return False

    def keep_samples_for_recomputation(self) -> None:
        """Make recomputed layers use the same samples as in the forward pass."""
        for module in self._model.modules():
            function = vars(module).get("_gradient_checkpointing_func")
            if function is not None and getattr(function, "func", None) is not _checkpointed:
                module._gradient_checkpointing_func = partial(_checkpointed, function)  # type: ignore[assignment]

    def names(self) -> str:
        """Return the names of the classes that run sample by sample, for the log."""
        return ", ".join(sorted({_own_type(it).__name__ for it in self.per_sample}))

    def _run_per_sample(self, mixers: list[nn.Module]) -> None:
        self.per_sample |= set(mixers)
        self.needs_scope = True
        for mixer in set(mixers) - self._wrapped:
            self._wrap(mixer)
        self._wrapped |= set(mixers)
        self.keep_samples_for_recomputation()

    def _wrap(self, mixer: nn.Module) -> None:
        plain = mixer.forward

        @wraps(plain)
        @torch.compiler.disable(reason="a graph would hold for one tuple of lengths")
        def forward(*args: Any, **kwargs: Any) -> Any:
            samples = current_samples()
            if samples is None or not (mixer in self.per_sample or mixer in self.with_kernels):
                return plain(*args, **kwargs)
            if mixer in self.with_kernels:
                return plain(
                    *args, **kwargs | {"cu_seq_lens_q": samples.offsets, "seq_idx": samples.indices}
                )
            if mixer in self._positions and LOOKED_UP in _parameters(type(mixer).forward):
                return plain(*args, **kwargs | {"position_ids": samples.positions()})
            dropped = {"position_ids"} if mixer in self._positions else FLASH_ATTENTION_ARGUMENTS
            kwargs = {name: value for name, value in kwargs.items() if name not in dropped}
            outputs = []
            start = 0
            total = sum(samples.lengths)
            for number, length in enumerate(samples.lengths):
                part = _Part(number, start, length, total)
                alone = (
                    PackedSamples.of([length], samples.offsets.device)
                    if mixer in self.attention
                    else None
                )
                with samples_of(alone):
                    outputs.append(plain(*part.of(args), **part.of(kwargs)))
                start += length
            return _joined(outputs, samples.lengths)

        mixer.forward = forward


def _checkpointed(checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any) -> Any:
    if torch.compiler.is_compiling():  # there, samples are an argument
        return checkpoint(function, *args)
    return checkpoint(partial(_with_samples, current_samples(), function), *args)


def _with_samples(samples: PackedSamples | None, function: Callable[..., Any], *args: Any) -> Any:
    with samples_of(samples):
        return function(*args)


@dataclass(frozen=True)
class _Part:
    """One sample of a packed sequence."""

    number: int
    start: int
    length: int
    total: int  # tokens of the whole sequence

    def of(self, value: Any) -> Any:
        """Return this sample's part of a module's argument: tokens of tensors, [.., tokens, tokens]
        of masks."""
        if isinstance(value, PackedSamples):
            return None  # rows_of provides it
        if isinstance(value, _PerSample):
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


def _joined(outputs: list[Any], lengths: tuple[int, ...]) -> Any:
    """Join the outputs of all samples: the first tensors are concatenated along their tokens."""
    if isinstance(outputs[0], torch.Tensor):
        return torch.cat(outputs, dim=_tokens_dim(outputs, lengths))
    first, *others = zip(*outputs, strict=True)
    return torch.cat(first, dim=_tokens_dim(first, lengths)), *(
        it[0] if all(one is it[0] for one in it) else _PerSample(it) for it in others
    )


def _tokens_dim(outputs: Sequence[torch.Tensor], lengths: tuple[int, ...]) -> int:
    """Return the dimension of the tokens: the last but one, or an earlier one if layers have several
    streams (HY 4's hyper-connections: [1, tokens, streams, width])."""
    dims = [dim for dim in (-2, 1, 0) if -outputs[0].ndim <= dim < outputs[0].ndim]
    return next(
        (dim for dim in dims if tuple(output.shape[dim] for output in outputs) == lengths), -2
    )


def missing_kernels(mixer: nn.Module) -> set[str] | None:
    """Return the packages that a mixer's kernels need, without which Transformers uses torch
    operations; None if it has no kernels. A call without other arguments finds out: functions check
    for kernels before they use any."""
    forward = inspect.unwrap(type(mixer).forward)
    named = [forward.__globals__.get(name) for name in forward.__code__.co_names]
    answers = [_answer(function) for function in named if hasattr(function, "__wrapped__")]
    found = [MISSING_KERNEL.search(answer) for answer in answers]
    return {match[1].replace("_", "-") for match in found if match} if answers else None


def _answer(function: Callable[..., Any]) -> str:
    try:
        function(seq_idx=True)
    # TypeError: the kernel exists, and its other arguments are missing
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def report_missing_kernels(model: nn.Module, device: torch.device) -> None:
    """On CUDA, log once which layers compute without their kernels, and what to install."""
    mixers = [it for it in model.modules() if device.type == "cuda" and _looks_back(it)]
    slow = {_own_type(it).__name__: missing for it in mixers if (missing := missing_kernels(it))}
    if slow:
        packages = " ".join(sorted(set[str]().union(*slow.values())))
        log.warning(
            f"{', '.join(sorted(slow))}: PyTorch's own operations compute these layers, several times slower than "
            f"their kernels. Install them: pip install {packages}"
        )


def _layers_and_mixers(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the decoder layers, and the outermost token mixers, in layers or before them (an
    embedding of n-grams). Modules that only pass their cache on to attention are not mixers
    themselves."""
    lists = [it for it in model.modules() if isinstance(it, nn.ModuleList)]
    stacks = [it for it in lists if any(map(_looks_back, it.modules()))] or lists
    inside = {part for stack in stacks for part in _inside(stack)}
    layers = {layer: _own_type(layer) for stack in stacks if stack not in inside for layer in stack}
    around = {
        module for module in model.modules() if not layers.keys().isdisjoint(module.modules())
    }

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            hands_on = not _calls_interface(child) and any(map(_calls_interface, _inside(child)))
            if _looks_back(child) and child not in around and not hands_on:
                yield child
            else:
                yield from visit(child)

    mixers = list(dict.fromkeys(visit(model)))
    with_mixers = {
        kind for layer, kind in layers.items() if not set(mixers).isdisjoint(layer.modules())
    }
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
    """Return a module's class without the subclass that fully_shard derives."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))
