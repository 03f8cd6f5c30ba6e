"""Memory and signals that ranks on one host share, on real processes."""

import json
from pathlib import Path

import pytest
from forked import forked

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
