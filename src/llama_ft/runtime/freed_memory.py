"""Freed memory of a process that trains on the CPU: new pages from the kernel cost time."""

import contextlib
import ctypes
import os

# parameters of glibc's mallopt, from malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory for the next tensor. Return whether it does: not if it is
    another one than glibc, or if the user has set variables of its own.

    By itself glibc returns blocks above 32 MiB and the end of its heap to the kernel, which zeroes
    every page that it hands out again. Source: `man 3 mallopt`.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        has_no_maps = libc.mallopt(M_MMAP_MAX, 0)
        is_never_trimmed = libc.mallopt(M_TRIM_THRESHOLD, -1)
        return bool(has_no_maps and is_never_trimmed)
    return False
