"""Packed sequences for token mixers that do not support them: Mamba, gated delta nets, short
convolutions, and attention outside of Transformers' attention interface.

    sequence      a a a b b c c c c        norms, MLPs and experts compute all samples at once
    token mixer   a a a | b b | c c c c    one sample after another, which is exact for any architecture

A token mixer is found by its arguments: a module that looks back along the sequence takes a cache
for generation. On CUDA its kernels get the offsets of the samples, if they are installed.
`check_packing` checks that they use them.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel

from llama_ft.errors import UserError
from llama_ft.libraries.evidence import (
    ADDED_FEATURES,
    ATTENTION_INTERFACE,
    CACHE_LENGTHS,
    CACHES,
    COUNTS_POSITIONS,
    FLASH_ATTENTION_ARGUMENTS,
    LOOKS_UP_POSITIONS,
    MASK,
    MEDIA_TOKENS,
    MERGED,
    MISSING_KERNEL,
    SAMPLE_OF_TOKEN,
    STATES,
)
from llama_ft.libraries.transformers_private import private
from llama_ft.models.base.replaced import replace_method
from llama_ft.models.packing.shared_heads import can_divide_heads, compute_own_heads
from llama_ft.models.packing.shared_sequences import NOT_SHARED, AllTokens
from llama_ft.runtime.console import log
from llama_ft.runtime.devices import sent
from llama_ft.runtime.sequence import SequenceRank
from llama_ft.runtime.target import current_target


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
    # The ranks that share the sequence, each with an equal part of its tokens; None: this rank has
    # all of them. Lengths and offsets are always those of the whole sequence.
    sequence: SequenceRank | None = None

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> "PackedSamples":
        """Create it from the tokens of each sample, for a model that computes on `device`."""
        ends = torch.tensor([0, *lengths]).cumsum(0)
        offsets = sent(ends.to(torch.int32), device)  # varlen kernels want int32
        return cls(tuple(lengths), offsets, max(lengths))

    def positions(self) -> torch.Tensor:
        """Return the position of each token in its sample, int64 [tokens], on the device."""
        total = sum(self.lengths)
        first_tokens = self.offsets[:-1]
        lengths = self.offsets.diff()
        # output_size: else repeat_interleave would synchronize with the device to learn it
        starts = torch.repeat_interleave(first_tokens, lengths, output_size=total)
        return torch.arange(total, device=self.offsets.device) - starts

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a value per token of the sequence, [1, tokens]: all of it, unless
        ranks share the sequence."""
        return whole if self.sequence is None else self.sequence.part(whole, 1)

    def cut(self, size: int) -> "PackedSamples":
        """Split samples into parts of at most `size` tokens, for chunked attention."""
        if size >= self.longest:
            return self
        chunks = []
        for length in self.lengths:
            chunks += [min(size, length - start) for start in range(0, length, size)]
        cut = PackedSamples.of(chunks, self.offsets.device)
        return replace(cut, sequence=self.sequence)


