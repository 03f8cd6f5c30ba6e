"""The first lines of a run, for machines that are not here: what a GPU is said to be, and who has which."""

import pytest
import torch

from llama_ft.runtime.devices import DeviceNote, batch_line, describe_gpu, device_lines, layout_line, take_device

GIB = 2**30


@pytest.mark.parametrize(
    ("free", "fraction", "said"),
    [
        (139, None, "NVIDIA H200, 140.00 GiB"),
        (40, None, "NVIDIA H200, 140.00 GiB, shared with another program (40.00 GiB free at the start)"),
        (140, 0.6, "NVIDIA H200, 140.00 GiB, at most 84.00 GiB used (device_memory_fraction)"),
    ],
)
def test_a_gpu_is_its_name_its_memory_and_who_uses_it(free: int, fraction: float | None, said: str) -> None:
    assert describe_gpu("NVIDIA H200", free * GIB, 140 * GIB, fraction) == said


def test_ranks_that_differ_in_number_only_share_a_line_and_a_shared_gpu_has_its_own() -> None:
    notes = [
        DeviceNote(host, f"cuda:{n}", "H200; shared" if (host, n) == ("b", 1) else "H200")
        for host in "ab"
        for n in range(4)
    ]
    assert device_lines(notes) == [
        "ranks 0-3 on a: cuda:0-3, H200 each",
        "rank 4 on b: cuda:0, H200",
        "rank 5 on b: cuda:1, H200; shared",
        "ranks 6-7 on b: cuda:2-3, H200 each",
    ]


def test_ranks_on_a_cpu_share_a_line_with_the_threads_each_has() -> None:
    assert device_lines([DeviceNote("a", "CPU", "2 threads")] * 3) == ["ranks 0-2 on a: CPU, 2 threads each"]
    assert device_lines([DeviceNote("a", "CPU", "1 thread")]) == ["rank 0 on a: CPU, 1 thread"]


def test_the_layout_of_parameters_names_the_mesh() -> None:
    assert layout_line(4, 1) == "mesh replicate 4 x shard 1: the whole model on each rank"
    assert layout_line(2, 4) == "mesh replicate 2 x shard 4: the rows of every parameter split over 4 ranks"


def test_the_global_batch_is_rows_of_every_rank_times_micro_batches() -> None:
    assert batch_line(8, 4, 2, 64) == "global batch: 64 rows = ranks (8) x micro-batch (4) x accumulation (2)"
    assert "8 rows as before, at most 2" in batch_line(1, 2, 2, 8)


def test_a_cpu_is_noted_with_its_threads_and_limits_nothing() -> None:
    note = take_device(torch.device("cpu"), None)
    assert note.device == "CPU" and note.about.split()[0] == str(torch.get_num_threads())
