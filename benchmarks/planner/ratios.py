"""The ratios of a row: our number and a peer's, over a bound or over each other.

Decides which cases have such a ratio; its limit is decided in `claims`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence

from benchmarks.planner.measures import Row
from benchmarks.planner.peers.collect import PEERS

Ratio = tuple[str, float]  # case, value
Number = Callable[[Row], float | None]  # reads a number off a row; None if it has none


def geomean(values: Iterable[float]) -> float:
    """The geometric mean of positive numbers; 1 if there are none."""
    logs = [math.log(v) for v in values]
    return math.exp(statistics.fmean(logs)) if logs else 1.0


def bytes_ratios(rows: Iterable[Row], received: Number) -> Iterator[Ratio]:
    """Received bytes over the lower bound, for even cases without partial sums that must move some."""
    for row in rows:
        bound = row["plans"]["bandwidth"]["bound_bytes"]
        found = received(row)
        if row["even"] and not row["partial"] and bound and found is not None:
            yield row["case"], found / bound


def our_bytes(row: Row) -> float:
    return row["plans"]["bandwidth"]["received_bytes"]


def peer_bytes(name: str) -> Number:
    return lambda row: row["peers"][name]["received_bytes"]


def seconds_ratios(rows: Iterable[Row], profile: str, peers: Sequence[str] = tuple(PEERS)) -> Iterator[Ratio]:
    """Predicted time of our plan over the best peer's, if a peer's plan can be priced."""
    for row in rows:
        ours = row["plans"][profile]["seconds"]
        priced = [row["peers"][p]["seconds"][profile] for p in peers if "seconds" in row["peers"][p]]
        if priced and min(priced) > 0:
            yield row["case"], ours / min(priced)


def node_ratios(rows: Iterable[Row], crossing: Number) -> Iterator[Ratio]:
    """Bytes that cross nodes over the bytes that must, if some must."""
    for row in rows:
        found = crossing(row)
        if "nodes" in row and row["nodes"]["bound_bytes"] and found:
            yield row["case"], found / row["nodes"]["bound_bytes"]


def our_crossing(profile: str) -> Number:
    return lambda row: row["nodes"]["crossing_bytes"][profile] if "nodes" in row else None


def peer_crossing(name: str) -> Number:
    return lambda row: row["peers"][name].get("crossing_bytes")
