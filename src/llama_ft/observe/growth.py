"""Finding memory that grows with every step."""

SKIPPED_STEPS = 2  # optimizer states, caches and buffers are made
FIRST_BLOCK_STEPS = 3
BLOCKS = 8
LEAST_BYTES = 64 * 2**20
LEAST_SHARE = 0.01  # of what is held
STEADY = 0.6  # what warms up rises less and less, and an evaluation or a save lifts the level once


class Growth:
    """Looks at memory at the same point of each step.

    Steps are taken together in eight blocks, of which the least use counts: what a checkpoint or a long row needs for a
    moment is not in it. When the blocks are full, pairs become one and blocks are twice as long from then on: after 26
    steps of a run, 50, 98... each time over all of it. It is a leak when twice in a row every block is above the one
    before, both halves rise alike, and it is 64 MiB and 1 % in all.

    Attributes:
        bytes_per_step: of the leak; 0 while none is found.
    """

    def __init__(self) -> None:
        self.bytes_per_step = 0.0
        self._steps = 0
        self._block_steps = FIRST_BLOCK_STEPS
        self._block: list[int] = []
        self._lows: list[int] = []
        self._suspected = False

    def note(self, held_bytes: int) -> None:
        """Take the use after one more step."""
        self._steps += 1
        if self._steps <= SKIPPED_STEPS:
            return
        self._block.append(held_bytes)
        if len(self._block) < self._block_steps:
            return
        self._lows.append(min(self._block))
        self._block = []
        if len(self._lows) == BLOCKS:
            rises = self._rises_steadily()
            if rises and self._suspected and not self.bytes_per_step:
                self.bytes_per_step = (self._lows[-1] - self._lows[0]) / ((BLOCKS - 1) * self._block_steps)
            self._suspected = rises
            self._lows = [min(pair) for pair in zip(self._lows[::2], self._lows[1::2], strict=True)]
            self._block_steps *= 2

    def _rises_steadily(self) -> bool:
        lows, half = self._lows, BLOCKS // 2
        halves = lows[half - 1] - lows[0], lows[-1] - lows[half]
        return (
            all(before < after for before, after in zip(lows, lows[1:], strict=False))
            and min(halves) >= STEADY * max(halves)
            and lows[-1] - lows[0] >= max(LEAST_BYTES, LEAST_SHARE * lows[-1])
        )
