"""Memory and signals that ranks on one host share, on real processes."""

import json
import os
import resource
from pathlib import Path

import pytest
from forked import forked

from llama_ft.errors import RunFailure
from llama_ft.runtime.shared_memory import enlarge

JOB = Path(__file__).with_name("shared_memory_job.py")


def test_ranks_read_what_others_wrote_and_see_when_one_is_killed(tmp_path: Path) -> None:
    """Rank 1 of 3 is killed while the others wait for its signal."""
    forked(JOB, tmp_path, ranks=3, timeout=120)
    for rank in range(3):
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert found["numbers"] == [[1, 2, 3], [1, 2, 3]]
        assert found["counted"] == [pytest.approx(22, abs=2), pytest.approx(44, abs=2)]
        for refused in ("on two hosts", "not everywhere", "not the same memory"):
            assert found[refused], refused
        assert found["left open"] == 0
        if rank != 1:
            assert "16 bytes here, and one of 8 bytes on rank 1 of the group" in found["other size"]
            assert found["error"] == "Connection closed by rank 1 of the group."
            assert found["seconds"] < 5


def test_a_block_that_cannot_grow_is_not_blamed_on_a_file_of_the_run() -> None:
    descriptor = os.memfd_create("test")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        enlarge(descriptor, 2**20)
        with pytest.raises(
            RunFailure, match=r"that ranks share \(2.0 MiB\): .* ulimit -f unlimited"
        ):
            enlarge(descriptor, 2**21)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises(MemoryError, match="memory that ranks share"):
        enlarge(-1, 2**20)
    os.close(descriptor)
