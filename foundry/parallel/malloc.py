"""Settings of the C library's memory allocator for training on a CPU."""

import ctypes
import os
import sys

# malloc.h
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_NEVER, _PAD_BYTES = 2**31 - 1, 2**28


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next activation of the same size instead of returning it to the kernel.

    By default every large tensor is mapped anew, and the kernel zeroes each page again, which takes a fifth of the step
    time of a small language model. glibc's own variables (`MALLOC_*`) take precedence if the user has set any; other C
    libraries are not changed.
    """
    if not sys.platform.startswith("linux") or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        mallopt(_M_MMAP_THRESHOLD, _NEVER)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
        mallopt(_M_TOP_PAD, _PAD_BYTES)
