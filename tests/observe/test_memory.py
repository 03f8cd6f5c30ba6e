"""Peaks of real allocations, against what the kernel says elsewhere."""

import resource
from pathlib import Path

import torch

from llama_ft.observe import memory_metrics, memory_use, reset_peaks
from llama_ft.observe.memory import _kernel_bytes

CPU = torch.device("cpu")
MIB = 2**20


def touched(size_bytes: int) -> torch.Tensor:
    return torch.ones(size_bytes, dtype=torch.uint8)  # ones, because untouched zeros are not resident


def test_the_host_peak_outlives_the_allocation_until_it_is_reset() -> None:
    reset_peaks(CPU)
    before = memory_use(CPU).resident_peak
    big = touched(300 * MIB)
    del big
    after = memory_use(CPU).resident_peak
    reset_peaks(CPU)
    fresh = memory_use(CPU).resident_peak
    assert 290 * MIB < after - before < 330 * MIB
    assert fresh < after - 250 * MIB


def test_the_host_peak_is_the_one_getrusage_reports() -> None:
    big = touched(64 * MIB)
    peak = memory_use(CPU).resident_peak
    assert peak > 0 and len(big) == 64 * MIB
    # ru_maxrss is the larger of the peak before and after a reset, so it can only be above.
    assert peak <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + MIB


def test_mapped_files_do_not_count_as_anonymous(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"\1" * (400 * MIB))
    before = memory_use(CPU).anonymous
    mapped = torch.from_file(str(path), shared=True, size=400 * MIB, dtype=torch.uint8)
    assert int(mapped.max()) == 1  # reads every page (a sum would need 8 bytes for each)
    with_map = memory_use(CPU).anonymous
    big = touched(400 * MIB)
    with_tensor = memory_use(CPU).anonymous
    # Wide bounds: libraries give memory of earlier tests back at any time.
    assert with_map - before < 200 * MIB
    assert 300 * MIB < with_tensor - with_map and len(big) == 400 * MIB


def test_the_cpu_has_no_device_peak() -> None:
    touched(MIB)
    assert memory_use(CPU).device == memory_use(CPU).device_peak == memory_use(CPU).device_reserved_peak == 0


def test_a_system_without_proc_tells_nothing(tmp_path: Path) -> None:
    assert _kernel_bytes(tmp_path / "status") == {}


def test_a_kernel_that_does_not_tell_the_peak_has_none(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmRSS:\t    2024 kB\nRssAnon:\t    2023 kB\n")
    assert _kernel_bytes(status) == {"RssAnon": 2023 * 1024}


def test_peaks_that_no_rank_measured_have_no_key() -> None:
    on_the_cpu = torch.tensor([[2.0**33, 0.0], [2.0**34, 0.0]], dtype=torch.float64)
    assert memory_metrics(on_the_cpu) == {"memory/host_peak_bytes": [2**33, 2**34]}
