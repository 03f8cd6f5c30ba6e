"""What the C library does with freed memory, seen as page faults of a process of its own."""

import platform
from pathlib import Path

import pytest
from forked import forked

COUNTS_PAGE_FAULTS = """
import resource, torch
from llama_ft.runtime.freed_memory import keep_freed_memory
print("kept", keep_freed_memory())
torch.ones(2**26)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    torch.ones(2**26)
print("faults", resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_freed_memory_serves_the_next_tensor_unless_the_user_has_set_malloc(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(COUNTS_PAGE_FAULTS)
    faults = []
    for environment in ({}, {"MALLOC_TRIM_THRESHOLD_": "131072"}):
        _, kept, _, count = forked(job, **environment).output.split()
        assert kept == str(not environment)
        faults.append(int(count))
    # 256 MiB are 65,536 pages, or 128 huge ones
    assert faults[0] < 100 < faults[1]
