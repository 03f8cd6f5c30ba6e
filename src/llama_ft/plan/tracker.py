"""Running the recipe's own functions on tensors without storage, and writing down what they would hold.

Fake tensors (torch._subclasses.fake_tensor) have shapes, dtypes and storages of a size, and no bytes behind them. Below
DTensor every operator of this rank passes here with local shapes: a mode that answers NotImplemented to DTensors is
asked again for the operators that these are made of.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.modeling_utils import PreTrainedModel

from llama_ft.models import lora_linear
from llama_ft.models.build import decoder_layers
from llama_ft.phases import MEMORY_CATEGORIES, MemoryCategory, Phase
from llama_ft.plan import torch_internals as internals
from llama_ft.plan.types import Moment, Peak

HELD_IN: dict[Phase, MemoryCategory] = {
    "load": "temporaries",
    "forward": "activations",
    "backward": "logits and loss",  # until it has passed the head
    "optimizer step": "temporaries",
    "evaluation": "activations",
    "save": "temporaries",
}
# cuBLAS' workspace, which torch allocates with the first matrix product and keeps (Hopper's; others take 8 MiB).
# Source: aten/src/ATen/cuda/CublasHandlePool.cpp
CUBLAS_BYTES = 32 * 2**20
# What fully_shard allocates where.
ALLOCATING: dict[tuple[Any, str], MemoryCategory] = {
    internals.ALL_GATHER: "communication buffers",
    internals.COPY_OUT: "gathered units",
    internals.REDUCE: "communication buffers",
    internals.ACCUMULATE: "gradients",
}


class MemoryLedger:
    """Storages that are alive, their bytes and holders, and the peak of each phase."""

    def __init__(self) -> None:
        self.now = 0  # bytes of all
        self.holders: dict[MemoryCategory, int] = dict.fromkeys(MEMORY_CATEGORIES, 0)
        self.holder: MemoryCategory = "temporaries"  # of what is allocated from now on
        self.phase: Phase | None = None  # whose peak is being measured
        self.peaks: dict[Phase, Peak] = {}
        self.module = ""  # at work, for the peaks
        self.timeline: list[Moment] = []
        self.events: list[tuple[int, int]] = []  # every change: (storage, bytes more or fewer)
        self._alive: dict[int, tuple[int, int, MemoryCategory]] = {}
        self._numbered = 0

    def begin(self, phase: Phase, holder: MemoryCategory) -> None:
        """Measure the peak of a phase; what is allocated belongs to `holder`."""
        self.phase, self.holder, self.module = phase, holder, ""
        self._note_peak()
        self.mark(phase)

    def note(self, storage: torch.UntypedStorage) -> None:
        """A storage that may be new or may have been resized."""
        key, nbytes = internals.storage_key(storage), storage.nbytes()
        number, before, holder = self._alive.get(key, (0, 0, self.holder))
        if key not in self._alive:
            self._numbered = number = self._numbered + 1
            weakref.finalize(storage, self._drop, key)
        if nbytes != before:
            self._change(number, nbytes - before, holder)
        self._alive[key] = (number, nbytes, holder)

    def note_temporary(self, nbytes: int) -> None:
        """Memory that an operator takes and gives back before it returns."""
        if nbytes:
            number = self.note_kept(nbytes)
            self._change(number, -nbytes, "temporaries")

    def note_kept(self, nbytes: int) -> int:
        """Memory that a library takes and keeps; returns its number."""
        self._numbered += 1
        self._change(self._numbered, nbytes, "temporaries")
        return self._numbered

    def assign(self, tensors: Iterable[torch.Tensor], holder: MemoryCategory) -> None:
        """Say who holds tensors that are alive already; of DTensors this rank's part."""
        for tensor in tensors:
            key = internals.storage_key(internals.local_part(tensor).untyped_storage())
            if key in self._alive:
                number, nbytes, before = self._alive[key]
                self._alive[key] = (number, nbytes, holder)
                self.holders[before] -= nbytes
                self.holders[holder] += nbytes

    def settle(self, phase: Phase, holder: MemoryCategory, others: Iterable[MemoryCategory]) -> None:
        """At the peak of a phase, what `others` hold now was counted as `holder`'s: they had not been assigned yet."""
        peak = self.peaks[phase]
        moved = {other: self.holders[other] for other in others}
        holders = {**peak.holders, **moved, holder: peak.holders[holder] - sum(moved.values())}
        self.peaks[phase] = replace(peak, holders=holders)

    def mark(self, label: str) -> None:
        """Put a moment on the timeline."""
        self.timeline.append(Moment(label, self.now, self.holders["gathered units"]))

    def _note_peak(self) -> None:
        if self.phase is not None and (self.phase not in self.peaks or self.now > self.peaks[self.phase].bytes):
            self.peaks[self.phase] = Peak(self.phase, self.now, dict(self.holders), self.module)

    def _change(self, number: int, more: int, holder: MemoryCategory) -> None:
        self.now += more
        self.holders[holder] += more
        self.events.append((number, more))
        if more > 0:
            self._note_peak()

    def _drop(self, key: int) -> None:
        number, nbytes, holder = self._alive.pop(key)
        if nbytes:
            self._change(number, -nbytes, holder)