_CURRENT: ContextVar[PackedSamples | None] = ContextVar("packed samples", default=None)
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
        has_towers: the model has towers, too, whose mixers do not see packed samples.

    Attributes:
        config: of the attention; see `_attn_implementation` of Transformers.
        attention: mixers that call Transformers' attention interface and contain no other mixer.
            None if other mixers call it, too.
        per_sample: mixers that run sample by sample.
        with_kernels: mixers whose kernels get the offsets of the samples.
        needs_scope: some mixer gets the samples only from `samples_of`, not as an argument.
        gets_masks: attention runs sample by sample, with masks of all pairs of tokens.
        sequence: the ranks that share each packed sequence; None: each rank has its own.
    """

    def __init__(self, model: PreTrainedModel, has_towers: bool = False) -> None:
        self._model = model
        self.sequence: SequenceRank | None = None
        self.config: PretrainedConfig = model.config
        text: nn.Module = model
        if has_towers:
            self.config = model.config.get_text_config()
            text = model.get_decoder()
        self._wrapped = set[nn.Module]()
        self._layers, mixers = _layers_and_mixers(text)
        self._positions = [
            module
            for module in text.modules()
            if not CACHE_LENGTHS.isdisjoint(_parameters(type(module).forward))
        ]
        others = [mixer for mixer in mixers if not _is_only_attention(mixer)]
        # an indexer or convolutions, which need Transformers' own masks
        if any(map(_calls_interface, others)):
            others = mixers
        self.attention = [mixer for mixer in mixers if mixer not in others]
        self.gets_masks = not self.attention and any(map(_attends, others))
        self.per_sample = set[nn.Module]()
        self.with_kernels = set[nn.Module]()
        self.needs_scope = False
        # Llama 4 counts positions inside the attention, and scales by them.
        others = others + [mixer for mixer in self.attention if hasattr(mixer, COUNTS_POSITIONS)]
        if others:
            self._run_per_sample(others)
        if torch.cuda.is_initialized():  # False in a plan for GPUs
            # Only these pass the offsets on to their kernels.
            take_kwargs = [
                mixer for mixer in others if "kwargs" in _parameters(type(mixer).forward)
            ]
            self.with_kernels = {mixer for mixer in take_kwargs if missing_kernels(mixer) == set()}
            self.per_sample -= self.with_kernels
        self.needs_scope |= not private(model, "_supports_attention_backend")

    def run_more_per_sample(self) -> bool:
        """Run the next larger part of the model sample by sample: mixers with kernels, position
        embeddings, all mixers, whole layers. Return False if there is none, if layers are compiled,
        or if the part contains FSDP units (ranks with fewer samples would all-gather less
        often)."""
        is_compiled = any(isinstance(layer.forward, partial) for layer in self._layers)
        for candidates in (list(self.with_kernels), self._positions, self.attention, self._layers):
            new = [module for module in candidates if module not in self.per_sample]
            has_units = any(_contains_units(module) for module in new)
            if not new or is_compiled or has_units:
                continue
            self.with_kernels -= set(new)
            # each sample gets its part of Transformers' mask
            if candidates in (self.attention, self._layers):
                attends = private(self.config, "_attn_implementation") or ""
                self.config._attn_implementation = attends.removeprefix("packed_")
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
        kinds = {_own_type(mixer).__name__ for mixer in self.per_sample}
        return ", ".join(sorted(kinds))

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
            if samples.sequence is None:
                return self._compute(mixer, samples, plain, *args, **kwargs)
            own_tokens = sum(samples.lengths) // samples.sequence.size
            tokens = AllTokens(samples.sequence, own_tokens)
            whole = replace(samples, sequence=None)
            compute = partial(self._compute, mixer, whole)
            with samples_of(whole):
                if inspect.ismethod(plain) and can_divide_heads(mixer, samples.sequence):
                    return _of_own_heads(
                        mixer, partial(compute, plain.__func__), tokens, args, kwargs
                    )
                output = compute(plain, *_gathered(args, tokens), **_gathered(kwargs, tokens))
                return _own(output, tokens)

        replace_method(mixer, "forward", forward)

    def _compute(
        self,
        mixer: nn.Module,
        samples: PackedSamples,
        function: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call a mixer's code with all tokens of a sequence: sample by sample, or with the offsets of the
        samples."""
        if mixer in self.with_kernels:
            kwargs = kwargs | {"cu_seq_lens_q": samples.offsets, SAMPLE_OF_TOKEN: samples.indices}
            return function(*args, **kwargs)
        embeds_positions = mixer in self._positions
        if embeds_positions and LOOKS_UP_POSITIONS in _parameters(type(mixer).forward):
            kwargs = kwargs | {"position_ids": samples.positions()}
            return function(*args, **kwargs)
        dropped = {"position_ids"} if embeds_positions else FLASH_ATTENTION_ARGUMENTS
        kwargs = {name: value for name, value in kwargs.items() if name not in dropped}
        outputs = []
        start = 0
        total = sum(samples.lengths)
        for number, length in enumerate(samples.lengths):
            own = _SampleSlice(number, start, length, total)
            alone = None
            if mixer in self.attention:
                alone = PackedSamples.of([length], samples.offsets.device)
            with samples_of(alone):
                outputs.append(function(*own.of(args), **own.of(kwargs)))
            start += length
        return _joined(outputs, samples.lengths)


