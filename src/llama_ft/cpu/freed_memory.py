"""Freed memory of a process that trains on the CPU: new pages from the kernel cost time."""

import contextlib
import ctypes
import os

# parameters of glibc's mallopt, from malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
# The largest threshold that glibc accepts. Larger blocks must not come from the heap: aligned ones
# rarely fit where an equal one was freed, and the heap would grow with every one of them.
LARGEST_BLOCK = 32 * 2**20
# Blocks from this size on are those of tensors.
SMALLEST_RETURNED = 2**20


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory for the next tensor. Return whether it does: not if it is
    another one than glibc, or if the user has set variables of its own.

    By itself glibc returns the end of its heap to the kernel, which zeroes every page that it hands
    out again. Blocks above 32 MiB are still returned. Source: `man 3 mallopt`.
    """
    return _set({M_MMAP_THRESHOLD: LARGEST_BLOCK, M_TRIM_THRESHOLD: -1})


def return_freed_memory() -> bool:
    """Make the C library return the memory of each freed tensor to the kernel. Return whether it does,
    see above.

    By itself glibc soon takes blocks up to 32 MiB from its heap. An aligned block needs a few bytes
    more than a freed one of its size has. So what is freed between two activations rarely serves
    another tensor, and a step takes up to 1.5 times the memory of its tensors.
    """
    return _set({M_MMAP_THRESHOLD: SMALLEST_RETURNED})


def _set(parameters: dict[int, int]) -> bool:
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        return all([libc.mallopt(*parameter) for parameter in parameters.items()])
    return False
