"""Calls timed by turns: every call once before any is timed again.

Decides the order of the calls and what counts as their time, so that a slow spell of the machine falls on all
alike. It must not know what is called.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

WARM_UP = 3

Name = TypeVar("Name", bound=Hashable)
Result = TypeVar("Result")


def seconds(
    calls: Mapping[Name, Callable[[], Result]],
    rounds: int,
    *,
    warm_up: int = WARM_UP,
    before: Callable[[], object] = lambda: None,
    after: Callable[[Result], object] = lambda result: None,
) -> dict[Name, list[float]]:
    """Seconds of every call, round by round, after `warm_up` rounds that do not count.

    before: runs before each call. after: takes each result. Neither is timed.
    """
    names = list(calls)
    found: dict[Name, list[float]] = {name: [] for name in names}
    for turn in range(warm_up + rounds):
        # The call before leaves traces in caches and memory: each comes first in its turn, and behind others.
        first = turn // 2 % len(names)
        order = names[first:] + names[:first]
        for name in order if turn % 2 == 0 else reversed(order):
            before()
            start = time.perf_counter()
            result = calls[name]()
            taken = time.perf_counter() - start
            after(result)
            del result  # memory is released outside the measured time
            if turn >= warm_up:
                found[name].append(taken)
    return found