def _checkpointed(
    checkpoint: Callable[..., Any],
    function: Callable[..., Any],
    *args: Any,
) -> Any:
    """Call torch's `checkpoint` of a function. Recomputation happens in the backward pass, where
    the samples of the micro-batch are no longer set: so they are bound to the function."""
    if torch.compiler.is_compiling():  # there, samples are an argument
        return checkpoint(function, *args)
    return checkpoint(partial(_with_samples, current_samples(), function), *args)


def _with_samples(
    samples: PackedSamples | None,
    function: Callable[..., Any],
    *args: Any,
) -> Any:
    with samples_of(samples):
        return function(*args)


@dataclass(frozen=True)
class _SampleSlice:
    """One sample of a packed sequence."""

    number: int
    start: int
    length: int
    total: int  # tokens of the whole sequence

    def of(self, value: Any) -> Any:
        """Return this sample's part of a module's argument: tokens of tensors, [.., tokens, tokens]
        of masks."""
        if isinstance(value, PackedSamples):
            return None  # samples_of provides it
        if isinstance(value, _PerSample):
            return value[self.number]
        if isinstance(value, dict | tuple | list):
            return _with_tokens(value, self.total, self.length, self.of)
        if not isinstance(value, torch.Tensor):
            return value
        for dim in _dims_of_tokens(value, self.total):
            value = value.narrow(dim, self.start, self.length)
        return value


def _with_tokens(value: Any, tokens: int, new_tokens: int, change: Callable[[Any], Any]) -> Any:
    """Return a container of a module's arguments with all entries changed; of a shape the number of
    tokens."""
    if isinstance(value, dict):
        return {name: change(each) for name, each in value.items()}
    if isinstance(value, torch.Size):
        return torch.Size(new_tokens if size == tokens else size for size in value)
    if type(value) in (tuple, list):
        return type(value)(change(each) for each in value)
    return value


def _dims_of_tokens(value: torch.Tensor, tokens: int) -> list[int]:
    """Return the dimensions of a module's argument that have all `tokens`: both of a mask [..,
    tokens, tokens]; of other tensors the first one, or none."""
    has_all_pairs = value.shape[-2:] == (tokens, tokens)
    if has_all_pairs and value.ndim in (2, 4):
        return [-2, -1]
    possible = [dim for dim in (1, 2, 3, 0) if dim < value.ndim]
    return [dim for dim in possible if value.shape[dim] == tokens][:1]


