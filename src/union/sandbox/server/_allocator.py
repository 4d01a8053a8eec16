"""How a process of ours keeps memory that it has freed.

Unless told otherwise, glibc gives freed memory back to the kernel as soon as 128 KiB of it are at
the end of the heap, and asks for it again for the next piece of output: every page is then cleared
and mapped anew, which costs more than all copies of it.
"""

from __future__ import annotations

import ctypes
from typing import Final

__all__ = ["keep_freed"]

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_LARGE: Final = 1024 * 1024
"""What is at least this large comes from the kernel, and goes back to it at once."""


def keep_freed(most: int) -> bool:
    """Keeps up to ``most`` freed bytes for what comes next; False: not with this C library.

    For the whole process and what it will do from now on: not for one that belongs to others.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    settings = ((_TRIM_THRESHOLD, most), (_TOP_PAD, _LARGE), (_MMAP_THRESHOLD, _LARGE))
    taken = [mallopt(name, value) == 1 for name, value in settings]
    return all(taken)
