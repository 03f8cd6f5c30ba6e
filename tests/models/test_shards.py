"""Rows are dealt out as torch.chunk does, which is how fully_shard splits a parameter."""

import pytest
import torch

from llama_ft.models.shards import row_ranges


@pytest.mark.parametrize(("rows", "shards"), [(65, 8), (64, 8), (6, 4), (5, 4), (3, 4), (1, 8), (9, 1), (1000, 7)])
def test_row_ranges_are_the_chunks_of_torch(rows: int, shards: int) -> None:
    chunks = torch.arange(rows).chunk(shards)
    found = [torch.arange(start, stop) for start, stop in row_ranges(rows, shards)]
    assert len(found) == shards
    for index, own in enumerate(found):
        assert torch.equal(own, chunks[index] if index < len(chunks) else torch.arange(0))
