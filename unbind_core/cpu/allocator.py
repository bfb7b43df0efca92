"""How the C library keeps memory that a forward pass has freed: for the next pass, which needs as much."""

from __future__ import annotations

import ctypes
import os

# By glibc's variables in the environment, which it reads when a process starts, and its options of mallopt(3).
KEEPING = {
    "MALLOC_MMAP_THRESHOLD_": 32 << 20,  # the most that it allows; larger blocks are given back when they are freed
    "MALLOC_TRIM_THRESHOLD_": 256 << 20,  # bytes that may lie free at the end of a heap before they are given back
}
OPTIONS = {"MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_TRIM_THRESHOLD_": -1}


def keep_freed_memory() -> bool:
    """In this process, and in those that it starts. False where nothing was done: the C library is not glibc, or the environment
    has settings of somebody's own for it.

    By default freed blocks of megabytes go back to the system, which hands them out again cleared, page by page: a tenth of the
    time of a long prompt's passes. One arena for all threads would keep more, but the passes of two lanes wait for it.
    """
    library = ctypes.CDLL(None)
    own = ("GLIBC_TUNABLES", "MALLOC_ARENA_MAX", *KEEPING)
    if not hasattr(library, "mallopt") or any(name in os.environ for name in own):
        return False
    os.environ |= {name: str(value) for name, value in KEEPING.items()}
    return all(library.mallopt(OPTIONS[name], value) for name, value in KEEPING.items())
