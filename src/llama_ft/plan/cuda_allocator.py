"""Simulate torch's CUDA allocator: how much memory it takes from the device for a sequence of
allocations.

The rules are those of c10/cuda/CUDACachingAllocator.cpp with expandable segments, which llama_ft
sets. Sizes are rounded up to 512 bytes. Blocks up to 1 MiB are in the small pool, which takes pages
of 2 MiB from the device, others in the large pool with pages of 20 MiB. The pages of a pool form one
range of addresses. The smallest sufficient free block is used, and split if at least 512 bytes
remain. If there is none, pages are mapped at the lowest address where the block fits. Neighboring
free blocks are merged. Pages without a block are returned to the device only when it has no more
memory: so the need is what is reserved if they are returned before the reserved memory exceeds its
previous maximum. One stream.
"""

import bisect
from collections.abc import Iterable
from typing import Literal

ROUND = 512
LARGEST_SMALL_BLOCK = 2**20
SMALL_PAGE = 2 * 2**20
LARGE_PAGE = 20 * 2**20
ADDRESS_SPACE = 2**60  # more than any device has; a multiple of no page, so it is rounded

State = Literal["used", "free", "unmapped"]


class _Block:
    """A range of addresses in a pool."""

    __slots__ = ("address", "after", "before", "size", "state")

    def __init__(self, address: int, size: int, state: State) -> None:
        self.address = address
        self.size = size
        self.state = state
        self.before: _Block | None = None
        self.after: _Block | None = None


