"""Tensors that say that they are on a GPU, and whose values are on the CPU."""

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_cuda.recorder import RECORDER, place
from emulated_cuda.rules import COLLECTIVES, Call, error_of, launches_of, waits_of
from torch.distributed.tensor import DTensor
from torch.utils import cpp_extension
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

GUARD = Path(__file__).with_name("cuda_guard.cpp")
COMPILER_OPTIONS = ("-O0", "-std=c++20", "-shared", "-fPIC")
# Their result is a number, or no new tensor.
NOT_TENSORS = ("_local_scalar_dense", "is_pinned")


def compile_guard(folder: Path) -> Path:
    """Compile cuda_guard.cpp in `folder` and return the library. Without a compiler the test is
    skipped."""
    library = folder / "cuda_guard.so"
    command = [cpp_extension.get_cxx_compiler(), *COMPILER_OPTIONS, str(GUARD), "-o", str(library)]
    command += [f"-I{path}" for path in cpp_extension.include_paths()]
    command += [f"-L{path}" for path in cpp_extension.library_paths()]
    command += ["-lc10", "-ltorch_cpu"]
    try:
        compiled = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip(f"there is no C++ compiler {command[0]}")
    if compiled.returncode:
        pytest.skip(f"{GUARD.name} does not compile here: {compiled.stderr[:1000]}")
    return library


def load_guard(library: Path, gpu: int, gpus: int) -> None:
    """Let torch see `gpus` GPUs in this process, whose own one is number `gpu`."""
    ctypes.CDLL(str(library)).emulate_cuda(gpu, gpus)


class Gpu:
    """The emulated GPU of this process. Operators have no argument for it."""

    capability = (9, 0)
    device = torch.device("cuda", 0)
    count = 1  # of the machine; each process has its own


class CudaTensor(torch.Tensor):
    """A tensor on the GPU with the values of `inner`, a tensor on the CPU. Its operators come to
    `compute`."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "CudaTensor":
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=Gpu.device,
            requires_grad=False,
        )
        tensor.inner = inner
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        return f"CudaTensor({tuple(self.shape)}, {self.dtype})"

    def __getitem__(self, index: Any) -> Any:
        """Index as torch does. It would copy lists to the GPU below the dispatcher."""
        parts = index if isinstance(index, tuple) else (index,)
        on_host = [torch.tensor(part) if isinstance(part, list) else part for part in parts]
        return super().__getitem__(tuple(on_host))

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def record_stream(self, _: Any) -> None:
        pass

    def tolist(self) -> Any:
        RECORDER.wait("tolist")
        return self.inner.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")


class EmulationMode(TorchDispatchMode):
    """Sends operators without a CUDA tensor to `compute`, too: they may make one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        return compute(func, args, kwargs or {})


def unwrap(value: Any) -> Any:
    """Return the tensor on the CPU of a CudaTensor; anything else as it is."""
    return value.inner if isinstance(value, CudaTensor) else value


def compute(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operator on the CPU values, by the rules of CUDA.

    Raises:
        RuntimeError: CUDA has no kernel for these arguments, such as tensors of two devices.
    """
    call = Call(operator, args, kwargs, Gpu.capability)
    if not call.cuda and call.device != "cuda":
        return operator(*args, **kwargs)
    if operator.namespace == "llama_ft" and operator.has_kernel_for_dispatch_key(
        torch._C.DispatchKey.CompositeExplicitAutograd
    ):
        with EmulationMode():  # several kernels, written in Python
            return operator._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
    if error := error_of(call):
        raise RuntimeError(f"{error} at {place()}")
    if operator.namespace in COLLECTIVES and Gpu.count == 1:
        RECORDER.problem(f"{call.name} starts NCCL for one process")
    for reason in waits_of(call):
        RECORDER.wait(reason)
    RECORDER.launch(*launches_of(call))
    result = _compute_on_host(call)
    if call.device in ("cpu", "meta") or call.name in NOT_TENSORS:
        return result
    if call.name == "_foreach_copy_":
        return None
    return args[0] if call.name == "copy_" else _on_device(result, call)


def _compute_on_host(call: Call) -> Any:
    kwargs = dict(call.kwargs)
    if call.device == "cuda":
        kwargs["device"] = torch.device("cpu")
    if kwargs.get("pin_memory"):  # a build for CPUs cannot
        kwargs["pin_memory"] = None
    args, kwargs = tree_map(unwrap, (call.args, kwargs))
    match call.name:
        # The CPU has no kernels for 16 bits in and fp32 out, nor a histogram of integers.
        case "_softmax" | "_log_softmax" if args[2]:
            return call.operator(args[0].float(), args[1], False)
        case "_softmax_backward_data" | "_log_softmax_backward_data" if args[0].dtype != args[3]:
            wide = call.operator(args[0], args[1], args[2], args[0].dtype)
            return wide.to(args[3])
        case "histc" if not args[0].is_floating_point():
            return call.operator(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
        case "_pin_memory":
            return args[0]
        case "_conj":  # below the dispatcher's Conjugate key nothing would read a conjugate bit
            return torch.conj_physical(args[0])
    return call.operator(*args, **kwargs)


def _on_device(result: Any, call: Call) -> Any:
    """Return the CPU's result as CUDA tensors; an argument that was changed is that argument."""
    by_inner = {id(tensor.inner): tensor for tensor in call.cuda}
    on_host = {id(tensor) for tensor in call.host}

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, CudaTensor):
            return value
        if id(value) in by_inner:
            return by_inner[id(value)]
        if id(value) in on_host or value.device.type == "meta":
            return value
        return CudaTensor(value)

    return tree_map(wrap, result)
