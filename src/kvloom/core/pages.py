"""Memory on huge pages: what is read once per step costs fewer look-ups of addresses there."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys

HUGE_PAGE = 2 * 2**20  # bytes


def huge_memory(num_bytes: int) -> memoryview:
    """``num_bytes`` of zeroed memory from a huge page's boundary on, given out as it is touched.

    A kernel without transparent huge pages serves small ones.

    Raises:
        OSError, ValueError, OverflowError: there is no such memory.
    """
    length = num_bytes + HUGE_PAGE  # a boundary lies within the first of them
    if sys.platform == "win32":
        mapping = mmap.mmap(-1, length)
    else:
        # Private: huge pages for shared mappings, which are the default, are another matter and mostly off.
        mapping = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % HUGE_PAGE
    return memoryview(mapping)[start : start + num_bytes]
