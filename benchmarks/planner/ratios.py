"""The numbers of a row that are compared: ours and a peer's, over a bound or over each other.

Decides which cases have such a number. What it should be is the business of `claims`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence

from planning.measures import Row
from planning.peers.collect import PEERS

Ratio = tuple[str, float]  # case, value
Number = Callable[[Row], float | None]  # what is read off a row; None where it has no such number


def geomean(values: Iterable[float]) -> float:
    """Of positive numbers; 1 of none."""
    logs = [math.log(v) for v in values]
    return math.exp(statistics.fmean(logs)) if logs else 1.0


def bytes_ratios(rows: Iterable[Row], received: Number) -> Iterator[Ratio]:
    """Received bytes over the lower bound, of even cases without partial sums that must move some."""
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
    """Predicted time of our plan over that of the best peer's, where a peer's plan can be priced."""
    for row in rows:
        ours = row["plans"][profile]["seconds"]
        priced = [row["peers"][p]["seconds"][profile] for p in peers if "seconds" in row["peers"][p]]
        if priced and min(priced) > 0:
            yield row["case"], ours / min(priced)


def node_ratios(rows: Iterable[Row], crossing: Number) -> Iterator[Ratio]:
    """Bytes that cross nodes over those that must, where some must."""
    for row in rows:
        found = crossing(row)
        if "nodes" in row and row["nodes"]["bound_bytes"] and found:
            yield row["case"], found / row["nodes"]["bound_bytes"]


def our_crossing(profile: str) -> Number:
    return lambda row: row["nodes"]["crossing_bytes"][profile] if "nodes" in row else None


def peer_crossing(name: str) -> Number:
    return lambda row: row["peers"][name].get("crossing_bytes")