class _Pool:
    """Blocks that share pages of one size. All addresses belong to exactly one block."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.mapped = 0  # bytes of its pages
        everything = _Block(0, ADDRESS_SPACE // page * page, "unmapped")
        self._free: list[tuple[int, int, _Block]] = []  # with size and address, ascending
        self._unmapped: list[tuple[int, _Block]] = [(0, everything)]  # with address, ascending

    def take_free_block(self, size: int) -> _Block | None:
        """Return the free block that torch chooses for `size` bytes, split to this size; None if
        no free block is large enough."""
        place = bisect.bisect_left(self._free, (size, 0))
        if place == len(self._free):
            return None
        block = self._free[place][2]
        # A block that can grow into unmapped pages counts with these, so a larger one that cannot
        # may come first.
        for _, _, larger in self._free[place + 1 :]:
            if _size_with_unmapped(larger) >= _size_with_unmapped(block):
                break
            block = larger
        self._remove(block)
        return self._split(block, size)

    def find_room(self, size: int) -> tuple[_Block, int]:
        """Return the first block of the lowest free or unmapped range with room for `size` bytes,
        and the bytes that must be mapped."""
        for _, block in self._unmapped:
            before = block.before
            first = before if before is not None and before.state == "free" else block
            total = 0
            unmapped = 0
            current: _Block | None = first
            while current is not None and current.state != "used":
                missing = size - total
                if current.state == "unmapped":
                    pages = -(-missing // self.page) * self.page
                    unmapped += min(pages, current.size)
                total += current.size
                if total >= size:
                    return first, unmapped
                current = current.after
        raise AssertionError("the last block is unmapped and has room")

    def map(self, first: _Block, size: int) -> _Block:
        """Map the pages that a block of `size` bytes needs, from `find_room`, and return it."""
        block = first
        if block.state == "unmapped":
            block = self._map_pages(block, size)
        while block.size < size:
            after = block.after
            assert after is not None
            block = self._map_pages(after, size - block.size)
        self._remove(block)
        return self._split(block, size)

    def free(self, block: _Block) -> None:
        """Make a used block free, and merge it with free neighbors."""
        block.state = "free"
        self._insert(self._merge(block))

    def unmap_free_pages(self) -> None:
        """Return all pages without a used block to the device."""
        for _, _, block in list(self._free):
            begin = -(-block.address // self.page) * self.page
            end = (block.address + block.size) // self.page * self.page
            if begin >= end:
                continue
            self._remove(block)
            if begin > block.address:
                rest = self._cut(block, begin - block.address)
                self._insert(block)
                block = rest
            if end < block.address + block.size:
                self._insert(self._cut(block, end - block.address))
            self.mapped -= block.size
            block.state = "unmapped"
            self._insert(self._merge(block))

    def _map_pages(self, block: _Block, size: int) -> _Block:
        """Map the first pages of an unmapped block, `size` bytes or more if it has them. Return
        the free block that they are part of."""
        self._remove(block)
        pages = -(-size // self.page) * self.page
        if pages < block.size:
            self._insert(self._cut(block, pages))
        self.mapped += block.size
        block.state = "free"
        merged = self._merge(block)
        self._insert(merged)
        return merged

    def _split(self, block: _Block, size: int) -> _Block:
        if block.size - size >= ROUND:
            self._insert(self._cut(block, size))
        block.state = "used"
        return block

    def _cut(self, block: _Block, size: int) -> _Block:
        """Shorten a block to `size` bytes and return the rest, of the same state."""
        rest = _Block(block.address + size, block.size - size, block.state)
        rest.before = block
        rest.after = block.after
        if block.after is not None:
            block.after.before = rest
        block.after = rest
        block.size = size
        return rest

    def _merge(self, block: _Block) -> _Block:
        """Merge a block with neighbors of its state, and return the result."""
        before = block.before
        if before is not None and before.state == block.state:
            self._remove(before)
            self._absorb_next(before)
            block = before
        after = block.after
        if after is not None and after.state == block.state:
            self._remove(after)
            self._absorb_next(block)
        return block

    def _absorb_next(self, block: _Block) -> None:
        after = block.after
        assert after is not None
        block.size += after.size
        block.after = after.after
        if block.after is not None:
            block.after.before = block

    def _insert(self, block: _Block) -> None:
        if block.state == "free":
            bisect.insort(self._free, (block.size, block.address, block))
        else:
            bisect.insort(self._unmapped, (block.address, block))

    def _remove(self, block: _Block) -> None:
        if block.state == "free":
            del self._free[bisect.bisect_left(self._free, (block.size, block.address))]
        else:
            del self._unmapped[bisect.bisect_left(self._unmapped, (block.address,))]


def _size_with_unmapped(block: _Block) -> int:
    after = block.after
    if after is not None and after.state == "unmapped":
        return block.size + after.size
    return block.size


class CachingAllocator:
    """The allocator of one device. `most`: the bytes it has reserved at most."""

    def __init__(self) -> None:
        self.most = 0
        self._small = _Pool(SMALL_PAGE)
        self._large = _Pool(LARGE_PAGE)

    def allocate(self, nbytes: int) -> _Block:
        """Return a block of at least `nbytes` bytes."""
        size = max(ROUND, -(-nbytes // ROUND) * ROUND)
        pool = self._pool(size)
        block = pool.take_free_block(size)
        if block is not None:
            return block
        first, unmapped = pool.find_room(size)
        if self.reserved + unmapped > self.most:
            # as on a device that has no more memory
            self._small.unmap_free_pages()
            self._large.unmap_free_pages()
            first, _ = pool.find_room(size)
        block = pool.map(first, size)
        self.most = max(self.most, self.reserved)
        return block

    def free(self, block: _Block, nbytes: int) -> None:
        """Return a block that was allocated for `nbytes` bytes."""
        self._pool(nbytes).free(block)

    @property
    def reserved(self) -> int:
        """Bytes of all pages."""
        return self._small.mapped + self._large.mapped

    def _pool(self, nbytes: int) -> _Pool:
        return self._small if nbytes <= LARGEST_SMALL_BLOCK else self._large


def reserved_bytes(events: Iterable[tuple[int, int]]) -> int:
    """Return the bytes that a device needs for a sequence of (number of a storage, change in
    bytes)."""
    allocator = CachingAllocator()
    blocks = dict[int, tuple[_Block, int]]()
    for number, change in events:
        size_before = 0
        if number in blocks:
            block, size_before = blocks.pop(number)
            allocator.free(block, size_before)
        size = size_before + change
        if size > 0:
            blocks[number] = (allocator.allocate(size), size)
    return allocator.most
