"""How fast the disk of a folder is: measured with nothing of the file in memory."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from xshard.cost.model import Link
from xshard.runtimes.fit import CalibrationError, rounded

DISK_BYTES = 2**28  # of the file
_PIECE_BYTES = 2**22  # of a large read
_LATENCY_BYTES = 2**12  # of a read that is all latency
_ROUNDS = 5  # of large reads; the median counts


def measure_disk(folder: str | Path, size: int = DISK_BYTES) -> Link:
    """Measure how fast the disk of a folder is read, by a temporary file of random bytes.

    Args:
        folder: A folder that can be written to.
        size: The bytes of the file that is written and read.

    Returns:
        The seconds of a small read, and the bytes per second of large ones, as a link.

    Raises:
        CalibrationError: The folder cannot be written to, or the system does not forget what it read.
    """
    if not hasattr(os, "posix_fadvise"):  # of macOS, for one
        hint = "measure on Linux, or write a disk into the profile"
        raise CalibrationError("this system keeps what was read of files in memory", hint=hint)
    starts = range(0, size, _PIECE_BYTES)
    small_s = []  # of one small read, at the beginning of each piece
    large_s = []  # of all pieces at once
    try:
        with (
            tempfile.TemporaryFile(dir=folder, buffering=0) as file,
            ThreadPoolExecutor() as threads,
        ):
            for _ in starts:
                file.write(os.urandom(_PIECE_BYTES))  # random, so that no disk compresses it
            os.fsync(file.fileno())
            for start in starts:
                small_s.append(_reading_s(map, file.fileno(), [start], _LATENCY_BYTES))
            for _ in range(_ROUNDS):
                large_s.append(_reading_s(threads.map, file.fileno(), starts, _PIECE_BYTES))
    except OSError as error:
        hint = "a folder that can be written to"
        raise CalibrationError(f"{folder}: {error.strerror}", hint=hint) from error
    bytes_per_s = size / statistics.median(large_s)
    return Link(rounded(statistics.median(small_s)), rounded(bytes_per_s))


def _reading_s(
    apply: Callable[..., Iterable[int]], file: int, starts: Sequence[int], n_bytes: int
) -> float:
    """Return the seconds that reads of `n_bytes` at each place of a file take together.

    The system is told first to forget what it keeps of the file in memory, so that the disk is
    read.

    Args:
        apply: `map`, for one read after another; or `map` of a pool of threads, for many at once.
        file: The file's descriptor.
        starts: Where each read begins, in bytes.
        n_bytes: The bytes of each read.
    """

    def read(start: int) -> int:
        return len(os.pread(file, n_bytes, start))

    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    begin_s = time.perf_counter()
    for _ in apply(read, starts):
        pass
    return time.perf_counter() - begin_s
