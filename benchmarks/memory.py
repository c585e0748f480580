"""Memory that a process keeps when it is freed."""

import ctypes

M_MMAP_MAX, M_TRIM_THRESHOLD = -4, -1  # of malloc.h


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, as torch's allocator for GPUs does; glibc only.

    Otherwise the system clears each page of a large tensor anew, which takes longer than to write it.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)