def _of_own_heads(
    mixer: nn.Module,
    compute: Callable[..., torch.Tensor],
    tokens: AllTokens,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Call a gated delta net with a part of its heads, see `compute_own_heads`. Return the output of
    this rank's tokens."""
    named = dict(kwargs)
    states, *others = args or (named.pop(STATES),)
    gathered_args = _gathered(others, tokens)
    gathered = _gathered(named, tokens)

    def of_view(view: nn.Module, columns: torch.Tensor) -> torch.Tensor:
        return compute(view, columns, *gathered_args, **gathered)

    return compute_own_heads(mixer, states, tokens.sequence, of_view)


def _gathered(value: Any, tokens: AllTokens) -> Any:
    """Return a token mixer's arguments with the tokens of all ranks that share the sequence."""
    if isinstance(value, PackedSamples):
        return None  # samples_of provides it
    if isinstance(value, dict | tuple | list):
        return _with_tokens(
            value, tokens.own_tokens, tokens.count, partial(_gathered, tokens=tokens)
        )
    if not isinstance(value, torch.Tensor):
        return value
    dims = _dims_of_tokens(value, tokens.own_tokens)
    if len(dims) > 1:
        raise UserError(
            f"{NOT_SHARED}: this model makes a mask of all pairs of tokens. Leave it out."
        )
    return tokens.gathered(value, dims[0]) if dims else value


def _own(value: Any, tokens: AllTokens) -> Any:
    """Return this rank's part of a token mixer's output."""
    if isinstance(value, _PerSample):
        return value
    if isinstance(value, dict | tuple | list):
        return _with_tokens(value, tokens.count, tokens.own_tokens, partial(_own, tokens=tokens))
    if not isinstance(value, torch.Tensor):
        return value
    dims = _dims_of_tokens(value, tokens.count)
    return tokens.own(value, dims[0]) if dims else value


def own_part_of_merged(
    decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...] | None:
    """Give a decoder this rank's part of a shared sequence whose tokens a model has merged with media.
    A hook before the forward pass.

    All ranks compute the embeddings and towers of all tokens, whose features lie anywhere in the
    sequence. Each rank's gradients are those of its own part, and add up over ranks.
    """
    samples = current_samples()
    merged = kwargs.get(MERGED)
    if samples is None or samples.sequence is None or merged is None:
        return None
    sequence = samples.sequence
    total = sum(samples.lengths)
    if merged.shape[1] != total:
        return None  # a micro-batch of text: the model got this rank's tokens only

    def own(value: Any) -> Any:
        if isinstance(value, dict | tuple | list):
            return _with_tokens(value, total, total // sequence.size, own)
        if not isinstance(value, torch.Tensor):
            return value
        dims = _dims_of_tokens(value, total)
        return sequence.part(value, dims[0]) if len(dims) == 1 else value

    features = kwargs.get(ADDED_FEATURES)
    own_kwargs = {name: own(value) for name, value in kwargs.items() if name != ADDED_FEATURES}
    if features is not None:
        is_media = kwargs[MEDIA_TOKENS]
        numbers = is_media.flatten().cumsum(0).view_as(is_media) - 1
        own_numbers = sequence.part(numbers, 1)[own_kwargs[MEDIA_TOKENS]]
        own_kwargs[ADDED_FEATURES] = [feature[own_numbers] for feature in features]
    return args, own_kwargs


def _joined(outputs: list[Any], lengths: tuple[int, ...]) -> Any:
    """Join the outputs of all samples: the first tensors are concatenated along their tokens."""
    if isinstance(outputs[0], torch.Tensor):
        return torch.cat(outputs, dim=_tokens_dim(outputs, lengths))
    first, *others = zip(*outputs, strict=True)
    joined: list[Any] = [torch.cat(first, dim=_tokens_dim(first, lengths))]
    for output in others:
        is_shared = all(value is output[0] for value in output)  # such as None
        joined.append(output[0] if is_shared else _PerSample(output))
    return tuple(joined)


def _tokens_dim(outputs: Sequence[torch.Tensor], lengths: tuple[int, ...]) -> int:
    """Return the dimension of the tokens: the last but one, or an earlier one if layers have several
    streams (HY 4's hyper-connections: [1, tokens, streams, width])."""
    dimensions = outputs[0].ndim
    possible = [dim for dim in (-2, 1, 0) if -dimensions <= dim < dimensions]
    for dim in possible:
        sizes = tuple(output.shape[dim] for output in outputs)
        if sizes == lengths:
            return dim
    return -2


def missing_kernels(mixer: nn.Module) -> set[str] | None:
    """Return the packages that a mixer's kernels need, without which Transformers uses torch
    operations; None if it has no kernels. A call without other arguments finds out: functions check
    for kernels before they use any."""
    forward = inspect.unwrap(type(mixer).forward)
    named = [forward.__globals__.get(name) for name in forward.__code__.co_names]
    # Transformers wraps these functions in one that looks for their kernels.
    answers = [_answer(function) for function in named if hasattr(function, "__wrapped__")]
    if not answers:
        return None
    matches = [MISSING_KERNEL.search(answer) for answer in answers]
    return {match[1].replace("_", "-") for match in matches if match}


def _answer(function: Callable[..., Any]) -> str:
    try:
        function(**{SAMPLE_OF_TOKEN: True})
    # TypeError: the kernel exists, and its other arguments are missing
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def report_missing_kernels(model: nn.Module) -> None:
    """On CUDA, log once which layers compute without their kernels, and what to install."""
    if not current_target().is_cuda:
        return
    slow = dict[str, set[str]]()
    for module in model.modules():
        missing = missing_kernels(module) if _looks_back(module) else None
        if missing:
            slow[_own_type(module).__name__] = missing
    if slow:
        missing_packages = set[str]().union(*slow.values())
        packages = " ".join(sorted(missing_packages))
        log.warning(
            f"{', '.join(sorted(slow))}: PyTorch's own operations compute these layers, several times slower than "
            f"their kernels. Install them: pip install {packages}"
        )


def _layers_and_mixers(
    model: nn.Module,
) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the decoder layers, and the outermost token mixers, in layers or before them (an
    embedding of n-grams). Modules that only pass their cache on to attention are not mixers
    themselves."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    look_back = [modules for modules in lists if any(map(_looks_back, modules.modules()))]
    stacks = look_back or lists
    inside = set[nn.Module]()
    for stack in stacks:
        inside.update(_inside(stack))
    layers = dict[nn.Module, type[Any]]()
    for stack in stacks:
        if stack not in inside:
            layers |= {layer: _own_type(layer) for layer in stack}
    around = set[nn.Module]()
    for module in model.modules():
        if not layers.keys().isdisjoint(module.modules()):
            around.add(module)

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            has_attention = any(map(_calls_interface, _inside(child)))
            passes_cache_on = has_attention and not _calls_interface(child)
            if _looks_back(child) and child not in around and not passes_cache_on:
                yield child
            else:
                yield from visit(child)

    mixers = list(dict.fromkeys(visit(model)))
    with_mixers = set[type[Any]]()
    for layer, kind in layers.items():
        if not set(mixers).isdisjoint(layer.modules()):
            with_mixers.add(kind)
    alone = [layer for layer, kind in layers.items() if kind not in with_mixers]
    return list(layers), mixers + [layer for layer in alone if _looks_back(layer) or not mixers]


def _inside(module: nn.Module) -> list[nn.Module]:
    return list(module.modules())[1:]


def _contains_units(module: nn.Module) -> bool:
    return any(isinstance(part, FSDPModule) for part in _inside(module))


def _is_only_attention(mixer: nn.Module) -> bool:
    """Return whether a mixer calls Transformers' attention interface and contains no other
    mixer."""
    return _calls_interface(mixer) and not any(map(_looks_back, _inside(mixer)))


def _looks_back(module: nn.Module) -> bool:
    takes_cache = not CACHES.isdisjoint(_parameters(type(module).forward))
    return takes_cache or any(isinstance(child, nn.Conv1d) for child in module.children())


@cache
def _parameters(forward: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(forward).parameters)


def _calls_interface(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and ATTENTION_INTERFACE in code.co_names


def _attends(mixer: nn.Module) -> bool:
    """Return whether a mixer is attention. Recurrent ones, which get a mask of tokens, have
    convolutions."""
    takes_mask = MASK in _parameters(type(mixer).forward)
    has_convolution = any(isinstance(module, nn.Conv1d) for module in mixer.modules())
    return takes_mask and (_calls_interface(mixer) or not has_convolution)


def _own_type(module: nn.Module) -> type[Any]:
    """Return a module's class without the subclass that fully_shard derives."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))