class Tracker(internals.TorchDispatchMode):
    """Keeps a ledger of every operator's tensors; a PhaseMonitor. Until the first phase, loading, begins, tensors are
    real: the skeleton is on the meta device anyway. `device` is what is planned for, cuda or cpu."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.ledger, self._is_cuda = MemoryLedger(), device == "cuda"
        self._workspace_bytes = CUBLAS_BYTES if self._is_cuda else 0  # not allocated yet
        self._module_names: dict[nn.Module, str] = {}
        self._units: set[nn.Module] = set()
        self._head: nn.Module | None = None
        self._hooked: set[int] = set()

    def enter(self, phase: Phase) -> None:
        """See PhaseMonitor."""
        self.ledger.begin(phase, HELD_IN[phase])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func is internals.DEVICE and isinstance(args[0], internals.FakeTensor):
            return args[0].fake_device  # more than half of all calls
        kwargs = kwargs or {}
        if func is internals.ITEM and isinstance(args[0], internals.FakeTensor):
            return True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        if self.ledger.phase is None or _computes_for_real(func, args, kwargs):
            with internals.unset_fake_temporarily():
                return func(*args, **kwargs)
        if func.namespace == "c10d" and not self._is_cuda:
            self.ledger.note_temporary(_gloo_bytes(func, args))
        self.ledger.note_temporary(_workspace_bytes(func, args, self._is_cuda))
        if self._workspace_bytes and internals.operator_name(func) in ("mm", "addmm", "bmm"):
            self.ledger.note_kept(self._workspace_bytes)
            self._workspace_bytes = 0
        if func is internals.GROUPED_MM and args[0].dtype != torch.bfloat16:
            # torch's fake kernel takes bf16 only, the real ones take fp32 and fp16 too.
            result = func(args[0].bfloat16(), args[1].bfloat16(), *args[2:], **kwargs).to(args[0].dtype)
        else:
            result = func(*args, **kwargs)
        for value in _tensors((result,)):
            if not isinstance(value, DTensor):
                self.ledger.note(value.untyped_storage())
        return result

    @contextmanager
    def planning(self) -> Iterator[None]:
        """In the block, tensors are fake and all of them are seen."""
        resize, propagate = torch.UntypedStorage.resize_, getattr(*internals.PROPAGATE)

        def resize_and_note(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
            result = resize(storage, nbytes)
            self.ledger.note(storage)
            return result

        def propagate_unseen(*args: Any, **kwargs: Any) -> Any:
            with internals._disable_current_modes():
                return propagate(*args, **kwargs)

        with ExitStack() as stack:
            stack.enter_context(patch.object(torch.UntypedStorage, "resize_", resize_and_note))
            stack.enter_context(patch.object(*internals.PROPAGATE, propagate_unseen))
            for place, holder in ALLOCATING.items():
                stack.enter_context(patch.object(*place, self._allocating(getattr(*place), holder)))
            stack.enter_context(internals.FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(self)
            yield

    def _allocating(self, function: Callable[..., Any], holder: MemoryCategory) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            before, self.ledger.holder = self.ledger.holder, holder
            result = function(*args, **kwargs)
            self.ledger.holder = before
            if function.__name__ == internals.REDUCE[1]:
                gradients = [parameter.sharded_param.grad for parameter in args[0]]
                self.ledger.assign([gradient for gradient in gradients if gradient is not None], "gradients")
            return result

        return wrapped

    def forget_steps(self) -> None:
        """Keep of what has been measured only the loading: the next step is the one to show."""
        self.ledger.peaks = {"load": self.ledger.peaks["load"]}
        self.ledger.timeline = []

    def note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Assign the states that an optimizer has made."""
        self.ledger.assign(states_of(optimizer), "optimizer state")

    def watch(self, model: PreTrainedModel) -> None:
        """Follow a model's forward and backward passes by module; assign its parameters."""
        for parameter in model.parameters():
            holder: MemoryCategory = "sharded parameters" if parameter.is_floating_point() else "quantized parts"
            self.ledger.assign([parameter], holder)
        self.ledger.settle("load", "temporaries", ("sharded parameters", "quantized parts"))
        self._module_names = {module: name for name, module in model.named_modules()}
        layers = set(decoder_layers(model))
        self._head = model.get_output_embeddings()
        self._units = {m for m in model.modules() if m in layers or isinstance(m, FSDPModule)}
        for module in model.modules():
            module.register_forward_pre_hook(self._before_forward)
            module.register_forward_hook(self._after_forward)

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.ledger.module = self._module_names[module]
        # FusedLora uses the parameters of its modules without calling them.
        for parameter in module.parameters(recurse=isinstance(module, lora_linear.FusedLora)):
            if parameter.requires_grad and id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))  # fully_shard keeps its gathered parameters for good
                parameter.register_post_accumulate_grad_hook(self._assign_gradient)
        if self.ledger.phase == "backward":  # recomputed
            return
        if module is self._head:
            self.ledger.holder = "logits and loss"
            if args and isinstance(args[0], torch.Tensor) and args[0].requires_grad:
                args[0].register_hook(lambda _: setattr(self.ledger, "holder", "activations"))
        if module in self._units:
            self.ledger.mark(f"forward {self._module_names[module] or 'the model'}")

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        if self.ledger.phase == "backward":
            return
        if module is self._head:
            self.ledger.module = "the loss"
        if module not in self._units:
            return
        name = self._module_names[module] or "the model"
        self.ledger.mark(f"forward {name} ends")
        for value in internals.tree_leaves(result):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                value.register_hook(lambda _: self._begin_backward(name))
                return

    def _begin_backward(self, name: str) -> None:
        self.ledger.module = name
        self.ledger.mark(f"backward {name}")

    def _assign_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self.ledger.assign([parameter.grad], "gradients")


