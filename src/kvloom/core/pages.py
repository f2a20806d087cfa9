"""Memory on huge pages: what is read once per step costs fewer look-ups of addresses there."""

from __future__ import annotations

import contextlib
import mmap
import sys

HUGE_PAGE = 2 * 2**20  # bytes


def huge_mapping(num_bytes: int) -> mmap.mmap:
    """Zeroed memory for ``num_bytes`` from some huge page's boundary in it on, given out as it is touched.

    It is one huge page longer than asked. A kernel without transparent huge pages serves small ones.

    Raises:
        OSError, ValueError, OverflowError: there is no such memory.
    """
    length = num_bytes + HUGE_PAGE
    if sys.platform == "win32":
        return mmap.mmap(-1, length)
    # Private: huge pages for shared mappings, which are the default, are another matter and mostly off.
    mapping = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping
