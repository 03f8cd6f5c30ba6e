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
from llama_ft.cpu.freed_memory import keep_freed_memory

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


@pytest.mark.slow
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


HOLES = """
import re, sys, torch
from pathlib import Path
from llama_ft.cpu import freed_memory

def anonymous():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\\s+(\\d+)", status)[1]) // 1024

assert getattr(freed_memory, sys.argv[1])()
before = anonymous()
kept = []
for number in range(30):
    temporary = torch.ones(2**20 + number * 2**14)  # fits into no earlier hole
    kept.append(torch.ones(2**21))  # into none, either
    del temporary
print(anonymous() - before - 30 * 8)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_returned_memory_leaves_no_holes_between_tensors_that_stay(tmp_path: Path) -> None:
    """30 tensors of 8 MiB stay. Temporary ones of 4 to 6 MiB, one at a time, are 147 MiB together."""
    job = tmp_path / "job.py"
    job.write_text(HOLES)
    held = {}
    for way in ("keep_freed_memory", "return_freed_memory"):
        finished = subprocess.run(
            [sys.executable, job, way],
            env=os.environ | {"PYTHONPATH": str(REPOSITORY / "src")},
            capture_output=True,
            text=True,
            check=True,
        )
        held[way] = int(finished.stdout)
    assert held["return_freed_memory"] < 16 < 100 < held["keep_freed_memory"]
