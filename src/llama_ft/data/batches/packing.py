"""Pack samples of different lengths into few sequences of one length."""

from bisect import bisect_left, bisect_right, insort

import numpy

# The search for samples that fill a sequence takes longer with its length. Above, best-fit is used.
LONGEST_EXACT_PACK = 8192
# The search begins when at most so many of the longest samples fit in the room.
SEARCHED_SAMPLES = 8


def pack_samples(
    lengths: numpy.ndarray, pack_length: int
) -> tuple[list[numpy.ndarray], numpy.ndarray]:
    """Pack whole samples into few sequences.

        lengths 5 3 3 2 2 1, pack_length 8    pack 0: 5 3    pack 1: 3 2 2 1, which are slots [0 1] and [2 3 4 5]

    Which slots share a sequence depends on the lengths only, not on which sample is in which slot.
    So every epoch has the same number of packed sequences.

    The demo's samples need 2,159 sequences of 256 tokens with SmolLM2's tokenizer (lower bound
    2,134; best-fit 2,214), and 1,578 with the demo's own, which is the minimum. A million samples
    take 0.1 to 3 s. If most samples are between a quarter and half of pack_length, the lower bound
    cannot be reached: three of them rarely fit.

    Args:
        lengths: tokens of each sample, 1 to pack_length.
        pack_length: tokens of a packed sequence.

    Returns:
        The slots of each packed sequence, where slot n is the n-th longest sample; and the tokens
        of each packed sequence, int64 [packed sequences].
    """
    longest_first = numpy.sort(lengths)[::-1]
    if pack_length <= LONGEST_EXACT_PACK:
        pack_of_slot = _fill_exactly(longest_first, pack_length)
    else:
        pack_of_slot = _best_fit(longest_first, pack_length)
    tokens = numpy.bincount(pack_of_slot, weights=longest_first).astype(numpy.int64)
    # All slots, those of sequence 0 first, are split where the next sequence begins.
    slots = numpy.argsort(pack_of_slot, kind="stable")
    ends = numpy.bincount(pack_of_slot).cumsum()
    return numpy.split(slots, ends[:-1]), tokens


def _fill_exactly(longest_first: numpy.ndarray, pack_length: int) -> numpy.ndarray:
    """Return the packed sequence of each slot: fill one sequence after the other, each with the
    longest sample left and the samples that leave the least room, long ones preferred.

    Those are found as a subset sum: bit n of an integer says that samples of together n tokens
    exist. A filled sequence is repeated as long as samples of its lengths are left.

    Source: J. N. D. Gupta and J. C. Ho, A new heuristic algorithm for the one-dimensional
    bin-packing problem, 1999 (minimum bin slack).
    """
    left = numpy.bincount(longest_first, minlength=pack_length + 1).tolist()
    # The first slot of each length that is not in a sequence yet. Both arguments are negated because
    # searchsorted needs ascending numbers.
    next_slot = numpy.searchsorted(-longest_first, -numpy.arange(pack_length + 1)).tolist()
    lengths = [length for length, count in enumerate(left) if count]  # ascending
    pack_of_slot = numpy.empty(len(longest_first), dtype=numpy.int64)
    count = 0
    while lengths:
        members = _next_members(lengths, left, pack_length)
        repeats = min(left[length] // number for length, number in members.items())
        packs = numpy.arange(count, count + repeats)
        for length, number in members.items():
            first = next_slot[length]
            taken = repeats * number
            pack_of_slot[first : first + taken] = packs.repeat(number)
            next_slot[length] += taken
            left[length] -= taken
            if not left[length]:
                del lengths[bisect_left(lengths, length)]
        count += repeats
    return pack_of_slot


def _next_members(lengths: list[int], left: list[int], pack_length: int) -> dict[int, int]:
    """Return the samples of the next sequence: length -> number of samples.

    Args:
        lengths: the lengths of which samples are left, ascending.
        left: for each length, the number of samples left.
        pack_length: tokens of a packed sequence.
    """
    members = {lengths[-1]: 1}
    room = pack_length - lengths[-1]
    at = bisect_right(lengths, room) - 1
    # While the next sample is short for the room, no search is needed. It is taken if it fits.
    while at >= 0 and room > SEARCHED_SAMPLES * lengths[at]:
        length = lengths[at]
        free = left[length] - members.get(length, 0)
        number = min(free, room // length - SEARCHED_SAMPLES // 2)
        if number:
            members[length] = members.get(length, 0) + number
            room -= number * length
        at -= number == free
    within_room = (1 << (room + 1)) - 1
    sums = 1  # bit n: n tokens can be filled with the lengths seen so far
    sums_before = list[int]()
    searched = list[int]()
    while at >= 0 and not sums >> room:
        length = lengths[at]
        searched.append(length)
        sums_before.append(sums)
        free = min(left[length] - members.get(length, 0), room // length)
        added = 1
        while free > 0:  # 1, 2, 4, ... samples, so that a million of them take 20 steps
            added = min(added, free)
            sums |= (sums << (length * added)) & within_room
            free -= added
            added *= 2
        at -= 1
    total = sums.bit_length() - 1
    for length, before in zip(reversed(searched), reversed(sums_before), strict=True):
        while not before >> total & 1:
            total -= length
            members[length] = members.get(length, 0) + 1
    return members


def _best_fit(longest_first: numpy.ndarray, pack_length: int) -> numpy.ndarray:
    """Return the packed sequence of each slot: longest first, each into the fullest sequence with
    enough room.

    Source: D. S. Johnson, Near-optimal bin packing algorithms, 1973: at most 11/9 of the minimum,
    plus 4.
    """
    pack_of_slot = numpy.empty(len(longest_first), dtype=numpy.int64)
    with_room: dict[int, list[int]] = {}  # free tokens -> packed sequences
    free_sizes: list[int] = []  # keys of with_room, ascending
    count = 0
    for slot, length in enumerate(longest_first.tolist()):
        at = bisect_left(free_sizes, length)
        if at < len(free_sizes):
            free = free_sizes[at]
            pack = with_room[free].pop()
            if not with_room[free]:
                del with_room[free], free_sizes[at]
        else:
            free = pack_length
            pack = count
            count = count + 1
        pack_of_slot[slot] = pack
        if free > length:
            if free - length not in with_room:
                with_room[free - length] = []
                insort(free_sizes, free - length)
            with_room[free - length].append(pack)
    return pack_of_slot
