"""What the C library does with freed memory, seen as page faults of a process of its own."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY

COUNTS_PAGE_FAULTS = """
import re, resource, torch
from pathlib import Path
from llama_ft.runtime.freed_memory import keep_freed_memory

def anonymous():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\\s+(\\d+)", status)[1]) // 1024

print("kept", keep_freed_memory())
for blocks, elements in ((16, 2**22), (1, 2**26)):
    for turn in range(5):
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        [torch.ones(elements) for _ in range(blocks)]
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    print(faults, anonymous())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_freed_memory_serves_the_next_tensors_unless_the_user_has_set_malloc(
    tmp_path: Path,
) -> None:
    """256 MiB at a time, as 16 tensors and as one, which must not leave 256 MiB each time."""
    job = tmp_path / "job.py"
    job.write_text(COUNTS_PAGE_FAULTS)
    faults = []
    for environment in ({}, {"MALLOC_TRIM_THRESHOLD_": "131072"}):
        # a new process: glibc reads the variables when it starts
        finished = subprocess.run(
            [sys.executable, job],
            env=os.environ | environment | {"PYTHONPATH": str(REPOSITORY / "src")},
            capture_output=True,
            text=True,
            check=True,
        )
        said, *lines = finished.stdout.splitlines()
        assert said == f"kept {not environment}"
        (count, before), (_, after) = (map(int, line.split()) for line in lines)
        faults.append(count)
        assert after < before + 300
    # 256 MiB are 65,536 pages, or 128 huge ones
    assert faults[0] < 100 < faults[1]
