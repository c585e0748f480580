"""How long planning takes: cold, cached, and on a mesh of 131,072 devices.

Planning is one thread's work, so processor time is measured: other processes do not count.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import xshard as xs
from benchmarks.cases import Case
from xshard.notation.maps import empty_caches

REPEATS = 3  # the quickest cold plan counts: the others were disturbed
LOOK_UPS = 2000
LARGE_MESH = xs.Mesh(dp=4096, tp=32)
LARGE_SHAPE = (4096 * 32 * 8, 4096 * 32)
LARGE_MOVES = (
    "n/dp d/tp -> n/tp d/dp",
    "n/dp/tp d -> n d/dp/tp",
    "n/dp d/tp -> n d/tp",
    "n/dp/tp d -> n/tp/dp d",
    "n/dp d -> n d/dp",
    "n d/tp -> n/dp d",
    "n/dp d | sum(tp) -> n/dp d/tp",
    "n d | sum(dp,tp) -> n/tp d/dp",
)


def cold_s(case: Case, profile: xs.Profile) -> float:
    """Seconds to plan a case with every cache of the package empty."""
    return quickest(lambda: case.plan(profile))


def cached_s(cases: Sequence[Case], profile: xs.Profile) -> float:
    """Seconds to get a plan again, the median of the cases; layouts are given as text."""
    return look_up_s(
        ((c.expression, c.mesh, c.shape, c.dtype), {"profile": profile}) for c in cases
    )


def large_mesh_s(profile: xs.Profile) -> dict[str, float]:
    """Seconds to plan even layouts on LARGE_MESH, cold, by expression."""
    return {
        move: quickest(
            lambda move=move: xs.plan(move, LARGE_MESH, LARGE_SHAPE, "bfloat16", profile=profile)
        )
        for move in LARGE_MOVES
    }


def look_up_s(calls: Iterable[tuple[tuple[Any, ...], dict[str, Any]]]) -> float:
    """Processor seconds to get a plan again, the median of the calls of `xs.plan`."""
    seconds = []
    for arguments, options in calls:
        xs.plan(*arguments, **options)
        start = time.process_time()
        for _ in range(LOOK_UPS):
            xs.plan(*arguments, **options)
        seconds.append((time.process_time() - start) / LOOK_UPS)
    return statistics.median(seconds)


def quickest(work: Callable[[], object]) -> float:
    """Processor seconds of the quickest of some calls, each with every cache of the package empty."""
    seconds = []
    for _ in range(REPEATS):
        empty_caches()
        gc.collect()
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds)
