"""The C library's allocator, for training on a CPU."""

import ctypes
import os
import sys

# malloc.h
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_NEVER, _PAD_BYTES = 2**31 - 1, 2**28


def keep_freed_memory() -> None:
    """Have glibc keep what is freed, for the next activation of the same size, instead of giving it back.

    Its default maps every large tensor anew, and the kernel zeroes each page again: a fifth of the time of a small
    language model's step. Variables of glibc's own (`MALLOC_*`) that the user has set stay in force; other C libraries
    are left alone.
    """
    if not sys.platform.startswith("linux") or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        mallopt(_M_MMAP_THRESHOLD, _NEVER)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
        mallopt(_M_TOP_PAD, _PAD_BYTES)
