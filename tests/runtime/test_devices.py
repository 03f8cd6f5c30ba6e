"""The first lines of a run, for machines that are not here: what a GPU is said to be, and who has which."""

import pytest
import torch

from llama_ft.runtime.devices import DeviceNote, batch_line, describe_gpu, device_lines, layout_line, take_device

GIB = 2**30


def test_a_gpu_of_ones_own_is_its_name_and_memory() -> None:
    assert describe_gpu("NVIDIA H200", 139 * GIB, 140 * GIB, None) == "NVIDIA H200, 140 GiB"
    assert describe_gpu("Tesla T4", int(14.2 * GIB), int(14.6 * GIB), None) == "Tesla T4, 15 GiB"


def test_a_gpu_that_another_program_uses_says_what_was_free() -> None:
    shared = describe_gpu("NVIDIA H200", 40 * GIB, 140 * GIB, None)
    assert shared == "NVIDIA H200, 140 GiB; shared with another program: 40 GiB were free at the start"


def test_a_memory_limit_is_told_in_gib() -> None:
    limited = describe_gpu("NVIDIA H200", 140 * GIB, 140 * GIB, 0.6)
    assert limited == "NVIDIA H200, 140 GiB; at most 84 GiB used (device_memory_fraction 0.6)"


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


@pytest.mark.parametrize(
    ("copies", "shards", "said"),
    [
        (1, 1, "mesh of one: the whole model on one rank"),
        (1, 4, "mesh shard 4: one copy of the model, the rows of every parameter split over 4 ranks"),
        (4, 1, "mesh replicate 4 x shard 1: the whole model on each of 4 ranks"),
        (2, 4, "mesh replicate 2 x shard 4: 2 copies of the model, the rows of every parameter split over 4 ranks"),
    ],
)
def test_the_layout_of_parameters_is_told(copies: int, shards: int, said: str) -> None:
    assert layout_line(copies, shards) == said


def test_the_global_batch_is_rows_of_every_rank_times_micro_batches() -> None:
    dealt = "every rank trains on rows of its own; global batch: 8 ranks x 4 rows x 2 micro-batches = 64"
    assert batch_line(8, 4, 2, 64) == dealt
    assert batch_line(1, 1, 1, 1) == "global batch: 1 rank x 1 row = 1"


def test_the_global_batch_of_a_run_begun_on_other_ranks_is_told_as_it_was() -> None:
    kept = "global batch: 8 rows as before, at most 2 of them in a micro-batch of a rank"
    assert batch_line(1, 2, 2, 8) == kept


def test_a_cpu_is_noted_with_its_threads_and_limits_nothing() -> None:
    note = take_device(torch.device("cpu"), None)
    assert note.device == "CPU" and note.about.split()[0] == str(torch.get_num_threads())
