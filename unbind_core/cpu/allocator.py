"""How the C library keeps memory that a forward pass has freed: for the next pass, which needs as much."""

from __future__ import annotations

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # mallopt(3)
KEPT = 1 << 30  # bytes that may lie free before some are given back
MAPPED = 32 << 20  # the most that glibc allows; larger blocks are mapped one by one, and given back when freed


def keep_freed_memory() -> bool:
    """To be called before other threads start. False where the C library is not glibc, and nothing was done.

    By default freed blocks of megabytes go back to the system, which hands them out again cleared, page by page: a fifth of
    the time of a prompt's pass in the engine's thread, for a thread's own arena is made of small heaps. One serves for all.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    settings = ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, MAPPED), (_TRIM_THRESHOLD, KEPT))
    return all(library.mallopt(option, value) for option, value in settings)
