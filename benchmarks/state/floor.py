"""The floor of a load, which has to read the bytes and copy them to new memory; and the memory it takes."""

import ctypes
import gc
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.state.weights import MEMCPY, READING

MIB = 2**20

Calls = dict[str, Callable[[], Any]]


def calls(files: Iterable[Path], n_bytes: int, part: int = 0) -> Calls:
    """Reading of so many bytes of files into one buffer that stays in caches, and a copy of as many.

    part: how many times n_bytes come first, which others read.
    """
    buffer = np.empty(MIB, np.uint8)
    whole = np.ones(n_bytes, np.uint8)
    skipped = part * n_bytes

    def reading() -> None:
        left = n_bytes
        start = skipped
        for file in files:
            size = file.stat().st_size
            with file.open("rb", buffering=0) as opened:
                opened.seek(min(start, size))
                while left and (n := opened.readinto(buffer[:left])):
                    left -= n
            start = max(0, start - size)

    return {READING: reading, MEMCPY: whole.copy}


def memory_at_hand(n_bytes: int) -> None:
    """Take twice as much memory, and give it back, for the next call to find.

    A hypervisor takes what lies idle for seconds, and to get it back takes longer than all that is measured.
    """
    np.ones(2 * n_bytes, np.uint8)


def bytes_beyond(load: Callable[[], Any], n_bytes: int) -> int:
    """The most memory that a load has at any moment beside its result of n_bytes, of looks each millisecond.

    Files that are mapped do not count: they are the system's own memory, and are given up when it needs it.
    Memory that earlier calls freed goes back first: a load that finds it at hand would seem to take less.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # of glibc, which keeps up to 32 MiB of freed memory per array
    before = _own_bytes()
    looks: list[int] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(1e-3):
            looks.append(_own_bytes())

    thread = threading.Thread(target=look)
    thread.start()
    _result = load()
    over.set()
    thread.join()
    return max(0, max(looks, default=0) - before - n_bytes)


def _own_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
