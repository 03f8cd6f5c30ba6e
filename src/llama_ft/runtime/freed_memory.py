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


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory for the next tensor. Return whether it does: not if it is
    another one than glibc, or if the user has set variables of its own.

    By itself glibc returns the end of its heap to the kernel, which zeroes every page that it hands
    out again. Blocks above 32 MiB are still returned. Source: `man 3 mallopt`.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        uses_heap = libc.mallopt(M_MMAP_THRESHOLD, LARGEST_BLOCK)
        is_never_trimmed = libc.mallopt(M_TRIM_THRESHOLD, -1)
        return bool(uses_heap and is_never_trimmed)
    return False
