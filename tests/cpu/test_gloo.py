"""Collectives over gloo, compared with gloo's own under fully_shard, on real ranks."""

from pathlib import Path

import pytest
import torch
from forked import forked

JOB = Path(__file__).with_name("gloo_job.py")


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gradients_equal_those_of_gloos_own_collectives(ranks: int, tmp_path: Path) -> None:
    """On 4 ranks also with 2 copies of the model. 7 and 13 rows give uneven shards, and an empty
    one on 4 ranks."""
    finished = forked(JOB, tmp_path, ranks=ranks)
    assert finished.exit_code == 0, finished.output
    for rank in range(ranks):
        for gloos, ours, shared in torch.load(tmp_path / f"rank-{rank}.pt").values():
            assert len(ours) == len(shared) == 4
            for name, gradient in ours.items():
                assert torch.equal(gradient, shared[name]), name
                if ranks == 2:
                    assert torch.equal(gradient, gloos[name]), name
                torch.testing.assert_close(gradient, gloos[name], rtol=1e-6, atol=1e-6)
