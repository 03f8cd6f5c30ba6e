"""What a run computes on."""

import threading

import pytest
import torch

from llama_ft import runtime
from llama_ft.runtime import Target, computing_on, current_target

GPU = Target("cuda", (9, 0), "nccl")


def test_before_a_run_starts_the_target_is_a_cpu() -> None:
    assert current_target() == Target("cpu", capability=None, backend="gloo")


def test_a_target_holds_in_its_block_only_and_in_all_threads() -> None:
    seen = []
    with computing_on(GPU):
        thread = threading.Thread(target=lambda: seen.append(current_target()))
        thread.start()
        thread.join()
        with computing_on(Target()):
            assert not current_target().is_cuda
        assert current_target() is GPU
    assert seen == [GPU]
    assert not current_target().is_cuda


def test_a_block_that_fails_restores_the_target() -> None:
    with pytest.raises(ValueError), computing_on(GPU):
        raise ValueError
    assert not current_target().is_cuda


def test_the_target_of_a_gpu_knows_its_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert Target.of(torch.device("cuda", 1)) == GPU
    assert Target.of(torch.device("cpu")) == Target()


def test_a_run_on_the_cpu_computes_on_its_ranks_target() -> None:
    with runtime.start("cpu", "world") as ranks:
        assert ranks.target == Target()
        assert current_target() is ranks.target
