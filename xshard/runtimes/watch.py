"""The signs of a hung process: it stands still, or it computes for very long.

Processor time counts, so that a busy machine is not taken for a hang.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

_STILL = 0.01  # seconds of processor time per second of the clock, below which nothing happens
_CORES = os.cpu_count() or 1


class Watch:
    """Looks at processes again and again; `why_over` says why they should be given up.

    spent_s: seconds of processor time that they have used, None where the system does not say.
    limit_s: the longest time without progress. Processor time is limited too, to `limit_s` per core, which
    an idle machine cannot spend sooner. Without processor time `limit_s` is time on the clock.
    grace_s: added to the limit, but not to the limit in the message.
    """

    def __init__(self, spent_s: Callable[[], float | None], limit_s: float, grace_s: float = 0.0) -> None:
        self._spent_s, self._stated_s, self._limit_s = spent_s, limit_s, limit_s + grace_s
        self._start_s = self._seen_s = spent_s() or 0.0
        self._since_s = time.monotonic()

    @property
    def pause_s(self) -> float:
        """How long to wait between two looks."""
        return min(1.0, self._limit_s / 8)

    def why_over(self) -> str | None:
        """None while the processes may go on."""
        now_s, spent_s = time.monotonic(), self._spent_s()
        is_late = now_s - self._since_s > self._limit_s
        if spent_s is None:
            return f"it took more than {self._stated_s:g} s" if is_late else None
        if spent_s - self._start_s > self._limit_s * _CORES:
            return f"it took more than {self._stated_s * _CORES:g} s of processor time"
        # Less than before: one of the processes has ended, which is progress.
        if not 0 <= spent_s - self._seen_s < _STILL * self._limit_s:
            self._seen_s, self._since_s = spent_s, now_s
            return None
        return f"it stood still for {self._stated_s:g} s" if is_late else None


def processor_time(pids: Iterable[int]) -> float | None:
    """Seconds of processor time of these processes and all that they have started; None off Linux."""
    if not Path("/proc/self/stat").exists():
        return None
    ticks: dict[int, int] = {}
    children: defaultdict[int, list[int]] = defaultdict(list)
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with suppress(OSError):  # it has ended
            stat = Path("/proc", str(pid), "stat").read_text()
            fields = stat.rpartition(")")[2].split()  # what stands before is the program's name
            children[int(fields[1])].append(pid)
            ticks[pid] = sum(map(int, fields[11:15]))  # its own, and of children that have ended
    tree = [pid for pid in pids if pid in ticks]
    for pid in tree:  # which grows as it goes
        tree += children[pid]
    return sum(ticks[pid] for pid in tree) / os.sysconf("SC_CLK_TCK")
