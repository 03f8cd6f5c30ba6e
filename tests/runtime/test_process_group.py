"""Which device and which copy of the model a rank has, for machines that are not here."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from llama_ft.errors import UserError
from llama_ft.runtime import Ranks
from llama_ft.runtime.devices import claim_device, pick_device
from llama_ft.runtime.process_group import (
    DataRank,
    ShardRank,
    describe_uneven,
    mesh_over,
    resolve_degree,
)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("cuda", 0, 0, 1), "--device"),
        (("auto", 2, 0, 3), "--nproc_per_node 2"),
        (("auto", 1, 3, 8), "--gpus-per-node"),
    ],
)
def test_too_few_gpus_are_rejected_with_the_flag_to_change(
    arguments: tuple[str, int, int, int], named: str
) -> None:
    with pytest.raises(UserError, match=named):
        pick_device(*arguments)


def test_a_gpu_that_cannot_be_used_is_named_with_the_error_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def too_old(_: torch.device) -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).")

    monkeypatch.setattr(torch.cuda, "set_device", too_old)
    with pytest.raises(UserError, match=r"cuda:0 cannot be used: The NVIDIA driver .* is too old"):
        claim_device(torch.device("cuda", 0), None)


def test_device_auto_takes_one_gpu_per_process_or_else_the_cpu() -> None:
    assert pick_device("auto", 4, 3, 4) == torch.device("cuda", 3)
    assert pick_device("auto", 0, 1, 2) == torch.device("cpu")
    assert pick_device("cpu", 2, 7, 8) == torch.device("cpu")


def test_the_model_is_sharded_over_the_world_a_node_or_a_given_number_of_ranks() -> None:
    assert resolve_degree("world", 8, 4) == 8
    assert resolve_degree("node", 8, 4) == 4
    assert resolve_degree(2, 8, 4) == 2
    with pytest.raises(
        UserError, match="--sharding_group_size 4: 6 ranks .* a multiple of 4 ranks"
    ):
        resolve_degree(4, 6, 2)


@pytest.mark.parametrize(
    ("degree", "shard"),
    [
        (1, ShardRank(rank=0, size=1, copy=3, copies=4)),
        (2, ShardRank(rank=1, size=2, copy=1, copies=2)),
        (4, ShardRank(rank=3, size=4, copy=0, copies=1)),
    ],
)
def test_a_rank_knows_its_share_of_the_samples_and_its_shard(degree: int, shard: ShardRank) -> None:
    """The last of 4 ranks, of which `degree` share a copy of the model."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    try:
        cpu = torch.device("cpu")
        ranks = Ranks(3, 4, 1, 2, cpu, cpu, "CPU", mesh_over("cpu", 4, degree), None)
        assert ranks.data == DataRank(rank=3, size=4)
        assert ranks.shard == shard
    finally:
        dist.destroy_process_group()


def test_the_mean_over_one_process_is_its_value_and_needs_no_process_group() -> None:
    cpu = torch.device("cpu")
    ranks = Ranks(0, 1, 0, 1, cpu, cpu, "CPU", None, None)
    value = torch.tensor([2.0, 3.0], requires_grad=True)
    mean = ranks.mean_over_ranks(value)
    assert mean.tolist() == [2.0, 3.0]
    assert not mean.requires_grad and mean.data_ptr() != value.data_ptr()


def test_a_global_batch_that_the_ranks_cannot_divide_is_described_with_those_that_can() -> None:
    assert describe_uneven(8, 4) == ""
    assert describe_uneven(12, 5) == (
        "; 5 ranks do not divide it, so some wait for others (1, 2, 3, 4, 6, 12 ranks do)"
    )
    assert "(1, 2, 4 ranks do)" in describe_uneven(4, 8)
