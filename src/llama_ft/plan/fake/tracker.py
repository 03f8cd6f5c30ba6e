"""Run the recipe's own functions on tensors without storage, and record the memory that they would
take.

Fake tensors (torch._subclasses.fake_tensor) have shapes, dtypes and storage sizes, but no data.
Every operator of this rank arrives here with local shapes, below DTensor: if a mode returns
NotImplemented for DTensors, it is called again for the operators on their local tensors.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from llama_ft.cpu import block_attention, rms_norm
from llama_ft.cpu.one_kernel import counted_as_one
from llama_ft.errors import UserError
from llama_ft.models import BuiltModel
from llama_ft.models.adapters import lora_experts, lora_linear
from llama_ft.models.base.layers import SCORE
from llama_ft.models.published import mxfp4
from llama_ft.phases import MEMORY_CATEGORIES, MemoryCategory, Phase
from llama_ft.plan.fake.attention_workspace import attention_workspace_bytes
from llama_ft.plan.fake.chunk_loops import LoopCall, LoopMemory, ShortLoop, loops_of
from llama_ft.plan.fake.moved_bytes import MovedBytes, tensors_of
from llama_ft.plan.fake.patches import counted_loops, counted_memory
from llama_ft.plan.types import Peak
from llama_ft.runtime import fp32_matmuls

try:  # private names: without one of them (newer torch), training continues without a plan
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError as error:
    raise UserError(f"Nothing can be planned with torch {torch.__version__}: {error}.") from error

CATEGORY_OF_PHASE: dict[Phase, MemoryCategory] = {
    "load": "temporaries",
    "generation": "activations",
    "forward": "activations",
    "backward": "logits and loss",  # until it has passed the LM head
    "optimizer step": "temporaries",
    "evaluation": "activations",
    "save": "temporaries",
}
# cuBLAS' workspace (Hopper's; other GPUs take 8 MiB). torch allocates it with the first matmul and
# keeps it.
# Source: aten/src/ATen/cuda/CublasHandlePool.cpp
CUBLAS_BYTES = 32 * 2**20
SMALLEST_MASK = 2**20  # elements; smaller ones are computed with values
# [samples, heads, queries, keys]; nothing else that is computed with values has so many
MASK_DIMENSIONS = 4
ITEM = torch.ops.aten._local_scalar_dense.default
DEVICE = torch.ops.prim.device.default
EQUALS = torch.ops.aten.eq.Scalar
INDEX = torch.ops.aten.index.Tensor
MASKED_SELECT = torch.ops.aten.masked_select.default
NEW_EMPTY = torch.ops.aten.new_empty.default
FACTORIES = (torch.ops.aten.arange, torch.ops.aten.linspace)  # of positions
GROUPED_MM = torch.ops.aten._grouped_mm.default  # a matmul per expert
EFFICIENT_BACKWARD = torch.ops.aten._efficient_attention_backward.default


class MemoryTracker(TorchDispatchMode):
    """Counts the tensors of every operator, as PhaseMonitor. Before the first phase, loading,
    tensors are real: the model is on the meta device anyway. `device` is the planned device, cuda
    or cpu.

    Attributes:
        peaks: the peak of each phase.
        kept_peaks: those of `keeping_units`.
        moved: bytes that operators move.
        most_offloaded_bytes: most pinned host memory of --activation_offload.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.peaks: dict[Phase, Peak] = {}
        self.kept_peaks: dict[Phase, Peak] = {}
        self.moved = MovedBytes()
        self._now = 0  # bytes of all living storages
        self._holders: dict[MemoryCategory, int] = dict.fromkeys(MEMORY_CATEGORIES, 0)
        self._holder: MemoryCategory = "temporaries"  # category of new storages
        self._phase: Phase | None = None  # the phase whose peak is measured
        self._alive: dict[int, tuple[int, MemoryCategory]] = {}  # bytes and category
        self._is_cuda = device == "cuda"
        self._workspace_bytes = CUBLAS_BYTES if self._is_cuda else 0  # not allocated yet
        self._model: nn.Module | None = None
        self._head: nn.Module | None = None
        self._hooked: set[int] = set()
        self.most_offloaded_bytes = 0
        self._offloaded_bytes = 0
        self._patches = ExitStack()  # of `planning`

    def enter(self, phase: Phase) -> None:
        """See PhaseMonitor."""
        self._phase = phase
        self.moved.enter(phase)
        self._holder = CATEGORY_OF_PHASE[phase]
        self._update_peak()

    def forget_steps(self) -> None:
        """Begin with new peaks of all phases but loading."""
        self.peaks = {"load": self.peaks["load"]}
        self.kept_peaks = {}
        self.moved = MovedBytes()
        self.moved.enter("load")
        self.most_offloaded_bytes = 0

    @contextmanager
    def keeping_units(self) -> Iterator[None]:
        """In the block, peaks are those of `kept_peaks`."""
        self.peaks, self.kept_peaks = self.kept_peaks, self.peaks
        try:
            yield
        finally:
            self.peaks, self.kept_peaks = self.kept_peaks, self.peaks

    def leave(self) -> None:
        """See PhaseMonitor. What follows counts for the phase until another one begins."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # a shortcut: more than half of all calls
        kwargs = kwargs or {}
        if func is ITEM and isinstance(args[0], FakeTensor):
            # a fake tensor has no value; a program that reads one gets 1 of its type
            if args[0].dtype == torch.bool:
                return True
            return 1.0 if args[0].is_floating_point() else 1
        if self._phase is None or _computes_for_real(func, args, kwargs):
            with unset_fake_temporarily():
                real = func(*args, **kwargs)
            if isinstance(real, torch.Tensor) and real.ndim == MASK_DIMENSIONS:
                self.count_storage(real.untyped_storage())
            return real
        if func is EQUALS and isinstance(args[0], FakeTensor) and args[0].is_floating_point():
            # Idefics 3 looks for images that are padding, and reads their number: none is
            self.count_workspace(args[0].numel())
            with unset_fake_temporarily():
                return torch.zeros((), dtype=torch.bool).expand(args[0].shape)
        selected = _selected_by_mask(func, args)
        if selected is not None:
            if not isinstance(args[0], FakeTensor):  # a mask of the host
                with unset_fake_temporarily():
                    return args[0].reshape(selected).clone()
            func = NEW_EMPTY
            args = (args[0], selected)
        self.count_workspace(_workspace_bytes(func, args, self._is_cuda))
        if self._workspace_bytes and func._opname in ("mm", "addmm", "bmm"):
            self.count_workspace(self._workspace_bytes, is_kept=True)
            self._workspace_bytes = 0
        if func is GROUPED_MM and args[0].dtype != torch.bfloat16:
            # torch's fake kernel accepts only bf16; the real kernels also accept fp32 and fp16.
            inputs, weights, *others = args
            result = func(inputs.bfloat16(), weights.bfloat16(), *others, **kwargs)
            result = result.to(inputs.dtype)
        elif func is EFFICIENT_BACKWARD:
            # torch's fake kernel lacks the arguments `out` and `window_size`.
            _, query, key, value, *_ = args
            gradients = [torch.empty_like(part) for part in (query, key, value)]
            result = (*gradients, query.new_empty(()))  # the last one is of a bias
        else:
            result = func(*args, **kwargs)
        workspace = attention_workspace_bytes(func, args) if self._is_cuda else 0
        if workspace:
            self.count_workspace(workspace, is_kept=True)
        for value in tensors_of((result,)):
            if not isinstance(value, DTensor):
                self.count_storage(value.untyped_storage())
        if workspace:
            self._change(-workspace, "temporaries")
        self.moved.count(func, args, kwargs, result)
        return result

    @contextmanager
    def planning(self) -> Iterator[None]:
        """In the block, all tensors are fake and counted."""
        with (
            ExitStack() as self._patches,
            counted_memory(self.count_storage, self._offloading, self._allocating),
            FakeTensorMode(allow_non_fake_inputs=True),
            self,
        ):
            if self._is_cuda:
                self._patches.enter_context(counted_as_one(self._count_kernel))
            yield

    def _count_kernel(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return self.moved.count_kernel(function, args)  # `moved` is another one for each length

    def _offloading(self, *_: Any, **__: Any) -> saved_tensors_hooks:
        """In place of `save_on_cpu`: what autograd keeps leaves the device until it is needed."""
        return saved_tensors_hooks(self._to_host, _OnHost.copy_back)

    def _to_host(self, tensor: torch.Tensor) -> "_OnHost | torch.Tensor":
        if not isinstance(tensor, FakeTensor):  # bookkeeping, such as positions
            return tensor
        moved = _OnHost(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        # torch rounds pinned memory up to a power of two
        nbytes = 1 << max(0, tensor.nbytes - 1).bit_length()
        self._offloaded_bytes += nbytes
        self.most_offloaded_bytes = max(self.most_offloaded_bytes, self._offloaded_bytes)
        weakref.finalize(moved, self._free_on_host, nbytes)
        return moved

    def _free_on_host(self, nbytes: int) -> None:
        self._offloaded_bytes -= nbytes

    def _allocating(
        self, function: Callable[..., Any], holder: MemoryCategory
    ) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            before = self._holder
            self._holder = holder
            result = function(*args, **kwargs)
            self._holder = before
            if function.__name__ == "foreach_reduce":
                self.assign([parameter.sharded_param.grad for parameter in args[0]], "gradients")
            return result

        return wrapped

    def watch(self, built: BuiltModel, shortens_loops: bool = True) -> None:
        """Count a model's parameters, its gradients, and the memory of its LM head. With
        `shortens_loops`, loops over chunks are counted instead of run: not with selective
        activation checkpointing, which keeps the matmuls inside of them."""
        model = built.model
        if shortens_loops:
            counted = counted_loops(loops_of(model), lambda loop: ShortLoop(loop, self))
            self._patches.enter_context(counted)
        self.assign(
            (value for value in model.parameters() if value.is_floating_point()),
            "sharded parameters",
        )
        self.assign(
            (value for value in model.parameters() if not value.is_floating_point()),
            "quantized parts",
        )
        # The peak of loading counted them as temporaries.
        peak = self.peaks["load"]
        held: dict[MemoryCategory, int] = {**self._holders, "temporaries": 0}
        held["temporaries"] = peak.bytes - sum(held.values())
        self.peaks["load"] = replace(peak, holders=held)
        self._model = model
        self._head = getattr(model, SCORE) if built.has_score else model.get_output_embeddings()
        for module in model.modules():
            module.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        # These modules use parameters of their submodules without calling them.
        for parameter in module.parameters(
            recurse=isinstance(module, lora_linear.FusedLora | ParamWrapper)
        ):
            if parameter.requires_grad and id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))  # fully_shard keeps its unsharded parameters alive
                parameter.register_post_accumulate_grad_hook(
                    lambda trained: self.assign([trained.grad], "gradients")
                )
        # a reference may have run in this phase before
        if module is self._model and self._phase is not None:
            self._holder = CATEGORY_OF_PHASE[self._phase]
        # in backward the LM head is only recomputed
        if module is self._head and self._phase != "backward":
            self._holder = "logits and loss"
            if args and isinstance(args[0], torch.Tensor) and args[0].requires_grad:
                args[0].register_hook(lambda _: setattr(self, "_holder", "activations"))

    def measure(self, call: LoopCall) -> LoopMemory:
        """Run a loop over chunks apart from what this tracker counts, and return its memory."""
        meter = MemoryTracker("cuda" if self._is_cuda else "cpu")
        meter._workspace_bytes = 0  # the model's first matmul has allocated it
        # Modes and the hooks of activation checkpointing belong to a thread. A new one has none.
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(meter._run_loop, call).result()

    def _run_loop(self, call: LoopCall) -> LoopMemory:
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            self,
            torch.set_grad_enabled(call.keeps),
        ):
            self.enter("forward")
            inputs = call.inputs()
            before = self._now
            output, _ = call.function(*inputs, **dict(call.options))
            forward = self.peaks["forward"].bytes - before
            graph = self._now - before - output.nbytes
            if not call.keeps:
                return LoopMemory(forward, moved_forward=self.moved.phases[-1].bytes)
            gradient = torch.empty_like(output)
            before = self._now
            self.enter("backward")
            trained = [tensor for tensor in inputs if tensor.requires_grad]
            torch.autograd.grad(output, trained, gradient)
            backward = self.peaks["backward"].bytes - before
            moved = [phase.bytes for phase in self.moved.phases]
            return LoopMemory(forward, graph, backward, *moved)

    def count_storage(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that may be new or resized."""
        key = storage._cdata
        nbytes = storage.nbytes()
        before, holder = self._alive.get(key, (0, self._holder))
        if key not in self._alive:
            weakref.finalize(storage, self._drop, key)
        if nbytes != before:
            self._change(nbytes - before, holder)
        self._alive[key] = (nbytes, holder)

    def repeated(self, times: int) -> AbstractContextManager[None]:
        """In the block, bytes that operators move count so many times."""
        return self.moved.repeated(times)

    def count_moved(self, nbytes: int) -> None:
        """Count bytes that operators move, which do not arrive here."""
        self.moved.add(nbytes)

    def count_workspace(self, nbytes: int, is_kept: bool = False) -> None:
        """Count memory that an operator allocates, and frees before it returns unless `is_kept`."""
        if not nbytes:
            return
        self._change(nbytes, "temporaries")
        if not is_kept:
            self._change(-nbytes, "temporaries")

    def assign(self, tensors: Iterable[torch.Tensor | None], holder: MemoryCategory) -> None:
        """Set the category of living tensors; of a DTensor only this rank's part."""
        for tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor)
            if local is None:
                continue
            key = local.untyped_storage()._cdata
            if key in self._alive:
                nbytes, before = self._alive[key]
                self._alive[key] = (nbytes, holder)
                self._holders[before] -= nbytes
                self._holders[holder] += nbytes

    def _update_peak(self) -> None:
        phase = self._phase
        if phase is None:
            return
        peak = self.peaks.get(phase)
        if peak is None or self._now > peak.bytes:
            self.peaks[phase] = Peak(phase, self._now, dict(self._holders))

    def _change(self, more: int, holder: MemoryCategory) -> None:
        self._now += more
        self._holders[holder] += more
        if more > 0:
            self._update_peak()

    def _drop(self, key: int) -> None:
        nbytes, holder = self._alive.pop(key)
        if nbytes:
            self._change(-nbytes, holder)