def states_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors that an optimizer has made."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in states if isinstance(value, torch.Tensor)]


def _computes_for_real(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator is of the host's bookkeeping (positions, labels), whose values steer the program, or of the
    meta device. Weights and activations are fake, and so is all that is made of them."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "meta":
        return True
    tensors = [*_tensors(args), *_tensors(kwargs.values())]
    if not tensors:
        return func.overloadpacket is torch.ops.aten.arange and kwargs.get("dtype") in (None, torch.int64)
    if any(isinstance(tensor, internals.FakeTensor) for tensor in tensors):
        return False
    on_meta = [tensor.device.type == "meta" for tensor in tensors]
    return all(on_meta) and device is None or not any(on_meta)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Those among an operator's arguments, or its results; 4 times faster than pytree, and operators know no dicts."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _gloo_bytes(func: Any, args: Any) -> int:
    """What gloo takes beside a collective's arguments: its reduce-scatter is an all-reduce of a copy of the input, and
    its all-gather receives into memory of its own. Source: AsyncAllgatherWork in torch's ProcessGroupGloo.cpp."""
    if not internals.operator_name(func).strip("_").startswith(("allgather", "reduce_scatter")):
        return 0
    return max((value.nbytes for value in internals.tree_leaves(args) if isinstance(value, torch.Tensor)), default=0)


def _workspace_bytes(func: Any, args: Any, is_cuda: bool) -> int:
    """Bytes that an operator allocates and frees before it returns."""
    name = internals.operator_name(func)
    if func.namespace == "llama_ft" and name == "lora_linear":
        return lora_linear.workspace_bytes(args)
    if func.namespace != "bitsandbytes":
        return 0
    inputs: torch.Tensor = args[0]
    if name == "gemm_4bit":  # the weight is dequantized into the inputs' dtype, then multiplied
        return int(torch.Size(args[2]).numel()) * inputs.dtype.itemsize
    if is_cuda:  # int32 sums, then fp16
        return int(inputs.shape[0] * args[1].shape[0] * (4 + 2)) if name == "int8_scaled_mm" else 0
    if name == "quantize_4bit":  # an fp32 copy, scaled, clamped, and int32 codes
        return inputs.numel() * 4 * 4
    if name == "int8_vectorwise_quant":
        return inputs.numel() * 4
    if name == "optimizer_update_8bit_blockwise":
        # In fp32: both states, the gradient, the second state's root before and after a division, narrower weights.
        return int(args[2].numel() * 4 * (5 if args[2].dtype == torch.float32 else 6))
    return 0
