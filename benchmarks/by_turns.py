"""Calls timed by turns, so that a slow spell of the machine falls on all of them."""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from operator import itemgetter
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
    times = {name: list[float]() for name in calls}
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


def medians(
    calls: Mapping[Name, Callable[[], Any]], rounds: int, **options: Any
) -> dict[Name, float]:
    """The median seconds of every call; options: passed on to `seconds`."""
    return {
        name: statistics.median(turns) for name, turns in seconds(calls, rounds, **options).items()
    }


def ratio(times: Mapping[Name, Sequence[float]], way: Name, to: Name) -> float:
    """The time of a way over another's: the median of each turn's ratio."""
    return statistics.median(a / b for a, b in zip(times[way], times[to], strict=True))


def beside_xla(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The median seconds of "ours" and "xla", and the median ratio of a round.

    noise: the same ratio between XLA's program and itself, which is called as "xla again".
    """
    times = seconds(calls, rounds, warm_up=1)
    return {
        "ours_s": statistics.median(times["ours"]),
        "xla_s": statistics.median(times["xla"]),
        "faster": ratio(times, "xla", "ours"),
        "noise": ratio(times, "xla", "xla again"),
    }


def alone(function: Callable[..., Result], *arguments: Any) -> Result:
    """The result of a function in a new process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def middle(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row whose `faster` is the median."""
    return sorted(rows, key=itemgetter("faster"))[len(rows) // 2]


def slowest(
    calls: Mapping[Name, Callable[[], Any]], rounds: int, **options: Any
) -> dict[Name, list[float]]:
    """Seconds of every call on the slowest torch rank of each turn; options: passed on to `seconds`."""
    import torch
    import torch.distributed as dist

    times = seconds(calls, rounds, **{"before": dist.barrier, **options})
    by_rank = torch.tensor(list(times.values()), dtype=torch.float64)
    dist.all_reduce(by_rank, dist.ReduceOp.MAX)
    return dict(zip(times, by_rank.tolist(), strict=True))
