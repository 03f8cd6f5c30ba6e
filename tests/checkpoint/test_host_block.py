"""Copies for a checkpoint are in one block of host memory."""

import mmap
from types import SimpleNamespace

import pytest
import torch

from llama_ft.checkpoint import host_block
from llama_ft.checkpoint.host_block import HostBlock

TENSORS = {
    "matrix": torch.randn(33, 7),
    "half": torch.randn(5).bfloat16(),
    "step": torch.tensor(3.0),
    "none": torch.empty(0, 4),
    "codes": torch.arange(70, dtype=torch.uint8),
    "strided": torch.randn(6, 4).t(),
}


def test_copies_are_equal_share_one_block_and_do_not_follow_the_tensors() -> None:
    tensors = {name: tensor.clone() for name, tensor in TENSORS.items()}
    copies = HostBlock().copy(tensors)
    for tensor in tensors.values():
        tensor.zero_()
    blocks = {copy.untyped_storage().data_ptr() for copy in copies.values()}
    assert len(blocks) == 1
    for name, tensor in TENSORS.items():
        assert copies[name].dtype == tensor.dtype and copies[name].is_contiguous()
        torch.testing.assert_close(copies[name], tensor, rtol=0, atol=0)
    held = copies["matrix"].untyped_storage().nbytes()
    assert held == HostBlock.bytes_for(TENSORS.values())
    exact = sum(tensor.nbytes for tensor in TENSORS.values())
    assert exact <= held < exact + len(TENSORS) * host_block.ALIGNED_BYTES


def test_on_the_cpu_no_memory_is_kept() -> None:
    block = HostBlock()
    block.copy(TENSORS)
    assert block._memory is None


class Runtime(SimpleNamespace):
    """Stands for CUDA's runtime, which is not here."""

    cudaError = SimpleNamespace(success=0)
    code = 0

    def __init__(self) -> None:
        super().__init__(registered=[], unregistered=[])

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.registered.append((address, nbytes))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.unregistered.append(address)
        return 0


def test_the_block_for_a_gpu_is_registered_once_reused_and_replaced_by_a_larger_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = Runtime()
    monkeypatch.setattr(host_block, "_cuda_runtime", lambda: runtime)
    block = HostBlock()
    first = block._keep(5000)
    assert first.data_ptr() % mmap.PAGESIZE == 0
    assert block._keep(4000).data_ptr() == first.data_ptr()
    assert runtime.registered == [(first.data_ptr(), 5000)]
    larger = block._keep(10_000)
    assert len(runtime.registered) == 2 and runtime.unregistered == [runtime.registered[0][0]]
    larger.fill_(7)
    assert larger.sum() == 70_000
    block.free()
    assert runtime.unregistered == [address for address, _ in runtime.registered]


def test_memory_that_cannot_be_pinned_is_used_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = Runtime()
    runtime.code = 2
    monkeypatch.setattr(host_block, "_cuda_runtime", lambda: runtime)
    monkeypatch.setattr(host_block, "_clear_cuda_error", lambda: None)
    monkeypatch.setattr(host_block.log, "propagate", True)
    block = HostBlock()
    assert block._keep(100).numel() == 100
    assert "at lower speed: cudaHostRegister: 2" in caplog.text
    block.free()
    assert runtime.unregistered == []