@dataclass(frozen=True, eq=False)
class _OnHost:
    """A tensor that autograd keeps on the host."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def copy_back(stored: "_OnHost | torch.Tensor") -> torch.Tensor:
        """Return it on the device again."""
        if isinstance(stored, torch.Tensor):
            return stored
        return torch.empty_strided(
            stored.shape, stored.stride, dtype=stored.dtype, device=stored.device
        )


def states_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors that an optimizer has created as states."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in states if isinstance(value, torch.Tensor)]


def _computes_for_real(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operator must compute real values: bookkeeping of the host (positions,
    labels), which the program branches on, or tensors on the meta device. Weights, activations,
    attention masks and all results of them are fake."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "meta":
        return True
    tensors = [*tensors_of(args), *tensors_of(kwargs.values())]
    if not tensors:
        of_numbers = kwargs.get("dtype") in (None, torch.int64, torch.float32)
        return func.overloadpacket in FACTORIES and of_numbers
    if any(isinstance(tensor, FakeTensor) for tensor in tensors) or _makes_mask(tensors):
        return False
    on_meta = [tensor.device.type == "meta" for tensor in tensors]
    return all(on_meta) and device is None or not any(on_meta)


def _makes_mask(tensors: list[torch.Tensor]) -> bool:
    """Return whether an operator makes an attention mask of positions: [tokens, 1] and [1, tokens]."""
    if any(tensor.dtype not in (torch.bool, torch.int64) for tensor in tensors):
        return False  # such as of rotary frequencies
    try:
        numel = math.prod(torch.broadcast_shapes(*(tensor.shape for tensor in tensors)))
    except RuntimeError:  # of other shapes
        return False
    largest = max(tensor.numel() for tensor in tensors)
    return numel > max(SMALLEST_MASK, 4 * largest)


def _selected_by_mask(func: Any, args: Any) -> list[int] | None:
    """Return the shape of what a mask selects, such as places of images among embeddings; None for
    other operators. A fake mask, such as of images that are not padding, selects everything."""
    if func is INDEX and len(args[1]) == 1:
        mask = args[1][0]
    elif func is MASKED_SELECT:
        mask = args[1]
    else:
        return None
    if mask.dtype != torch.bool:
        return None
    count = mask.numel()
    if not isinstance(mask, FakeTensor):
        with unset_fake_temporarily():
            count = int(mask.sum())
    return [count, *args[0].shape[mask.ndim :]]


def _workspace_bytes(func: Any, args: Any, is_cuda: bool) -> int:
    """Return the bytes that an operator allocates and frees before it returns."""
    match f"{func.namespace}.{func._opname}":
        case "aten.mm" | "aten.addmm" if not is_cuda:
            *_, left, right = args
            return _product_bytes(left, right.shape[1])
        case "llama_ft.lora_linear":
            dequantized = lora_linear.workspace_bytes(args)
            return dequantized + (0 if is_cuda else _product_bytes(args[0], len(args[5])))
        case "llama_ft.lora_experts":
            return lora_experts.workspace_bytes(args)
        case "llama_ft.dequantize_mxfp4":
            return mxfp4.workspace_bytes(args[0], is_cuda)
        case "llama_ft.attention_in_blocks" | "llama_ft.attention_in_blocks_backward":
            return block_attention.workspace_bytes(args)
        case "llama_ft.rms_norm" | "llama_ft.rms_norm_backward":
            return rms_norm.workspace_bytes(args)
        # dequantizes the weight to the inputs' dtype, then multiplies
        case "bitsandbytes.gemm_4bit":
            inputs, _, shape, *_ = args
            dequantized = int(torch.Size(shape).numel()) * int(inputs.dtype.itemsize)
            return dequantized + (0 if is_cuda else _product_bytes(inputs, shape[0]))
        case "bitsandbytes.int8_scaled_mm" if is_cuda:
            rows = args[0].shape[0]
            columns = args[1].shape[0]
            return int(rows * columns * (4 + 2))  # int32 sums, then fp16
        # an fp32 copy, scaled, clamped, and int32 codes
        case "bitsandbytes.quantize_4bit" if not is_cuda:
            return int(args[0].numel() * 4 * 4)
        case "bitsandbytes.int8_vectorwise_quant" if not is_cuda:
            return int(args[0].numel() * 4)
        case "bitsandbytes.optimizer_update_8bit_blockwise" if not is_cuda:
            # In fp32: two states, the gradient, the second state's root before and after a
            # division, 16-bit weights.
            weight = args[2]
            copies = 5 if weight.dtype == torch.float32 else 6
            return int(weight.numel() * 4 * copies)
    return 0


def _product_bytes(left: torch.Tensor, columns: int) -> int:
    """Return the workspace of a product with `columns` columns on the CPU."""
    inner = left.shape[-1]
    return fp32_matmuls.workspace_bytes(left.numel() // inner, inner, columns, left.dtype)
