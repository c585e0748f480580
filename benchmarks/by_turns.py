"""Calls timed by turns, so that a slow spell of the machine falls on all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

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
    times: dict[Name, list[float]] = {name: [] for name in names}
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
                times[name].append(taken)
    return times


def medians(calls: Mapping[Name, Callable[[], Any]], rounds: int, **options: Any) -> dict[Name, float]:
    """The median seconds of every call; options: passed on to `seconds`."""
    return {name: statistics.median(turns) for name, turns in seconds(calls, rounds, **options).items()}


def slowest(calls: Mapping[Name, Callable[[], Any]], rounds: int, **options: Any) -> dict[Name, list[float]]:
    """Seconds of every call on the slowest torch rank of each turn; options: passed on to `seconds`."""
    import torch
    import torch.distributed as dist

    times = seconds(calls, rounds, **{"before": dist.barrier, **options})
    by_rank = torch.tensor(list(times.values()), dtype=torch.float64)
    dist.all_reduce(by_rank, dist.ReduceOp.MAX)
    return dict(zip(times, by_rank.tolist(), strict=True))
