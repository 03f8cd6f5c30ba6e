"""Errors that mean memory, limits of the host's, and the kernel's counts of what it has killed."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from llama_ft.runtime import out_of_memory
from llama_ft.runtime.out_of_memory import Shortage, explain_kill, host_memory, kernel_kills, shortage

GIB = 2**30
# In the words of c10/cuda/CUDACachingAllocator.cpp, c10/core/impl/alloc_cpu.cpp and ProcessGroupNCCL.cpp.
CUDA = (
    "CUDA out of memory. Tried to allocate 376.00 MiB. GPU 0 has a total capacity of 23.68 GiB of which 212.81 MiB is "
    "free. Process 81034 has 4.57 GiB memory in use. Including non-PyTorch memory, this process has 18.90 GiB "
    "memory in use. Of the allocated memory 17.71 GiB is allocated by PyTorch, and 740.37 MiB is reserved by PyTorch "
    "but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
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
        (lambda: OSError(errno.ENOMEM, "Cannot allocate memory"), "host"),
        (lambda: torch.OutOfMemoryError(CUDA), "device"),
        (lambda: torch.AcceleratorError("CUDA error: out of memory"), "device"),
        (
            lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
            "device",
        ),
        (lambda: torch.distributed.DistBackendError(NCCL), "device"),
        (lambda: RuntimeError("[gloo] Connection closed by peer"), None),
        (lambda: OSError(errno.ENOSPC, "No space left on device"), None),
        (lambda: ValueError("out of memory of former times"), None),
    ],
)
def test_an_error_says_which_memory_has_run_out(make: Callable[[], BaseException], kind: Shortage | None) -> None:
    assert shortage(make()) == kind


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A /proc of a machine with 8 GiB, of which 6 are free, that has killed one process before."""
    write(
        tmp_path / "proc",
        meminfo="MemTotal:  8388608 kB\nMemAvailable:  6291456 kB\n",
        vmstat="pgfault 7\noom_kill 1\n",
    )
    write(tmp_path / "proc" / "self", cgroup="0::/job/step\n")
    return tmp_path


def test_the_host_has_what_the_machine_has_where_nothing_limits_it(machine: Path) -> None:
    host = host_memory(machine / "proc", machine / "sys")
    assert host is not None and (host.bytes, host.available_bytes) == (8 * GIB, 6 * GIB)
    real = host_memory()
    assert real is not None and 0 < real.bytes <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize("kind", ["v2", "v2 of a container", "v1"])
def test_a_control_group_limits_the_host(machine: Path, kind: str) -> None:
    limits = {"memory__max": str(3 * GIB), "memory__current": str(2 * GIB)}
    sys = machine / "sys"
    if kind == "v1":
        write(machine / "proc" / "self", cgroup="5:cpu,cpuacct:/\n4:memory:/job/step\n0::/\n")
        limits = {"memory__limit_in_bytes": str(3 * GIB), "memory__usage_in_bytes": str(2 * GIB)}
        write(sys / "memory", memory__limit_in_bytes="9223372036854771712")
        write(sys / "memory" / "job" / "step", **limits)
    elif kind == "v2":
        write(sys / "job" / "step", memory__max="max", memory__current=str(GIB))
        write(sys / "job", **limits)  # the limit is of the group around it
    else:
        write(sys, **limits)  # the container's own group is mounted as the root
    host = host_memory(machine / "proc", sys)
    assert host is not None and (host.bytes, host.available_bytes) == (3 * GIB, GIB)
    assert "3.00 GiB (the limit of this job's control group), 1.00 GiB of it free" in str(host)


def test_kills_count_from_the_beginning(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_of_memory, "PROC", machine / "proc")
    before = kernel_kills()
    assert "or somebody's kill -9" in explain_kill(before)
    write(machine / "proc", vmstat="pgfault 9\noom_kill 3\n")
    assert "counted 2 kills for want of host memory" in explain_kill(before)
