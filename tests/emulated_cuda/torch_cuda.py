"""The functions of torch.cuda, of torch's memory and of the process group for an emulated GPU."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo  # noqa: F401  it keeps functions of torch.cuda, as they are now
import torch.distributed as dist
from emulated_cuda import attention
from emulated_cuda.device import CudaTensor, EmulationMode, Gpu
from emulated_cuda.recorder import RECORDER
from torch.utils._device import _device_constructors
from torch.utils.checkpoint import DefaultDeviceType

from llama_ft.cpu import one_kernel
from llama_ft.extensions.images.towers import without_waits
from llama_ft.models.packing import kernels, packed_attention

GIB = 2**30
NAME = "NVIDIA H100 80GB HBM3"
_device_constructors()  # torch keeps a list of functions, also of those that are replaced below


class Event:
    """An event that has always happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def wait(self, *_: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        RECORDER.wait("event.synchronize")

    def elapsed_time(self, _: "Event") -> float:
        return 100.0


class Stream:
    """A stream that is never behind."""

    cuda_stream = 0
    priority = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = Gpu.device

    def wait_stream(self, _: "Stream") -> None:
        pass

    def wait_event(self, _: Event) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        RECORDER.wait("stream.synchronize")


class HostGenerator(torch.Generator):
    """A generator of the GPU's random numbers on the CPU."""

    def __new__(cls, device: Any = "cpu") -> "HostGenerator":
        return super().__new__(cls, "cpu")


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _properties(*_: Any) -> SimpleNamespace:
    major, minor = Gpu.capability
    return SimpleNamespace(
        name=NAME,
        major=major,
        minor=minor,
        total_memory=80 * GIB,
        multi_processor_count=132,
        gcnArchName="",
    )


# Registering host memory succeeds, with code 0.
CUDA_RUNTIME = SimpleNamespace(
    cudaError=SimpleNamespace(success=0),
    cudaHostRegister=lambda *_: 0,
    cudaHostUnregister=lambda *_: 0,
)
OF_TORCH_CUDA: dict[str, Any] = {
    "_initialized": True,
    "_is_in_bad_fork": lambda: False,
    "_lazy_init": _nothing,
    "Event": Event,
    "Stream": Stream,
    "cudart": lambda: CUDA_RUNTIME,
    "current_device": lambda: Gpu.device.index,
    "current_stream": Stream,
    "default_stream": Stream,
    "device": lambda _: nullcontext(),
    "device_count": lambda: Gpu.count,
    "empty_cache": _nothing,
    "get_device_capability": lambda *_: Gpu.capability,
    "get_device_name": lambda *_: NAME,
    "get_device_properties": _properties,
    "get_rng_state": lambda *_: torch.get_rng_state(),
    "get_rng_state_all": lambda: [],
    "host_memory_stats": dict,
    "init": _nothing,
    "is_available": lambda: True,
    "is_bf16_supported": lambda **_: Gpu.capability >= (8, 0),
    "is_initialized": lambda: True,
    "manual_seed": _nothing,
    "manual_seed_all": _nothing,
    "max_memory_allocated": lambda *_: 0,
    "mem_get_info": lambda *_: (79 * GIB, 80 * GIB),
    "memory_allocated": lambda *_: 0,
    "memory_reserved": lambda *_: 0,
    "memory_stats": lambda *_: {},
    "memory_stats_as_nested_dict": lambda *_: {},
    "reset_peak_memory_stats": _nothing,
    "set_device": _nothing,
    "set_per_process_memory_fraction": _nothing,
    "set_rng_state": lambda state, *_: torch.set_rng_state(state),
    "set_rng_state_all": _nothing,
    "stream": lambda _: nullcontext(),
    "synchronize": lambda *_: RECORDER.wait("cuda.synchronize"),
}


def _through_the_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make torch.tensor and torch.as_tensor copy to the GPU. They copy values of Python below the
    dispatcher, where the emulation does not see them."""

    def make(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None:
            return function(data, *args, **kwargs)
        if isinstance(data, torch.Tensor) or torch.device(device).type != "cuda":
            return function(data, *args, device=device, **kwargs)
        with torch._C._DisableTorchDispatch():
            values = function(data, *args, **kwargs)
            if values.numel():  # otherwise there is nothing to copy
                RECORDER.wait(f"{function.__name__} on the GPU")
            return CudaTensor(values)

    return make


def _new_tensor(
    self: torch.Tensor, data: Any, *args: Any, device: Any = None, **kwargs: Any
) -> Any:
    kwargs.setdefault("dtype", self.dtype)
    return torch.tensor(data, *args, device=device or self.device, **kwargs)


def _pin_memory(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    if isinstance(tensor, CudaTensor):
        raise RuntimeError("cannot pin a CUDA tensor: only dense CPU tensors can be pinned")
    return tensor


def _over_gloo(init_process_group: Callable[..., None]) -> Callable[..., None]:
    """Let gloo do what NCCL would, with the values on the CPU."""

    def init(*, backend: str, device_id: Any, **others: Any) -> None:
        init_process_group(backend="gloo", **others)

    return init


def _patches() -> list[Any]:
    patches: list[Any] = [
        patch.object(torch.cuda, name, value) for name, value in OF_TORCH_CUDA.items()
    ]
    for owner, name, value in (
        (DefaultDeviceType, "_default_device_type", "cuda"),
        (torch, "Generator", HostGenerator),
        (torch.accelerator, "current_stream", Stream),
        (torch, "tensor", _through_the_host(torch.tensor)),
        (torch, "as_tensor", _through_the_host(torch.as_tensor)),
        (torch.Tensor, "new_tensor", _new_tensor),
        (torch.Tensor, "pin_memory", _pin_memory),
        (torch.Tensor, "record_stream", _nothing),
        (torch.nn.functional, "scaled_dot_product_attention", attention.sdpa),
        (torch.ops.aten, "_efficient_attention_forward", attention.efficient_forward),
        (torch.ops.aten, "_efficient_attention_backward", attention.efficient_backward),
        (packed_attention, "varlen_attn", attention.varlen_attn),
        (without_waits, "varlen_attn", attention.varlen_attn),
        (kernels, "varlen_attn", attention.varlen_attn),
        (torch.ops.torch_attn, "_varlen_attn_backward", attention.varlen_backward),
        (one_kernel, "runs_compiled", lambda _: False),  # there is no GPU to compile for
        (dist, "init_process_group", _over_gloo(dist.init_process_group)),
    ):
        patches.append(patch.object(owner, name, value))
    return patches


@contextmanager
def emulated(capability: tuple[int, int], gpu: int = 0, gpus: int = 1) -> Iterator[None]:
    """In the block, torch has `gpus` GPUs of a compute capability, and this process uses number
    `gpu`. `load_guard` must have been called."""
    Gpu.capability = capability
    Gpu.device = torch.device("cuda", gpu)
    Gpu.count = gpus
    with ExitStack() as stack:
        for each in _patches():
            stack.enter_context(each)
        stack.enter_context(EmulationMode())
        yield
