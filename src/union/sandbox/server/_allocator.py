"""Settings of the C library's memory allocator for the server's process.

By default, glibc returns freed memory to the kernel as soon as 128 KiB are free at the end of the
heap, and requests it again for the next piece of output. The kernel then clears and maps every page
anew, which costs more than copying the output.

This is a module of its own because it is the only one of the server that may use ``ctypes``.
"""

from __future__ import annotations

import ctypes
from typing import Final

__all__ = ["retain_freed_memory"]

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_LARGE_BYTES: Final = 1024 * 1024
"""Blocks of at least this size are mapped from the kernel, and unmapped when freed."""


def retain_freed_memory(max_bytes: int) -> bool:
    """Keep up to ``max_bytes`` of freed memory in the process.

    The setting holds for the whole process, so only programs may call this, not libraries.

    Args:
        max_bytes: How many freed bytes at the end of the heap are not returned to the kernel.

    Returns:
        Whether the C library accepted all settings; False if it is not glibc.

    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    settings = (
        (_TRIM_THRESHOLD, max_bytes),
        (_TOP_PAD, _LARGE_BYTES),
        (_MMAP_THRESHOLD, _LARGE_BYTES),
    )
    accepted = [mallopt(name, value) == 1 for name, value in settings]
    return all(accepted)
