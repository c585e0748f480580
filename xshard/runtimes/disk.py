"""The disk of a folder as a link: measured on a file of its own, read in pieces at once, as loads read."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from xshard.cost.model import Link
from xshard.runtimes.fit import CalibrationError

SIZE = 2**28  # bytes of the file
_PIECE, _LEAST = 2**22, 2**12  # bytes of a read, and of one that is all latency
_ROUNDS = 5


def measure_disk(folder: str | Path, size: int = SIZE) -> Link:
    """A folder -> the seconds of a small read there, and the bytes per second of large ones.

    A file of `size` bytes, whole pieces of 4 MiB, is written, read and removed. Raises CalibrationError where
    it cannot be, and where the system cannot be told to forget a file.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     measure_disk(folder, 2**22).bytes_per_s > 0
    True
    """
    if not hasattr(os, "posix_fadvise"):  # of macOS, for one
        hint = "measure on Linux, or write a disk into the profile"
        raise CalibrationError("this system keeps what was read of files in memory", hint=hint)
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file, ThreadPoolExecutor() as threads:
            pieces = range(0, size, _PIECE)
            for _ in pieces:
                file.write(os.urandom(_PIECE))
            os.fsync(file.fileno())
            small = [_seconds(map, file.fileno(), [start], _LEAST) for start in pieces]
            large = [_seconds(threads.map, file.fileno(), pieces, _PIECE) for _ in range(_ROUNDS)]
    except OSError as error:
        hint = "a folder that can be written to"
        raise CalibrationError(f"{folder}: {error.strerror}", hint=hint) from error
    latency_s, rate = statistics.median(small), size / statistics.median(large)
    return Link(float(f"{latency_s:.4g}"), float(f"{rate:.4g}"))


def _seconds(on_each: Callable[..., Iterable[int]], file: int, starts: Sequence[int], n_bytes: int) -> float:
    """Seconds to read so many bytes at each of these places, with nothing in memory."""
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    begin = time.perf_counter()
    sum(on_each(lambda start: len(os.pread(file, n_bytes, start)), starts))
    return time.perf_counter() - begin
