"""One block of host memory for the copies of a checkpoint.

A block for copies from a GPU is pinned and kept for the next checkpoint. torch's own pinned memory
rounds each tensor up to a power of two and keeps it: 1.1 to 1.4 times the bytes of a checkpoint.
"""

import mmap
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch

from llama_ft.models.base.shards import local_shard
from llama_ft.runtime import log

ALIGNED_BYTES = 64  # a tensor in the block starts at a multiple of a cache line


class HostBlock:
    """Copies tensors to the host, all into one block of memory."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None  # uint8, for copies from a GPU
        self._is_pinned = False

    def copy(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy this rank's rows to the host. Copies from a GPU are overwritten by the next call;
        all of them are done when it returns."""
        shards = {name: local_shard(tensor) for name, tensor in tensors.items()}
        on_gpu = any(shard.is_cuda for shard in shards.values())
        sizes = [_size_of(shard) for shard in shards.values()]
        total = sum(sizes)
        # On the CPU the memory is freed when the checkpoint is written.
        block = self._keep(total) if on_gpu else torch.empty(total, dtype=torch.uint8)
        parts = block[:total].split(sizes)
        copies = {}
        for (name, shard), part in zip(shards.items(), parts, strict=True):
            target = part[: shard.nbytes].view(shard.dtype).view(shard.shape)
            copies[name] = target.copy_(shard, non_blocking=True)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return copies

    @staticmethod
    def bytes_for(tensors: Iterable[torch.Tensor]) -> int:
        """Return the bytes of a block for copies of this rank's rows."""
        return sum(_size_of(local_shard(tensor)) for tensor in tensors)

    def free(self) -> None:
        """Unpin and free the kept memory. No copy may be used after it."""
        if self._memory is not None and self._is_pinned:
            _cuda_runtime().cudaHostUnregister(self._memory.data_ptr())
        self._memory = None
        self._is_pinned = False

    def _keep(self, nbytes: int) -> torch.Tensor:
        """Return the kept block, or a new one if it is smaller than `nbytes`."""
        if self._memory is None or self._memory.numel() < nbytes:
            self.free()
            self._memory = page_aligned(nbytes)
            self._is_pinned = _pin(self._memory)
        return self._memory


def _size_of(shard: torch.Tensor) -> int:
    return -(-shard.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES


def page_aligned(nbytes: int) -> torch.Tensor:
    """Return private, anonymous memory that starts at a page, as uint8 [nbytes]."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()


def _pin(block: torch.Tensor) -> bool:
    """Pin memory, so that the GPU copies into it at full speed. Return whether it is pinned: the
    system may limit such memory."""
    runtime = _cuda_runtime()
    error = runtime.cudaHostRegister(block.data_ptr(), block.numel(), 0)
    if error == runtime.cudaError.success:
        return True
    log.warning(f"Checkpoints are copied from the GPU at lower speed: cudaHostRegister: {error}.")
    _clear_cuda_error()
    return False


def _clear_cuda_error() -> None:
    """Start a kernel: CUDA reports an error of its runtime again after the next kernel, and that
    should not be one of training."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)
