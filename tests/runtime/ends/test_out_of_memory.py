"""Errors that mean memory, and limits of the host's."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from llama_ft.runtime.ends.out_of_memory import Shortage, host_memory, shortage

GIB = 2**30
# In the words of c10/cuda/CUDACachingAllocator.cpp, c10/core/impl/alloc_cpu.cpp and
# ProcessGroupNCCL.cpp.
CUDA = "CUDA out of memory. Tried to allocate 376.00 MiB. GPU 0 has a total capacity of 23.68 GiB of which 212.81 MiB"
CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "10737418240 bytes. Error code 12 (Cannot allocate memory)"
)
NCCL = "NCCL error in: ProcessGroupNCCL.cpp:77, unhandled cuda error, NCCL version 2.27\nCuda failure 2 'out of memory'"


def run_out() -> BaseException:
    """What torch raises when the host does not have so many bytes."""
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**46, dtype=torch.uint8)
    return raised.value


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (run_out, "host"),
        (lambda: RuntimeError(CPU), "host"),
        (lambda: MemoryError(), "host"),
        (lambda: RuntimeError("std::bad_alloc"), "host"),
        (lambda: torch.OutOfMemoryError(CUDA), "device"),
        (
            lambda: RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"
            ),
            "device",
        ),
        (lambda: torch.distributed.DistBackendError(NCCL), "device"),
        (lambda: RuntimeError("[gloo] Connection closed by peer"), None),
    ],
)
def test_an_error_names_the_device_that_ran_out_of_memory(
    make: Callable[[], BaseException], kind: Shortage | None
) -> None:
    assert shortage(make()) == kind


@pytest.mark.parametrize("kind", ["no limit", "v2", "v2 of a container", "with files"])
def test_host_memory_is_that_of_the_machine_or_the_limit_of_the_control_group(
    kind: str, tmp_path: Path
) -> None:
    def write(folder: Path, **files: object) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(str(text))

    proc = tmp_path / "proc"
    sys = tmp_path / "sys"
    write(proc, meminfo="MemTotal:  8388608 kB\nMemAvailable:  6291456 kB\n")
    write(proc / "self", cgroup="5:cpu,cpuacct:/\n0::/job/step\n")
    if kind == "v2":
        write(sys / "job" / "step", memory__max="max", memory__current=GIB)
        # the limit is of the group around it
        write(sys / "job", memory__max=3 * GIB, memory__current=2 * GIB)
    elif kind == "with files":
        write(sys / "job" / "step", memory__max=3 * GIB, memory__current=5 * GIB // 2)
        write(sys / "job" / "step", memory__stat=f"file {GIB}\ninactive_file {GIB // 2}\n")
    elif kind == "v2 of a container":
        # its own group is mounted as the root
        write(sys, memory__max=3 * GIB, memory__current=2 * GIB)
    host = host_memory(proc, sys)
    assert host is not None
    assert (host.bytes, host.available_bytes) == (
        (8 * GIB, 6 * GIB) if kind == "no limit" else (3 * GIB, GIB)
    )
