"""Simulate torch's CUDA allocator: how much memory it takes from the device for a sequence of
allocations.

The rules are those of c10/cuda/CUDACachingAllocator.cpp. Sizes are rounded up to 512 bytes. Blocks
up to 1 MiB come from segments of 2 MiB, blocks up to 10 MiB from segments of 20 MiB. A larger block
gets its own segment, rounded up to 2 MiB. The smallest sufficient free block of a pool is used, and
split if more than 512 bytes (small pool) or 1 MiB (large pool) remain. Neighboring free blocks are
merged. Free segments are kept until the device has no more memory: so the need is what is reserved
if they are returned before new ones are taken. One stream, without expandable segments.
"""

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

ROUND = 512
SMALL = 2**20
LARGE_BUFFER = 20 * 2**20
OWN_SEGMENT = 10 * 2**20
SEGMENT_ROUND = 2 * 2**20


@dataclass(eq=False)
class _Block:
    address: int
    size: int
    is_small: bool
    before: "_Block | None" = None
    after: "_Block | None" = None
    is_free: bool = False


Pool = list[tuple[int, int, _Block]]  # free blocks with size and address, ascending


class CachingAllocator:
    """The allocator's blocks."""

    def __init__(self) -> None:
        self.reserved = 0  # bytes now
        self.most = 0  # their maximum
        self._end = 0  # address where the last segment ends
        self._free: dict[bool, Pool] = {True: [], False: []}

    def allocate(self, nbytes: int) -> _Block:
        """Return a block of at least `nbytes` bytes."""
        size = max(ROUND, -(-nbytes // ROUND) * ROUND)
        is_small = size <= SMALL
        pool = self._free[is_small]
        place = bisect.bisect_left(pool, (size, 0))
        if place < len(pool):
            _, _, block = pool.pop(place)  # the smallest one that is large enough
        else:
            block = self._segment(size, is_small)
        block.is_free = False
        left = block.size - size
        is_split = left >= ROUND if is_small else left > SMALL
        if is_split:
            rest = _Block(block.address + size, left, is_small, block, block.after)
            if block.after is not None:
                block.after.before = rest
            block.size = size
            block.after = rest
            self._put_back(rest)
        return block

    def free(self, block: _Block) -> None:
        """Return a block to its pool, and merge it with free neighbors."""
        before = block.before
        if before is not None and before.is_free:
            self._take_out(before)
            block.address = before.address
            block.size += before.size
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        after = block.after
        if after is not None and after.is_free:
            self._take_out(after)
            block.size += after.size
            block.after = after.after
            if block.after is not None:
                block.after.before = block
        self._put_back(block)

    def _segment(self, size: int, is_small: bool) -> _Block:
        """Return a new segment as one block. Free segments are returned to the device first; see
        the top of this file."""
        if is_small:
            segment_size = 2 * SMALL
        elif size < OWN_SEGMENT:
            segment_size = LARGE_BUFFER
        else:
            segment_size = -(-size // SEGMENT_ROUND) * SEGMENT_ROUND
        for pool in self._free.values():
            whole_segments = [
                block for _, _, block in pool if block.before is None and block.after is None
            ]
            for block in whole_segments:
                self._take_out(block)
                self.reserved -= block.size
        address = self._end
        self.reserved += segment_size
        self.most = max(self.most, self.reserved)
        self._end += segment_size
        return _Block(address, segment_size, is_small)

    def _put_back(self, block: _Block) -> None:
        block.is_free = True
        bisect.insort(self._free[block.is_small], (block.size, block.address, block))

    def _take_out(self, block: _Block) -> None:
        pool = self._free[block.is_small]
        del pool[bisect.bisect_left(pool, (block.size, block.address))]
        block.is_free = False


def reserved_bytes(events: Iterable[tuple[int, int]]) -> int:
    """Return the bytes that a device needs for a sequence of (number of a storage, change in
    bytes)."""
    allocator = CachingAllocator()
    blocks = dict[int, tuple[_Block, int]]()
    for number, change in events:
        block, size_before = blocks.pop(number, (None, 0))
        if block is not None:
            allocator.free(block)
        size = size_before + change
        if size > 0:
            blocks[number] = (allocator.allocate(size), size)
    return allocator.most
