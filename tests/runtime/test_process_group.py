import os

import pytest
import torch

from llama_ft.errors import UserError
from llama_ft.runtime.process_group import _pick_device, _set_threads, resolve_degree


def test_cuda_asked_for_without_a_gpu_is_refused_with_the_way_out() -> None:
    with pytest.raises(UserError, match="--device cuda: no GPU.*\n.*--device cpu"):
        _pick_device("cuda", 0, 0, 1)


def test_auto_takes_a_gpu_for_each_process_of_the_node_and_else_the_cpu() -> None:
    assert _pick_device("auto", 4, 3, 4) == torch.device("cuda", 3)
    assert _pick_device("auto", 0, 1, 2) == torch.device("cpu")
    assert _pick_device("cpu", 2, 7, 8) == torch.device("cpu")


def test_more_processes_than_gpus_are_refused_naming_both_and_the_way_out() -> None:
    with pytest.raises(UserError) as refused:
        _pick_device("auto", 2, 0, 3)
    assert "3 processes on" in str(refused.value) and "has 2 GPUs" in str(refused.value)
    assert "--nproc_per_node 2" in str(refused.value) and "--device cpu" in str(refused.value)


def test_ranks_that_do_not_divide_into_groups_are_refused_naming_what_would() -> None:
    with pytest.raises(UserError, match="6 ranks do not divide into groups of 4.*\n.*1, 2, 3, 6"):
        resolve_degree(4, 6, 2)


def test_a_copy_of_the_model_is_shared_by_all_ranks_a_node_or_as_many_as_asked() -> None:
    assert resolve_degree("world", 8, 4) == 8
    assert resolve_degree("node", 8, 4) == 4
    assert resolve_degree(2, 8, 4) == 2


def test_cores_are_shared_out_unless_the_user_has_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    before, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    try:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")  # what torchrun sets for several processes
        _set_threads(2)
        assert torch.get_num_threads() == max(1, cores // 2)
        _set_threads(10_000)
        assert torch.get_num_threads() == 1
        _set_threads(1)
        assert torch.get_num_threads() == 1, "one process: the 1 is the user's own"
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        _set_threads(2)
        assert torch.get_num_threads() == 1, "left as it was: OpenMP has read the user's 3 itself"
    finally:
        torch.set_num_threads(before)
